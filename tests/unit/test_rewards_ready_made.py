"""Ready-made rewards: total on any text, between 0 and 1, fast on hostile text, and right."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_agent import Task, Transcript
from relax_agent.envs.rewards import (
    F1,
    ExactMatch,
    JsonMatch,
    MultipleChoice,
    NumericMatch,
    after,
    boxed,
    exact_match,
    f1,
    json_match,
    last_line,
    multiple_choice,
    numeric_match,
    tagged,
)
from relax_agent.envs.rewards.verdicts import read_mark, shortened
from relax_agent.errors import ConfigError, EnvError
from relax_agent.messages import assistant, user

COMPARING = [
    exact_match,
    numeric_match,
    f1,
    ExactMatch(ignore_punctuation=True),
    NumericMatch(1e-2),
]
ALL = [*COMPARING, multiple_choice]
HOSTILE = ["1", "1,", "1 ", "1/", "A ", "(a", "answer is ", "not a ", "\\boxed{", "{", "[", "$"]
HOSTILE += ["-", "\n", " ", "***", "a and ", "\\frac{", "1x10^", "```\n", '{"mark":', "the "]


def judge(reward, answer, gold, **data):
    task = Task("t", "?", gold, data)
    return reward(task, Transcript([user("?"), assistant(answer)]))


texts = st.text(max_size=60) | st.text("0123456789.,%/-+e ^$\\{}frac", max_size=30)


@pytest.mark.parametrize("reward", ALL, ids=repr)
@given(answer=texts, gold=texts)
@settings(max_examples=60, deadline=None)
def test_every_reward_is_total_and_between_0_and_1(reward, answer, gold):
    try:
        assert 0.0 <= judge(reward, answer, gold) <= 1.0
    except EnvError:  # only a gold that is none of the options
        assert reward is multiple_choice


@pytest.mark.parametrize("reward", COMPARING, ids=repr)
@given(a=texts, b=texts)
@settings(max_examples=60, deadline=None)
def test_comparing_is_symmetric(reward, a, b):
    assert reward.compare(a, b) == reward.compare(b, a)


@pytest.mark.parametrize("reward", [exact_match, f1], ids=repr)
@given(text=st.text(min_size=1).map(str.strip).filter(bool))
@settings(max_examples=60, deadline=None)
def test_a_text_equals_itself(reward, text):
    assert judge(reward, text, text) == 1.0


@pytest.mark.parametrize("piece", HOSTILE)
def test_hostile_text_costs_milliseconds(piece):
    """No pattern backtracks: a thread that matches one holds up the whole process."""
    text = piece * (20_000 // len(piece))
    choices = ["London", "Paris"]
    started = time.process_time()
    for reward in ALL:
        judge(reward, text, "1" if reward is not multiple_choice else "A", choices=choices)
    judge(json_match, text, None, schema={"type": "object"})
    boxed(text), read_mark(text, 10)
    assert time.process_time() - started < 1.5


@pytest.mark.parametrize("reward", ALL, ids=repr)
def test_no_answer_is_worth_nothing_and_a_task_without_gold_is_the_authors_mistake(reward):
    assert judge(reward, "", "A") == 0.0
    assert judge(reward, "  \n", "A") == 0.0
    for gold in (None, [], [None]):
        with pytest.raises(EnvError, match="has no answer"):
            judge(reward, "A", gold)


# -- exact match -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer", ["Paris", "paris", " PARIS. ", '"Paris"', "**Paris**", "Ｐａｒｉｓ"]
)
def test_exact_match_looks_past_case_and_edges(answer):
    assert judge(exact_match, answer, "Paris") == 1.0


@pytest.mark.parametrize(
    ("reward", "answer", "gold", "value"),
    [
        (exact_match, "in Paris", "Paris", 0.0),
        (exact_match, "3.0", 3, 0.0),
        (exact_match, "3", 3, 1.0),
        (exact_match, "Rome", ["Paris", "Rome"], 1.0),
        (exact_match, "new   york", "New\nYork", 1.0),
        (exact_match, ".", "", 0.0),
        (exact_match, "!", "?", 0.0),
        (ExactMatch(ignore_case=False), "paris", "Paris", 0.0),
        (ExactMatch(ignore_edges=False), "Paris.", "Paris", 0.0),
        (ExactMatch(ignore_punctuation=True), "New-York!", "NewYork", 1.0),
        (ExactMatch(ignore_punctuation=True), "?!", "!?", 0.0),
        (ExactMatch(ignore_articles=True), "the moon", "A Moon", 1.0),
        (ExactMatch(extract=boxed), r"So \boxed{Paris}.", "Paris", 1.0),
        (ExactMatch(extract=boxed), "Paris", "Paris", 0.0),
        (ExactMatch(extract=tagged()), "<answer> Paris </answer>", "Paris", 1.0),
        (ExactMatch(extract=after("####")), "long\n#### Paris", "Paris", 1.0),
        (ExactMatch(extract=last_line), "long\n\nParis\n", "Paris", 1.0),
    ],
)
def test_exact_match(reward, answer, gold, value):
    assert judge(reward, answer, gold) == value


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {\boxed{3}}", "3"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"} \fbox{x} {", "x"),
        ("none", None),
    ],
)
def test_boxed_takes_the_last_whole_box(text, inner):
    assert boxed(text) == inner


def test_tagged_takes_the_last_pair():
    assert tagged()("<answer>1</answer> <answer>2</answer> <answer>3") == "2"
    assert tagged("x")("<answer>1</answer>") is None


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("1,234.5", 1234.5),
        ("1{,}234", 1234),
        ("It costs $1,234.50.", "1234.5"),
        ("-$5", -5),
        ("$-5", -5),
        ("−3", -3),
        ("x = -3", -3),
        (".5", "1/2"),
        ("1/2", 0.5),
        ("3 1/2", 3.5),
        ("3½", 3.5),
        (r"\frac{1}{2}", "0.5"),
        (r"-\dfrac{1}{2}", "-0.5"),
        ("2 × 10^5", 200_000),
        (r"1.5 \times 10^{-3}", 0.0015),
        ("1e-3", 0.001),
        ("2^10", 1024),
        ("10⁵", 100_000),
        ("12%", "12"),
        ("12%", 0.12),
        ("0.12", "12%"),
        (r"12\%", "12 percent"),
        ("GPT-4 says 42 apples", 42),
        ("3 + 4 = 7", 7),
        (r"\boxed{7}, after 9 steps", 7),
        (r"\boxed{x = 7}", 7),
        ("٣", 3),
        ("0.1", 0.1),
        ("0.30000000000000004", 0.3),
        (str(10**30), 10**30),
    ],
)
def test_numbers_are_read_however_they_are_written(answer, gold):
    assert judge(numeric_match, answer, gold) == 1.0


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("12%", "1200%"),
        ("12%", "0.12%"),
        ("4.2", 42),
        ("x2", 2),
        ("H2O", 2),
        ("3/4/2024", 2024),
        ("1/0", 1),
        ("v1.2.3", 3),
        ("1.000.000", 1),
        ("1e999999", 1),
        ("9" * 500, 9),
        ("nan", "nan"),
        ("inf", "inf"),
        ("GPT-4", -4),
        ("1000000001", 1000000000),
        ("42 or 43", 42),
    ],
)
def test_other_numbers_and_what_is_no_number_do_not_agree(answer, gold):
    assert judge(numeric_match, answer, gold) == 0.0


def test_tolerances_are_those_of_isclose():
    assert judge(NumericMatch(rel_tol=1e-3), "3.14", 3.1415) == 1.0
    assert judge(NumericMatch(rel_tol=1e-4), "3.14", 3.1415) == 0.0
    assert judge(NumericMatch(abs_tol=0.5), "10.5", 10) == 1.0
    assert judge(NumericMatch(rel_tol=0), "10.0", 10) == 1.0
    for wrong in ({"rel_tol": -1}, {"rel_tol": 1}, {"abs_tol": float("nan")}):
        with pytest.raises(ConfigError, match="tolerances"):
            NumericMatch(**wrong)


@given(
    st.integers()
    | st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: abs(x) < 1e300)
)
@settings(max_examples=100, deadline=None)
def test_every_number_that_python_writes_is_read(number):
    assert judge(numeric_match, f"The answer is {number}.", number) == 1.0


# -- multiple choice -------------------------------------------------------------------------------

CHOICES = ["London", "Paris", "Rome", "Berlin"]
CHOOSES_B = """B|b|(B)|(b).|B.|**B**|**B.**|Option B|The answer is B|the answer is (b)
The correct answer is: B|Answer: B|answer:b|Final answer: **B**|ANSWER: B|I choose option B
I'd go with B|I pick B, because A is wrong.|\\boxed{B}|\\boxed{\\text{B}}|$\\boxed{(B)}$|B) Paris
B. Paris|(B) Paris|B: Paris|Paris|Paris.|The answer is Paris.|Option B is correct.
B is the correct answer|It cannot be A, so it is B.|A is wrong. C is wrong. B|答案是B|答案：B
The answer is not A. The answer is B.|Die richtige Antwort ist B.|La réponse est B|It's B
The answer is option B: Paris|My answer is "B".|So I would select (B).|<answer>B</answer>
The answer is B rather than A|B, since a capital is needed|**Answer:** B|**Answer: B**
The answer is $\\textbf{(B)}$|A good question. The answer is B|The correct option is B, not C.
Answer - B|The answer should be B|B is the right choice because C isn't.|answer = B
I believe it is B|B seems correct|Answer B|**Answer: B. Paris**|The answer is **Paris (B)**
The answer: B|I'm choosing B|Selected option: B|B. Because.""".replace("\n", "|").split("|")
CHOOSES_NONE = """A or B|A and B|The answer is A or B|The answer is A, B|A, B, C, D|ABCD|No idea
The answer is A. The answer is B.|The answer is a dog|I think so|The answer is not B|\\boxed{A, B}
Both A and B|A/B|(A)(B)(C)(D)|It is neither A nor B|The answer is A B C D|A dog|Vienna|B-52
Plan B's|A: London. B: Paris|(A) London (B) Paris""".replace("\n", "|").split("|")


CHOOSES_B += [
    "A) London\nB) Paris\nThe answer is B",
    "So:\n\nB",
    "Each option:\n\nA. London: no\nB. Paris: yes\n\nTherefore, the answer is B. Paris",
    "B\n\nExplanation: A is wrong because London is in the UK.",
    "The answer is:\n\n**(B) Paris**",
]


@pytest.mark.parametrize("answer", CHOOSES_B)
def test_a_choice_is_found_in_many_phrasings(answer):
    assert judge(multiple_choice, answer, "B", choices=CHOICES) == 1.0


@pytest.mark.parametrize("answer", [*CHOOSES_NONE, "A) London\nB) Paris", "Answer: A\nAnswer: B"])
def test_several_choices_and_none_are_refused(answer):
    for gold in "ABCD":
        assert judge(multiple_choice, answer, gold, choices=CHOICES) == 0.0


@pytest.mark.parametrize("gold", ["B", "b", "(B)", 1, "Paris", ["A", "B"]])
def test_the_right_choice_may_be_a_letter_a_number_or_a_text(gold):
    assert judge(multiple_choice, "B", gold, choices=CHOICES) == 1.0
    by_letter = dict(zip("ABCD", CHOICES, strict=True))
    assert judge(multiple_choice, "C", gold, choices=by_letter) == 0.0


def test_a_right_choice_that_is_no_option_is_the_authors_mistake():
    for gold in ("Vienna", "E", 4, -1):
        with pytest.raises(EnvError, match="none of its options ABCD"):
            judge(multiple_choice, "B", gold, choices=CHOICES)
    with pytest.raises(EnvError, match="none of its options AB"):
        judge(MultipleChoice(options=2), "B", "C")
    with pytest.raises(ConfigError, match="2 to 26"):
        MultipleChoice(options=1)


def test_letters_beyond_the_options_are_not_choices():
    assert judge(multiple_choice, "Vitamin C: B", "B", choices=["x", "y"]) == 1.0


# -- f1 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "gold", "value"),
    [
        ("the cat sat", "cat sat down", 2 * 2 / (2 + 3)),
        ("A cat.", "the cat", 1.0),
        ("cat cat", "cat", 2 / 3),
        ("dog", "cat", 0.0),
        ("Paris, France", ["Rome", "Paris"], 2 / 3),
        ("北京市", "北京", 0.8),
        ("the", "the", 1.0),
        ("!", "the", 0.0),
    ],
)
def test_f1_is_that_of_squad(answer, gold, value):
    assert judge(F1(), answer, gold) == pytest.approx(value)


# -- JSON ------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("answer", "whole", "share"),
    [
        ('{"name": "x", "age": 3}', 1.0, 1.0),
        ('Here:\n```json\n{"name": "x", "age": 3}\n```\nDone.', 1.0, 1.0),
        ('Sure! {"name": "x", "age": 3} Bye.', 1.0, 1.0),
        ('{"name": "x", "age": "3"}', 0.0, 2 / 3),
        ('{"name": "x"}', 0.0, 2 / 3),
        ('{"name": 1, "tags": 1}', 0.0, 1 / 4),
        ('{"name": "x", "age": 3, "x": 1}', 0.0, 2 / 3),
        ("[1]", 0.0, 1 / 2),
        ("{}", 0.0, 1 / 3),
        ("hello", 0.0, 0.0),
        ('{"name": "x", "age": NaN}', 0.0, 0.0),
        ('{"name": "x", ', 0.0, 0.0),
        ("[" * 5000 + "]" * 5000, 0.0, 0.0),
    ],
)
def test_json_fits_its_schema_or_a_share_of_it(answer, whole, share):
    assert judge(JsonMatch(SCHEMA), answer, None) == whole
    assert judge(json_match, answer, None, schema=SCHEMA) == whole
    assert judge(JsonMatch(SCHEMA, partial=True), answer, None) == pytest.approx(share)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(value=json_values, text=st.text(max_size=30))
@settings(max_examples=80, deadline=None)
def test_a_share_is_1_exactly_where_the_whole_fits(value, text):
    import json

    for answer in (json.dumps(value), text):
        share = judge(JsonMatch(SCHEMA, partial=True), answer, None)
        assert 0.0 <= share <= 1.0
        assert (share == 1.0) == (judge(JsonMatch(SCHEMA), answer, None) == 1.0)


def test_wrong_schemas_are_the_authors_mistake_and_nothing_is_fetched():
    with pytest.raises(ConfigError, match="schema is wrong"):
        JsonMatch({"type": "strnig"})
    with pytest.raises(EnvError, match="schema is wrong"):
        judge(json_match, "{}", None, schema={"type": "strnig"})
    with pytest.raises(EnvError, match="has no schema"):
        judge(json_match, "{}", None)
    with pytest.raises(EnvError, match="cannot be resolved"):
        judge(JsonMatch({"$ref": "http://127.0.0.1:9/schema.json"}), "{}", None)


# -- a judge's verdict -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "mark"),
    [
        ('{"reason": "right", "mark": 7}', 7.0),
        ('```json\n{"reason": "ok", "mark": "7"}\n```', 7.0),
        ('<think>{"mark": 1}</think>{"mark": 7}', 7.0),
        ('I see {"a": 1}. {"score": 7}', 7.0),
        ("**Mark:** 7/10", 7.0),
        ("Score: 7", 7.0),
        ('{"mark": 10} is what it asks for. {"mark": 2}', None),
        ("Score: 7/100", None),
        ("mark: 3, score: 4", None),
        ('{"mark": 11}', None),
        ('{"mark": -1}', None),
        ('{"mark": true}', None),
        ('{"mark": NaN}', None),
        ('{"mark": null}', None),
        ("good answer", None),
        ("", None),
    ],
)
def test_a_verdict_is_one_mark_within_bounds(reply, mark):
    assert read_mark(reply, 10) == mark


@given(st.text())
@settings(max_examples=60, deadline=None)
def test_reading_a_verdict_is_total(text):
    mark = read_mark(text, 10)
    assert mark is None or 0 <= mark <= 10


def test_long_texts_lose_their_middle():
    text = shortened("a" * 100 + "b" * 100, 20)
    assert text.startswith("a" * 10) and text.endswith("b" * 10)
    assert "180 characters left out" in text
    assert shortened("abc", 3) == "abc"

"""Tasks: splits that share nothing, an order that resumes, answers that do not leak."""

import asyncio
import dataclasses
import itertools
import json
import pickle
import pprint
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_agent.envs import Task, TaskSet, ToolEnv
from relax_agent.errors import ConfigError, EnvError
from relax_agent.messages import Audio, Image, Text, assistant, system, user


def numbered(count, prefix="t"):
    return [Task(f"{prefix}{n}", f"question {n}", answer=f"secret {n}") for n in range(count)]


def take(order, count):
    return list(itertools.islice(order, count))


@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 10))
def test_an_order_resumed_anywhere_goes_on_as_if_never_stopped(size, position, seed):
    """U10, U11: the position is all that a checkpoint keeps, also exactly at an epoch's end."""
    tasks = TaskSet(numbered(size))
    whole = take(tasks.sample_order(seed), position + 20)
    resumed = tasks.sample_order(seed, position=position)
    assert take(resumed, 20) == whole[position:]
    assert resumed.position == position + 20


def test_every_pass_visits_every_task_once_in_another_order():
    tasks = TaskSet(numbered(50))
    order = tasks.sample_order(3)
    passes = [take(order, 50) for _ in range(3)]
    assert all(sorted(ids) == sorted(tasks.ids()) for ids in passes)
    assert passes[0] != passes[1] != passes[2]
    assert take(tasks.sample_order(4), 50) != passes[0]


def test_the_order_is_the_same_in_every_process():
    tasks = TaskSet(numbered(5))
    assert take(tasks.sample_order(7), 10) == [f"t{n}" for n in (1, 4, 3, 0, 2, 2, 3, 4, 1, 0)]


def test_splits_share_no_id():
    with pytest.raises(ConfigError, match="two tasks have the id 't0'"):
        TaskSet(numbered(2), numbered(1))
    tasks = TaskSet(numbered(2), numbered(3, "e"))
    assert tasks.ids("train") == ("t0", "t1")
    assert tasks.ids("eval") == ("e0", "e1", "e2")
    with pytest.raises(ConfigError, match="no split 'test'"):
        tasks.ids("test")


def test_a_task_stays_in_its_split_when_others_come():
    few = TaskSet.split(numbered(200), eval_share=0.2)
    many = TaskSet.split(numbered(400), eval_share=0.2)
    assert set(few.ids("eval")) == set(many.ids("eval")) & {t.id for t in numbered(200)}
    assert 20 < len(few.ids("eval")) < 60


def test_the_fingerprint_changes_with_any_task():
    prints = {
        TaskSet(numbered(3)).fingerprint(),
        TaskSet(numbered(4)).fingerprint(),
        TaskSet(numbered(3)[::-1]).fingerprint(),
        TaskSet(numbered(2), numbered(3)[2:]).fingerprint(),
        TaskSet([*numbered(2), Task("t2", "question 2", "another")]).fingerprint(),
    }
    assert len(prints) == 5
    assert TaskSet(numbered(3)).fingerprint() in prints


RICH = """
import dataclasses, datetime, decimal, enum, fractions, functools, operator, pathlib, uuid
import collections
import numpy as np
from relax_agent.envs import Task, TaskSet, ToolEnv
from relax_agent.messages import Image, ToolCall, assistant, user


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Case:
    given: int
    wanted: str


class Plain:
    def __init__(self):
        self.a, self.b = 1, {"x", "y", "z"}


class Slots:
    __slots__ = ("a",)

    def __init__(self):
        self.a = Plain()


Pair = collections.namedtuple("Pair", "left right")
VALUES = [
    None, True, 1, 1.0, float("nan"), float("inf"), -0.0, 0.0, "1", b"1", [1], [[1]], {1}, {"1"},
    {"a": 1, "b": 2}, {1: "a"}, {"1": "a"}, Colour.RED, Case(1, "x"), Plain(), Slots(), Pair(1, 2),
    datetime.date(2024, 1, 1), datetime.datetime(2024, 1, 1), decimal.Decimal("1"),
    fractions.Fraction(1, 3), uuid.UUID(int=1), pathlib.PurePosixPath("a"), range(3), 1j,
    np.arange(3), np.arange(3.0), np.arange(4).reshape(2, 2), np.array(["a", None], object),
    len, operator.add, Plain, Plain().__init__, functools.partial(int, base=2), Image(b"x"),
    user("hi"), assistant("hi"), assistant("", tool_calls=[ToolCall("f", {"x": 1}, "c")]),
    10**5000, frozenset({"p", "q", "r", "s"}), "\\ud800", {"deep": [{"er": {"s", "t"}}]},
]
"""


def test_the_fingerprint_tells_values_apart_and_is_the_same_in_every_process():
    """Whatever the hash seed: a set, a dict and the address of an object must not show."""
    code = RICH + "print(*(TaskSet([Task('t', '?', v)]).fingerprint() for v in VALUES))"
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True,
            text=True, check=True,
        ).stdout.split()
        for seed in ("1", "22")
    ]  # fmt: skip
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == len(set(outputs[0])) > 40


@pytest.mark.parametrize(
    "change",
    [
        {"id": "b"},
        {"prompt": "2+2?"},
        {"prompt": (Text("1+1?"), Image(b"x"))},
        {"prompt": (Text("1+1?"), Image(b"y"))},
        {"prompt": (Text("1+1?"), Audio(b"x"))},
        {"answer": "2"},
        {"data": {"level": 2}},
        {"data": {"level": 1, "more": None}},
        {"messages": (system("S"), user("1+1?"))},
        {"messages": (user("1+1?"), assistant("?"), user("1+1?"))},
    ],
    ids=str,
)
def test_the_fingerprint_changes_with_every_part_of_a_task(change):
    task = Task("a", "1+1?", 2, {"level": 1})
    others = [dataclasses.replace(task, **change)]
    assert TaskSet([task]).fingerprint() != TaskSet(others).fingerprint()
    assert TaskSet([task]).fingerprint() == TaskSet([dataclasses.replace(task)]).fingerprint()


def test_the_same_prompt_in_another_form_has_the_same_fingerprint():
    prints = {
        TaskSet([Task("a", prompt)]).fingerprint()
        for prompt in ("1+1?", (Text("1+1?"),), ["1+1?"], Text("1+1?"))
    }
    assert len(prints) == 1


def test_what_has_no_stable_form_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"task 'a': a value of type builtins\.object has no"):
        TaskSet([Task("a", "?", object())]).fingerprint()
    loop = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="task 'a': its data contain themselves"):
        TaskSet([Task("a", "?", data={"x": loop})]).fingerprint()


def test_a_printed_task_hides_its_answer():
    assert "secret" not in repr(numbered(1)[0])
    assert "secret" not in repr(TaskSet(numbered(1)))


def test_an_unknown_task_and_an_empty_split_are_named():
    tasks = TaskSet(numbered(1))
    with pytest.raises(EnvError, match="there is no task 'x' → "):
        tasks["x"]
    with pytest.raises(ConfigError, match="no tasks"):
        tasks.sample_order(0, split="eval")


HIDING = [
    repr,
    str,
    dataclasses.asdict,
    dataclasses.astuple,
    pprint.pformat,
    lambda task: json.dumps(dataclasses.asdict(task)),
    lambda task: json.dumps(task, default=str),
    lambda task: f"{task} {task!r}",
]


@pytest.mark.parametrize("show", HIDING)
def test_nothing_that_prints_or_saves_a_task_shows_what_is_the_environments(show):
    task = Task("a", "2+2?", answer="secret", data={"tests": "secret"})
    assert "2+2?" in str(show(task))
    assert "secret" not in str(show(task))
    with pytest.raises((TypeError, AttributeError)):
        vars(task)


def test_a_copied_replaced_or_pickled_task_keeps_its_answer():
    task = Task("a", "2+2?", answer="4", data={"level": 1})
    assert pickle.loads(pickle.dumps(task)) == task
    other = dataclasses.replace(task, prompt="what is 2+2?")
    assert (other.answer, other.data, other.prompt) == ("4", {"level": 1}, "what is 2+2?")
    assert other != task
    assert Task("a", "2+2?", answer="5", data={"level": 1}) != task


def test_a_set_of_ids_orders_as_the_set_it_stands_for_and_has_no_answers():
    real = TaskSet(numbered(5), numbered(2, "e"))
    known = TaskSet.of_ids(real.ids(), real.ids("eval"), real.fingerprint())
    assert known.ids_only
    assert not real.ids_only
    assert known.fingerprint() == real.fingerprint()
    assert take(known.sample_order(3), 12) == take(real.sample_order(3), 12)
    assert "t3" in known
    assert (len(known), repr(known)) == (7, repr(real))
    with pytest.raises(EnvError, match=r"only the id of task 't3' is known here.*another process"):
        known["t3"]
    with pytest.raises(EnvError, match="only the id"):
        next(iter(known))
    with pytest.raises(EnvError, match="there is no task 'x'"):
        known["x"]
    with pytest.raises(ConfigError, match="two tasks have the id 'a'"):
        TaskSet.of_ids(["a"], ["a"])


def test_a_negative_position_is_told():
    with pytest.raises(ConfigError, match="position=-1"):
        TaskSet(numbered(2)).sample_order(0, position=-1)


def test_a_conversation_opens_an_episode_and_a_prompt_is_one_user_message():
    chat = (system("Be brief."), user("Hi"), assistant("Hello"), user("2+2?"))
    assert Task("a", "2+2?", messages=chat).to_messages() == list(chat)
    assert Task("a", "2+2?").to_messages() == [user("2+2?")]
    assert Task("a", ["see", Image(b"x")]).to_messages() == [user(["see", Image(b"x")])]


def test_the_system_prompts_of_an_environment_and_of_its_task_are_one_message():
    """Most chat templates take one system message, at the beginning."""

    class Chat(ToolEnv):
        system_prompt = "Use the tools."
        tasks = TaskSet([
            Task("a", "2+2?", messages=(system("Be brief."), user("2+2?"))),
            Task("b", "3+3?"),
        ])  # fmt: skip

        def score(self, task, transcript):
            return 0.0

    def opening(task):
        messages, _ = asyncio.run(Chat().reset(options={"task": task}))
        return [(message.role, message.text) for message in messages]

    assert opening("a") == [("system", "Use the tools.\n\nBe brief."), ("user", "2+2?")]
    assert opening("b") == [("system", "Use the tools."), ("user", "3+3?")]
    assert opening("a") == opening("a")


@pytest.mark.parametrize("wrong", [[{"prompt": "a"}], ["a"], [Task(7, "a")], "abc", [None]])
def test_what_is_no_task_is_told(wrong):
    with pytest.raises(ConfigError, match=r"is no task, or its id is no text → .*from_generator"):
        TaskSet(wrong)

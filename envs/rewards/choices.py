r"""A reward for multiple choice: which letter does an answer choose, if it chooses one?

Looked at in this order; the first that names a letter decides, and if it names several different
ones the answer has chosen none (naming them all must not win):

1. the last ``\boxed{…}``,
2. an answer that is a letter and no more: ``B``, ``(b).``, ``**B**``, ``option B``,
3. what is said to be the answer: ``the answer is B``, ``Answer: (b)``, ``I choose option B``,
   ``option B is correct``,
4. a letter that begins a line, with its option behind it: ``B) Paris``, ``B. Paris``,
5. the text of an option (``task.data["choices"]``): ``Paris``, ``the answer is Paris``,
6. capital letters that stand alone in the text.

Letters that are denied (``not A``, ``A is wrong``, ``rather than A``) are left out first.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_agent.envs.rewards.answers import AnswerReward, boxed, golds_of
from relax_agent.envs.rewards.texts import ExactMatch
from relax_agent.envs.tasks import Task
from relax_agent.envs.transcript import Transcript
from relax_agent.errors import ConfigError, EnvError

_MARKUP = re.compile(
    r"\*\*|__|`|\$|\\(?:text(?:bf|rm)?|math(?:rm|bf)|boxed|left|right)\b|\\[()\[\]]"
)
_ANSWER = r"(?:answer|solution|antwort|lösung|réponse|respuesta|risposta|答案)"
_NOUN = rf"(?:{_ANSWER}|choice|option|letter)"
_OPEN, _CLOSE = r"[\"'“‘(\[{]{0,2}", r"[\"'”’)\]}]{0,2}"
_LETTER = rf"{_OPEN}([A-Za-z])(?![\w'’]){_CLOSE}"
_FIRST = re.compile(_LETTER)
_NEXT = re.compile(
    rf"\s?(?:,\s?and\b|,\s?or\b|,|/|&|\+|\band\b|\bor\b|(?-i:(?=\s[A-Z](?![\w'’.]))))\s?{_LETTER}",
    re.IGNORECASE,
)
_CUES = re.compile(
    rf"""
    (?:
        {_NOUN} (?:[ ]?\([^()]{{0,20}}\))? [ ]?
        (?: \b(?:is|are|would[ ]be|must[ ]be|should[ ]be|ist|est|es|è)\b | 是 | 为 ) \s{{0,3}}
        (?: [:：]\s{{0,3}} )?
      | {_ANSWER} (?:[ ]?\([^()]{{0,20}}\))? [ ]? [:：=] \s{{0,3}}
      | (?:choice|option|letter) [ ]? [:：=] [ ]?  # "each option:" may begin a list of them all
      | \b(?:choose|choosing|chose|pick|picked|select|selected|(?:go|going|went)[ ]with)\b [ ]
    )
    (?:(?:definitely|clearly|therefore|thus|indeed|most[ ]likely)[ ])?
    (?:(?:the|die|der|la)[ ])? (?:{_NOUN}[ ])?
    """,
    re.VERBOSE | re.IGNORECASE,
)
_PRAISED = re.compile(
    rf"\b{_NOUN}?[ ]?{_LETTER} (?:is|seems|would be|must be|ist) (?:the |die )?(?:\w+ )?"
    r"(?:correct|right|best|true|answer|richtig)",
    re.IGNORECASE,
)
_DENIED = re.compile(
    rf"""
    (?: \b(?:not|cannot[ ]be|neither|nor|instead[ ]of|rather[ ]than|than|except|eliminate[sd]?
        |exclud(?:e|ed|ing)|rul(?:e|ed|ing)[ ]out) | n['’]t )
    [ ](?:the[ ])? (?:{_NOUN}[ ])? {_LETTER}
  | \b(?:{_NOUN}[ ])? {_LETTER} [ ]
    (?:(?:is|are|was|can|could)(?:[ ]not\b|n['’]t\b)
      |(?:is|are|was)[ ](?:\w+[ ])?(?:wrong|incorrect|false|out\b|impossible))
    """,
    re.VERBOSE | re.IGNORECASE,
)
_BEGINS = re.compile(
    rf"""
    (?: ^[\s>\#*-]{{0,9}} (?:{_NOUN}[ ])?
      | (?-i: [.;,)]\s{{1,3}} (?=[(\[]?[A-Z]) | \s (?=\([A-Z]\)) ) )  # more options on the line
    [(\[]? ([A-Za-z]) [)\].:][)\]]? \s
    """,
    re.VERBOSE | re.MULTILINE | re.IGNORECASE,
)
_ALONE = re.compile(r"(?<![\w'’.-])([A-Z])(?![\w'’]|-\w)")
_IN_SENTENCE = re.compile(r"\s(?!(?:and|or|as|is|because|since)\b)[a-z]")
"""What stands behind a bare ``a`` or ``I`` that is a word, not a choice."""
_MOST_PLACES, _MOST_CHARS = 5, 1000
_SAME = ExactMatch(ignore_punctuation=True, ignore_articles=True)


@dataclass(frozen=True)
class MultipleChoice(AnswerReward):
    """1 if the answer chooses the right letter and no other, else 0; see the module's docstring.

    The right answer is a letter, the number of the option counted from 0, or its text. The options
    are in ``task.data["choices"]``, as a list or as a dict by letter; without them only letters
    can be told apart.
    """

    options: int = 10
    """How many options a question has, where the task does not say."""

    def __post_init__(self) -> None:
        if not 2 <= self.options <= 26:
            raise ConfigError(f"multiple choice takes 2 to 26 options, not {self.options}")

    def __call__(self, task: Task, transcript: Transcript) -> float:
        """Return 1.0 or 0.0."""
        choices = _choices(task.data.get("choices"), self.options)
        rights = {right_letter(gold, choices, task.id) for gold in golds_of(task)}
        text = self.answer(transcript)
        return float(text is not None and chosen_letter(text, choices) in rights)

    def compare(self, answer: str, gold: Any) -> float:
        """Return 1.0 or 0.0, without knowing the options' texts."""
        choices = _choices(None, self.options)
        return float(chosen_letter(answer, choices) == right_letter(gold, choices, "?"))


def chosen_letter(text: str, choices: Mapping[str, str]) -> str | None:
    """Return the one letter that a text chooses, or None.

    Args:
        text: The answer.
        choices: Letters with the texts of their options, which may be empty.
    """
    inner = boxed(text)
    if inner is not None:
        text = inner
    text = _DENIED.sub(" ", _MARKUP.sub("", text)).strip()
    for found in (
        _whole(text),
        _said(text),
        set(_BEGINS.findall(text)),
        _by_text(text, choices),
        _standing_alone(text),
    ):
        letters = {letter.upper() for letter in found} & choices.keys()
        if letters:
            return letters.pop() if len(letters) == 1 else None
    return None


def right_letter(gold: Any, choices: Mapping[str, str], task_id: str) -> str:
    """Return the letter of a right answer: a letter already, a number from 0, or an option's text.

    Raises:
        EnvError: It is none of these.
    """
    letters = list(choices)
    if isinstance(gold, int) and not isinstance(gold, bool) and 0 <= gold < len(letters):
        return letters[gold]
    text = str(gold).strip()
    bare = text.strip("()[]. ").upper()
    if bare in choices:
        return bare
    same = [letter for letter, option in choices.items() if option and option == text]
    if len(same) != 1:
        raise EnvError(
            f"the answer {gold!r} of task {task_id!r} is none of its options {''.join(letters)}",
            hint="give its letter, its number from 0, or its text as in data['choices']",
        )
    return same[0]


def _choices(given: Any, count: int) -> dict[str, str]:
    if isinstance(given, Mapping):
        return {str(letter).upper(): str(option) for letter, option in given.items()}
    if isinstance(given, Sequence) and not isinstance(given, str) and given:
        return dict(zip(string.ascii_uppercase, map(str, given), strict=False))
    return dict.fromkeys(string.ascii_uppercase[:count], "")


def _whole(text: str) -> set[str]:
    match = re.fullmatch(rf"\W*(?:(?:{_NOUN})\W{{1,3}})?{_LETTER}\W*", text, re.IGNORECASE)
    return {match[1]} if match else set()


def _said(text: str) -> set[str]:
    found = {match[1] for match in _PRAISED.finditer(text) if _is_choice(match, 1)}
    for cue in _CUES.finditer(text):
        match = _FIRST.match(text, cue.end())
        while match is not None and _is_choice(match, 1):
            found.add(match[1])
            match = _NEXT.match(text, match.end())
    return found


def _is_choice(match: re.Match[str], group: int) -> bool:
    """Tell a choice from the article a and the pronoun I, which have a word behind them."""
    letter, text = match[group], match.string
    bare = match.start() == match.start(group) and match.end() == match.end(group)
    if not bare or letter not in "aAI" or not _IN_SENTENCE.match(text, match.end()):
        return True
    before = text[max(0, match.start() - 9) : match.start()].rstrip()[-1:]
    return letter == "A" and before not in ("", ".", "!", "?", ":")


def _by_text(text: str, choices: Mapping[str, str]) -> set[str]:
    if not any(choices.values()):
        return set()
    behind = [cue.end() for cue in _CUES.finditer(text)][-_MOST_PLACES:]
    places = [text, *(text[n : n + _MOST_CHARS].partition("\n")[0] for n in behind)]
    told = {_SAME.normalise(place) for place in places} - {""}
    return {letter for letter, option in choices.items() if _SAME.normalise(option) in told}


def _standing_alone(text: str) -> set[str]:
    return {match[1] for match in _ALONE.finditer(text) if _is_choice(match, 1)}


multiple_choice = MultipleChoice()

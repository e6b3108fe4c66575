"""What ready-made rewards share: finding the answer in a text, and the right answers of a task.

:class:`AnswerReward` compares the final answer with ``task.answer``, or with each of them if that
is a list, tuple or set: the best comparison counts. ``extract`` takes the answer out of a longer
text first; one of the functions here or any ``str -> str | None``. No answer is worth 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from relax_agent.envs.tasks import Task
from relax_agent.envs.transcript import Transcript
from relax_agent.errors import EnvError

Extract: TypeAlias = Callable[[str], str | None]

MAX_CHARS = 20_000
"""Only so much of the end of an answer is looked at: judging must stay a matter of milliseconds."""
_BRACES = re.compile(r"\\(?:boxed|fbox)\s{0,9}\{|\\[{}]|[{}]")


@dataclass(frozen=True)
class AnswerReward:
    """Compares the final answer with the task's own."""

    extract: Extract | None = field(default=None, kw_only=True)
    """Takes the answer out of the text; by default the whole text is the answer."""

    def __call__(self, task: Task, transcript: Transcript) -> float:
        """Return how good the final answer is, from 0 to 1."""
        answer = self.answer(transcript)
        golds = golds_of(task)
        return 0.0 if answer is None else max(self.compare(answer, gold) for gold in golds)

    def answer(self, transcript: Transcript) -> str | None:
        """Return the answer that the conversation ends with; None if there is none."""
        text = transcript.answer[-MAX_CHARS:]
        if self.extract is None:
            return text or None
        found = self.extract(text)
        return None if found is None else found.strip()

    def compare(self, answer: str, gold: Any) -> float:
        """Return how well ``answer`` agrees with one right answer, from 0 to 1."""
        raise NotImplementedError


def golds_of(task: Task) -> list[Any]:
    """Return the right answers of a task, at least one.

    Raises:
        EnvError: The task has none: its author's mistake, not the model's.
    """
    answer = task.answer
    golds = list(answer) if isinstance(answer, (list, tuple, set, frozenset)) else [answer]
    if not golds or any(gold is None for gold in golds):
        raise EnvError(
            f"task {task.id!r} has no answer to compare with", hint="Task(id, prompt, answer)"
        )
    return golds


def boxed(text: str) -> str | None:
    r"""Return what is in the last ``\boxed{…}``, braces inside it balanced."""
    open_at: list[int | None] = []  # for every open brace: where its box begins, if it is one
    last: tuple[int, str] | None = None
    for match in _BRACES.finditer(text):
        if match[0].endswith("{") and len(match[0]) != 2:
            open_at.append(match.end() if len(match[0]) > 1 else None)
        elif match[0] == "}" and open_at:
            begin = open_at.pop()
            if begin is not None and (last is None or begin > last[0]):
                last = begin, text[begin : match.start()].strip()
    return None if last is None else last[1]


def tagged(name: str = "answer") -> Extract:
    """Return a function that finds what is in the last ``<name>…</name>``."""
    return partial(_between, f"<{name}>", f"</{name}>")


def after(marker: str = "####") -> Extract:
    """Return a function that finds what follows the last ``marker``."""
    return partial(_behind, marker)


def last_line(text: str) -> str | None:
    """Return the last line that is not blank."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else None


def _between(opening: str, closing: str, text: str) -> str | None:
    head, found, _ = text.rpartition(closing)
    if not found:
        return None
    _, begun, inner = head.rpartition(opening)
    return inner.strip() if begun else None


def _behind(marker: str, text: str) -> str | None:
    _, found, rest = text.rpartition(marker)
    return rest.strip() if found else None

"""Failures of an author's code in words: told once, where they are, with what to do.

A defect in ``step`` or ``score`` stops every check that plays an episode. The first row tells it;
the checks that it stops say that they were not done.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

from relax_agent.envs.checking.lab import CallFailed
from relax_agent.envs.checking.report import Row
from relax_agent.envs.transcript import Transcript
from relax_agent.errors import RelaxError
from relax_agent.messages import AssistantMessage, Message

_FORMS = {
    "reset": "def reset(self, *, seed=None, options=None)",
    "step": "def step(self, action)",
    "setup": "def setup(self, task)",
    "first_messages": "def first_messages(self, task)",
    "follow_up": "def follow_up(self, task, transcript)",
    "score": "def score(self, task, transcript)",
    "teardown": "def teardown(self)",
}
"""How an author writes what is called for him."""
_KNOWN = {
    AssistantMessage: "its text is .text, its calls are .tool_calls",
    Message: "its text is .text",
    Transcript: "the final answer is .answer, the messages are its items, the calls are .calls",
}


class Told:
    """What has been told so far. A row that tells it again becomes a word that it was told."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], str] = {}

    def shorten(self, rows: Sequence[Row], failures: Sequence[CallFailed]) -> list[Row]:
        """Return the rows of one check without what an earlier row has told."""
        out: list[Row] = []
        again: set[str] = set()
        for row in rows:
            cause = _cause(row, failures)
            if cause is None:
                out.append(row)
                continue
            check = self._rows.setdefault(cause, row.check)
            if check == row.check and all(_cause(each, failures) != cause for each in out):
                out.append(row)
            elif check != row.check:
                again.add(check)
        if not out and again:
            words = f"it needs what {sorted(again)[0]!r} says above to be mended"
            out.append(Row(rows[0].check, "skip", words))
        return out


def _cause(row: Row, failures: Sequence[CallFailed]) -> tuple[str, str] | None:
    """Return the kind of failure and its place, where a row tells a failure of a call."""
    if row.status not in ("fail", "warn"):
        return None
    for failed in failures:
        if str(failed) in row.message or (
            failed.where and failed.where == row.where and f"raised {failed.kind}" in row.message
        ):
            return failed.kind, failed.where or str(failed)
    return None


def advice(failed: CallFailed) -> str:
    """Say what to do about a call that raised."""
    error = failed.error
    if isinstance(error, RelaxError) and error.hint:
        return ""  # it says so itself
    if failed.call == "the constructor":
        return "no environment could be made"
    known = _of_attribute(error) or _of_signature(error) or _of_value(error)
    if known:
        return known
    if failed.call == "reset()":
        return "every reset(seed=…, options=None) must begin an episode"
    return "mend the code, or, if the model's message is at fault, answer it with one that says why"


def _of_attribute(error: BaseException) -> str:
    """Name the attribute that was meant."""
    if not isinstance(error, AttributeError) or error.obj is None:
        return ""
    target: Any = error.obj
    names = [name for name in dir(target) if not name.startswith("_")]
    near = difflib.get_close_matches(str(error.name), names, n=1)
    if near:
        return f"did you mean .{near[0]}?"
    return next((words for kind, words in _KNOWN.items() if isinstance(target, kind)), "")


def _of_signature(error: BaseException) -> str:
    """Say how a function is written that was called with arguments that it does not take."""
    if not isinstance(error, TypeError):
        return ""
    words = r"(?:takes \d|takes from|missing \d|got an unexpected keyword)"
    found = re.search(rf"(\w+)\(\) {words}", str(error))
    form = _FORMS.get(found[1]) if found else None
    return f"write `{form}`" if form else ""


def _of_value(error: BaseException) -> str:
    if isinstance(error, RelaxError) and "score() returned" in str(error):
        return "`return` a number, such as float(transcript.answer == task.answer), or a Score"
    return ""

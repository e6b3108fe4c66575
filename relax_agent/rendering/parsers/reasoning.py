"""Separating reasoning from what the model says: ``<think>…</think>`` at the beginning.

Only one region at the beginning is reasoning; tags after it are ordinary text, and a second opening
tag inside says nothing. A call that is drafted inside is part of the reasoning, if the reasoning is
closed after it. If it never is, the first thing that can only be a call ends it: models forget the
closing tag. Which of the two it was is known at the closing tag or at the end, so the draft is held
back until then.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from relax_agent.rendering.parsers.tape import (
    SPACE,
    Marks,
    Steps,
    Tape,
    Thought,
    run,
    skip,
    upto,
)

Reasoning: TypeAlias = Literal["tagged", "opened", "none"]

_OPEN, _CLOSE = "<think>", "</think>"
_CLOSING = Marks(_CLOSE)


def split(tape: Tape, where: Reasoning, opener: str | None) -> Steps[None]:
    """Yield thoughts, then the text behind them as it comes."""
    if where != "none":
        space = yield from run(tape, SPACE)
        if (yield from skip(tape, _OPEN)) or where == "opened":
            yield from _thoughts(tape, opener)
        elif space:
            yield space
    while True:
        if tape.next():
            yield tape.take()
        elif tape.ended:
            return
        else:
            yield None


def _thoughts(tape: Tape, opener: str | None) -> Steps[None]:
    marks = Marks(_CLOSE, _OPEN, opener) if opener else Marks(_CLOSE, _OPEN)
    while True:
        text, mark = tape.until(marks)
        if text:
            yield Thought(text)
        if mark == _CLOSE:
            return
        if mark == _OPEN:
            continue
        if mark:
            yield from _draft(tape, mark)
            return
        if tape.ended:
            return
        yield None


def _draft(tape: Tape, opener: str) -> Steps[None]:
    draft, closed = yield from upto(tape, _CLOSING)
    if closed:
        yield Thought((opener + draft).replace(_OPEN, ""))
    else:
        tape.push_back(opener + draft)

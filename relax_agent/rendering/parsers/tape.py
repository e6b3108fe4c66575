"""Text that arrives in pieces, read once from front to back.

Every format here is written as one generator over a :class:`Tape`, as if the whole text were
there. Where the text runs out before the reader can decide, the generator yields None and goes on
when more has come. A whole output is one piece, so streamed and whole readings agree by
construction.

What is decided leaves the tape at once. Only a possible beginning of a marker stays behind, so the
work is linear in the text however small the pieces are; ``work`` counts it.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from relax_agent.messages import ToolCall

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of reasoning."""

    text: str


Piece: TypeAlias = str | Thought | ToolCall
Steps: TypeAlias = Generator[Piece | None, None, T]
"""A reader: yields what it found, or None where it needs more text; returns a T."""

SPACE = re.compile(r"\s*")


class Marks:
    """Literal markers to look for. None may contain another."""

    def __init__(self, *marks: str) -> None:
        self.pattern = re.compile("|".join(map(re.escape, marks)))
        self._beginnings = frozenset(mark[:n] for mark in marks for n in range(1, len(mark)))
        self._longest = max(map(len, marks)) - 1

    def begun(self, text: str, at: int) -> int:
        """Return how many characters at the end of ``text[at:]`` may begin a marker."""
        for n in range(min(self._longest, len(text) - at), 0, -1):
            if text[-n:] in self._beginnings:
                return n
        return 0


class Tape:
    """The text that came and was not read yet."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self.ended = False
        """Whether no more text will come."""
        self.work = 0
        """Characters copied or looked at so far; for tests."""

    def add(self, text: str) -> None:
        """Append text that came."""
        self._text = self._text[self._at :] + text
        self._at = 0
        self.work += len(self._text)

    def push_back(self, text: str) -> None:
        """Put back the text that was read last."""
        if self._at >= len(text):
            self._at -= len(text)
        else:
            self._text = text + self._text[self._at :]
            self._at = 0
            self.work += len(self._text)

    def next(self, count: int = 1) -> str:
        """Return the next characters without reading them; empty if there are none yet."""
        return self._text[self._at : self._at + count]

    def take(self, count: int | None = None) -> str:
        """Read some characters, or all there are."""
        end = len(self._text) if count is None else self._at + count
        taken = self._text[self._at : end]
        self._at += len(taken)
        self.work += len(taken)
        return taken

    def match(self, pattern: re.Pattern[str]) -> str:
        """Read what matches here; the pattern must match the empty text too."""
        found = pattern.match(self._text, self._at)
        return self.take(found.end() - self._at) if found else ""

    def until(self, marks: Marks) -> tuple[str, str]:
        """Read up to the first marker, and it; the second text is empty if none is there yet."""
        found = marks.pattern.search(self._text, self._at)
        if found:
            text = self.take(found.start() - self._at)
            return text, self.take(found.end() - found.start())
        left = len(self._text) - self._at
        begun = 0 if self.ended else marks.begun(self._text, self._at)
        self.work += begun
        return self.take(left - begun), ""


def run(tape: Tape, pattern: re.Pattern[str]) -> Steps[str]:
    """Read the longest run of a character class."""
    taken = []
    while True:
        taken.append(tape.match(pattern))
        if tape.next() or tape.ended:
            return "".join(taken)
        yield None


def quoted(tape: Tape, inside: re.Pattern[str]) -> Steps[str]:
    """Read what is inside a string, escapes as a whole."""
    taken = []
    while True:
        taken.append((yield from run(tape, inside)))
        if tape.next(2) != "\\" or tape.ended:
            return "".join(taken)
        yield None  # the other half of an escape


def upto(tape: Tape, marks: Marks) -> Steps[tuple[str, str]]:
    """Read everything up to a marker, and it; the marker is empty if the text ended first."""
    taken = []
    while True:
        text, mark = tape.until(marks)
        taken.append(text)
        if mark or tape.ended:
            return "".join(taken), mark
        yield None


def ahead(tape: Tape, mark: str) -> Steps[bool]:
    """Say whether a marker comes next, without reading it."""
    while True:
        there = tape.next(len(mark))
        if there == mark or tape.ended or not mark.startswith(there):
            return there == mark
        yield None


def skip(tape: Tape, mark: str) -> Steps[bool]:
    """Read a marker if it comes next, and say whether it did."""
    there = yield from ahead(tape, mark)
    if there:
        tape.take(len(mark))
    return there


def peek(tape: Tape) -> Steps[str]:
    """Return the next character without reading it; empty at the end of the text."""
    while not tape.next() and not tape.ended:
        yield None
    return tape.next()


def plain_until(tape: Tape, marks: Marks) -> Steps[str]:
    """Yield text as it comes up to a marker; return it, or nothing at the end of the text."""
    while True:
        text, mark = tape.until(marks)
        if text:
            yield text
        if mark or tape.ended:
            return mark
        yield None

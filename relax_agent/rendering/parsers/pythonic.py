"""Pythonic (Llama 4): ``[f(a=1, b="x"), g()]``, perhaps between ``<|python_start|>`` and its end.

Nothing marks such a list but its shape, ``[name(``. At the beginning of a line, or after
``<|python_start|>``, it is meant as calls: what is wrong with it is a broken call, which runs to
the end of the message. In the middle of a line it is calls only if its first element is a whole
call with named literal arguments; else it is prose about a list, and text.

A call counts once the ``,`` or ``]`` behind it is there. Its arguments are read by
:mod:`~.literals`, never run.
"""

from __future__ import annotations

import re

from relax_agent.messages import ToolCall
from relax_agent.rendering.parsers.literals import keyword_arguments
from relax_agent.rendering.parsers.stream import Tools
from relax_agent.rendering.parsers.tape import (
    SPACE,
    Marks,
    Steps,
    Tape,
    peek,
    quoted,
    run,
    skip,
    upto,
)
from relax_agent.rendering.parsers.values import MALFORMED, UNCLOSED, broken, checked_call

_START, _STOP = "<|python_start|>", "<|python_end|>"
_OPENING, _STOPPING = Marks("[", _START, _STOP), Marks(_STOP)
_NAME = re.compile(r"[\w.-]*")
_QUIET = re.compile(r"""[^'"()\[\]{}#]*""")
_SINGLE = {
    "'": re.compile(r"(?:[^'\\\n]|\\.)*", re.DOTALL),
    '"': re.compile(r'(?:[^"\\\n]|\\.)*', re.DOTALL),
}
_TRIPLE = {
    "'": re.compile(r"(?:[^'\\]|\\.)*", re.DOTALL),
    '"': re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL),
}
_MAX_DEPTH = 100


def read(tape: Tape, tools: Tools) -> Steps[None]:
    """Yield text and calls."""
    fresh = True  # only white space since the line began
    while True:
        text, mark = tape.until(_OPENING)
        if text:
            yield text
            line = text.rpartition("\n")[2]
            fresh = line.isspace() or not line if "\n" in text else fresh and text.isspace()
        if mark == "[":
            yield from _list(tape, fresh)
            fresh = False
        elif mark:
            fresh = mark == _START
        elif tape.ended:
            return
        else:
            yield None


def _list(tape: Tape, meant: bool) -> Steps[None]:
    """Read what follows a ``[``: calls if it is a list of them, else text."""
    seen = "["
    while True:
        space = yield from run(tape, SPACE)
        name = yield from run(tape, _NAME)
        opened = name[:1].isidentifier() and (yield from skip(tape, "("))
        if not opened:
            yield from _no_call(tape, seen + space + name)
            return
        text, closed = yield from _arguments(tape)
        after = yield from run(tape, SPACE)
        end = yield from peek(tape)
        call = _call(name, text, closed, end)
        if seen and not meant and call.error:
            yield f"{seen}{space}{name}({text}{')' if closed else ''}{after}"
            return
        yield call
        if not closed or end not in ("]", ","):
            yield from _lost(tape)
            return
        tape.take(1)
        if end == "]":
            return
        seen = ""


def _no_call(tape: Tape, text: str) -> Steps[None]:
    if text.startswith("["):
        yield text
    elif (yield from peek(tape)) == "]":  # a comma behind the last call
        tape.take(1)
    else:
        yield broken(MALFORMED if tape.next() else UNCLOSED, text.strip())
        yield from _lost(tape)


def _lost(tape: Tape) -> Steps[None]:
    yield from upto(tape, _STOPPING)


def _call(name: str, text: str, closed: bool, end: str) -> ToolCall:
    if not closed or end not in ("]", ","):
        return broken(MALFORMED if end else UNCLOSED, name)
    try:
        return checked_call(name, keyword_arguments(text))
    except ValueError as error:
        return broken(f"the arguments are broken: {error}", name)


def _arguments(tape: Tape) -> Steps[tuple[str, bool]]:
    """Read up to the bracket that closes the call, which is read but not returned."""
    taken: list[str] = []
    depth = 1
    while 0 < depth <= _MAX_DEPTH:
        taken.append((yield from run(tape, _QUIET)))
        there = tape.next()
        if there in ("'", '"'):
            if not (yield from _string(tape, taken)):
                break
        elif not there or there == "#":
            break
        else:
            depth += 1 if there in "([{" else -1
            taken.append(tape.take(1))
    if depth == 0:
        taken.pop()
    return "".join(taken), depth == 0


def _string(tape: Tape, taken: list[str]) -> Steps[bool]:
    quote = tape.next()
    if (yield from skip(tape, quote * 3)):
        taken.append(quote * 3)
        while True:
            taken.append((yield from quoted(tape, _TRIPLE[quote])))
            if (yield from skip(tape, quote * 3)):
                taken.append(quote * 3)
                return True
            if tape.next() != quote:
                return False
            taken.append(tape.take(1))
    taken.append(tape.take(1))
    taken.append((yield from quoted(tape, _SINGLE[quote])))
    closed = tape.next() == quote
    if closed:
        taken.append(tape.take(1))
    return closed

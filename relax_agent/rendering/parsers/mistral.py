"""Mistral: ``[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]``, or ``[TOOL_CALLS]name{…}``.

Newer templates write ``[CALL_ID]id`` and ``[ARGS]`` between the name and the arguments, or neither,
and one ``[TOOL_CALLS]`` a call. There is no end tag: a call ends with its JSON. What is broken runs
to the next ``[TOOL_CALLS]`` or the end of the message, and takes no whole call before it along.
"""

from __future__ import annotations

import re

from relax_agent.messages import ToolCall
from relax_agent.rendering.parsers.stream import Tools
from relax_agent.rendering.parsers.tape import (
    SPACE,
    Marks,
    Steps,
    Tape,
    peek,
    plain_until,
    run,
    skip,
    upto,
)
from relax_agent.rendering.parsers.values import (
    MALFORMED,
    NOT_JSON,
    UNCLOSED,
    broken,
    checked_call,
    json_call,
    json_value,
    read_json,
)

OPENER = "[TOOL_CALLS]"
_ARGS, _ID = "[ARGS]", "[CALL_ID]"
_OPENING = Marks(OPENER)
_NAME = re.compile(r"[^\s\[{]*")
_BETWEEN = re.compile(r"[\s,]*")


def read(tape: Tape, tools: Tools) -> Steps[None]:
    """Yield text and calls."""
    mark = yield from plain_until(tape, _OPENING)
    while mark:
        yield from run(tape, SPACE)
        array = yield from skip(tape, "[")
        good = yield from (_array(tape) if array else _named(tape))
        # What follows a broken call is part of it.
        mark = yield from (plain_until(tape, _OPENING) if good else _rest(tape))


def _rest(tape: Tape) -> Steps[str]:
    _, mark = yield from upto(tape, _OPENING)
    return mark


def _array(tape: Tape) -> Steps[bool]:
    """Yield the calls of an array; return whether it could be read to its end."""
    while True:
        yield from run(tape, _BETWEEN)
        first = yield from peek(tape)
        if first == "]":
            tape.take(1)
            return True
        if first != "{":
            yield from _fault(first)
            return False
        text, whole = yield from json_value(tape)
        yield json_call(text) if whole else _cut(text, tape)
        if not whole:
            return False


def _fault(first: str) -> Steps[None]:
    """An array that ends between two calls was cut, but no call was."""
    if first:
        yield broken(MALFORMED)


def _named(tape: Tape) -> Steps[bool]:
    """Yield a call whose name stands before its arguments."""
    name = yield from run(tape, _NAME)
    yield from run(tape, SPACE)
    if (yield from skip(tape, _ID)):
        yield from run(tape, _NAME)
        yield from run(tape, SPACE)
    if (yield from skip(tape, _ARGS)):
        yield from run(tape, SPACE)
    first = yield from peek(tape)
    if not name or first not in ("{", "["):
        yield broken(MALFORMED if first else UNCLOSED, name)
        return False
    text, whole = yield from json_value(tape)
    yield _call(name, text) if whole else _cut(text, tape, name)
    return whole


def _call(name: str, text: str) -> ToolCall:
    try:
        return checked_call(name, read_json(text))
    except ValueError as error:
        return broken(f"{NOT_JSON}: {error}", name)


def _cut(text: str, tape: Tape, name: str = "") -> ToolCall:
    if not tape.next():
        return broken(UNCLOSED, name)
    return broken(f"{NOT_JSON}: unexpected {tape.next()!r} at character {len(text)}", name)

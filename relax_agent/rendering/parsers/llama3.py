"""Llama 3: ``{"name": …, "parameters": {…}}``, with or without ``<|python_tag|>`` before it.

Several calls are separated by ``;`` or white space. After the tag everything is meant to be calls:
what is none is a broken call that ends at the next tag or with the message. Without the tag, only a
message that *begins* with an object may be calls, and an object that is cut, broken or has not the
shape of a call is an answer in JSON and stays text.
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
    UNCLOSED,
    broken,
    guess_json,
    json_call,
    json_value,
    looks_like_a_call,
)

OPENER = "<|python_tag|>"
_OPENING = Marks(OPENER)
_BETWEEN = re.compile(r"[\s;,]*")


def read(tape: Tape, tools: Tools) -> Steps[None]:
    """Yield text and calls."""
    yield (yield from run(tape, SPACE))
    if (yield from peek(tape)) == "{":
        yield from _objects(tape, marked=False)
    while (yield from plain_until(tape, _OPENING)):
        yield from _objects(tape, marked=True)


def _objects(tape: Tape, *, marked: bool) -> Steps[None]:
    """Yield calls, one object after the other."""
    yield from run(tape, SPACE)
    while True:
        text, whole = "", False
        if (yield from peek(tape)) == "{":
            text, whole = yield from json_value(tape)
        call = _marked(text, whole) if marked else _bare(text)
        yield call if call else text
        if not call:
            return
        if not whole:
            _, tag = yield from upto(tape, _OPENING)
        else:
            between = yield from run(tape, _BETWEEN)
            tag = OPENER if (yield from skip(tape, OPENER)) else ""
            if not tag and tape.next() != "{":
                if tape.next():
                    yield between
                return
        if tag:
            marked = True
            yield from run(tape, SPACE)
        elif tape.ended and not tape.next():
            return


def _marked(text: str, whole: bool) -> ToolCall:
    if whole:
        return json_call(text)
    return broken(UNCLOSED if text else MALFORMED)


def _bare(text: str) -> ToolCall | None:
    return json_call(text) if looks_like_a_call(guess_json(text)) else None

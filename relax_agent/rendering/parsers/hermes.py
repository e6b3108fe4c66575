r"""Hermes and Qwen: ``<tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>``, any number.

A call ends at the first end tag that is not inside a JSON string. If the JSON breaks before that (a
raw line break in a string, a character that cannot stand outside of one), strings cannot be
trusted: the call ends at its first end tag, wherever it is, and is broken; what follows is read on
its own.

Reading on from the first end tag reads text twice, but never often: where one call is inside a
string, another that began there is outside, so at most two readings of a place can go on.
"""

from __future__ import annotations

from relax_agent.messages import ToolCall
from relax_agent.rendering.parsers.stream import Tools
from relax_agent.rendering.parsers.tape import (
    SPACE,
    Marks,
    Steps,
    Tape,
    plain_until,
    run,
    skip,
    upto,
)
from relax_agent.rendering.parsers.values import UNCLOSED, broken, json_call, json_value

OPENER = "<tool_call>"
_END = "</tool_call>"
_OPENING, _ENDING = Marks(OPENER), Marks(_END)


def read(tape: Tape, tools: Tools) -> Steps[None]:
    """Yield text and calls."""
    while (yield from plain_until(tape, _OPENING)):
        yield (yield from _call(tape))


def _call(tape: Tape) -> Steps[ToolCall]:
    before = yield from run(tape, SPACE)
    value, whole = yield from json_value(tape)
    after = yield from run(tape, SPACE)
    if whole and (yield from skip(tape, _END)):
        return json_call(value)
    seen = before + value + after
    end = seen.find(_END)
    if end >= 0:
        tape.push_back(seen[end + len(_END) :])
        return json_call(seen[:end])
    rest, closed = yield from upto(tape, _ENDING)
    return json_call(seen + rest) if closed else broken(UNCLOSED)

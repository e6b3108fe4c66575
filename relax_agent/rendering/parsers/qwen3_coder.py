r"""Qwen3-coder: XML whose values are bare text.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

One line break at each end of a value belongs to the tags; everything else is the value. A value
ends at ``</parameter>``. Models forget that tag: the next ``<parameter=`` at the beginning of a
line stands for it, and so does ``</function>`` right before ``</tool_call>``. Anywhere else these
are part of the value, so code that speaks of such tags can be written.

A parameter whose header is broken is left out, and takes none of the others with it. A call without
its end, a broken header of the function, or one parameter twice is a broken call. Text says nothing
about types: the tool's schema does (:mod:`~.schema_types`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from relax_agent.messages import ToolCall
from relax_agent.rendering.parsers.schema_types import Types, types_of
from relax_agent.rendering.parsers.stream import Tools
from relax_agent.rendering.parsers.tape import (
    SPACE,
    Marks,
    Steps,
    Tape,
    ahead,
    plain_until,
    run,
    skip,
    upto,
)
from relax_agent.rendering.parsers.values import (
    MALFORMED,
    NO_NAME,
    UNCLOSED,
    broken,
    checked_call,
)

OPENER = "<tool_call>"
_END, _FUNCTION, _FUNCTION_END = "</tool_call>", "<function=", "</function>"
_PARAMETER, _PARAMETER_END, _NEXT = "<parameter=", "</parameter>", "\n<parameter="
_OPENING = Marks(OPENER)
_IN_CALL = Marks(_FUNCTION, _END)
_IN_FUNCTION = Marks(_PARAMETER, _FUNCTION_END, _END)
_IN_VALUE = Marks(_PARAMETER_END, _NEXT, _FUNCTION_END, _END)
_HEADER = re.compile(r"[^<>\n]*")


def read(tape: Tape, tools: Tools) -> Steps[None]:
    """Yield text and calls."""
    types = types_of(tools)
    while (yield from plain_until(tape, _OPENING)):
        yield from (yield from _calls(tape, types))


def _calls(tape: Tape, types: Types) -> Steps[list[ToolCall]]:
    """Read one block up to its end tag. Models put several functions into one."""
    calls: list[ToolCall] = []
    while True:
        _, mark = yield from upto(tape, _IN_CALL)
        if mark == _END:
            return calls or [broken(MALFORMED)]
        if not mark:
            cut = [replace(call, arguments={}, error=UNCLOSED) for call in calls]
            return cut or [broken(UNCLOSED)]
        call, ended = yield from _function(tape, types)
        calls.append(call)
        if ended:
            return calls


def _function(tape: Tape, types: Types) -> Steps[tuple[ToolCall, bool]]:
    """Read one function, and say whether its block ended with it."""
    name = yield from run(tape, _HEADER)
    if not (yield from skip(tape, ">")):
        return broken(f"{MALFORMED}: <function={name[:80]} has no '>'"), False
    values = _Values(name.strip(), types)
    while True:
        _, mark = yield from upto(tape, _IN_FUNCTION)
        while mark == _PARAMETER:
            mark = yield from _parameter(tape, values)
        if mark == _FUNCTION_END:
            return values.call(), False
        if mark == _END:
            return values.call(), True
        if not mark and tape.ended and not tape.next():
            return broken(UNCLOSED, values.name), True


def _parameter(tape: Tape, values: _Values) -> Steps[str]:
    """Read one parameter; return the marker that was read behind it, if one stood for its end."""
    key = yield from run(tape, _HEADER)
    if not (yield from skip(tape, ">")):
        return ""
    value: list[str] = []
    while True:
        text, mark = yield from upto(tape, _IN_VALUE)
        value.append(text)
        if mark == _PARAMETER_END:
            values.add(key, "".join(value))
            return ""
        if mark == _NEXT:
            values.add(key, "".join(value))
            return _PARAMETER
        if not mark:
            return ""
        space = yield from run(tape, SPACE)
        if mark == _FUNCTION_END and (yield from skip(tape, _END)):
            values.add(key, "".join(value))
            return _END
        if mark == _END and ((yield from ahead(tape, OPENER)) or not tape.next()):
            values.problem = f"{MALFORMED}: <parameter={key[:80]}> has no end tag"
            return _END
        value += [mark, space]


class _Values:
    """The parameters of one call so far."""

    def __init__(self, name: str, types: Types) -> None:
        self.name = name
        self.problem: str | None = None if name else NO_NAME
        self._types = types
        self._values: dict[str, Any] = {}

    def add(self, key: str, text: str) -> None:
        key = key.strip()
        if key in self._values:
            self.problem = self.problem or f"the parameter {key[:80]!r} is given twice"
        text = text.removeprefix("\n").removesuffix("\n")
        self._values[key] = self._types.value(self.name, key, text)

    def call(self) -> ToolCall:
        if self.problem:
            return broken(self.problem, self.name)
        return checked_call(self.name, self._values)

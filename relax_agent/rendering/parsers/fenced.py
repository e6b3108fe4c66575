"""The fallback for models without a format of their own: a call as JSON in a fenced block.

A block without a language or marked ``json`` holds calls if all of it is an object, or an array of
objects, with the shape of a call; anything else, cut or broken JSON included, is text like other
code. A block marked ``tool_call`` is meant as calls, and what is wrong with it is a broken call. A
fence begins a line and the one that ends a block stands alone on it; blocks in other languages are
not looked into.
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
    NOT_JSON,
    UNCLOSED,
    broken,
    guess_json,
    looks_like_a_call,
    object_call,
    read_json,
)

_FENCE = "```"
_FENCES = Marks(f"\n{_FENCE}")
_INFO = re.compile(r"[^\n`]*")
_BLANK = re.compile(r"[ \t\r]*")
_SHAPED = {"", "json"}
_MEANT = {"tool_call", "tool_calls", "tool"}


def read(tape: Tape, tools: Tools) -> Steps[None]:
    """Yield text and calls."""
    yield (yield from run(tape, SPACE))
    fence = _FENCE if (yield from skip(tape, _FENCE)) else ""
    while fence := fence or (yield from plain_until(tape, _FENCES)):
        info = yield from run(tape, _INFO)
        language = info.strip().lower()
        if (yield from peek(tape)) == "`" or language not in _SHAPED | _MEANT:
            yield fence + info
            yield from _other(tape)
        else:
            yield from _block(tape, fence + info, meant=language in _MEANT)
        fence = ""


def _other(tape: Tape) -> Steps[None]:
    """Yield a block that holds no calls, as it comes."""
    while fence := (yield from plain_until(tape, _FENCES)):
        blank = yield from run(tape, _BLANK)
        yield fence + blank
        if (yield from peek(tape)) in ("", "\n"):
            return


def _block(tape: Tape, before: str, *, meant: bool) -> Steps[None]:
    taken: list[str] = []
    while True:
        text, fence = yield from upto(tape, _FENCES)
        taken.append(text)
        blank = (yield from run(tape, _BLANK)) if fence else ""
        if not fence or (yield from peek(tape)) in ("", "\n"):
            break
        taken.append(fence + blank)
    body = "".join(taken)
    calls = _meant(body, bool(fence)) if meant else _shaped(body, bool(fence))
    if calls:
        yield from calls
    else:
        yield before + body + fence + blank


def _shaped(body: str, closed: bool) -> list[ToolCall]:
    items = _items(guess_json(body)) if closed else []
    return _meant(body, closed) if items and all(map(looks_like_a_call, items)) else []


def _meant(body: str, closed: bool) -> list[ToolCall]:
    if not closed:
        return [broken(UNCLOSED)]
    try:
        return [object_call(item) for item in _items(read_json(body))]
    except ValueError as error:
        return [broken(f"{NOT_JSON}: {error}")]


def _items(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]

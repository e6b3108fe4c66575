"""From the text of one call to a :class:`ToolCall`: strict JSON, and every fault told in words.

A call that is not wholly right is a call with an ``error`` and no arguments: the toolset answers it
with that error, and nothing of it runs. Strict means: no key twice, no NaN or infinity (also not by
overflow), no half surrogate pairs, at most 100 levels deep. The words go to the model.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from relax_agent.messages import ToolCall
from relax_agent.rendering.parsers.tape import Steps, Tape, quoted

UNCLOSED = "the call has no closing tag"
NO_NAME = "the call names no tool"
NOT_JSON = "the call is not valid JSON"
MALFORMED = "the call does not follow the format"
NOT_AN_OBJECT = "the arguments are not a JSON object"

_MAX_DEPTH = 100
_OUTSIDE = re.compile(r"[\s{}\[\],:+\-.\dEtrufalsenNIity]*", re.ASCII)
"""What JSON may hold outside of a string; ``NaN`` and ``Infinity`` too, to be refused in words."""
_INSIDE = re.compile(r'(?:[^"\\\x00-\x1f]|\\[^\x00-\x1f])*')
_BRACKET = re.compile(r"[{}\[\]]")


def broken(problem: str, name: str = "") -> ToolCall:
    """Return a call that cannot be run."""
    return ToolCall(name, {}, error=problem)


def json_call(text: str) -> ToolCall:
    """Return the call that a JSON text asks for."""
    try:
        return object_call(read_json(text))
    except ValueError as error:
        known = guess_json(text)
        name = known.get("name") if isinstance(known, dict) else None
        return broken(f"{NOT_JSON}: {error}", name if isinstance(name, str) else "")


def object_call(value: Any) -> ToolCall:
    """Return the call that an object with a name and arguments asks for."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return broken(NO_NAME)
    if "arguments" in value and "parameters" in value:
        return broken("the call has both arguments and parameters; give one", name)
    return checked_call(name, value.get("arguments", value.get("parameters", {})))


def checked_call(name: str, arguments: Any) -> ToolCall:
    """Return a call, with an error if its arguments cannot be JSON."""
    if not isinstance(arguments, dict):
        wrong = f"{NOT_AN_OBJECT} but {_kind(arguments)}"
        return broken(wrong, name)
    problem = unsendable([name, arguments])
    return broken(problem, name) if problem else ToolCall(name, arguments)


def guess_json(text: str) -> Any:
    """Read JSON leniently, None if it is none: a call with a key twice has the shape of one."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def looks_like_a_call(value: Any) -> bool:
    """Whether an object that nothing marks as a call has the shape of one.

    A JSON answer may have a name too (``{"name": "Ada", "age": 36}``): a call has arguments, or
    nothing besides its name.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return False
    return bool({"arguments", "parameters"} & set(value)) or set(value) <= {"name", "type", "id"}


def read_json(text: str) -> Any:
    """Read JSON strictly.

    Raises:
        ValueError: with one line that tells a model what is wrong.
    """
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_no_key_twice)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply to be read") from None
    except ValueError as error:
        if "integer string conversion" in str(error):
            raise ValueError("a number is too long to be read") from None
        raise


def repeated_key(text: str) -> str | None:
    """Return the error of a JSON text that gives a key twice; None if it does not."""
    try:
        read_json(text)
    except _Repeated as error:
        return str(error)
    except ValueError:
        pass
    return None


def unsendable(value: Any) -> str | None:
    """Say why a value cannot travel as JSON; None if it can. Needs no deep stack."""
    level, depth = [value], 0
    while level:
        if depth > _MAX_DEPTH + 1:  # the list around name and arguments is one
            return f"the arguments are nested more than {_MAX_DEPTH} levels deep"
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item)
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif (isinstance(item, float) and not math.isfinite(item)) or _is_half(item):
                return "the arguments hold NaN, infinity or broken Unicode"
        level, depth = below, depth + 1
    return None


def json_value(tape: Tape) -> Steps[tuple[str, bool]]:
    """Read one JSON object or array as text, up to the bracket that closes it.

    Returns:
        The text, and whether it was closed. If not, the text ends where JSON cannot go on, or
        where the output ends.
    """
    taken: list[str] = []
    depth = 0
    while True:
        text = tape.match(_OUTSIDE)
        end, depth = _closing(text, depth)
        if end:
            tape.push_back(text[end:])
            return "".join((*taken, text[:end])), True
        taken.append(text)
        if tape.next() == '"':
            if not (yield from _string(tape, taken)):
                return "".join(taken), False
        elif tape.next() or tape.ended:
            return "".join(taken), False
        else:
            yield None


def _string(tape: Tape, taken: list[str]) -> Steps[bool]:
    """Read a JSON string with both quotes; False if it is not closed."""
    taken.append(tape.take(1))
    taken.append((yield from quoted(tape, _INSIDE)))
    if tape.next() != '"':  # a control character, or the end
        return False
    taken.append(tape.take(1))
    return True


def _closing(text: str, depth: int) -> tuple[int, int]:
    """Return where the outermost bracket closes in ``text`` (0: nowhere), and the depth there."""
    for bracket in _BRACKET.finditer(text):
        depth += 1 if bracket.group() in "{[" else -1
        if depth <= 0:
            return bracket.end(), 0
    return 0, depth


class _Repeated(ValueError):
    """A key that an object has twice."""


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    whole = dict(pairs)
    if len(whole) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in whole if keys.count(key) > 1)
        raise _Repeated(f"{twice[:80]!r} is given twice")
    return whole


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON number")


def _is_half(item: Any) -> bool:
    return isinstance(item, str) and not item.isascii() and bool(_SURROGATE.search(item))


_SURROGATE = re.compile(r"[\ud800-\udfff]")


def _kind(value: Any) -> str:
    kinds = {str: "a string", list: "an array", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")

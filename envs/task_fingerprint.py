"""A fingerprint of tasks that is the same wherever, whenever and out of whatever they are made.

Everything a task says goes in: id, messages with the bytes of their media, answer and data. The
order of keys in a dict or of a set, the process and its hash seed do not matter; neither does the
source: the same rows from JSONL and from Parquet give the same fingerprint. What differs between
two processes by accident (the address in a ``repr``) is refused rather than hashed.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import pathlib
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from relax_agent.errors import ConfigError
from relax_agent.media.kinds import kind_of
from relax_agent.messages import Audio, Image, Message, Text, Video, to_record

if TYPE_CHECKING:
    from relax_agent.envs.tasks import Task

_SIMPLE = (
    complex,
    range,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    decimal.Decimal,
    fractions.Fraction,
    uuid.UUID,
    pathlib.PurePath,
)
"""Their ``repr`` says all about them."""


def fingerprint(tasks: Iterable[tuple[str, Task]]) -> str:
    """Return the fingerprint of tasks, each with the name of its split, in order.

    Raises:
        ConfigError: A task's answer or data hold something that has no stable form.
    """
    whole = hashlib.sha256()
    for split, task in tasks:
        row = [split, task.id, task.to_messages(), task.answer, task.data]
        try:
            whole.update(_digest(row))
        except RecursionError:
            raise ConfigError(f"task {task.id!r}: its data contain themselves") from None
        except ConfigError as error:
            raise ConfigError(f"task {task.id!r}: {error.message}", hint=error.hint) from None
    return whole.hexdigest()[:16]


def _hash(tag: str, *pieces: bytes) -> bytes:
    digest = hashlib.sha256(tag.encode())
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.digest()


def _digest(value: Any) -> bytes:
    if value is None or (isinstance(value, (bool, int, float)) and type(value) in _PLAIN):
        return _hash("plain", type(value).__name__.encode(), _written(value).encode())
    if type(value) is str:
        return _hash("str", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _hash("bytes", bytes(value))
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return _hash("list", *map(_digest, value))
    if isinstance(value, Mapping):
        return _hash("dict", *sorted(_digest(key) + _digest(value[key]) for key in value))
    if isinstance(value, (set, frozenset)):
        return _hash("set", *sorted(map(_digest, value)))
    return _digest_object(value)


_PLAIN = (bool, int, float)
_LONG_BITS = 10_000
"""Python refuses to write longer whole numbers as decimals."""


def _written(value: bool | int | float | None) -> str:
    long = isinstance(value, int) and value.bit_length() > _LONG_BITS
    return hex(value) if isinstance(value, int) and long else repr(value)


def _digest_object(value: Any) -> bytes:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, (Text, Image, Audio, Video)):
        return _digest_part(value)
    if isinstance(value, Message):
        record = to_record(replace(value, content=()))
        return _hash("message", _digest(record), *map(_digest_part, value.content))
    if isinstance(value, enum.Enum):
        return _hash("enum", name.encode(), value.name.encode())
    if isinstance(value, _SIMPLE):
        return _hash("simple", name.encode(), repr(value).encode())
    if hasattr(value, "dtype") and hasattr(value, "tobytes"):
        return _digest_array(value)
    if isinstance(value, (str, int, float)):  # a subclass
        base = next(each for each in (str, int, float) if isinstance(value, each))
        return _hash("subclass", name.encode(), _digest(base(value)))
    if isinstance(value, functools.partial):
        return _hash("partial", *map(_digest, (value.func, value.args, value.keywords)))
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return _digest_callable(value)
    return _hash("object", name.encode(), _digest(_state(value, name)))


def _digest_part(part: Text | Image | Audio | Video) -> bytes:
    if isinstance(part, Text):
        return _hash("text", part.text.encode())
    return _hash(kind_of(part), part.mime.encode(), part.data)


def _digest_array(value: Any) -> bytes:
    if value.dtype == object:
        return _digest(value.tolist())
    if not getattr(value, "shape", ()):
        return _digest(value.item())
    return _hash("array", value.dtype.str.encode(), repr(value.shape).encode(), value.tobytes())


def _digest_callable(value: Any) -> bytes:
    """By name: what a function does is not looked at."""
    owner = getattr(value, "__self__", None)
    own = b"" if owner is None or isinstance(owner, type(functools)) else _digest(owner)
    return _hash("callable", f"{value.__module__}:{value.__qualname__}".encode(), own)


def _state(value: Any, name: str) -> dict[str, Any]:
    """Return the attributes of an object of some class."""
    if is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    if hasattr(value, "_fields"):  # a named tuple
        return dict(zip(value._fields, value, strict=True))
    state = dict(getattr(value, "__dict__", {}))
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, slot):
                state[slot] = getattr(value, slot)
    if not state:
        raise ConfigError(
            f"a value of type {name} has no stable form for the fingerprint",
            hint="keep plain data in answer and data",
        )
    return state

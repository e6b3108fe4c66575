"""What a parameter of a tool may be: types that JSON can say.

pydantic has an answer for nearly every type, and some answers are not honest: ``bytes`` become "a
string", a class or a type variable becomes "anything", an ``Iterable`` is checked only when the
tool is halfway through it. Those are refused when the tool is declared.
"""

from __future__ import annotations

import collections.abc
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError

from relax_agent.errors import ToolDeclarationError

MEDIA_FORMATS = ("image", "audio", "video")
_REFUSED = {
    "bytes": "bytes have no JSON form; take an Image, Audio or Video, or text",
    "complex": "complex numbers have no JSON form; take two floats",
    "generator": "an Iterable is checked too late; take a list",
    "callable": "a function has no JSON form",
    "is-subclass": "a class has no JSON form; take its name, as a Literal",
    "is-instance": "only Python can make such an object; take plain data or a pydantic model",
    "custom-error": "it says nothing about the value; state the type",
}
_NO_KEYS = {
    "list", "set", "frozenset", "tuple", "dict", "model", "dataclass", "typed-dict", "bytes",
}  # fmt: skip


def refuse_types(annotation: Any, tool: str, parameter: str) -> None:
    """Raise ToolDeclarationError if JSON cannot say a parameter's type.

    Args:
        annotation: The type.
        tool: The tool's name.
        parameter: The parameter's name.
    """
    reason = next(_annotation_faults(annotation), None)
    if reason is None:
        try:
            core = TypeAdapter(annotation).core_schema
        except PydanticUserError:  # told by whoever builds the schema of all parameters
            return
        reason = next(_core_faults(core), None)
    if reason is not None:
        raise ToolDeclarationError(
            f"tool {tool}: parameter '{parameter}' of type {_told(annotation)}: {reason}",
            hint="use str, int, float, bool, lists, dicts, Literal, enums, dataclasses, pydantic"
            " models, Image, Audio or Video",
        )


def _told(annotation: Any) -> str:
    return getattr(annotation, "__name__", None) or str(annotation).replace("typing.", "")


def _annotation_faults(annotation: Any) -> Iterator[str]:
    if isinstance(annotation, typing.TypeVar):
        yield "a type variable says nothing about the value; state the type"
    elif annotation is object or annotation is collections.abc.Hashable:
        yield "it says nothing about the value; state the type, or Any if it really may be anything"
    for inner in typing.get_args(annotation):
        if isinstance(inner, (type, typing.TypeVar)) or typing.get_origin(inner) is not None:
            yield from _annotation_faults(inner)


def _core_faults(core: Any) -> Iterator[str]:
    """Look at every node of pydantic's own form of a type."""
    stack = [core]
    seen: set[int] = set()
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Mapping):
            kind = node.get("type")
            if isinstance(kind, str) and kind in _REFUSED:
                yield _REFUSED[kind]
            keys = node.get("keys_schema")
            if kind == "dict" and isinstance(keys, Mapping) and keys.get("type") in _NO_KEYS:
                yield "the keys of a JSON object are text"
            stack.extend(value for key, value in node.items() if key not in _ASIDE)
        elif isinstance(node, (list, tuple)):
            stack.extend(node)


_ASIDE = {"metadata", "serialization", "function", "cls", "default", "config"}


def takes_media(schema: Any) -> bool:
    """Tell whether a JSON schema has a place for a picture, a sound or a video."""
    if isinstance(schema, dict):
        if schema.get("format") in MEDIA_FORMATS and schema.get("type") == "string":
            return True
        return any(takes_media(each) for each in schema.values())
    return isinstance(schema, list) and any(takes_media(each) for each in schema)

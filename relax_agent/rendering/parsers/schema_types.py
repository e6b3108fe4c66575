"""What the bare text of an XML parameter means, by the tool's JSON schema.

``42`` is a number for an integer parameter and a text for a string parameter. A parameter that may
be a string keeps its text to the letter; only ``null`` is None where the schema allows that. For
other types the text is read as JSON, then as a Python literal (``True``, ``['a']``), and stays text
if it is neither: the toolset then names the argument that is wrong. Where no schema speaks of the
parameter, the text is a JSON value if it is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from relax_agent.rendering.parsers.literals import literal
from relax_agent.rendering.parsers.stream import Tools
from relax_agent.rendering.parsers.values import read_json

_MAX_DEPTH = 20
_NEITHER = object()
_KINDS: dict[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


class Types:
    """The JSON types that each parameter of each tool may have."""

    def __init__(self, by_tool: dict[str, dict[str, frozenset[str]]]) -> None:
        self._by_tool = by_tool

    def value(self, tool: str, parameter: str, text: str) -> Any:
        """Return the value that ``text`` stands for."""
        types = self._by_tool.get(tool, {}).get(parameter, frozenset())
        if not types:
            return _json(text.strip(), text)
        if types == {"string"}:
            return text
        value = _json_or_python(text.strip(), text)
        if "string" in types and (isinstance(value, str) or not _fits(value, types)):
            return text
        return value


def types_of(tools: Tools) -> Types:
    """Return the parameters' types; schemas that say nothing, or nonsense, count as silent."""
    by_tool: dict[str, dict[str, frozenset[str]]] = {}
    for tool in tools:
        inner = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            continue
        schema = inner.get("parameters")
        if isinstance(schema, dict) and isinstance(properties := schema.get("properties"), dict):
            by_tool[inner["name"]] = {
                key: frozenset(_types(value, schema, 0)) for key, value in properties.items()
            }
    return Types(by_tool)


def _types(schema: Any, root: dict[str, Any], depth: int) -> Iterator[str]:
    """Yield the types that a schema allows; nothing if it does not say."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return
    declared = schema.get("type")
    if isinstance(declared, str):
        yield declared
    elif isinstance(declared, list):
        yield from (kind for kind in declared if isinstance(kind, str))
    else:
        values = schema["enum"] if isinstance(schema.get("enum"), list) else []
        values = [*values, schema["const"]] if "const" in schema else values
        yield from (_KINDS[type(value)][0] for value in values if type(value) in _KINDS)
    for key in ("anyOf", "oneOf", "allOf"):
        for branch in schema[key] if isinstance(schema.get(key), list) else []:
            yield from _types(branch, root, depth + 1)
    if isinstance(schema.get("$ref"), str):
        yield from _types(_referred(schema["$ref"], root), root, depth + 1)


def _referred(reference: str, root: dict[str, Any]) -> Any:
    found: Any = root
    for name in reference.removeprefix("#/").split("/"):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _json(text: str, otherwise: Any) -> Any:
    try:
        return read_json(text)
    except ValueError:
        return otherwise


def _json_or_python(text: str, otherwise: str) -> Any:
    value = _json(text, _NEITHER)
    if value is not _NEITHER:
        return value
    try:
        return literal(text)
    except ValueError:
        return otherwise


def _fits(value: Any, types: frozenset[str]) -> bool:
    whole = isinstance(value, float) and value.is_integer() and "integer" in types
    return whole or not types.isdisjoint(_KINDS.get(type(value), ()))

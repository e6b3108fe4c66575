"""Random arguments that fit a JSON schema: what :class:`RandomPolicy` calls tools with.

It knows the keywords that tool schemas have in practice: types and unions, ``enum`` and ``const``,
``$ref`` into ``$defs`` (recursive ones end), ``anyOf``, ``oneOf`` and ``allOf``, bounds of numbers,
strings and arrays, ``prefixItems``, required and optional properties. Every choice comes from the
generator that is handed in.
"""

from __future__ import annotations

import math
import random
import string
from typing import Any

_MAX_DEPTH = 6
"""How deep optional parts go; below that only what is required is made."""
_LETTERS = string.ascii_lowercase


def random_arguments(schema: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return one object that fits a schema of type ``object``."""
    return _Maker(schema, rng).object(schema, 0)


class _Maker:
    """Makes values for one schema and its definitions."""

    def __init__(self, root: dict[str, Any], rng: random.Random) -> None:
        self._root = root
        self._rng = rng

    def value(self, schema: Any, depth: int) -> Any:
        """Return a value that fits ``schema``."""
        if not isinstance(schema, dict):
            return self._text({})  # `true`: anything goes
        schema = self._flat(schema)
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return self._rng.choice(schema["enum"])
        for key in ("anyOf", "oneOf"):
            if schema.get(key):
                return self.value(self._branch(schema[key], depth), depth + 1)
        return self._typed(schema, depth)

    def _flat(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Resolve ``$ref`` and merge ``allOf`` into one schema."""
        while "$ref" in schema or "allOf" in schema:
            rest = {k: v for k, v in schema.items() if k not in ("$ref", "allOf")}
            found = [self._resolve(schema["$ref"])] if "$ref" in schema else []
            for part in [*found, *schema.get("allOf", ())]:
                rest = _merged(rest, part)
            schema = rest
        return schema

    def _resolve(self, reference: str) -> dict[str, Any]:
        target: Any = self._root
        for step in reference.lstrip("#/").split("/") if reference != "#" else ():
            target = target[step.replace("~1", "/").replace("~0", "~")]
        return dict(target)

    def _branch(self, choices: list[Any], depth: int) -> Any:
        """Choose a branch; deep down, one that does not go deeper."""
        if depth >= _MAX_DEPTH:
            flat = [each for each in choices if self._is_flat(each)]
            choices = flat or choices
        return self._rng.choice(choices)

    def _is_flat(self, schema: Any) -> bool:
        if not isinstance(schema, dict) or "$ref" in schema:
            return False
        return schema.get("type") not in ("object", "array") and "type" in schema

    def _typed(self, schema: dict[str, Any], depth: int) -> Any:
        kind = schema.get("type", _guess(schema))
        if isinstance(kind, list):
            kind = self._rng.choice(kind)
        if kind == "integer":
            return self._integer(schema)
        if kind == "number":
            return self._number(schema)
        if kind == "boolean":
            return self._rng.random() < 0.5
        if kind == "array":
            return self._array(schema, depth)
        if kind == "object":
            return self.object(schema, depth)
        return None if kind == "null" else self._text(schema)

    def _integer(self, schema: dict[str, Any]) -> int:
        low, high = _bounds(schema, 10)
        step = schema.get("multipleOf", 1)
        first, last = math.ceil(low / step), math.floor(high / step)
        first += int("exclusiveMinimum" in schema and first * step == schema["exclusiveMinimum"])
        last -= int("exclusiveMaximum" in schema and last * step == schema["exclusiveMaximum"])
        return int(self._rng.randint(first, max(first, last)) * step)

    def _number(self, schema: dict[str, Any]) -> float:
        if "multipleOf" in schema:
            low, high = _bounds(schema, 10 * schema["multipleOf"])
            step = schema["multipleOf"]
            whole = {"minimum": math.ceil(low / step), "maximum": math.floor(high / step)}
            return self._integer(whole) * float(step)
        low, high = _bounds(schema, 10)
        value = self._rng.uniform(low, high)
        open_ends = (schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum"))
        return (low + high) / 2 if value in open_ends else value

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        first = [self.value(each, depth + 1) for each in schema.get("prefixItems", ())]
        least = schema.get("minItems", 0)
        most = schema.get("maxItems", least + 3)
        items = schema.get("items", True)
        if items is False or depth >= _MAX_DEPTH:
            most = least
        count = self._rng.randint(least, max(least, most)) - len(first)
        out = first
        for _ in range(20 * max(0, count)):
            if len(out) >= count + len(first):
                break
            value = self.value(items, depth + 1)
            if not (schema.get("uniqueItems") and value in out):
                out = [*out, value]
            if len(out) - len(first) >= count:
                break
        return out

    def object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        """Return an object with all required and some of the other properties."""
        schema = self._flat(schema)
        required = schema.get("required", ())
        out = {
            name: self.value(item, depth + 1)
            for name, item in schema.get("properties", {}).items()
            if name in required or (depth < _MAX_DEPTH and self._rng.random() < 0.5)
        }
        others = schema.get("additionalProperties")
        if isinstance(others, dict) and not schema.get("properties") and depth < _MAX_DEPTH:
            for _ in range(max(schema.get("minProperties", 0), self._rng.randint(0, 2))):
                out[self._text({"minLength": 3})] = self.value(others, depth + 1)
        return out

    def _text(self, schema: dict[str, Any]) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        text = f"{self._rng.randint(0, 99)}+{self._rng.randint(0, 99)}"
        text += "".join(self._rng.choices(_LETTERS, k=max(0, least - len(text))))
        return text if most is None else text[:most]


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    out = {**second, **first}
    if "properties" in first and "properties" in second:
        out["properties"] = {**second["properties"], **first["properties"]}
    if "required" in first and "required" in second:
        out["required"] = [*first["required"], *second["required"]]
    return out


def _guess(schema: dict[str, Any]) -> str:
    if "properties" in schema or "additionalProperties" in schema:
        return "object"
    if "items" in schema or "prefixItems" in schema:
        return "array"
    return "number" if "minimum" in schema or "maximum" in schema else "string"


def _bounds(schema: dict[str, Any], spread: float) -> tuple[float, float]:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is None:
        low = -spread if high is None else high - 2 * spread
    if high is None:
        high = max(spread, low + 2 * spread)
    return low, high

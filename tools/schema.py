"""From a typed signature to a JSON schema and a validator, by way of pydantic.

The parameters become a ``TypedDict`` (not a model: a model reserves names such as ``schema`` or
``copy``), so validation returns exactly the keyword arguments that the caller gave, converted.
Defaults stay the function's own; the schema only mentions them. Argument descriptions come from
the docstring, or from ``Annotated[…, Field(description=…)]``. What JSON cannot say is refused when
the tool is declared (:mod:`relax_agent.tools.types`), never passed off as a string.
"""

from __future__ import annotations

import inspect
import math
import re
import reprlib
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NotRequired

import typing_extensions
from pydantic import ConfigDict, Field, PydanticSchemaGenerationError, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticSerializationError, PydanticUndefined, to_jsonable_python

from relax_agent.errors import ToolDeclarationError, ToolError, ToolErrorKind
from relax_agent.references import media_schema
from relax_agent.tools.docstrings import check_described
from relax_agent.tools.types import MEDIA_FORMATS, refuse_types, takes_media

_MAX_SHOWN = 60
"""Characters of a wrong value that an error message quotes."""
_MAX_NAME = 80

_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _MAX_SHOWN
_BRIEF.maxlevel = 3


class _Schema(GenerateJsonSchema):
    """JSON schema without the generated titles: every one costs prompt tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return False: a property's name is its title."""
        return False


@dataclass(frozen=True)
class Arguments:
    """The arguments of one tool: their JSON schema and their validator."""

    schema: dict[str, Any]
    """A JSON schema of type ``object``, as it stands in a prompt."""
    adapter: TypeAdapter[Any]
    filled_in: dict[str, Any] = field(default_factory=dict)
    """Defaults that stand in a ``Field(…)`` and of which the function itself knows nothing."""
    takes_media: bool = False
    """Whether a picture, a sound or a video can be among them."""

    def validate(self, arguments: Any) -> dict[str, Any]:
        """Return converted keyword arguments, or raise ToolError naming the wrong one."""
        if not isinstance(arguments, dict):
            shown = type(arguments).__name__
            raise _invalid(f"arguments must be one JSON object, not {shown}")
        for name, value in arguments.items():
            if isinstance(value, (str, list, dict)) and (oddity := _oddity(value)) is not None:
                raise _invalid(f"argument '{_name(name)}' holds {oddity}")
        try:
            values: dict[str, Any] = self.adapter.validate_python(arguments)
        except ValidationError as error:
            raise _invalid(self._explain(error)) from None
        except (RecursionError, OverflowError, UnicodeError) as error:
            raise _invalid(f"arguments cannot be read: {type(error).__name__}") from None
        return {**self.filled_in, **values} if self.filled_in else values

    def _explain(self, error: ValidationError) -> str:
        found = error.errors(include_url=False, include_context=False)
        lines = [self._line(item) for item in found[:4]]
        if len(found) > 4:
            lines.append(f"and {len(found) - 4} more")
        return "; ".join(lines)

    def _line(self, item: Mapping[str, Any]) -> str:
        place = _name(".".join(str(step) for step in item["loc"]))
        if item["type"] == "missing":
            return f"argument '{place}' is missing"
        if item["type"] == "extra_forbidden":
            names = ", ".join(self.schema["properties"]) or "none"
            return f"argument '{place}' does not exist (arguments: {names})"
        if item["type"] == "value_error":  # a validator's own words
            return f"argument '{place}': {item['msg'].removeprefix('Value error, ')}"
        message = item["msg"][:1].lower() + item["msg"][1:]  # the rest may quote what is right
        return f"argument '{place}': {message}, got {_shown(item['input'])}"


def _name(text: Any) -> str:
    """Quote what somebody gave as a name, whatever it is."""
    shown = str(text).encode("utf-8", "replace").decode()
    return shown if len(shown) <= _MAX_NAME else f"{shown[:_MAX_NAME]}…"


def _oddity(value: Any) -> str | None:
    """Return what in plain data, however deep, is no JSON; None if all of it is."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            if not item.isascii() and _SURROGATE.search(item):
                return "half a character (a lone surrogate)"
        elif isinstance(item, float):
            if not math.isfinite(item):
                return "NaN or Infinity, which are no JSON numbers"
        elif isinstance(item, dict):
            stack.extend(item.values())
            stack.extend(item)
        elif isinstance(item, list):
            stack.extend(item)
    return None


_SURROGATE = re.compile("[\ud800-\udfff]")


def _shown(value: Any) -> str:
    """Quote a wrong value, whatever its size and depth."""
    try:
        text = _BRIEF.repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"


def _invalid(message: str) -> ToolError:
    return ToolError(message, kind=ToolErrorKind.INVALID_ARGUMENTS)


def arguments_of(
    function: Callable[..., Any], name: str, *, skip: int, docs: Mapping[str, str]
) -> Arguments:
    """Build the arguments of ``function``, without its first ``skip`` parameters.

    Args:
        function: The tool's function.
        name: What messages call it.
        skip: 1 for a method, whose ``self`` is no argument.
        docs: What the docstring says of each parameter.

    Raises:
        ToolDeclarationError: A parameter has no name, no type, or a type without a JSON form.
    """
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    check_described(name, docs, [each.name for each in parameters])
    hints = _hints(function, name)
    fields = {p.name: _field(p, name, hints, docs) for p in parameters}
    make_typed_dict: Any = typing_extensions.TypedDict
    body: Any = make_typed_dict(name, fields)
    body.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)
    for each in parameters:
        refuse_types(hints[each.name], name, each.name)
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(body)
        schema = adapter.json_schema(schema_generator=_Schema)
    except (PydanticSchemaGenerationError, PydanticUserError, PydanticSerializationError) as error:
        raise _inexpressible(name, error) from error
    defaults = {p.name: _default(p, name, hints) for p in parameters if p.default is not p.empty}
    filled = {p.name: defaults[p.name] for p in parameters if isinstance(p.default, FieldInfo)}
    filled = {each: value for each, value in filled.items() if value is not PydanticUndefined}
    out = _finish(schema, defaults)
    return Arguments(out, adapter, filled, takes_media(out))


def _inexpressible(name: str, error: Exception) -> ToolDeclarationError:
    reason = str(error).splitlines()[0]
    return ToolDeclarationError(
        f"tool {name}: a parameter's type has no JSON form: {reason}",
        hint="use str, int, float, bool, lists, dicts, Literal, enums, dataclasses, pydantic"
        " models, Image, Audio or Video",
    )


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ToolDeclarationError(
            f"tool {name}: {error} in its annotations",
            hint="define the type at module level, outside `if TYPE_CHECKING`",
        ) from error


def _field(
    parameter: inspect.Parameter, name: str, hints: Mapping[str, Any], docs: Mapping[str, str]
) -> Any:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise ToolDeclarationError(
            f"tool {name}: parameter {parameter} cannot be passed by name",
            hint="give every argument a name of its own; no *args, **kwargs or '/'",
        )
    if parameter.name not in hints:
        raise ToolDeclarationError(
            f"tool {name}: parameter '{parameter.name}' has no type",
            hint=f"annotate it, e.g. {parameter.name}: str",
        )
    kind = hints[parameter.name]
    kind = Annotated[kind, _Own()]
    if docs.get(parameter.name):
        kind = Annotated[kind, Field(description=docs[parameter.name])]
    default = parameter.default
    if isinstance(default, FieldInfo):  # count: int = Field(3, ge=1, description="…")
        facts = default.asdict()
        words = {key: value for key, value in facts["attributes"].items() if key not in _DEFAULTS}
        kind = Annotated[(kind, *facts["metadata"], Field(**words))]
        default = parameter.empty if default.is_required() else default
    return kind if default is parameter.empty else NotRequired[kind]


class _Own:
    """Tells one parameter's type from every other one.

    ``typing`` hands out one object for equal types, and ``int | str`` equals ``str | int``: without
    this, the order in one tool's schema would be that of whichever tool was declared before it.
    """


_DEFAULTS = {"default", "default_factory", "annotation"}


def _default(parameter: inspect.Parameter, name: str, hints: Mapping[str, Any]) -> Any:
    """Return a parameter's default, which must be a value that the model could give as well."""
    default = parameter.default
    if isinstance(default, FieldInfo):
        default = default.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return default
    try:
        TypeAdapter(hints[parameter.name]).validate_python(default)
    except ValidationError as error:
        told = f"{_shown(default)} is no value of its type"
        wanted = "None" if default is None else "…"
        raise ToolDeclarationError(
            f"tool {name}: the default of '{parameter.name}': {told}",
            hint=f"annotate it as `… | {wanted}`, or choose another default",
        ) from error
    return default


def _finish(schema: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Put the schema in one stable order, mention defaults, and explain media."""
    properties = schema.get("properties", {})
    for name, default in defaults.items():
        if default is PydanticUndefined:
            continue
        try:
            properties[name]["default"] = to_jsonable_python(default)
        except (PydanticSerializationError, ValueError):  # no JSON: the function knows it
            continue
    for item in properties.values():
        kind = item.get("format")
        if kind in MEDIA_FORMATS and item["type"] == "string":
            how = media_schema(kind)["description"]
            if item["description"] != how:
                item["description"] = f"{item['description']} {how}"
    out: dict[str, Any] = {"type": "object", "properties": properties}
    if schema.get("required"):
        out["required"] = schema["required"]
    if "$defs" in schema:
        out["$defs"] = schema["$defs"]
    return out

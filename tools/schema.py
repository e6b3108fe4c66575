"""From a typed signature to a JSON schema and a validator, by way of pydantic.

The parameters become a ``TypedDict`` (not a model: a model reserves names such as ``schema`` or
``copy``), so validation returns exactly the keyword arguments that the caller gave, converted.
Defaults stay the function's own; the schema only mentions them. Argument descriptions come from
the docstring (Google, NumPy or reST style).
"""

from __future__ import annotations

import inspect
import reprlib
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired

import docstring_parser
import typing_extensions
from pydantic import ConfigDict, Field, PydanticSchemaGenerationError, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_jsonable_python

from relax_agent.errors import ToolDeclarationError, ToolError, ToolErrorKind

_MAX_SHOWN = 60
"""Characters of a wrong value that an error message quotes."""


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

    def validate(self, arguments: Any) -> dict[str, Any]:
        """Return converted keyword arguments, or raise ToolError naming the wrong one."""
        if not isinstance(arguments, dict):
            shown = type(arguments).__name__
            raise _invalid(f"arguments must be one JSON object, not {shown}")
        try:
            return self.adapter.validate_python(arguments)
        except ValidationError as error:
            raise _invalid(self._explain(error)) from None
        except (RecursionError, OverflowError) as error:
            raise _invalid(f"arguments cannot be read: {type(error).__name__}") from None

    def _explain(self, error: ValidationError) -> str:
        found = error.errors(include_url=False, include_context=False)
        lines = [self._line(item) for item in found[:4]]
        if len(found) > 4:
            lines.append(f"and {len(found) - 4} more")
        return "; ".join(lines)

    def _line(self, item: Mapping[str, Any]) -> str:
        place = ".".join(str(step) for step in item["loc"])
        if item["type"] == "missing":
            return f"argument '{place}' is missing"
        if item["type"] == "extra_forbidden":
            names = ", ".join(self.schema["properties"]) or "none"
            return f"argument '{place}' does not exist (arguments: {names})"
        return f"argument '{place}': {item['msg'].lower()}, got {_shown(item['input'])}"


def _shown(value: Any) -> str:
    """Quote a wrong value, whatever its size and depth."""
    try:
        text = _BRIEF.repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"


def _invalid(message: str) -> ToolError:
    return ToolError(message, kind=ToolErrorKind.INVALID_ARGUMENTS)


def describe(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return a function's description and the description of each argument."""
    parsed = docstring_parser.parse(inspect.getdoc(function) or "")
    pieces = [parsed.short_description, parsed.long_description]
    text = "\n\n".join(piece.strip() for piece in pieces if piece)
    return text, {
        param.arg_name: " ".join((param.description or "").split()) for param in parsed.params
    }


def arguments_of(
    function: Callable[..., Any], name: str, *, skip: int, docs: Mapping[str, str]
) -> Arguments:
    """Build the arguments of ``function``, without its first ``skip`` parameters."""
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    hints = _hints(function, name)
    fields = {p.name: _field(p, name, hints, docs) for p in parameters}
    make_typed_dict: Any = typing_extensions.TypedDict
    body: Any = make_typed_dict(name, fields)
    body.__pydantic_config__ = ConfigDict(extra="forbid", arbitrary_types_allowed=False)
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(body)
        schema = adapter.json_schema(schema_generator=_Schema)
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        reason = str(error).splitlines()[0]
        raise ToolDeclarationError(
            f"tool {name}: a parameter's type has no JSON form: {reason}",
            hint="use str, int, float, bool, lists, dicts, Literal, enums or pydantic models",
        ) from error
    return Arguments(_finish(schema, parameters), adapter)


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
    if docs.get(parameter.name):
        kind = Annotated[kind, Field(description=docs[parameter.name])]
    return kind if parameter.default is parameter.empty else NotRequired[kind]


def _finish(schema: dict[str, Any], parameters: list[inspect.Parameter]) -> dict[str, Any]:
    """Put the schema in one stable order and mention defaults."""
    properties = schema.get("properties", {})
    for parameter in parameters:
        if parameter.default is not parameter.empty:
            properties[parameter.name]["default"] = to_jsonable_python(
                parameter.default, fallback=repr
            )
    out: dict[str, Any] = {"type": "object", "properties": properties}
    if schema.get("required"):
        out["required"] = schema["required"]
    if "$defs" in schema:
        out["$defs"] = schema["$defs"]
    return out

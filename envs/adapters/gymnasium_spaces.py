"""Gymnasium's spaces in the terms of a language model: actions as a tool, observations as text.

:func:`action_tool` turns an action space into a declared tool with a JSON schema, so a model's
arguments are validated as those of any other tool:

    Discrete(4)             {"action": 2}, or {"action": "left"} where the actions have names
    Discrete(3, start=5)    {"action": 5 … 7}
    MultiDiscrete, Box      {"action": [0.5, -1.0]}, nested lists for more than one dimension
    Box of shape ()         {"action": 0.5}
    Dict                    its keys are the arguments; a Dict inside it is an object
    Tuple                   item_0, item_1, …
    Text, Sequence          a string, a list

:func:`to_action` makes the native value of it and checks the rest against the space.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import typing_extensions
from pydantic import ConfigDict, Field

from relax_agent.errors import ConfigError, ToolError, ToolErrorKind
from relax_agent.tools import Tool

ARGUMENT = "action"
"""The tool's argument, where the space is one value and not a Dict or Tuple."""
_MAX_NUMBERS = 256
"""Numbers of one array that still make a readable text."""
_DIGITS = 5
"""Significant digits of a number in a text."""


# -- actions ---------------------------------------------------------------------------------------


def action_tool(
    space: Any, name: str, description: str, names: Sequence[str] | None
) -> Tool[..., Any]:
    """Declare the tool whose arguments are the actions of ``space``.

    Args:
        space: The action space.
        name: The tool's name.
        description: What the tool does, for the model.
        names: Names of the actions of a Discrete space, in order.
    """
    fields = _fields(space, names)

    def act(**action: Any) -> str:
        return json.dumps(action)

    parameters = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, annotation=kind)
        for key, kind in fields.items()
    ]
    act.__dict__["__signature__"] = inspect.Signature(parameters)
    act.__annotations__ = {**fields, "return": str}
    return Tool(act, name=name, description=description, inline=True)


def _fields(space: Any, names: Sequence[str] | None) -> dict[str, Any]:
    """Return the arguments with their types."""
    kind = kind_of(space)
    if kind == "Dict":
        wrong = [key for key in space.spaces if not str(key).isidentifier()]
        if wrong:
            raise ConfigError(
                f"the key {wrong[0]!r} of the action space cannot be an argument's name",
                hint="rename it in a wrapper of the Gymnasium environment",
            )
        return {str(key): _part(each, key) for key, each in space.spaces.items()}
    if kind == "Tuple":
        return {f"item_{i}": _part(each, i) for i, each in enumerate(space.spaces)}
    return {ARGUMENT: Annotated[_type(space, names), Field(description="What to do.")]}


def _part(space: Any, key: Any) -> Any:
    return Annotated[_type(space), Field(description=f"Part {key} of the action.")]


def _type(space: Any, names: Sequence[str] | None = None) -> Any:
    kind = kind_of(space)
    if kind == "Discrete":
        if names is not None:
            return Literal[tuple(names)]
        first = int(space.start)
        return Annotated[int, Field(ge=first, le=first + int(space.n) - 1)]
    if kind == "MultiBinary":
        return _nested(Annotated[int, Field(ge=0, le=1)], space.shape)
    if kind == "MultiDiscrete":
        return _nested(int, space.shape, f"lowest {_plain(space.start)}, below {_limits(space)}")
    if kind == "Box":
        return _box_type(space)
    if kind == "Text":
        return Annotated[str, Field(min_length=space.min_length, max_length=space.max_length)]
    if kind == "Sequence":
        return list[_type(space.feature_space)]  # type: ignore[misc]
    if kind in ("Dict", "Tuple"):
        return _object_type(space)
    raise ConfigError(
        f"an action space of type {kind} cannot be a tool",
        hint="wrap the Gymnasium environment with gymnasium.wrappers.TransformAction",
    )


def _object_type(space: Any) -> Any:
    make_typed_dict: Any = typing_extensions.TypedDict
    body = make_typed_dict("Action", _fields(space, None))
    body.__pydantic_config__ = ConfigDict(extra="forbid")
    return body


def _box_type(space: Any) -> Any:
    number: Any = int if space.dtype.kind in "iu" else float
    low, high = space.low, space.high
    same = bool((low == low.flat[0]).all() and (high == high.flat[0]).all())
    if same:
        limits = Field(ge=_bound(low.flat[0]), le=_bound(high.flat[0]))
        number = Annotated[number, limits]
    return _nested(number, space.shape, "" if same else f"from {_plain(low)} to {_plain(high)}")


def _bound(value: Any) -> float | int | None:
    """Return a bound as the shortest number that means it; None if there is none."""
    if not math.isfinite(value):
        return None
    return int(value) if value.dtype.kind in "iu" else float(str(value))


def _nested(item: Any, shape: tuple[int, ...], description: str = "") -> Any:
    for length in reversed(shape):
        item = Annotated[list[item], Field(min_length=length, max_length=length)]
    return Annotated[item, Field(description=description)] if description else item


def _limits(space: Any) -> Any:
    return _plain(space.start + space.nvec)


def to_action(space: Any, arguments: Mapping[str, Any], names: Sequence[str] | None) -> Any:
    """Return the native action, or raise ToolError that says why it is none.

    Args:
        space: The action space.
        arguments: Validated arguments of the tool that :func:`action_tool` declared.
        names: The same names as there.
    """
    kind = kind_of(space)
    if kind == "Dict":
        value: Any = {key: _native(each, arguments[str(key)]) for key, each in space.spaces.items()}
    elif kind == "Tuple":
        value = tuple(_native(each, arguments[f"item_{i}"]) for i, each in enumerate(space.spaces))
    elif names is not None:
        value = _native(space, int(space.start) + list(names).index(arguments[ARGUMENT]))
    else:
        value = _native(space, arguments[ARGUMENT])
    if not space.contains(value):
        raise ToolError(
            f"{_brief(arguments)} lies outside {_brief_space(space)}",
            kind=ToolErrorKind.INVALID_ARGUMENTS,
        )
    return value


def _native(space: Any, value: Any) -> Any:
    kind = kind_of(space)
    if kind == "Discrete":
        return space.dtype.type(value)
    if kind == "Dict":
        return {key: _native(each, value[str(key)]) for key, each in space.spaces.items()}
    if kind == "Tuple":
        return tuple(_native(each, value[f"item_{i}"]) for i, each in enumerate(space.spaces))
    if kind == "Sequence":
        return tuple(_native(space.feature_space, each) for each in value)
    if kind in ("Box", "MultiBinary", "MultiDiscrete"):
        return _array(space, value)
    return value


def _array(space: Any, value: Any) -> Any:
    import numpy as np

    try:
        return np.asarray(value, dtype=space.dtype).reshape(space.shape)
    except (OverflowError, ValueError) as error:
        raise ToolError(str(error), kind=ToolErrorKind.INVALID_ARGUMENTS) from None


# -- observations ----------------------------------------------------------------------------------


def to_text(space: Any, value: Any, names: Sequence[str] | None = None) -> str:
    """Return an observation of ``space`` as a readable text.

    Args:
        space: The observation space.
        value: The observation.
        names: Names of the components of a Box, MultiDiscrete or Tuple.
    """
    kind = kind_of(space)
    if kind == "Dict":
        return "\n".join(
            f"{key}: {to_text(each, value[key])}" for key, each in space.spaces.items()
        )
    if kind == "Tuple":
        labels = names or [str(i) for i in range(len(space.spaces))]
        pairs = zip(labels, space.spaces, value, strict=True)
        return "\n".join(f"{label}: {to_text(each, item)}" for label, each, item in pairs)
    if kind == "Text":
        return str(value)
    if names is not None:
        numbers = _plain(value)
        return "\n".join(f"{k}: {_json(v)}" for k, v in zip(names, numbers, strict=True))
    return _json(_plain(value))


def require_readable(space: Any) -> None:
    """Raise ConfigError if an observation of ``space`` would make no readable text."""
    kind = kind_of(space)
    if kind in ("Dict", "Tuple"):
        for each in space.spaces.values() if kind == "Dict" else space.spaces:
            require_readable(each)
    size = math.prod(space.shape or ()) if kind == "Box" else 0
    if size > _MAX_NUMBERS:
        raise ConfigError(
            f"an observation of shape {space.shape} has {size} numbers, too many for a text",
            hint='observation="image" shows what it renders',
        )


def describe_observation(space: Any, names: Sequence[str] | None) -> str:
    """Return one line on what an observation holds; empty where its text says it all."""
    kind = kind_of(space)
    if kind == "Discrete":
        first = int(space.start)
        return f"An observation is a whole number from {first} to {first + int(space.n) - 1}."
    if kind == "Box" and names is None and space.shape:
        return f"An observation is {'×'.join(map(str, space.shape))} numbers."
    return ""


def kind_of(space: Any) -> str:
    """Return the name of the space's own class among Gymnasium's, e.g. ``Discrete``."""
    for base in type(space).__mro__:
        if base.__module__.startswith("gymnasium.spaces"):
            return base.__name__
    return type(space).__name__


def _plain(value: Any) -> Any:
    """Return arrays and containers of them as plain data with few digits."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return _short(value)
    return value


def _short(value: float) -> float | int:
    if not math.isfinite(value):
        return value
    rounded = float(f"{value:.{_DIGITS}g}")
    return 0.0 if rounded == 0 else rounded


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def plain_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Gymnasium info as plain JSON data; what has no JSON form is left out."""
    out = {}
    for key, value in info.items():
        try:
            out[str(key)] = json.loads(json.dumps(_plain(value), allow_nan=False))
        except (TypeError, ValueError):
            continue
    return out


def _brief(value: Any) -> str:
    text = _json(value)
    return text if len(text) <= 60 else text[:59] + "…"


def _brief_space(space: Any) -> str:
    text = " ".join(str(space).split())
    return text if len(text) <= 120 else text[:119] + "…"

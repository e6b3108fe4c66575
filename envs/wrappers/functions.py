"""Functions as arguments of wrappers: given as such, or named ``module:function``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from relax_agent.envs.specs import WrapperSpec, label_of
from relax_agent.errors import ConfigError
from relax_agent.importing import import_named


def load_function(function: Callable[..., Any] | str) -> Callable[..., Any]:
    """Return a function that may be given by name.

    Raises:
        ConfigError: There is no such function.
    """
    if not isinstance(function, str):
        if not callable(function):
            raise ConfigError(
                f"{function!r} is not a function", hint="give a function, or 'module:function'"
            )
        return function
    module, colon, path = function.partition(":")
    if not (module and colon and path):
        raise ConfigError(f"{function!r} names no function", hint="write module:function")
    target: Any = import_named(module)
    for name in path.split("."):
        target = getattr(target, name, None)
    if not callable(target):
        raise ConfigError(f"{module} has no function {path!r}", hint="check the name")
    return target


def function_name(function: Callable[..., Any]) -> str:
    """Return what to call a function in a message."""
    name = getattr(function, "__qualname__", None) or type(function).__name__
    return f"{getattr(function, '__module__', '?')}:{name}"


def plain_arguments(spec: WrapperSpec | None) -> WrapperSpec | None:
    """Return a wrapper's spec with paths as text and functions by name, where they have one.

    A lambda stays what it is: the spec works in this process, and ``to_json`` names it.
    """
    if spec is None:
        return None
    return replace(spec, kwargs={key: _plain(value) for key, value in spec.kwargs.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    if not callable(value) or not hasattr(value, "__qualname__"):
        return value
    label = label_of(value)
    return value if "<" in label or label.startswith("__main__:") else label

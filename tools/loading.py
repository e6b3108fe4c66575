"""From a module's name to its tools: ``my_tools``, or ``my_tools:ATTRIBUTE``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from relax_agent.errors import ConfigError, ToolDeclarationError
from relax_agent.importing import import_named
from relax_agent.tools.declaration import Tool
from relax_agent.tools.sessions import is_session_class, tools_of
from relax_agent.tools.toolset import Toolset


def load_toolset(target: str) -> Toolset:
    """Return every tool of a module, or what one of its attributes holds.

    A module's tools are its functions with ``@tool``, and the classes that it defines whose methods
    have it: those are made once for each session.

    Args:
        target: ``module`` or ``module:attribute``, the attribute being a toolset, a tool, a class
            with tools, or a list of these. Modules in the current folder are found as well.

    Raises:
        ConfigError: The module cannot be imported or holds no tool.
    """
    name, _, attribute = target.partition(":")
    module = import_named(name)
    try:
        if not attribute:
            return _all_of(module, name)
        if not hasattr(module, attribute):
            raise ConfigError(f"{name} has no attribute {attribute!r}")
        return _as_toolset(getattr(module, attribute), target)
    except ToolDeclarationError as error:
        raise ConfigError(f"{target}: {error}") from error


def _all_of(module: ModuleType, name: str) -> Toolset:
    members = {id(item): item for item in vars(module).values()}.values()
    functions = [item for item in members if isinstance(item, Tool) and not item.is_method]
    classes = [item for item in members if isinstance(item, type) and _is_session(item, module)]
    if not functions and not classes:
        raise ConfigError(f"{name} has no tools", hint="put @tool before a function")
    return Toolset([*functions, *classes])


def _is_session(cls: type[Any], module: ModuleType) -> bool:
    """Tell whether a class is meant to be served: one of this module's, made without arguments."""
    if cls.__module__ != module.__name__ or not tools_of(cls) or _is_environment(cls):
        return False
    try:
        inspect.signature(cls).bind()
    except (TypeError, ValueError):
        return False
    return True


def _is_environment(cls: type[Any]) -> bool:
    """Tell whether a class's tools belong to an environment, which runs its own episodes."""
    own = [getattr(cls, name, None) for name in ("reset", "step")]
    return all(callable(each) and not isinstance(each, Tool) for each in own)


def _as_toolset(value: Any, target: str) -> Toolset:
    if isinstance(value, Toolset):
        return value
    if isinstance(value, Tool) or is_session_class(value):
        return Toolset([value])
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        items = list(value)
        if items and all(isinstance(item, Tool) or is_session_class(item) for item in items):
            return Toolset(items)
    raise ConfigError(f"{target} is neither a toolset, a tool nor a list of tools")

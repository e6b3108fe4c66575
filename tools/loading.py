"""From a module's name to its tools: ``my_tools``, or ``my_tools:ATTRIBUTE``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from relax_agent.errors import ConfigError
from relax_agent.importing import import_named
from relax_agent.tools.declaration import Tool
from relax_agent.tools.toolset import Toolset


def load_toolset(target: str) -> Toolset:
    """Return every tool of a module, or what one of its attributes holds.

    Args:
        target: ``module`` or ``module:attribute``, the attribute being a toolset, a tool or a
            list of tools. Modules in the current folder are found as well.

    Raises:
        ConfigError: The module cannot be imported or holds no tool.
    """
    name, _, attribute = target.partition(":")
    module = import_named(name)
    if not attribute:
        found = {id(item): item for item in vars(module).values() if isinstance(item, Tool)}
        tools = [item for item in found.values() if not item.is_method]
        if not tools:
            raise ConfigError(f"{name} has no tools", hint="put @tool before a function")
        return Toolset(tools)
    if not hasattr(module, attribute):
        raise ConfigError(f"{name} has no attribute {attribute!r}")
    return _as_toolset(getattr(module, attribute), target)


def _as_toolset(value: Any, target: str) -> Toolset:
    if isinstance(value, Toolset):
        return value
    if isinstance(value, Tool):
        return Toolset([value])
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        items = list(value)
        if items and all(isinstance(item, Tool) for item in items):
            return Toolset(items)
    raise ConfigError(f"{target} is neither a toolset, a tool nor a list of tools")

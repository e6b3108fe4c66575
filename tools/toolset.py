"""A toolset: what the model may call. Failures of tools are values, never exceptions.

:class:`Toolset` runs tools in this process. :class:`~relax_agent.tools.client.RemoteToolset` has
the same interface over HTTP; both are an :class:`AnyToolset`, and an environment cannot tell
which one it was given.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

from relax_agent.errors import ToolDeclarationError, ToolErrorKind
from relax_agent.messages import ToolCall
from relax_agent.tools.declaration import Tool
from relax_agent.tools.result import ToolResult


@runtime_checkable
class AnyToolset(Protocol):
    """What an environment needs of its tools."""

    @property
    def names(self) -> tuple[str, ...]:
        """The tools' names, in the order of their schemas."""

    def schemas(self) -> list[dict[str, Any]]:
        """Return every tool as chat templates and SDKs want it."""

    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call. Failures are results; only cancellation raises."""

    async def close(self) -> None:
        """Give back what the toolset holds. May be called twice."""


class Toolset:
    """An immutable collection of tools that run in this process."""

    def __init__(self, tools: Iterable[Tool[..., Any] | Callable[..., Any]] = ()) -> None:
        self._tools: dict[str, Tool[..., Any]] = {}
        for item in tools:
            declared = item if isinstance(item, Tool) else Tool(item)
            if declared.name in self._tools:
                raise ToolDeclarationError(
                    f"two tools are called {declared.name!r}", hint="rename one: @tool(name=…)"
                )
            if declared.is_method:
                raise ToolDeclarationError(
                    f"tool {declared.name} is a method without its instance",
                    hint="take it from an instance: Toolset([thing.method])",
                )
            self._tools[declared.name] = declared

    @property
    def names(self) -> tuple[str, ...]:
        """The tools' names, in the order given."""
        return tuple(self._tools)

    def __len__(self) -> int:
        return len(self._tools)

    def __iter__(self) -> Iterator[Tool[..., Any]]:
        return iter(self._tools.values())

    def __getitem__(self, name: str) -> Tool[..., Any]:
        return self._tools[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def __repr__(self) -> str:
        return f"Toolset({', '.join(self._tools)})"

    def schemas(self) -> list[dict[str, Any]]:
        """Return every tool as chat templates and SDKs want it."""
        return [tool.schema() for tool in self]

    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call. Failures are results; only cancellation raises."""
        refused = refuse(call, self.names)
        return refused or await self._tools[call.name].invoke(call.arguments)

    async def close(self) -> None:
        """Do nothing: tools in this process hold nothing."""


def refuse(call: ToolCall, names: tuple[str, ...]) -> ToolResult | None:
    """Return the failure of a call that no tool can take; None if one of ``names`` can."""
    if call.error is not None:
        message = f"this tool call could not be read: {call.error}"
        return ToolResult.failure(ToolErrorKind.INVALID_ARGUMENTS, message)
    if call.name in names:
        return None
    near = difflib.get_close_matches(call.name, names, n=1)
    advice = f"did you mean {near[0]!r}?" if near else f"tools: {', '.join(names) or 'none'}"
    message = f"there is no tool {call.name[:64]!r}; {advice}"
    return ToolResult.failure(ToolErrorKind.NOT_FOUND, message)

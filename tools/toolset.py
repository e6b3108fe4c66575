"""A toolset: what the model may call. Failures of tools are values, never exceptions.

:class:`Toolset` runs tools in this process. Tools with state live in a session, one for each
episode (:mod:`relax_agent.tools.sessions`). :class:`~relax_agent.tools.client.RemoteToolset` has
the same interface over HTTP; both are an :class:`AnyToolset`, and an environment cannot tell
which one it was given.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Protocol, TypeAlias, runtime_checkable

from relax_agent.errors import ToolDeclarationError, ToolError, ToolErrorKind
from relax_agent.messages import ToolCall
from relax_agent.tools.declaration import Tool
from relax_agent.tools.result import ToolResult
from relax_agent.tools.sessions import Instance, SessionClass, ToolSession, is_session_class
from relax_agent.tools.trace import SINKS, Place, tell
from relax_agent.tools.warming import is_warm, warm_once

ToolLike: TypeAlias = Tool[..., Any] | Callable[..., Any]


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

    def __init__(self, tools: Iterable[ToolLike] = ()) -> None:
        """Collect tools: functions, methods of an instance, or classes whose methods are tools.

        Args:
            tools: In the order in which the model sees them. A class, or ``functools.partial`` of
                one, is made once for each session (:mod:`relax_agent.tools.sessions`).

        Raises:
            ToolDeclarationError: Two tools have one name, or something is no tool.
        """
        self._tools: dict[str, Tool[..., Any]] = {}
        self._homes: dict[str, SessionClass] = {}
        for item in tools:
            if is_session_class(item):
                home = SessionClass(item)
                for each in home.tools.values():
                    self._add(each)
                    self._homes[each.name] = home
                continue
            if not callable(item):
                raise ToolDeclarationError(
                    f"an object of type {type(item).__name__} is no tool",
                    hint="name functions, its methods (thing.method), or its class",
                )
            declared = item if isinstance(item, Tool) else Tool(item)
            if declared.is_method:
                raise ToolDeclarationError(
                    f"tool {declared.name} is a method without its instance",
                    hint="take it from an instance: Toolset([thing.method]); or name its class:"
                    " Toolset([Thing])",
                )
            self._add(declared)

    def _add(self, declared: Tool[..., Any]) -> None:
        if declared.name in self._tools:
            raise ToolDeclarationError(
                f"two tools are called {declared.name!r}", hint="rename one: @tool(name=…)"
            )
        self._tools[declared.name] = declared

    @property
    def names(self) -> tuple[str, ...]:
        """The tools' names, in the order given."""
        return tuple(self._tools)

    @property
    def has_sessions(self) -> bool:
        """Whether some tools have state of an episode: those want :meth:`session`."""
        return bool(self._homes) or any(tool.requires_session for tool in self)

    def is_stateful(self, name: str) -> bool:
        """Tell whether a tool belongs to a session: its calls must reach the same instance."""
        return name in self._homes or self._tools[name].requires_session

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

    def session(self) -> ToolSession:
        """Return the tools for one episode; close it when the episode ends."""
        return ToolSession(self, self._homes)

    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call. Failures are results; only cancellation raises."""
        return await self.run(call)

    async def run(
        self, call: ToolCall, session: ToolSession | None = None, place: Place = "process"
    ) -> ToolResult:
        """Run one call in a session, and tell of it."""
        result = refuse(call, self._tools) or await self._run(call, session)
        if SINKS:
            tell(call, result, place)
        return result

    async def _run(self, call: ToolCall, session: ToolSession | None) -> ToolResult:
        declared = self._tools[call.name]
        home = self._homes.get(call.name)
        if session is None:
            if declared.requires_session:
                return ToolResult.failure(ToolErrorKind.DENIED, NEEDS_SESSION.format(call.name))
            if home is None:
                return await declared.invoke(call.arguments)
            owner = Instance(home)  # of this call alone
            try:
                return await declared.invoke(call.arguments, owner)
            finally:
                await owner.close()
        if home is None:
            return await declared.invoke(call.arguments)
        try:
            instance = session.owner(home)
        except ToolError as error:
            return ToolResult.failure(error.kind, f"{call.name}: {error}")
        return await declared.invoke(call.arguments, instance)

    async def warm_up(self) -> None:
        """Run the tools' warm-up hooks, all at the same time; each once in a process.

        Raises:
            ToolError: One of them failed.
        """
        hooks = {tool.warm_up: tool.name for tool in self if tool.warm_up is not None}
        cold = [(hook, name) for hook, name in hooks.items() if not is_warm(hook)]
        if not cold:
            return
        try:
            async with asyncio.TaskGroup() as group:
                for hook, name in cold:
                    group.create_task(warm_once(hook, name))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def close(self) -> None:
        """Do nothing: what sessions hold is theirs to give back."""


NEEDS_SESSION = "{}: this tool has state and needs a session; open one first"


async def warm_up(tools: Any) -> None:
    """Warm up whatever has tools; those of a server are warm before it is ready.

    Raises:
        ToolError: A hook failed.
    """
    hook = getattr(tools, "warm_up", None)
    if hook is not None:
        await hook()


def refuse(call: ToolCall, names: Collection[str]) -> ToolResult | None:
    """Return the failure of a call that no tool can take; None if one of ``names`` can."""
    if call.error is not None:
        message = f"this tool call could not be read: {call.error}"
        return ToolResult.failure(ToolErrorKind.INVALID_ARGUMENTS, message)
    if call.name in names:
        return None
    name = str(call.name)  # whatever a model's API has sent
    near = difflib.get_close_matches(name, names, n=1)
    advice = f"did you mean {near[0]!r}?" if near else f"tools: {', '.join(names) or 'none'}"
    message = f"there is no tool {name[:64]!r}; {advice}"
    return ToolResult.failure(ToolErrorKind.NOT_FOUND, message)

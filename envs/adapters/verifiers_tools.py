"""Toolsets of verifiers in this process, without the MCP server that verifiers starts for each.

Names, schemas, checking of arguments and the texts of results are what a model sees through
verifiers: a toolset registers itself with the MCP library's own server object, which is then asked
directly. ``self.state`` of a tool is the state of the running episode's trace, as it is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Sequence
from typing import Any

from relax_agent.errors import ConfigError, EnvError, ToolErrorKind
from relax_agent.messages import ToolCall
from relax_agent.tools import ToolResult
from relax_agent.tools.toolset import refuse

_TRACE: contextvars.ContextVar[Any] = contextvars.ContextVar("relax_verifiers_trace", default=None)
"""The trace of the episode that calls a tool."""


class InProcess:
    """One toolset, and the names under which the model knows its tools."""

    def __init__(self, toolset: Any) -> None:
        from mcp.server.mcpserver import MCPServer

        check_placement(toolset)
        self._toolset = toolset
        self._server = MCPServer(toolset.server_name or type(toolset).__name__)
        self._own_names: dict[str, str] = {}
        toolset._pull_state, toolset._push_state = self._pull_state, self._push_state

    async def open(self, data: Any | None) -> list[dict[str, Any]]:
        """Set the toolset up, for a task or for all; return the schemas of its tools."""
        try:
            await self._toolset._exit_stack.__aenter__()
            await self._toolset.setup()
            if data is not None:
                await self._toolset.setup_task(data)
            self._toolset.register(self._server)
        except Exception as error:
            raise EnvError(
                f"toolset {type(self._toolset).__name__}: {type(error).__name__}: {error}"
            ) from error
        return await self.schemas()

    async def schemas(self) -> list[dict[str, Any]]:
        """Return the schemas of what the toolset has registered."""
        found = []
        prefix = self._toolset.server_name
        for tool in await self._server.list_tools():
            name = f"{prefix}_{tool.name}" if prefix else tool.name
            self._own_names[name] = tool.name
            function = {
                "name": name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            }
            found.append({"type": "function", "function": function})
        return found

    async def call(self, name: str, arguments: dict[str, Any], trace: Any) -> Any:
        """Call a tool; return its content as verifiers puts it into a tool message."""
        from verifiers.v1.harnesses.utils.mcp import mcp_content_to_chat_content

        token = _TRACE.set(trace)
        try:
            result = await self._server.call_tool(self._own_names[name], arguments)
        finally:
            _TRACE.reset(token)
        return mcp_content_to_chat_content(getattr(result, "content", ()))

    async def close(self) -> None:
        """Give back what the toolset has opened."""
        with contextlib.suppress(Exception):
            await self._toolset._exit_stack.aclose()

    # In verifiers these two go over HTTP to the process that has the trace.

    async def _pull_state(self) -> Any:
        trace = _TRACE.get()
        if trace is None:
            return self._toolset._state_cls()
        return self._toolset._state_cls.model_validate_json(trace.state.model_dump_json())

    async def _push_state(self, before: bytes) -> None:
        from verifiers.v1.mcp.server import _call_state

        trace, state = _TRACE.get(), _call_state.get()
        if trace is not None and state is not None:
            trace.state = type(trace.state).model_validate_json(state.model_dump_json())


def check_placement(toolset: Any) -> None:
    """Refuse a toolset that its configuration places elsewhere."""
    config, name = toolset.config, type(toolset).__name__
    runtime = getattr(config, "runtime", None)
    if getattr(config, "url", None) is not None:
        raise ConfigError(f"toolset {name} is served at a url; here tools run in this process")
    placed = getattr(runtime, "type", "subprocess")
    if getattr(config, "colocated", False) or placed != "subprocess":
        raise ConfigError(
            f"toolset {name} runs beside the agent in a container, and there is none here",
            hint="run it with verifiers itself",
        )


async def peek(toolsets: Sequence[Any], data: Any) -> list[dict[str, Any]]:
    """Return the schemas of toolsets; only one that cannot tell them otherwise is set up for it."""
    found: list[dict[str, Any]] = []
    for toolset in toolsets:
        each = InProcess(toolset)
        try:
            toolset.register(each._server)
            found += await each.schemas()
        except Exception:
            again = InProcess(toolset)
            try:
                found += await again.open(data)
            finally:
                await again.close()
    return found


class Tools:
    """All tools of an episode: those of the task's own toolsets, and those of the taskset's."""

    def __init__(self) -> None:
        self.schemas: list[dict[str, Any]] = []
        self.errors = 0
        """Calls that failed."""
        self._by_name: dict[str, InProcess] = {}
        self._own: list[InProcess] = []

    async def add(self, toolsets: Sequence[Any], data: Any | None) -> None:
        """Set up toolsets; they end with this object."""
        for toolset in toolsets:
            each = InProcess(toolset)
            self._own.append(each)
            self._put(each, await each.open(data))

    def _put(self, each: InProcess, schemas: Sequence[dict[str, Any]]) -> None:
        for item in schemas:
            name = item["function"]["name"]
            if name in self._by_name:
                raise ConfigError(f"two tools are called {name}")
            self._by_name[name] = each
            self.schemas.append(item)

    def share(self, other: Tools) -> None:
        """Offer the tools of another one too, without ending them."""
        for item in other.schemas:
            self._put(other._by_name[item["function"]["name"]], [item])

    @property
    def names(self) -> tuple[str, ...]:
        """The tools' names."""
        return tuple(self._by_name)

    async def call(self, call: ToolCall, call_id: str, trace: Any, timeout_s: float) -> Any:
        """Run a call; return verifiers' tool message. Failures are told to the model."""
        from verifiers.v1.harnesses.utils.compaction import bound_tool_message
        from verifiers.v1.types import ToolMessage

        try:
            content = await self._content(call, trace, timeout_s)
        except _CallFailedError as failed:
            self.errors += 1
            content = str(failed)
        message = {"role": "tool", "tool_call_id": call_id, "content": content, "name": call.name}
        return ToolMessage.model_validate(bound_tool_message(message))

    async def _content(self, call: ToolCall, trace: Any, timeout_s: float) -> Any:
        from mcp.server.mcpserver.exceptions import ToolError
        from mcp.shared.exceptions import MCPError

        refused = refuse(call, self.names)
        if refused is not None:
            raise _CallFailedError(refused.text)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._by_name[call.name].call(call.name, call.arguments, trace)
        except TimeoutError:
            told = f"{call.name} took over {timeout_s:g} s"
            raise _CallFailedError(ToolResult.failure(ToolErrorKind.TIMEOUT, told).text) from None
        except (ToolError, MCPError) as error:
            raise _CallFailedError(str(error)) from error

    async def close(self) -> None:
        """End the toolsets that are this object's own."""
        for each in self._own:
            await each.close()


class _CallFailedError(Exception):
    """What a failed call tells the model. Internal."""

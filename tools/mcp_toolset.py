"""``McpToolset``: any MCP server's tools as a toolset.

    async with await McpToolset.connect("https://mcp.example.com/mcp", token=…) as toolset: …
    async with await McpToolset.connect(["uvx", "mcp-server-time"]) as toolset: …

A command is started as a child (stdio) and ended with the toolset; a URL is reached over
streamable HTTP. Failures of calls are values, like everywhere: the server's own words where the
tool failed, ``unavailable`` where it is gone, ``timeout`` where it is too slow.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

from relax_agent.closing import Closing
from relax_agent.errors import ConfigError, MissingExtraError, ToolErrorKind, one_line
from relax_agent.messages import ToolCall
from relax_agent.references import read_media
from relax_agent.tools.context import seconds_left
from relax_agent.tools.result import ToolResult
from relax_agent.tools.toolset import refuse
from relax_agent.tools.trace import SINKS, tell
from relax_agent.tools.types import takes_media
from relax_agent.tools.wire import data_urls, with_media

_START_S = 60.0
_CLOSE_S = 10.0
_PAGES = 100


class McpToolset(Closing):
    """The tools of an MCP server. Made by :meth:`connect`; close it when done."""

    def __init__(self, target: str | Sequence[str], timeout_s: float) -> None:
        self.target = target if isinstance(target, str) else shlex.join(target)
        """The URL, or the command."""
        self._timeout_s = timeout_s
        self._tools: dict[str, dict[str, Any]] = {}
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    @classmethod
    async def connect(
        cls,
        target: str | Sequence[str],
        *,
        token: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float = 60.0,
        start_timeout_s: float = _START_S,
    ) -> McpToolset:
        """Start or reach a server and read its tools.

        Args:
            target: An ``http(s)://`` URL, or a command: one string, or its words.
            token: The bearer token of a URL.
            env: Variables for a command, beside the few that it inherits.
            cwd: A command's working directory.
            timeout_s: Seconds that one call may take.
            start_timeout_s: Seconds until the tools must be known.

        Raises:
            ConfigError: No MCP server answers there.
            MissingExtraError: The MCP SDK is not installed.
        """
        self = cls(target, timeout_s)
        transport = _transport(target, token, env, cwd)
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.get_running_loop().create_task(self._run(transport, ready))
        try:
            async with asyncio.timeout(start_timeout_s):
                await asyncio.shield(ready)
        except TimeoutError:
            await self.close()
            raise ConfigError(
                f"{self.target} did not tell its tools within {start_timeout_s:g} s"
            ) from None
        except BaseException:
            await self.close()
            raise
        return self

    async def _run(self, transport: Any, ready: asyncio.Future[None]) -> None:
        """Hold the connection, which one task must open and close."""
        from mcp import Client

        try:
            async with Client(transport) as client:
                self._tools = await _read_tools(client)
                self._client = client
                ready.set_result(None)
                await self._stop.wait()
        except Exception as error:
            if ready.done():
                return
            told, hint = one_line(_first(error)), "a command must speak MCP on standard output"
            if self.target.startswith("http"):
                hint = "is it the whole address, and does it need token=…?"
            words = f"no MCP server answers at {self.target}: {told}"
            ready.set_exception(ConfigError(words, hint=hint))
        finally:
            self._client = None
            if not ready.done():
                ready.cancel()

    @property
    def names(self) -> tuple[str, ...]:
        """The tools' names, in the server's order."""
        return tuple(self._tools)

    def schemas(self) -> list[dict[str, Any]]:
        """Return every tool as chat templates and SDKs want it."""
        return list(self._tools.values())

    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call on the server. Failures are results; only cancellation raises."""
        started = time.perf_counter()
        result = refuse(call, self._tools)
        if result is None:
            result = (await self._call(call)).timed(time.perf_counter() - started)
        if SINKS:
            tell(call, result, "client")
        return result

    async def _call(self, call: ToolCall) -> ToolResult:
        from mcp.shared.exceptions import MCPError

        from relax_agent.tools.mcp_server import from_mcp

        client = self._client
        if client is None:
            return _failure(call, ToolErrorKind.UNAVAILABLE, "the MCP server is gone")
        if not isinstance(call.arguments, dict):
            words = "arguments must be one JSON object"
            return _failure(call, ToolErrorKind.INVALID_ARGUMENTS, words)
        limit, left = self._timeout_s, seconds_left()
        if left is not None:
            limit = max(0.001, min(limit, left))
        try:
            arguments = _with_media(call.arguments, self._tools[call.name])
            async with asyncio.timeout(limit):
                return from_mcp(await client.call_tool(call.name, arguments))
        except TimeoutError:
            return _failure(call, ToolErrorKind.TIMEOUT, f"no answer after {round(limit, 3):g} s")
        except MCPError as error:
            kind = _KINDS.get(error.code, ToolErrorKind.CRASHED)
            return _failure(call, kind, " ".join(str(error).split())[:500])
        except (ValueError, TypeError) as error:  # no JSON, or an answer that breaks the protocol
            return _failure(call, ToolErrorKind.INVALID_ARGUMENTS, one_line(error))
        except Exception as error:
            words = f"the MCP server cannot be reached ({one_line(_first(error))})"
            return _failure(call, ToolErrorKind.UNAVAILABLE, words)

    async def close(self) -> None:
        """End the connection, and the command with it. May be called twice."""
        self._stop.set()
        task, self._task = self._task, None
        if task is not None:
            if self._client is None:  # still on its way in: there is nothing to say goodbye to
                task.cancel()
            _, late = await asyncio.wait({task}, timeout=_CLOSE_S)
            if late:
                task.cancel()
                await asyncio.wait({task}, timeout=_CLOSE_S)

    def __repr__(self) -> str:
        return f"McpToolset({self.target}: {', '.join(self._tools)})"


_KINDS = {
    -32602: ToolErrorKind.INVALID_ARGUMENTS,
    -32601: ToolErrorKind.NOT_FOUND,
    -32001: ToolErrorKind.TIMEOUT,
    -32000: ToolErrorKind.UNAVAILABLE,
}
"""What JSON-RPC's numbers mean: wrong parameters, no such method, too slow, connection closed."""


def _transport(
    target: str | Sequence[str], token: str | None, env: Mapping[str, str] | None, cwd: str | None
) -> Any:
    try:
        from mcp import StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client
    except ImportError as error:
        raise MissingExtraError("mcp", "mcp") from error
    if isinstance(target, str) and target.startswith(("http://", "https://")):
        headers = {"Authorization": f"Bearer {token}"} if token else None
        return streamable_http_client(target, http_client=create_mcp_http_client(headers))
    words = shlex.split(target) if isinstance(target, str) else list(target)
    if not words:
        raise ConfigError("no MCP server is named", hint="a URL or a command")
    return StdioServerParameters(
        command=words[0], args=words[1:], env=dict(env) if env else None, cwd=cwd
    )


async def _read_tools(client: Any) -> dict[str, dict[str, Any]]:
    tools: dict[str, dict[str, Any]] = {}
    cursor = None
    for _ in range(_PAGES):
        page = await client.list_tools(cursor=cursor)
        for each in page.tools:
            parameters = {
                key: value for key, value in each.input_schema.items() if key != "$schema"
            }
            parameters.setdefault("properties", {})
            function = {
                "name": each.name,
                "description": each.description or each.title or each.name,
                "parameters": parameters,
            }
            tools[each.name] = {"type": "function", "function": function}
        cursor = page.next_cursor
        if cursor is None:
            break
    return tools


def _with_media(arguments: dict[str, Any], schema: dict[str, Any]) -> Any:
    """Return arguments as MCP takes them: a medium, or a reference to one, as a data URL."""
    parameters = schema["function"]["parameters"]
    if takes_media(parameters):
        from relax_agent.tools.client import MEDIA

        arguments = with_media(
            arguments, parameters, lambda text, kind: read_media(text, MEDIA[kind])
        )
    return data_urls(arguments)


def _failure(call: ToolCall, kind: ToolErrorKind, words: str) -> ToolResult:
    return ToolResult.failure(kind, f"{call.name}: {words}")


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

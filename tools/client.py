"""``RemoteToolset``: a tool server behind the interface of a toolset.

``connect`` reads the server's manifest once; a wrong token or no server at all is a ConfigError
there and then. After that every failure is a value: a server that is gone, answers nonsense or
takes too long gives a :class:`ToolResult` of the right kind, after one more attempt where the
tool declares that a second call does no harm. One pooled session serves all concurrent calls;
it is aiohttp's own, which costs less than half of httpx over aiohttp for each call.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from relax_agent.errors import ConfigError, ToolErrorKind
from relax_agent.messages import ToolCall
from relax_agent.tools.result import ToolResult
from relax_agent.tools.toolset import refuse

_MARGIN_S = 5.0
"""Seconds on top of the server's own limits, so that its answer wins over our time-out."""
_CONNECT_S = 5.0
_KEEP_ALIVE_S = 15.0
"""Idle connections end here first, long before the server would end them."""
_AGAIN = {ToolErrorKind.CRASHED, ToolErrorKind.TIMEOUT, ToolErrorKind.UNAVAILABLE}


@dataclass(frozen=True, slots=True)
class _RemoteTool:
    schema: dict[str, Any]
    timeout_s: float
    """Seconds that the server may take for one request, all its own attempts included."""
    idempotent: bool

    @property
    def name(self) -> str:
        name: str = self.schema["function"]["name"]
        return name

    @classmethod
    def read(cls, item: dict[str, Any]) -> _RemoteTool:
        attempts = item["retries"] + 1
        limit = (item["timeout_s"] + item["queue_timeout_s"]) * attempts
        if not isinstance(item["schema"]["function"]["name"], str):
            raise TypeError("a tool's name must be a string")
        return cls(item["schema"], float(limit), bool(item["idempotent"]))


@dataclass(slots=True)
class CallCounts:
    """How the server does."""

    answered: int = 0
    """Calls that the server answered, be it with a tool's own error."""
    unanswered: int = 0
    """Calls that failed because of the server: it was gone, too slow, or in error."""
    last_failure: str = ""
    """What the model was told when that happened last."""


class RemoteToolset:
    """The tools of a server. Made by :meth:`connect`; close it when done."""

    def __init__(self, url: str, session: aiohttp.ClientSession, tools: list[_RemoteTool]) -> None:
        self.url = url
        self._session = session
        self._tools = {tool.name: tool for tool in tools}
        self.counts = CallCounts()
        """What has become of the calls so far."""

    @classmethod
    async def connect(
        cls, url: str, token: str | None = None, *, max_connections: int = 256
    ) -> RemoteToolset:
        """Read a server's manifest.

        Args:
            url: Where it listens, e.g. ``http://127.0.0.1:8100``.
            token: Its bearer token.
            max_connections: Size of the connection pool.

        Raises:
            ConfigError: No tool server answers there, or it refuses the token.
        """
        url = url.rstrip("/")
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=max_connections, keepalive_timeout=_KEEP_ALIVE_S),
            headers={"Authorization": f"Bearer {token}"} if token else {},
        )
        try:
            tools = await _read_manifest(session, url, has_token=token is not None)
        except BaseException:
            await session.close()
            raise
        return cls(url, session, tools)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"RemoteToolset({self.url}: {', '.join(self._tools)})"

    @property
    def names(self) -> tuple[str, ...]:
        """The tools' names, in the server's order."""
        return tuple(self._tools)

    def schemas(self) -> list[dict[str, Any]]:
        """Return every tool as chat templates and SDKs want it."""
        return [tool.schema for tool in self._tools.values()]

    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call on the server. Failures are results; only cancellation raises."""
        refused = refuse(call, self.names)
        if refused is not None:
            return refused
        started = time.perf_counter()
        try:
            body = json.dumps(call.arguments).encode()
        except (TypeError, ValueError, RecursionError) as error:
            message = f"{call.name}: arguments are not JSON: {error}"
            return ToolResult.failure(ToolErrorKind.INVALID_ARGUMENTS, message)
        tool = self._tools[call.name]
        result, reached = await self._post(tool, body)
        if tool.idempotent and not reached and result.error in _AGAIN:
            result, reached = await self._post(tool, body)
        self._count(result, reached)
        return result.timed(time.perf_counter() - started)

    def _count(self, result: ToolResult, reached: bool) -> None:
        if reached:
            self.counts.answered += 1
        else:
            self.counts.unanswered += 1
            self.counts.last_failure = result.text

    async def _post(self, tool: _RemoteTool, body: bytes) -> tuple[ToolResult, bool]:
        """Return the result, and whether it is the tool server's own answer."""
        try:
            async with self._session.post(
                f"{self.url}/tools/{tool.name}",
                data=body,
                headers={"Content-Type": "application/json"},
                timeout=_within(tool.timeout_s + _MARGIN_S),
            ) as response:
                return _read(tool, response.status, await response.read())
        except aiohttp.ConnectionTimeoutError as error:
            return _unavailable(tool, error), False
        except TimeoutError:
            message = f"{tool.name}: no answer after {tool.timeout_s + _MARGIN_S:g} s"
            return ToolResult.failure(ToolErrorKind.TIMEOUT, message), False
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            return _unavailable(tool, error), False

    async def close(self) -> None:
        """Close the connections. May be called twice."""
        await self._session.close()


def _within(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_S)


def _unavailable(tool: _RemoteTool, error: Exception) -> ToolResult:
    reason = " ".join(str(error).split()) or type(error).__name__
    message = f"{tool.name}: the tool server cannot be reached ({reason[:200]})"
    return ToolResult.failure(ToolErrorKind.UNAVAILABLE, message)


def _read(tool: _RemoteTool, status: int, body: bytes) -> tuple[ToolResult, bool]:
    try:
        return ToolResult.from_json(json.loads(body)), True
    except (ValueError, RecursionError):
        pass
    if status in (401, 403):
        kind, reason = ToolErrorKind.DENIED, "the tool server refuses our token"
    elif status in (429, 502, 503, 504):
        kind, reason = ToolErrorKind.UNAVAILABLE, f"the tool server says {status}"
    else:
        kind, reason = ToolErrorKind.CRASHED, f"the tool server failed ({status})"
    return ToolResult.failure(kind, f"{tool.name}: {reason}"), False


async def _read_manifest(
    session: aiohttp.ClientSession, url: str, *, has_token: bool
) -> list[_RemoteTool]:
    try:
        async with session.get(f"{url}/tools", timeout=_within(_MARGIN_S)) as response:
            status, body = response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"no tool server answers at {url}: {reason}",
            hint="relax-agent tools serve MODULE starts one",
        ) from error
    if status in (401, 403):
        raise ConfigError(
            f"the tool server at {url} {'refuses this token' if has_token else 'needs a token'}"
        )
    try:
        return [_RemoteTool.read(item) for item in json.loads(body)["tools"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{url} is not a tool server (GET /tools: {status})") from error

"""``RemoteToolset``: tool servers behind the interface of a toolset.

    async with await RemoteToolset.connect("http://tools:8100", token=…) as toolset:
        env = MyEnv(tools=toolset)

``connect`` reads the server's manifest once; a wrong token or no server at all is a ConfigError
there and then. After that every failure is a value: a server that is gone, answers nonsense or
takes too long gives a :class:`ToolResult` of the right kind. A call is made again, once, where the
tool declares that a second one does no harm, or where it is sure that the first was not begun; with
several servers (``connect([url, url])``), elsewhere. A deadline
(:func:`~relax_agent.tools.context.call_context`) goes with the call, and the server ends what
nobody waits for any more. Media travel as bytes.

One pooled session serves all concurrent calls; it is aiohttp's own, which costs less than half of
httpx over aiohttp for each call.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import aiohttp

from relax_agent.closing import Closing
from relax_agent.errors import ToolError, ToolErrorKind
from relax_agent.messages import Audio, Image, ToolCall, Video
from relax_agent.references import read_media
from relax_agent.tools.context import call_context, current_call
from relax_agent.tools.remote_session import RemoteSession, Renewer, ask
from relax_agent.tools.replicas import (
    CONNECT_S,
    FreshConnector,
    RemoteTool,
    Replica,
    Replicas,
    read_manifests,
    split_urls,
)
from relax_agent.tools.result import ToolResult
from relax_agent.tools.toolset import NEEDS_SESSION, refuse
from relax_agent.tools.trace import SINKS, tell
from relax_agent.tools.wire import (
    CALL_ID,
    DEADLINE,
    EPISODE,
    FRAME_TYPE,
    JSON_TYPE,
    NO_SESSION,
    REFUSED,
    SESSION,
    data_urls,
    dump_arguments,
    load_result,
    with_media,
)

_MARGIN_S = 5.0
"""Seconds on top of the server's own limits, so that its answer wins over our time-out."""
_DEADLINE_MARGIN_S = 1.0
"""The same where the caller itself stops waiting."""
_KEEP_ALIVE_S = 15.0
"""Idle connections end here first, long before the server would end them."""
_MOST_HEADER = 200
"""Characters of an id that goes along as a header; the server reads no more."""
_ACCEPT = f"{FRAME_TYPE}, {JSON_TYPE}"
_AGAIN = {ToolErrorKind.CRASHED, ToolErrorKind.TIMEOUT, ToolErrorKind.UNAVAILABLE}
MEDIA: dict[str, type[Any]] = {"image": Image, "audio": Audio, "video": Video}


class _Reach(Enum):
    """How far a request got."""

    ANSWERED = "the tool server's own answer"
    REFUSED = "the server says that it has not begun the call"
    UNSENT = "no connection: it was never sent"
    LOST = "sent, and nobody knows what came of it"


@dataclass(slots=True)
class CallCounts:
    """How the server does."""

    answered: int = 0
    """Calls that the server answered, be it with a tool's own error."""
    unanswered: int = 0
    """Calls that failed because of the server: it was gone, too slow, or in error."""
    last_failure: str = ""
    """What the model was told when that happened last."""


class RemoteToolset(Closing):
    """The tools of a server. Made by :meth:`connect`; close it when done."""

    def __init__(
        self,
        urls: Sequence[str],
        session: aiohttp.ClientSession,
        tools: Sequence[RemoteTool],
        *,
        frames: bool = False,
    ) -> None:
        self.url = ", ".join(urls)
        self.replicas = Replicas(urls, [tool.name for tool in tools])
        """The servers; sessions use them."""
        self._session = session
        self._tools = {tool.name: tool for tool in tools}
        self._frames = frames
        self._renewer = Renewer(self)
        self.keep, self.forget = self._renewer.keep, self._renewer.forget
        self.counts = CallCounts()
        """What has become of the calls so far."""

    @classmethod
    async def connect(
        cls, url: str | Sequence[str], token: str | None = None, *, max_connections: int = 256
    ) -> RemoteToolset:
        """Read a server's manifest.

        Args:
            url: Where it listens, e.g. ``http://127.0.0.1:8100``; several servers of the same tools
                as a list, or between commas.
            token: Their bearer token.
            max_connections: Size of the connection pool.

        Raises:
            ConfigError: No tool server answers there, it refuses the token, or they differ.
        """
        urls = split_urls(url)
        session = aiohttp.ClientSession(
            connector=FreshConnector(limit=max_connections, keepalive_timeout=_KEEP_ALIVE_S),
            headers={"Authorization": f"Bearer {token}"} if token else {},
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        try:
            manifest = await read_manifests(session, urls, has_token=token is not None)
        except BaseException:
            await session.close()
            raise
        return cls(urls, session, manifest["read"], frames=manifest.get("frames") is True)

    def __repr__(self) -> str:
        return f"RemoteToolset({self.url}: {', '.join(self._tools)})"

    @property
    def names(self) -> tuple[str, ...]:
        """The tools' names, in the server's order."""
        return tuple(self._tools)

    @property
    def has_sessions(self) -> bool:
        """Whether some tools have state of an episode: those want :meth:`session`."""
        return any(tool.stateful for tool in self._tools.values())

    def schemas(self) -> list[dict[str, Any]]:
        """Return every tool as chat templates and SDKs want it."""
        return [tool.schema for tool in self._tools.values()]

    def session(self) -> RemoteSession:
        """Return the tools for one episode; close it when the episode ends."""
        return RemoteSession(self)

    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call on the server. Failures are results; only cancellation raises."""
        return await self.run(call)

    async def run(self, call: ToolCall, session: RemoteSession | None = None) -> ToolResult:
        """Run one call in a session, and tell of it."""
        started = time.perf_counter()
        result = refuse(call, self._tools)
        if result is None:
            result = await self._run(call, self._tools[call.name], session)
            result = result.timed(time.perf_counter() - started)
        if SINKS:
            with call_context(session=session.label if session is not None else None):
                tell(call, result, "client")
        return result

    async def _run(
        self, call: ToolCall, tool: RemoteTool, session: RemoteSession | None
    ) -> ToolResult:
        if session is None and tool.requires_session:
            return ToolResult.failure(ToolErrorKind.DENIED, NEEDS_SESSION.format(call.name))
        try:
            body, content_type = self._body(tool, call.arguments)
            if session is not None and tool.stateful:
                await session.open()
        except ToolError as error:
            return ToolResult.failure(error.kind, f"{call.name}: {error}")
        headers = {"Content-Type": content_type, "Accept": _ACCEPT}
        if call.id and _fits_a_header(call.id):
            headers[CALL_ID] = call.id
        if session is not None and tool.stateful:
            return await self._in_session(tool, body, headers, session)
        return await self._anywhere(tool, body, headers)

    def _body(self, tool: RemoteTool, arguments: Any) -> tuple[bytes, str]:
        if tool.takes_media:
            schema = tool.schema["function"]["parameters"]
            arguments = with_media(arguments, schema, _referenced)
            if not self._frames:
                arguments = data_urls(arguments)
        body, content_type = dump_arguments(arguments)
        if len(body) > tool.max_request_bytes:
            words = f"the arguments are larger than {tool.max_request_bytes:,} bytes"
            raise ToolError(words, kind=ToolErrorKind.TOO_LARGE)
        return body, content_type

    async def _in_session(
        self, tool: RemoteTool, body: bytes, headers: dict[str, str], session: RemoteSession
    ) -> ToolResult:
        if session.replica is None or session.id is None:  # closed meanwhile
            return ToolResult.failure(ToolErrorKind.UNAVAILABLE, f"{tool.name}: it is closed")
        headers[SESSION] = session.id
        result, reach = await self._post(tool, session.replica, body, headers)
        if _may_repeat(tool, result, reach) and session.replica is not None:
            result, reach = await self._post(tool, session.replica, body, headers)
        session.lost = session.lost or reach is _Reach.REFUSED
        self._count(result, reach)
        return result

    async def _anywhere(self, tool: RemoteTool, body: bytes, headers: dict[str, str]) -> ToolResult:
        replica = self.replicas.pick()
        assert replica is not None
        tried = [replica]
        result, reach = await self._post(tool, replica, body, headers)
        if reach is not _Reach.ANSWERED:
            repeated = False
            while True:
                unbegun = reach in (_Reach.REFUSED, _Reach.UNSENT)
                if not (unbegun or (not repeated and _may_repeat(tool, result, reach))):
                    break
                replica = self.replicas.pick(tried)
                if replica is None and not repeated and _may_repeat(tool, result, reach):
                    replica = tried[0]
                if replica is None:
                    break
                repeated = repeated or not unbegun or replica is tried[0]
                tried.append(replica)
                result, reach = await self._post(tool, replica, body, headers)
        self._count(result, reach)
        return result

    def _count(self, result: ToolResult, reach: _Reach) -> None:
        if reach is _Reach.ANSWERED:
            self.counts.answered += 1
        else:
            self.counts.unanswered += 1
            self.counts.last_failure = result.text

    async def _post(
        self, tool: RemoteTool, replica: Replica, body: bytes, headers: dict[str, str]
    ) -> tuple[ToolResult, _Reach]:
        """Make one request, and tell how far it got."""
        timeout = _within(tool.timeout_s + _MARGIN_S)
        context = current_call()
        if context.episode and _fits_a_header(context.episode):
            headers[EPISODE] = context.episode
        if context.deadline is not None:
            left = context.deadline - time.monotonic()
            if left <= 0:
                return _failure(tool, ToolErrorKind.TIMEOUT, "no time is left"), _Reach.ANSWERED
            headers[DEADLINE] = f"{left:.3f}"
            timeout = _within(min(left + _DEADLINE_MARGIN_S, timeout.total or left))
        replica.in_flight += 1
        try:
            async with self._session.post(
                replica.urls[tool.name], data=body, headers=headers, timeout=timeout
            ) as response:
                return await _read(tool, replica, response)
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            replica.failed()
            return _unavailable(tool, error), _Reach.UNSENT
        except TimeoutError:
            words = f"no answer after {timeout.total:g} s"
            return _failure(tool, ToolErrorKind.TIMEOUT, words), _Reach.LOST
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            replica.failed()
            return _unavailable(tool, error), _Reach.LOST
        finally:
            replica.in_flight -= 1

    async def ask(
        self,
        method: str,
        replica: Replica,
        path: str,
        limit_s: float,
        body: dict[str, Any] | None = None,
    ) -> tuple[int, dict[str, Any]]:
        """Make a request about sessions; status 0 and the reason if there is no answer."""
        return await ask(self._session, method, f"{replica.url}{path}", limit_s, body)

    async def close(self) -> None:
        """Close the connections. May be called twice."""
        await self._renewer.close()
        await self._session.close()


def _fits_a_header(text: str) -> bool:
    return len(text) <= _MOST_HEADER and text.isascii() and text.isprintable()


def _may_repeat(tool: RemoteTool, result: ToolResult, reach: _Reach) -> bool:
    return tool.idempotent and reach is not _Reach.ANSWERED and result.error in _AGAIN


def _referenced(text: str, kind: str) -> Any:
    """Return the medium of the conversation that a model's text names."""
    try:
        return read_media(text, MEDIA[kind])
    except ValueError as error:
        raise ToolError(str(error), kind=ToolErrorKind.INVALID_ARGUMENTS) from None


def _within(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_S)


def _failure(tool: RemoteTool, kind: ToolErrorKind, words: str) -> ToolResult:
    return ToolResult.failure(kind, f"{tool.name}: {words}")


def _unavailable(tool: RemoteTool, error: Exception) -> ToolResult:
    reason = " ".join(str(error).split()) or type(error).__name__
    words = f"the tool server cannot be reached ({reason[:200]})"
    return _failure(tool, ToolErrorKind.UNAVAILABLE, words)


async def _body_of(response: aiohttp.ClientResponse, most: int) -> bytes | None:
    """Return an answer's body; None if it is larger than it may be, also once unpacked."""
    size = response.content_length
    if size is not None and "Content-Encoding" not in response.headers:
        return await response.read() if size <= most else None
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > most:
            response.close()
            return None
    return bytes(body)


async def _read(
    tool: RemoteTool, replica: Replica, response: aiohttp.ClientResponse
) -> tuple[ToolResult, _Reach]:
    most = 2 * tool.max_output_bytes + (1 << 20)
    body = await _body_of(response, most)
    if body is None:
        words = f"the tool server answers with more than {most:,} bytes"
        return _failure(tool, ToolErrorKind.TOO_LARGE, words), _Reach.LOST
    try:
        result = load_result(response.headers.get("Content-Type", ""), body)
    except (ValueError, RecursionError):
        result = None
    why = response.headers.get(REFUSED)
    if why is not None:
        words = "the process that had this session has ended, and its state is lost"
        if why != NO_SESSION:
            replica.failed()
            words = "the tool server takes no calls"
        return result or _failure(tool, ToolErrorKind.UNAVAILABLE, words), _Reach.REFUSED
    if result is not None:
        replica.answered()
        return result, _Reach.ANSWERED
    status = response.status
    if status in (401, 403):
        kind, words = ToolErrorKind.DENIED, "the tool server refuses our token"
    elif status in (429, 502, 503, 504):
        kind, words = ToolErrorKind.UNAVAILABLE, f"the tool server says {status}"
    else:
        kind, words = ToolErrorKind.CRASHED, f"the tool server failed ({status})"
    return _failure(tool, kind, words), _Reach.LOST

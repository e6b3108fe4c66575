"""What a tool server does, whatever carries the requests: calls, sessions, counting, the end.

One :class:`ToolService` stands behind the HTTP routes (:mod:`relax_agent.tools.app`) and the MCP
endpoint (:mod:`relax_agent.tools.mcp_server`) of one process.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from relax_agent.errors import ConfigError, ToolError, ToolErrorKind
from relax_agent.messages import ToolCall
from relax_agent.tools.context import call_context
from relax_agent.tools.declaration import Tool
from relax_agent.tools.leases import LEASE_S, MAX_SESSIONS, Leases, NoSession
from relax_agent.tools.metrics import ToolMetrics
from relax_agent.tools.result import ToolResult
from relax_agent.tools.toolset import Toolset
from relax_agent.tools.wire import MANIFEST_VERSION

if TYPE_CHECKING:
    from relax_agent.tools.peers import Peers

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 1 << 20
MAX_MEDIA_REQUEST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """What a tool server allows."""

    max_request_bytes: int = MAX_REQUEST_BYTES
    """Size of the arguments of one call."""
    max_media_request_bytes: int = MAX_MEDIA_REQUEST_BYTES
    """The same for tools that take pictures, sounds or videos."""
    max_sessions: int = MAX_SESSIONS
    """Sessions at the same time, in each process."""
    lease_s: float = LEASE_S
    """How long a session lives without a call or a renewal, unless its client asks for another
    time.
    """

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0, not {getattr(self, name)}")


class ToolService:
    """The tools of one server process, with what it knows of them and of their sessions."""

    def __init__(
        self,
        toolset: Toolset,
        limits: ServiceLimits | None = None,
        *,
        worker: int | None = None,
        peers: Peers | None = None,
    ) -> None:
        """Make the service; nothing is started.

        Args:
            toolset: What it serves.
            limits: Sizes, sessions and times.
            worker: The number of this process, if the server has several.
            peers: The other processes, then.
        """
        self.peers = peers
        self.toolset = toolset
        self.limits = limits or ServiceLimits()
        self.worker = worker
        self.id = secrets.token_hex(8)
        """Another one for each start: a client can tell that its sessions are gone."""
        self.metrics = ToolMetrics()
        self.leases = Leases(
            toolset,
            lease_s=self.limits.lease_s,
            max_sessions=self.limits.max_sessions,
            worker=worker,
        )
        self.draining = False
        """Whether no new call and no new session may begin."""
        self.failure: ToolError | None = None
        """Why the tools could not be warmed up."""
        self._warming: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def ready(self) -> bool:
        """Whether the tools are warm and calls are taken."""
        warm = self._warming is not None and self._warming.done() and self.failure is None
        return warm and not self.draining

    def open(self) -> None:
        """Take calls, also after :meth:`close`: an application may be started again."""
        self.draining, self.failure, self._warming = False, None, None
        self._idle = asyncio.Event()
        self._idle.set()
        self.start()

    def start(self) -> asyncio.Task[None]:
        """Begin to warm the tools up, once."""
        if self._warming is None:
            self._warming = asyncio.get_running_loop().create_task(self._warm_up())
        return self._warming

    async def _warm_up(self) -> None:
        try:
            await self.toolset.warm_up()
        except ToolError as error:
            self.failure = error
            logger.error("%s", error)

    def request_limit(self, tool: Tool[..., Any]) -> int:
        """Return the most bytes that the arguments of a tool may have."""
        if tool.arguments.takes_media:
            return max(self.limits.max_media_request_bytes, self.limits.max_request_bytes)
        return self.limits.max_request_bytes

    async def call(
        self,
        call: ToolCall,
        *,
        session: str | None = None,
        episode: str | None = None,
        timeout_s: float | None = None,
    ) -> ToolResult:
        """Run one call, and count it.

        Args:
            call: The call.
            session: The id of the session that it belongs to.
            episode: Whose it is, for the trace.
            timeout_s: Seconds after which its caller stops waiting.
        """
        metrics = self.metrics
        metrics.in_flight += 1
        self._idle.clear()
        try:
            if episode is None and timeout_s is None:
                result = await self._call(call, session)
            else:
                with call_context(episode=episode, timeout_s=timeout_s):
                    result = await self._call(call, session)
        finally:
            metrics.in_flight -= 1
            if not metrics.in_flight:
                self._idle.set()
        metrics.add(call.name if call.name in self.toolset else "(unknown)", result)
        return result

    async def _call(self, call: ToolCall, session_id: str | None) -> ToolResult:
        if session_id is None:
            return await self.toolset.run(call, place="server")
        try:
            with self.leases.use(session_id) as session, call_context(session=session.id):
                return await self.toolset.run(call, session, "server")
        except NoSession:
            return self.no_session(call, session_id)

    def no_session(self, call: ToolCall, session_id: str) -> ToolResult:
        """Return the failure of a call in a session that is not there."""
        words = f"{call.name}: there is no session {session_id[:8]!r}…, or it has ended"
        return ToolResult.failure(ToolErrorKind.UNAVAILABLE, words)

    async def call_anywhere(self, call: ToolCall, session: str | None) -> ToolResult:
        """Run one call, in another process if that has its session."""
        elsewhere = None if session is None else self._elsewhere(session)
        if elsewhere is None or self.peers is None or session is None:
            return await self.call(call, session=session)
        return await self.peers.call(elsewhere, call, session)

    async def close_session(self, session_id: str) -> list[str]:
        """End a session and return what of it could not be closed.

        Raises:
            NoSession: It has ended already.
        """
        elsewhere = self._elsewhere(session_id)
        if elsewhere is not None and self.peers is not None:
            return await self.peers.close_session(elsewhere, session_id)
        return await self.leases.close(session_id)

    async def renew_sessions(self, ids: Sequence[str]) -> list[str]:
        """Let sessions live for another lease; returns those that have ended."""
        lost, far = [], []
        for each in ids:
            if self._elsewhere(each) is not None:
                far.append(each)
                continue
            try:
                self.leases.renew(each)
            except NoSession:
                lost.append(each)
        return lost + (await self.peers.renew(far) if self.peers is not None and far else [])

    def _elsewhere(self, session_id: str) -> int | None:
        return None if self.peers is None else self.peers.home(session_id)

    async def numbers(self, *, alone: bool) -> dict[str, float]:
        """Return what there is to count of sessions, in all processes or in this one alone."""
        numbers = Counter(self.leases.numbers())
        if self.peers is not None and not alone:
            for each in await self.peers.ask_all("GET", "/sessions"):
                numbers.update(json.loads(each))
        return dict(numbers)

    def manifest(self) -> dict[str, Any]:
        """Return what a client needs to know: each tool's schema and limits."""
        return {
            "version": MANIFEST_VERSION,
            "server": self.id,
            "frames": True,
            "sessions": self.toolset.has_sessions,
            "lease_s": self.limits.lease_s,
            "tools": [
                {
                    "schema": tool.schema(),
                    "timeout_s": tool.limits.timeout_s,
                    "queue_timeout_s": tool.limits.queue_timeout_s,
                    "retries": tool.limits.retries,
                    "idempotent": tool.limits.idempotent,
                    "requires_session": tool.requires_session,
                    "stateful": self.toolset.is_stateful(tool.name),
                    "takes_media": tool.arguments.takes_media,
                    "max_request_bytes": self.request_limit(tool),
                    "max_output_bytes": tool.limits.max_output_bytes,
                }
                for tool in self.toolset
            ],
        }

    def metrics_text(self) -> str:
        """Return the counters as Prometheus reads them."""
        numbers = {"ready": float(self.ready), **self.leases.numbers()}
        return self.metrics.text(numbers, self.worker)

    async def drain(self, limit_s: float) -> None:
        """Begin nothing new, and wait until no call runs, for so long at most."""
        self.draining = True
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("%d calls still ran after %g s", self.metrics.in_flight, limit_s)

    async def close(self) -> None:
        """Close every session. May be called twice."""
        self.draining = True
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.gather(self._warming, return_exceptions=True)
        await self.leases.close_all()

"""One episode's session at a tool server: opened when it is needed, kept alive, closed for sure.

The lease of a session is short, so that the server is rid of a client's state soon after it was
killed. A client that lives renews all its sessions together, a few times within their lease. A
session that the server has lost (it was started anew) stays lost: its state is gone, and a model
that got a fresh one without a word would be deceived.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
from typing import TYPE_CHECKING, Any

import aiohttp

from relax_agent.closing import Closing
from relax_agent.errors import ToolError, ToolErrorKind
from relax_agent.messages import ToolCall
from relax_agent.tools.replicas import CONNECT_S, Replica
from relax_agent.tools.result import ToolResult

if TYPE_CHECKING:
    from relax_agent.tools.client import RemoteToolset

logger = logging.getLogger(__name__)

_OPEN_S = 30.0
_CLOSE_S = 15.0
_USUAL_S, _SHORTEST_S = 60.0, 0.05
_MOST_AT_ONCE = 1000
"""Sessions that one request renews; servers take ten times as many."""


class RemoteSession(Closing):
    """All tools of a server for one episode; made by :meth:`RemoteToolset.session`."""

    def __init__(self, toolset: RemoteToolset) -> None:
        self._toolset = toolset
        self._opening = asyncio.Lock()
        self._closed = False
        self.replica: Replica | None = None
        """The server that has it, once it is open."""
        self.id: str | None = None
        """The server's name for it, a secret: whoever knows it may use the session."""
        self.label = secrets.token_urlsafe(9)
        """What the trace calls it."""
        self.lost = False
        """Whether the server knows it no more."""

    @property
    def names(self) -> tuple[str, ...]:
        """The tools' names, in the server's order."""
        return self._toolset.names

    def schemas(self) -> list[dict[str, Any]]:
        """Return every tool as chat templates and SDKs want it."""
        return self._toolset.schemas()

    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call on the server. Failures are results; only cancellation raises."""
        return await self._toolset.run(call, self)

    async def open(self) -> None:
        """Open it now instead of at the first call that needs it.

        Raises:
            ToolError: No server opens one, or it is closed or lost.
        """
        async with self._opening:
            if self._closed:
                raise ToolError("the session is closed", kind=ToolErrorKind.UNAVAILABLE)
            if self.lost:
                words = "the tool server has lost this session and its state"
                raise ToolError(words, kind=ToolErrorKind.UNAVAILABLE)
            if self.id is None:
                await self._open()

    async def _open(self) -> None:
        tried: list[Replica] = []
        told = "no tool server opens a session"
        while (replica := self._toolset.replicas.pick(tried)) is not None:
            tried.append(replica)
            replica.sessions += 1  # now, so that those who open at the same time spread
            try:
                status, answer = await self._toolset.ask("POST", replica, "/sessions", _OPEN_S)
                if status == 201 and isinstance(answer.get("session"), str):
                    self.replica, self.id = replica, answer["session"]
                    self._toolset.keep(self, _lease_of(answer))
                    return
            finally:
                replica.sessions -= self.id is None
            told = f"no tool server opens a session ({answer.get('detail', status)})"
        raise ToolError(told, kind=ToolErrorKind.UNAVAILABLE)

    async def close(self) -> None:
        """Close it at the server, whose lease ends it if that fails. May be called twice."""
        self._closed = True
        async with self._opening:
            session_id, self.id = self.id, None
            replica, self.replica = self.replica, None
            if session_id is None or replica is None:
                return
            replica.sessions -= 1
            self._toolset.forget(self)
            if not self.lost:
                path = f"/sessions/{session_id}"
                status, answer = await self._toolset.ask("DELETE", replica, path, _CLOSE_S)
                if status != 200 or answer.get("failures"):
                    words = answer.get("failures") or answer.get("detail") or status
                    logger.warning("a session at %s was not closed: %s", replica.url, words)

    def __repr__(self) -> str:
        state = "lost" if self.lost else "closed" if self._closed else "open" if self.id else "new"
        return f"<RemoteSession: {state}>"


class Renewer:
    """Renews the sessions of one client for as long as it has any."""

    def __init__(self, toolset: RemoteToolset) -> None:
        self._toolset = toolset
        self._sessions: set[RemoteSession] = set()
        self._lease_s = _USUAL_S
        self._task: asyncio.Task[None] | None = None

    def keep(self, session: RemoteSession, lease_s: float) -> None:
        """Renew a session from now on."""
        if not self._sessions or lease_s < self._lease_s:
            self._lease_s = lease_s
            if self._task is not None:
                self._task.cancel()
        self._sessions.add(session)
        if self._task is None or self._task.done() or self._task.cancelling():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def forget(self, session: RemoteSession) -> None:
        """Renew a session no more."""
        self._sessions.discard(session)
        if not self._sessions and self._task is not None:
            self._task.cancel()
            self._task = None

    async def close(self) -> None:
        """Renew nothing any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            by_replica: dict[Replica, dict[str, RemoteSession]] = {}
            for each in self._sessions:
                if each.replica is not None and each.id is not None:
                    by_replica.setdefault(each.replica, {})[each.id] = each
            async with asyncio.TaskGroup() as group:  # one that hangs must not hold up the others
                for replica, sessions in by_replica.items():
                    items = list(sessions.items())
                    for start in range(0, len(items), _MOST_AT_ONCE):
                        some = dict(items[start : start + _MOST_AT_ONCE])
                        group.create_task(self._renew(replica, some))

    async def _renew(self, replica: Replica, sessions: dict[str, RemoteSession]) -> None:
        body = {"sessions": list(sessions)}
        status, answer = await self._toolset.ask(
            "POST", replica, "/sessions/renew", self._lease_s / 6, body
        )
        lost = answer.get("lost") if status == 200 else None
        if not isinstance(lost, list):
            words = answer.get("detail") or status
            logger.warning("%d sessions at %s: not renewed: %s", len(sessions), replica.url, words)
            return
        for each in lost:
            if isinstance(each, str) and each in sessions:
                sessions[each].lost = True


def _lease_of(answer: dict[str, Any]) -> float:
    """Return the seconds of a lease that a server told of; the usual ones if it tells nonsense."""
    told = answer.get("lease_s")
    return told if isinstance(told, int | float) and _SHORTEST_S <= told < math.inf else _USUAL_S


async def ask(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    limit_s: float,
    body: dict[str, Any] | None = None,
) -> tuple[int, dict[str, Any]]:
    """Make a request that is no tool call; 0 and the reason if there is no answer."""
    timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_S)
    try:
        async with session.request(method, url, json=body or {}, timeout=timeout) as response:
            answer = json.loads(await response.read())
            return response.status, answer if isinstance(answer, dict) else {}
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RuntimeError) as error:
        return 0, {"detail": " ".join(str(error).split()) or type(error).__name__}

"""The sessions of a tool server: opened, leased, renewed, and closed for sure.

A session that nobody uses or renews for as long as its lease closes by itself, so a client that was
killed costs the server its tools' state for that long and no longer. Every closing is waited for
and counted; what could not be closed in time is counted apart (``left_behind``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Iterator

from relax_agent.errors import RelaxError
from relax_agent.tools.sessions import ToolSession
from relax_agent.tools.toolset import Toolset

logger = logging.getLogger(__name__)

LEASE_S = 60.0
"""How long a session lives without a call or a renewal, where nobody says otherwise."""
MAX_LEASE_S = 3600.0
MAX_SESSIONS = 4096


class TooManySessions(RelaxError):
    """The server has as many sessions as it allows. Internal: becomes status 429."""


class NoSession(RelaxError):
    """There is no such session, or it has ended. Internal: becomes status 404."""


class Lease:
    """One session, as long as somebody uses or renews it."""

    def __init__(self, session_id: str, session: ToolSession, lease_s: float) -> None:
        self.id = session_id
        """Whoever knows it may use the session."""
        self.session = session
        self.lease_s = lease_s
        self.calls = 0
        """Calls that run; meanwhile it does not end."""
        self.until = 0.0
        """When it ends, on the loop's clock."""
        self.timer: asyncio.TimerHandle | None = None


class Leases:
    """All sessions of one server process."""

    def __init__(
        self,
        toolset: Toolset,
        *,
        lease_s: float = LEASE_S,
        max_sessions: int = MAX_SESSIONS,
        worker: int | None = None,
    ) -> None:
        """Make the place for sessions.

        Args:
            toolset: Whose sessions they are.
            lease_s: How long one lives without a call or a renewal.
            max_sessions: Most sessions at a time.
            worker: The number of this process; it begins the ids, so that others find it.
        """
        self._toolset = toolset
        self._lease_s = lease_s
        self._max_sessions = max_sessions
        self._worker = worker or 0
        self._open: dict[str, Lease] = {}
        self._closing: set[asyncio.Task[list[str]]] = set()
        self.opened = 0
        self.closed: Counter[str] = Counter()
        """By reason: ``closed`` by its client, ``expired``, or the server's ``shutdown``."""
        self.left_behind = 0
        """Tools of sessions that could not be closed."""

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, session_id: object) -> bool:
        return session_id in self._open

    def open(self, lease_s: float | None = None) -> Lease:
        """Begin a session.

        Raises:
            TooManySessions: There are as many as there may be.
        """
        if len(self._open) >= self._max_sessions:
            words = f"all {self._max_sessions} sessions are taken"
            raise TooManySessions(words, hint="close some, or try again later")
        session_id = f"{self._worker}.{secrets.token_urlsafe(18)}"
        lease = Lease(session_id, self._toolset.session(), lease_s or self._lease_s)
        self._open[lease.id] = lease
        self.opened += 1
        self._renew(lease)
        return lease

    def renew(self, session_id: str) -> Lease:
        """Let a session live for another lease.

        Raises:
            NoSession: It has ended.
        """
        lease = self._find(session_id)
        self._renew(lease)
        return lease

    @contextlib.contextmanager
    def use(self, session_id: str) -> Iterator[ToolSession]:
        """Use a session for one call, during and after which it lives on.

        Raises:
            NoSession: It has ended.
        """
        lease = self._find(session_id)
        lease.calls += 1
        try:
            yield lease.session
        finally:
            lease.calls -= 1
            self._renew(lease)

    async def close(self, session_id: str) -> list[str]:
        """End a session and return what of it could not be closed.

        Raises:
            NoSession: It has ended already.
        """
        return await asyncio.shield(self._end(self._find(session_id), "closed"))

    async def close_all(self) -> None:
        """End every session and wait until all are gone."""
        for lease in list(self._open.values()):
            self._end(lease, "shutdown")
        await asyncio.gather(*self._closing, return_exceptions=True)

    def numbers(self) -> dict[str, float]:
        """Return what there is to count, by name."""
        return {
            "sessions": len(self._open),
            "sessions_closing": len(self._closing),
            "sessions_opened_total": self.opened,
            **{f"sessions_{reason}_total": self.closed[reason] for reason in _REASONS},
            "sessions_left_behind_total": self.left_behind,
        }

    def _find(self, session_id: str) -> Lease:
        lease = self._open.get(session_id)
        if lease is None:
            raise NoSession(
                f"there is no session {session_id[:8]!r}…, or it has ended",
                hint="POST /sessions opens one",
            )
        return lease

    def _renew(self, lease: Lease) -> None:
        loop = asyncio.get_running_loop()
        lease.until = loop.time() + lease.lease_s
        if lease.timer is None and lease.id in self._open:
            lease.timer = loop.call_at(lease.until, self._look, lease)

    def _look(self, lease: Lease) -> None:
        """End a lease that has run out; one that was renewed meanwhile is looked at again then."""
        lease.timer = None
        loop = asyncio.get_running_loop()
        if lease.calls or lease.until > loop.time():
            at = max(lease.until, loop.time() + min(lease.lease_s, 1.0))
            lease.timer = loop.call_at(at, self._look, lease)
            return
        logger.info("a session ended: nobody used it for %g s", lease.lease_s)
        self._end(lease, "expired")

    def _end(self, lease: Lease, reason: str) -> asyncio.Task[list[str]]:
        if lease.timer is not None:
            lease.timer.cancel()
            lease.timer = None
        del self._open[lease.id]
        task = asyncio.get_running_loop().create_task(self._close(lease, reason))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def _close(self, lease: Lease, reason: str) -> list[str]:
        failures = await lease.session.close()
        self.closed[reason] += 1
        self.left_behind += len(failures)
        return failures


_REASONS = ("closed", "expired", "shutdown")

"""All engines behind one door: sticky routing with escape, load counters, versions, pauses.

**Sticky.** The turns of one episode go to the engine that has its prefix in the cache. The episode
is the part of the request's id before the first dot, compared as a whole. **Escape.** When that
engine has clearly more to do than the least busy one, the episode moves there and stays. A new
episode goes to the engine with the fewest running requests, then the fewest episodes: what the
prompt looks like plays no part, so a shared system prompt does not gather everybody on one engine.

**Versions.** An engine gets requests only while it serves the fleet's newest weights; one that
joins, or that missed an update, waits until it has them. **Failures.** A request whose engine is
unavailable goes to another one, once, as it was; engines that failed are avoided for a while.
Load counters are released however a request ends.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from relax_agent.engines.protocol import Engine, GenerateRequest, GenerateResult
from relax_agent.engines.wire import parse_version
from relax_agent.errors import EngineUnavailable

_REMEMBERED_EPISODES = 65_536


@dataclass(slots=True, eq=False)
class _Member:
    """One engine and what the fleet knows of it."""

    engine: Engine
    version: int
    load: int = 0
    """Requests under way."""
    episodes: int = 0
    """Episodes that stick to it."""
    avoid_until: float = float("-inf")
    """Time of the event loop."""
    failures: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How one engine is doing."""

    name: str
    version: int
    requests: int
    """Under way at this moment."""
    episodes: int
    failures: int
    """Requests that found it unavailable."""


class Fleet:
    """A :class:`~relax_agent.rollout.sampling.PolicySource` over several engines."""

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        version: int = 0,
        escape_load: int = 4,
        avoid_s: float = 5.0,
    ) -> None:
        """Take the engines in.

        Args:
            engines: All serve weight version ``version``.
            version: The weight version that they serve.
            escape_load: An episode leaves its engine when that has more than so many requests more
                than the least busy one.
            avoid_s: Seconds for which an engine that was unavailable is avoided.
        """
        self._members = [_Member(engine, version) for engine in engines]
        self._version = version
        self._escape_load = escape_load
        self._avoid_s = avoid_s
        self._sticky: OrderedDict[str, _Member] = OrderedDict()
        self._running: dict[str, _Member] = {}
        self._paused_s = 0.0
        self._paused_at: float | None = None

    @property
    def engines(self) -> list[Engine]:
        """All engines, behind or not."""
        return [member.engine for member in self._members]

    @property
    def weight_version(self) -> int:
        """The newest weight version; only engines that serve it get requests."""
        return self._version

    def loads(self) -> list[EngineLoad]:
        """Return what every engine is doing."""
        return [
            EngineLoad(m.engine.name, m.version, m.load, m.episodes, m.failures)
            for m in self._members
        ]

    # -- requests ----------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one answer on a fitting engine.

        Raises:
            EngineUnavailable: no engine can take it, or two have failed at it.
            EngineError: the engine refused the request or answered wrongly; not tried again.
        """
        first = self._choose(request.rid, None)
        try:
            return await self._send(first, request)
        except EngineUnavailable as error:
            self._blame(first)
            try:
                second = self._choose(request.rid, first)
            except EngineUnavailable:
                raise error from None
        try:
            return await self._send(second, request)
        except EngineUnavailable:
            self._blame(second)
            raise

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all; each returns its partial answer."""
        if rid is None:
            async with asyncio.TaskGroup() as group:
                for member in self._members:
                    group.create_task(member.engine.abort(None))
        elif rid in self._running:
            await self._running[rid].engine.abort(rid)

    def forget(self, episode_id: str) -> None:
        """Say that an episode has ended and needs no engine any more."""
        member = self._sticky.pop(episode_id, None)
        if member is not None:
            member.episodes -= 1

    async def _send(self, member: _Member, request: GenerateRequest) -> GenerateResult:
        member.load += 1
        self._running[request.rid] = member
        try:
            return await member.engine.generate(request)
        finally:
            member.load -= 1
            self._running.pop(request.rid, None)

    def _choose(self, rid: str, without: _Member | None) -> _Member:
        fitting = [m for m in self._members if m.version == self._version and m is not without]
        if not fitting:
            names = ", ".join(m.engine.name for m in self._members) or "none"
            raise EngineUnavailable(
                f"no engine is left that serves weight version {self._version} (engines: {names})"
            )
        now = asyncio.get_running_loop().time()
        usable = [m for m in fitting if m.avoid_until <= now] or fitting
        least = min(usable, key=lambda m: (m.load, m.episodes))
        episode = rid.rsplit(".", 2)[0]  # the loop's ids end in turn and attempt
        home = self._sticky.get(episode)
        if home in usable and home.load - least.load <= self._escape_load:
            least = home
        self._stick(episode, least)
        return least

    def _stick(self, episode: str, member: _Member) -> None:
        home = self._sticky.get(episode)
        if home is not member:
            if home is not None:
                home.episodes -= 1
            member.episodes += 1
            self._sticky[episode] = member
        self._sticky.move_to_end(episode)
        while len(self._sticky) > _REMEMBERED_EPISODES:
            self._sticky.popitem(last=False)[1].episodes -= 1

    def _blame(self, member: _Member) -> None:
        member.failures += 1
        member.avoid_until = asyncio.get_running_loop().time() + self._avoid_s

    # -- weights -----------------------------------------------------------------------------

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Put this around a publication to all engines.

        The time inside counts as a pause, and when it ends well all engines serve ``version``.
        """
        self._pause()
        try:
            yield
        finally:
            self._unpause()
        self.published(version)

    def published(self, version: int, names: Sequence[str] | None = None) -> None:
        """Say that engines (all, or those named) serve ``version`` from now on."""
        for member in self._members:
            if names is None or member.engine.name in names:
                member.version = version
        self._version = max(self._version, version)

    def paused_s(self) -> float:
        """Return the seconds that the engines have been paused so far."""
        running = 0.0
        if self._paused_at is not None:
            running = asyncio.get_running_loop().time() - self._paused_at
        return self._paused_s + running

    def _pause(self) -> None:
        self._paused_at = asyncio.get_running_loop().time()

    def _unpause(self) -> None:
        self._paused_s, self._paused_at = self.paused_s(), None

    # -- members -----------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Ask every engine which weight version it serves."""
        for member in list(self._members):
            info = await member.engine.model_info()
            member.version = parse_version(info.get("weight_version"))
        self._version = max((m.version for m in self._members), default=self._version)

    async def add(self, engine: Engine) -> None:
        """Take another engine in; it gets requests as soon as it serves the newest weights."""
        info = await engine.model_info()
        self._members.append(_Member(engine, parse_version(info.get("weight_version"))))

    def remove(self, name: str) -> None:
        """Let an engine go; requests under way there end as they end."""
        gone = [member for member in self._members if member.engine.name == name]
        self._members = [member for member in self._members if member not in gone]
        for episode in [key for key, member in self._sticky.items() if member in gone]:
            del self._sticky[episode]

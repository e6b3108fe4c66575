"""Jobs: which episodes are to be played, by whom, and the workers that play them.

A :class:`Run` has one worker per slot. Each takes the next job when it is free and hands over the
finished :class:`~relax_agent.envs.playing.Play`; at most as many wait to be taken as there are
slots, so a slow reader slows the playing down instead of filling the memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Any, TypeAlias

from relax_agent.envs.playing import Play, Policies
from relax_agent.envs.slots import Slot
from relax_agent.errors import ConfigError
from relax_agent.limits import GRACE_S


@dataclass(frozen=True, slots=True)
class Job:
    """One episode to play."""

    task: str | None = None
    """The task's id; None lets the environment choose."""
    seed: int | None = None


Jobs: TypeAlias = Iterable[Job | str] | AsyncIterable[Job | str]
PolicySource: TypeAlias = Policies | Callable[[], Policies]
"""A policy (or policies by role) that all episodes share, or what makes one for each episode."""


class Run:
    """The workers of one run, and the plays that they hand over."""

    def __init__(
        self,
        slots: Sequence[Slot],
        jobs: Jobs,
        play_one: Callable[[Slot, Job], Awaitable[Play]],
    ) -> None:
        """Start one worker for each slot.

        Args:
            slots: Where episodes can be played.
            jobs: What is to be played.
            play_one: Plays a job in a slot; what it raises ends the run.
        """
        self._jobs = JobSource(jobs)
        self._play_one = play_one
        self._done: asyncio.Queue[Play | BaseException | None] = asyncio.Queue(len(slots))
        self._workers = [asyncio.create_task(self._work(slot)) for slot in slots]
        self.stopping = False
        self.ended = asyncio.Event()

    async def plays(self) -> AsyncIterator[Play]:
        """Yield what the workers hand over until all of them have ended."""
        left = len(self._workers)
        while left and not self.stopping:
            item = await self._done.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item

    async def _work(self, slot: Slot) -> None:
        try:
            while (job := await self._jobs.next()) is not None:
                await self._done.put(await self._play_one(slot, job))
        except BaseException as error:  # a worker that ends without a word is waited for for ever
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            if not self.stopping:  # nobody reads any more
                await self._done.put(error)
        if not self.stopping:
            await self._done.put(None)

    async def stop(self) -> None:
        """Cancel the workers and see them end. May be called twice."""
        self.stopping = True
        try:
            for worker in self._workers:
                worker.cancel()
            # An episode that is cancelled takes up to two such times: to stop, and to close.
            await asyncio.wait(self._workers, timeout=3 * GRACE_S)
        finally:
            if self._done.empty():
                self._done.put_nowait(None)  # for a reader that waits
            self.ended.set()


class JobSource:
    """Hands out jobs one by one, from a plain or an async iterable."""

    def __init__(self, jobs: Jobs) -> None:
        if isinstance(jobs, (str, Job)):
            raise ConfigError("jobs must be a list", hint=f"[{jobs!r}]")
        self._plain = None if isinstance(jobs, AsyncIterable) else iter(jobs)
        self._later = aiter(jobs) if isinstance(jobs, AsyncIterable) else None
        self._lock = asyncio.Lock()

    async def next(self) -> Job | None:
        """Return the next job; None when there is none left."""
        if self._plain is not None:
            return _job(next(self._plain, _OVER))
        assert self._later is not None
        async with self._lock:
            return _job(await anext(self._later, _OVER))


_OVER: Any = object()


def _job(item: object) -> Job | None:
    if item is _OVER:
        return None
    if isinstance(item, Job):
        return item
    if isinstance(item, str):
        return Job(item)
    raise ConfigError(
        f"a job is a task's id or a Job, not {item!r:.80}",
        hint="relax_agent.envs.Job(task=…, seed=…)",
    )


def policy_maker(policy: PolicySource) -> Callable[[], Policies]:
    """Return what gives each episode its policy."""
    if isinstance(policy, Mapping) or (hasattr(policy, "act") and not isinstance(policy, type)):
        shared: Any = policy
        return lambda: shared
    if callable(policy):
        return policy
    raise ConfigError(
        f"{policy!r:.80} is no policy", hint="it has a method act(messages, tools), or makes one"
    )

"""Limits of an episode, and waiting under them. Time is the event loop's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from relax_agent.rollout.settings import RolloutSettings

T = TypeVar("T")

GRACE_S = 5.0
"""How long a call that was told to stop may take to do so before it is left behind."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """What ends an episode from outside."""

    max_turns: int = 8
    max_tokens_per_turn: int = 256
    """Sampled tokens in one assistant message."""
    max_context: int = 4096
    """Tokens of the whole sequence."""
    timeout_s: float = 600.0
    """Seconds for the episode, pauses of the engines not counted."""
    env_timeout_s: float = 120.0
    """Seconds for one reset or step."""
    max_resumes: int = 8
    """How often one answer goes on after an engine has aborted it."""

    @classmethod
    def of(cls, settings: RolloutSettings) -> EpisodeLimits:
        """Take the limits from a recipe."""
        return cls(
            settings.max_turns,
            settings.max_tokens_per_turn,
            settings.max_context,
            settings.episode_timeout_s,
            settings.env_timeout_s,
        )


class Overrun(Exception):
    """A call took longer than it may. Internal: becomes an episode's status."""


class TimeBudget:
    """Seconds that may pass from now on, without the time that ``paused`` counts."""

    def __init__(self, seconds: float, paused: Callable[[], float] = lambda: 0.0) -> None:
        self._paused = paused
        self._end = asyncio.get_running_loop().time() + seconds - paused()

    def left(self) -> float:
        """Return the seconds that remain; negative when it is over."""
        return self._end + self._paused() - asyncio.get_running_loop().time()


async def wait_bounded(task: asyncio.Future[T], left: Callable[[], float]) -> bool:
    """Wait for ``task`` until ``left()`` is used up; tell whether it is done.

    ``left`` is asked again at the end of every wait, since pauses may have moved it.
    """
    while not task.done():
        remaining = left()
        if remaining <= 0:
            return False
        await asyncio.wait({task}, timeout=remaining)
    return True


async def bounded(call: Awaitable[T], left: Callable[[], float]) -> T:
    """Await ``call`` until ``left()`` seconds have passed, then stop it and raise Overrun.

    A call that does not react to its cancellation within :data:`GRACE_S` is left behind: the wait
    is bounded even against code that swallows cancellations.
    """
    task = asyncio.ensure_future(contained(call))
    try:
        if await wait_bounded(task, left):
            return outcome(task)
    finally:
        await stop(task)
    raise Overrun


def outcome(task: asyncio.Future[T]) -> T:
    """Return the result of a finished task; its own cancellation is not the caller's."""
    if task.cancelled():
        raise RuntimeError("the call was cancelled from inside")
    return task.result()


async def contained(call: Awaitable[T]) -> T:
    """Keep ``sys.exit`` in an author's code from ending the event loop, perhaps with status 0."""
    try:
        return await call
    except SystemExit as error:
        raise RuntimeError(f"sys.exit({error.code!r}) was called") from error


async def stop(task: asyncio.Future[T]) -> None:
    """Cancel a task, if it still runs, and see it end or give it up after :data:`GRACE_S`."""
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE_S)

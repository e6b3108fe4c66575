"""Waiting under a limit. Time is the event loop's clock.

:func:`bounded` awaits one call under a limit that may move meanwhile. :class:`Watch` guards the
many waits of one task with a single timer: it costs next to nothing for a call that ends in time.
Both keep to their word against code that swallows cancellations: it is left behind.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from relax_agent.errors import one_line

T = TypeVar("T")

GRACE_S = 5.0
"""How long a call that was told to stop may take to do so before it is left behind."""


STOPS = (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit)
"""What no driver of an author's code may take for a failure of that code. All else is one, also
what is no Exception: ``sys.exit``, or the PanicException of a library written in Rust."""


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


class Watch:
    """One timer for all the waits of a task, which it cancels when one of them takes too long.

    The timer is set anew only where a limit is earlier than the one it stands at; an expired timer
    whose wait has ended looks again at the wait that runs by then.
    """

    def __init__(self, task: asyncio.Task[Any], total_s: float = math.inf) -> None:
        """Watch ``task``, for ``total_s`` seconds in all."""
        self._task = task
        self._loop = task.get_loop()
        self._when = math.inf
        self._handle: asyncio.TimerHandle | None = None
        self._ended: asyncio.Future[None] = self._loop.create_future()
        task.add_done_callback(self._end)
        self.end = self._loop.time() + total_s
        """When the whole task's time is over, on the loop's clock."""
        self.rang = False
        """Whether a wait took too long; the task was cancelled for it."""

    @property
    def over(self) -> bool:
        """Whether the whole task's time is over."""
        return self._loop.time() >= self.end

    def start(self, seconds: float) -> None:
        """Begin a wait that may take so long; raise Overrun if there is no time left at all."""
        now = self._loop.time()
        if now >= self.end:
            self.rang = True
            raise Overrun
        self._when = when = min(now + seconds, self.end)
        handle = self._handle
        if handle is None:
            if when < math.inf:
                self._handle = self._loop.call_at(when, self._ring)
        elif when < handle.when():
            handle.cancel()
            self._handle = self._loop.call_at(when, self._ring)

    def stop(self) -> None:
        """End the wait."""
        self._when = math.inf

    async def wait(self) -> bool:
        """Wait for the task; False if it was told to stop and did not within :data:`GRACE_S`."""
        await self._ended
        return self._task.done()

    def close(self) -> None:
        """Watch no longer."""
        self._when = math.inf
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _ring(self) -> None:
        self._handle = None
        if self._when > self._loop.time():
            if self._when < math.inf:
                self._handle = self._loop.call_at(self._when, self._ring)
            return
        self.rang = True
        self._task.cancel()
        self._handle = self._loop.call_later(GRACE_S, self._end)

    def _end(self, _: object = None) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


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


async def all_bounded(calls: Sequence[Awaitable[T]], seconds: float) -> list[T | Exception]:
    """Await all calls at once; each item is a result, what was raised, or Overrun."""
    tasks = [asyncio.ensure_future(contained(call)) for call in calls]
    late: set[asyncio.Future[T]] = set()
    try:
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=seconds)
    finally:
        await _stop_all([task for task in tasks if not task.done()])
    return [Overrun() if task in late else _outcome_or_error(task) for task in tasks]


async def _stop_all(tasks: Sequence[asyncio.Future[T]]) -> None:
    for task in tasks:
        task.add_done_callback(_seen)
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=GRACE_S)


def _outcome_or_error(task: asyncio.Future[Any]) -> Any:
    try:
        return outcome(task)
    except Exception as error:
        return error


def _seen(task: asyncio.Future[T]) -> None:
    """Look at the outcome of a task that nobody waits for, so that it is no unseen exception."""
    if not task.cancelled():
        task.exception()


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
    except (Exception, *STOPS):
        raise
    except BaseException as error:
        raise RuntimeError(one_line(error)) from error


async def stop(task: asyncio.Future[T]) -> None:
    """Cancel a task, if it still runs, and see it end or give it up after :data:`GRACE_S`."""
    task.add_done_callback(_seen)
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE_S)

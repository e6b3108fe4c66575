"""Running one attempt of a tool so that its caller never waits longer than it may.

What passes its limit is told to stop and gets a moment for it; code that swallows its cancellation
is left behind and counted, and so is a plain function, whose thread nobody can stop. Its place
(:mod:`relax_agent.tools.limits`) is given back when it has really ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from relax_agent.errors import ToolError, one_line

T = TypeVar("T")

GRACE_S = 1.0
"""Seconds that a cancelled tool has to clean up before it is left behind."""


class Late(Exception):
    """An attempt took longer than it may. Internal: becomes a ``timeout``."""


class _LeftBehind:
    """Tools that were given up and still run."""

    def __init__(self) -> None:
        self.total = 0
        """So far."""
        self.running = 0
        """Now."""

    def add(self, future: asyncio.Future[Any]) -> None:
        self.total += 1
        self.running += 1
        future.add_done_callback(self._ended)

    def _ended(self, _: object) -> None:
        self.running -= 1


LEFT_BEHIND = _LeftBehind()


async def within(future: asyncio.Future[T], seconds: float | None) -> T:
    """Wait for ``future`` for so long, and give it up when the time is over or nobody waits.

    Raises:
        Late: The time is over.
        ToolError: It was cancelled, but not by its caller.
        BaseException: What it raised.
    """
    loop = asyncio.get_running_loop()
    wake: asyncio.Future[None] = loop.create_future()

    def rouse(_: object = None) -> None:
        if not wake.done():
            wake.set_result(None)

    future.add_done_callback(rouse)
    timer = None if seconds is None else loop.call_later(seconds, rouse)
    try:
        await wake  # not the future itself: one that swallows its cancellation would hold us up
    except asyncio.CancelledError:
        await give_up(future)
        raise
    finally:
        if timer is not None:
            timer.cancel()
    if not future.done():
        await give_up(future)
        raise Late
    try:
        return future.result()
    except asyncio.CancelledError:
        raise ToolError("was cancelled from inside") from None


async def run_within(
    call: Callable[[], Awaitable[T]], seconds: float, on_end: Callable[[], None]
) -> T:
    """Run a coroutine function in a task of its own for so long; see :func:`within`.

    The task hands its outcome over itself: of all ways to wait for one, this is the shortest for
    the event loop, and it stands on every call of an async tool.

    Args:
        call: What to run.
        seconds: How long it may take.
        on_end: Called when it has really ended.

    Raises:
        Late: The time is over.
        ToolError: It was cancelled, but not by its caller.
        BaseException: What it raised.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()
    task = loop.create_task(_hand_over(call, outcome, on_end))
    timer = loop.call_later(seconds, _expire, outcome)
    try:
        return await outcome
    except (asyncio.CancelledError, Late):
        await give_up(task)
        raise
    finally:
        timer.cancel()


async def _hand_over(
    call: Callable[[], Awaitable[T]], outcome: asyncio.Future[T], on_end: Callable[[], None]
) -> None:
    error: BaseException
    try:
        value = await call()
    except asyncio.CancelledError:
        error = ToolError("was cancelled from inside")
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except SystemExit as left:  # must not end the event loop
        error = ToolError(f"failed with {one_line(left)}")
    except BaseException as raised:
        error = raised
    else:
        if not outcome.done():
            outcome.set_result(value)
        return
    finally:
        on_end()
    if not outcome.done():  # else nobody waits any more
        outcome.set_exception(error)


def _expire(outcome: asyncio.Future[Any]) -> None:
    if not outcome.done():
        outcome.set_exception(Late())


async def give_up(future: asyncio.Future[Any]) -> None:
    """Tell something to stop, and leave it behind if it does not."""
    future.add_done_callback(_seen)
    if future.done():
        return
    future.cancel()
    if isinstance(future, asyncio.Task):
        await asyncio.wait((future,), timeout=GRACE_S)
        if not future.done():
            LEFT_BEHIND.add(future)


def _seen(future: asyncio.Future[Any]) -> None:
    """Look at the outcome of what nobody waits for, so that it is no unseen exception."""
    if not future.cancelled():
        future.exception()


def start(call: Callable[[], Awaitable[T]]) -> asyncio.Task[T]:
    """Run a coroutine function in a task of its own: one that cancels its task ends itself."""
    return asyncio.get_running_loop().create_task(_contained(call))


async def _contained(call: Callable[[], Awaitable[T]]) -> T:
    """Await a call; ``sys.exit`` in it must not end the event loop."""
    try:
        return await call()
    except SystemExit as error:
        raise ToolError(f"failed with {one_line(error)}") from error

"""Waiting for a change, with a limit, until somebody says that nothing will come any more.

All waiters sleep on one event that every change replaces, and look again for themselves when they
wake. Whoever finds nothing sleeps on the *new* event, so no wake-up is lost and nobody spins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from relax_agent.errors import NoData, ProducerFailed, QueueError, StorageError, one_line

T = TypeVar("T")


class Waiters:
    """Everybody who waits for one queue to change. Time is the event loop's clock."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._closed = False

    def notify(self) -> None:
        """Let every waiter look again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def fail(self, error: BaseException) -> None:
        """End every wait, now and later, with ProducerFailed; the first cause counts."""
        self._failure = self._failure or error
        self.notify()

    def close(self) -> None:
        """End every wait, now and later, with QueueError."""
        self._closed = True
        self.notify()

    def raise_if_ended(self) -> None:
        """Raise what :meth:`fail` or :meth:`close` left for the waiters."""
        if self._closed:
            raise QueueError("the queue is closed")
        if self._failure is not None:
            cause = first_cause(self._failure)
            raise ProducerFailed(f"rollout has failed: {one_line(cause, None)}") from cause

    async def until(
        self,
        look: Callable[[], T | None],
        *,
        deadline: Callable[[], float],
        wake: Callable[[], float],
        why: Callable[[], str],
    ) -> T:
        """Wait until ``look()`` returns something.

        Args:
            look: Decides and returns the outcome, or None to go on waiting.
            deadline: When to give up, asked again after every change.
            wake: When to look again even without a change.
            why: The words of the NoData error at the deadline.
        """
        loop = asyncio.get_running_loop()
        while True:
            self.raise_if_ended()
            value = look()
            if value is not None:
                return value
            limit = deadline()
            if loop.time() >= limit:
                raise NoData(why())
            await _wait(self._changed, min(limit, wake()))


async def _wait(event: asyncio.Event, when: float) -> None:
    try:
        async with asyncio.timeout_at(when):
            await event.wait()
    except TimeoutError:
        return


async def in_thread(function: Callable[..., Any], *args: Any) -> None:
    """Run a short file operation in a thread; a cancellation waits for its end."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # seen; the cancellation matters more
        raise
    except OSError as error:
        raise StorageError(f"{error.filename or 'queue'}: {error.strerror or error}") from error


def first_cause(error: BaseException) -> BaseException:
    """Return the first plain exception inside exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

"""What a tool may take, and the places that its calls wait for."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from relax_agent.errors import ToolDeclarationError, ToolError, ToolErrorKind

MAX_THREADS = 256
"""Calls of one plain tool that may run at once, where nothing else is said."""


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """What a tool may take, declared beside the function and enforced by every caller."""

    timeout_s: float = 30.0
    """Seconds that one attempt may run, the start-up of its session included."""
    queue_timeout_s: float = 60.0
    """Seconds that a call may wait for its session and for one of the ``max_concurrency`` places.
    """
    max_concurrency: int | None = None
    """Calls that may run at once in one process; None: no limit (threads: 256)."""
    max_output_bytes: int = 1 << 20
    """Size of the content of one result."""
    idempotent: bool = False
    """Whether a second call does no harm; only then is anything ever retried."""
    retries: int = 0
    """Attempts after the first; needs ``idempotent``."""

    def check(self, name: str) -> None:
        """Raise ToolDeclarationError if a limit makes no sense."""
        if self.retries and not self.idempotent:
            raise ToolDeclarationError(
                f"tool {name}: retries need idempotent=True",
                hint="a call that timed out may have had its effect already",
            )
        if not (self.timeout_s > 0 and self.queue_timeout_s > 0 and self.retries >= 0):
            raise ToolDeclarationError(f"tool {name}: time-outs must be positive, retries ≥ 0")
        if self.max_output_bytes < 1 or (
            self.max_concurrency is not None and self.max_concurrency < 1
        ):
            raise ToolDeclarationError(f"tool {name}: size and concurrency limits must be ≥ 1")

    @property
    def longest_s(self) -> float:
        """Seconds after which a call has ended for sure, whatever happens."""
        return (self.timeout_s + self.queue_timeout_s) * (self.retries + 1)


class Places:
    """The places of one tool: a semaphore for each event loop that calls it."""

    def __init__(self, count: int | None) -> None:
        self._count = count
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    async def take(self, timeout_s: float) -> Callable[[], None]:
        """Wait for a place and return the function that gives it back."""
        if self._count is None:
            return _nothing
        places = self._by_loop.get(loop := asyncio.get_running_loop())
        if places is None:
            places = self._by_loop[loop] = asyncio.Semaphore(self._count)
        words = f"all {self._count} places were busy for {timeout_s:g} s"
        await acquire(places, timeout_s, words)
        return places.release


def _nothing() -> None:
    """Give nothing back."""


async def acquire(lock: asyncio.Semaphore | asyncio.Lock, timeout_s: float, words: str) -> None:
    """Wait for a lock for so long, or raise ToolError (``unavailable``) with these words."""
    if not lock.locked():
        await lock.acquire()
        return
    try:
        async with asyncio.timeout(timeout_s):
            await lock.acquire()
    except TimeoutError:
        raise ToolError(words, kind=ToolErrorKind.UNAVAILABLE) from None

"""Time limits on decoding: looked at between steps, and from outside.

A decoder runs in native code that nobody can interrupt. The loop around it looks at a
:class:`Deadline` after each step (a frame, a block), which ends all but a single step that hangs.
In an event loop, :func:`in_thread` bounds that too: past its limit the thread is abandoned.
"""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from relax_agent.errors import MediaError
from relax_agent.threads import THREADS

T = TypeVar("T")

DECODERS = max(4, 2 * (os.cpu_count() or 1))
"""Decodes that run at the same time in one event loop; more wait their turn."""
_SLOTS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
    weakref.WeakKeyDictionary()
)


class Deadline:
    """A moment that work may not go past."""

    def __init__(
        self, limit_s: float, what: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_s, self._what, self._clock = limit_s, what, clock
        self._end = clock() + limit_s

    def check(self) -> None:
        """Raise MediaError if the moment is past."""
        if self._clock() > self._end:
            raise MediaError(
                f"{self._what} took more than {self._limit_s:g} s", hint="timeout_s= allows more"
            )


async def in_thread(call: Callable[[], T], *, timeout_s: float = 60.0) -> T:
    """Run ``call``, which decodes or encodes, in a thread, while the event loop goes on.

    At most :data:`DECODERS` run at a time; the limit counts from when this one starts. A call
    that goes past it is abandoned: its thread cannot be killed, and is counted until it ends.

    Raises:
        MediaError: It took longer than ``timeout_s``, or the call raised it.
    """
    async with _slots():
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                return await THREADS.run(call)
        except TimeoutError:
            if not limit.expired():
                raise
            raise MediaError(
                f"a decoder did not end within {timeout_s:g} s and was left behind",
                hint="timeout_s= allows more",
            ) from None


def _slots() -> asyncio.Semaphore:
    return _SLOTS.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(DECODERS))

"""A pool of warm interpreters: a new session need not wait for one to start.

A daemon thread starts them, so the pool belongs to no event loop. Each interpreter serves one
session and is never given to a second one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable

from relax_agent.closing import Closing
from relax_agent.errors import RelaxError, ToolError, ToolErrorKind
from relax_agent.threads import Worker
from relax_agent.tools.sandbox.interpreter import Interpreter, start_async


class SandboxPool(Closing):
    """Warm interpreters, and the places of the sessions that use them."""

    def __init__(
        self,
        start: Callable[[], Interpreter],
        *,
        warm: int = 1,
        max_sessions: int | None = None,
        queue_timeout_s: float = 60.0,
    ) -> None:
        """Make an empty pool; it fills when the first interpreter is taken, or by :meth:`fill`.

        Args:
            start: Starts one interpreter, blocking.
            warm: How many to keep ready.
            max_sessions: Sessions at once in one event loop; None: no limit.
            queue_timeout_s: Seconds that a session may wait for a place.
        """
        self._start = start
        self._warm = warm
        self._max_sessions = max_sessions
        self._queue_timeout_s = queue_timeout_s
        self._closed = False
        self._begin()
        _POOLS.add(self)

    def _begin(self) -> None:
        """Have no interpreters: at the start, and in a fork, whose parent keeps its own."""
        self._ready: deque[Interpreter] = deque()
        self._starting = 0
        self._lock = threading.Lock()
        self._thread: Worker | None = None
        self._places: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def ready(self) -> int:
        """Interpreters that wait for a session."""
        return len(self._ready)

    async def enter(self) -> Callable[[], None]:
        """Wait for a session's place; return the function that gives it back.

        Raises:
            ToolError: All places stayed taken, or the pool is closed (``unavailable``).
        """
        if self._max_sessions is None:
            return lambda: None
        places = self._places.setdefault(
            asyncio.get_running_loop(), asyncio.Semaphore(self._max_sessions)
        )
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                await places.acquire()
        except TimeoutError:
            raise ToolError(
                f"all {self._max_sessions} sandbox sessions were in use "
                f"for {self._queue_timeout_s:g} s",
                kind=ToolErrorKind.UNAVAILABLE,
                hint="close sessions, or raise max_sessions",
            ) from None
        return places.release

    async def take(self) -> Interpreter:
        """Return an interpreter that nobody has used: a warm one, or else a new one.

        Raises:
            ToolError: None can be started, or the pool is closed (``unavailable``).
        """
        if self._closed:
            raise ToolError("the sandbox is closed", kind=ToolErrorKind.UNAVAILABLE)
        interpreter = self._pop()
        self.fill()
        return interpreter or await start_async(self._start)

    def fill(self) -> None:
        """Have the missing warm interpreters started; does not wait."""
        with self._lock:
            missing = 0 if self._closed else self._warm - len(self._ready) - self._starting
            if missing <= 0:
                return
            self._starting += missing
            if self._thread is None:
                self._thread = Worker("relax-sandbox-pool")
            for _ in range(missing):
                self._thread.post(self._start_one)

    async def close(self) -> None:
        """End the warm interpreters; sessions go on. May be called twice."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()
        while (interpreter := self._pop()) is not None:
            await interpreter.close()

    def _pop(self) -> Interpreter | None:
        while True:
            try:
                interpreter = self._ready.popleft()
            except IndexError:
                return None
            if interpreter.alive:
                return interpreter
            interpreter.kill()

    def _start_one(self) -> None:
        made = None
        try:
            if not self._closed:
                with contextlib.suppress(RelaxError):  # the next session starts its own, and hears
                    made = self._start()
        finally:
            with self._lock:
                self._starting -= 1
                keep = made is not None and not self._closed
                if keep and made is not None:
                    self._ready.append(made)
            if made is not None and not keep:
                made.kill()


_POOLS: weakref.WeakSet[SandboxPool] = weakref.WeakSet()


def _forget_interpreters() -> None:
    for pool in list(_POOLS):
        pool._begin()


os.register_at_fork(after_in_child=_forget_interpreters)

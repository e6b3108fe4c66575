"""The event loop that the code of verifiers' tasks runs in: one thread for the whole process.

Tasks, tools and rewards of verifiers are written for a worker of their own: a reward may block,
what ``setup`` opens belongs to the loop it was opened in, and some seed the global generators. So
none of it runs in the caller's loop. All of it runs here, one piece at a time as in such a worker,
each environment with generators of its own
(:class:`~relax_agent.envs.adapters.common.PrivateRandomness`).

A call that blocks the thread beyond its time is given up, and the next environment that is reset
gets a fresh loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import os
import threading
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

from relax_agent.envs.adapters.common import PrivateRandomness
from relax_agent.errors import EnvError

T = TypeVar("T")

RANDOMNESS: contextvars.ContextVar[PrivateRandomness | None] = contextvars.ContextVar(
    "relax_verifiers_randomness", default=None
)
"""Whose generators the code that runs in the loop draws from."""
_ALIVE_S = 2.0
"""Seconds in which a loop that is not blocked answers."""


class OwnLoop:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.stuck = False
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(_seeded_task)
        threading.Thread(target=self._loop.run_forever, name="relax-verifiers", daemon=True).start()

    async def run(self, call: Coroutine[Any, Any, T], what: str, timeout_s: float) -> T:
        """Wait for a call that runs in this loop. Whatever ends the wait ends the call.

        Raises:
            EnvError: It took too long.
        """
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            if future.done() and not future.cancelled():
                raise  # the call's own
            future.cancel()
            await self._look()
            blocked = ", and blocks its thread" if self.stuck else ""
            raise EnvError(f"{what} took over {timeout_s:g} s{blocked}") from None
        finally:
            future.cancel()

    def wait(self, call: Coroutine[Any, Any, T], what: str, timeout_s: float) -> T:
        """Block until a call has ended; for constructors."""
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise  # the call's own
            raise EnvError(f"{what} took over {timeout_s:g} s") from None
        finally:
            future.cancel()

    async def _look(self) -> None:
        answer: asyncio.Future[None] = asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        )
        _, late = await asyncio.wait([answer], timeout=_ALIVE_S)
        self.stuck = bool(late)

    def soon(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task of this loop from any thread."""
        if self.pid == os.getpid():
            self._loop.call_soon_threadsafe(task.cancel)


_current: OwnLoop | None = None
_lock = threading.Lock()


def own_loop() -> OwnLoop:
    """Return this process's loop; another one where the last is blocked."""
    global _current
    with _lock:
        if _current is None or _current.stuck or _current.pid != os.getpid():
            _current = OwnLoop()
        return _current


class _Seeded(Coroutine[Any, Any, Any]):
    """A coroutine whose every piece, from one wait to the next, has generators of its own."""

    def __init__(self, inner: Coroutine[Any, Any, Any], randomness: PrivateRandomness) -> None:
        self._inner, self._randomness = inner, randomness

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()

    def send(self, value: Any) -> Any:
        with self._randomness.swapped_in():
            return self._inner.send(value)

    def throw(self, kind: Any, value: Any = None, trace: Any = None) -> Any:
        with self._randomness.swapped_in():
            return self._inner.throw(kind if value is None else value)

    def close(self) -> None:
        self._inner.close()


def _seeded_task(loop: asyncio.AbstractEventLoop, call: Any, **options: Any) -> asyncio.Task[Any]:
    randomness = RANDOMNESS.get()
    if randomness is not None and asyncio.iscoroutine(call):
        call = _Seeded(call, randomness)
    return asyncio.Task(call, loop=loop, **options)

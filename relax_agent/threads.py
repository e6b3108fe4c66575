"""Daemon threads for code that may block: sync tools and sync environments.

``asyncio.to_thread`` has two habits that do not fit here: its pool is small and shared, so one
hung call takes a place away from everyone, and the interpreter waits for its threads at exit.
A :class:`Worker` is one daemon thread that runs jobs in order (an environment's own thread: its
id never changes). :class:`Threads` lends workers to single jobs and takes them back when the job
*really* ends. A cancelled or timed-out wait abandons the job; the thread cannot be killed, so it
is counted until it ends by itself.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_IDLE = 32
"""Idle threads kept for the next job; more than that end."""


def _as_exception(error: BaseException) -> BaseException:
    """Futures refuse StopIteration, and SystemExit would end the event loop."""
    if isinstance(error, (StopIteration, SystemExit, KeyboardInterrupt)):
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _log_failure(future: concurrent.futures.Future[object]) -> None:
    if future.exception() is not None:
        logger.warning("a job that nobody waits for failed: %r", future.exception())


class _Job:
    """One function call on its way through a thread and back to the event loop."""

    __slots__ = ("context", "error", "function", "future", "loop", "on_end", "value")

    def __init__(self, function: Callable[[], Any], on_end: Callable[[], None] | None) -> None:
        self.function = function
        self.on_end = on_end
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.context = contextvars.copy_context()
        self.value: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.value = self.context.run(self.function)
        except BaseException as raised:
            self.error = _as_exception(raised)

    def deliver(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if not self.future.cancelled():
            if self.error is None:
                self.future.set_result(self.value)
            else:
                self.future.set_exception(self.error)
        if self.on_end is not None:
            self.on_end()


class _BlockingJob:
    """A job whose caller blocks; used to construct an environment in its own thread."""

    __slots__ = ("error", "function", "future", "value")

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.value: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.value = self.function()
        except BaseException as raised:
            self.error = _as_exception(raised)

    def deliver(self) -> None:
        if self.error is None:
            self.future.set_result(self.value)
        else:
            self.future.set_exception(self.error)


class Worker:
    """One daemon thread that runs what it is handed, in order."""

    def __init__(self, name: str = "relax-worker") -> None:
        self._jobs: SimpleQueue[_Job | _BlockingJob | None] = SimpleQueue()
        self._handed = 0  # written by callers only, as _ended is by the thread: no lock needed
        self._ended = 0
        self._after: Callable[[Worker], bool] | None = None
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a job runs or waits; an abandoned one counts until it ends."""
        return self._handed != self._ended

    async def run(self, function: Callable[[], T]) -> T:
        """Run ``function`` in this thread. Cancellation abandons the job, it does not stop it."""
        return await self.submit(function)

    def submit(
        self, function: Callable[[], T], on_end: Callable[[], None] | None = None
    ) -> asyncio.Future[T]:
        """Hand a job over; ``on_end`` runs in the event loop when it has really ended."""
        job = _Job(function, on_end)
        self._hand(job)
        return job.future

    def run_blocking(self, function: Callable[[], T], timeout_s: float) -> T:
        """Run ``function`` in this thread and block the caller; for code outside a loop."""
        job = _BlockingJob(function)
        self._hand(job)
        value: T = job.future.result(timeout_s)
        return value

    def post(self, function: Callable[[], object]) -> None:
        """Run ``function`` after the jobs before it, with nobody waiting; failures are logged."""
        job = _BlockingJob(function)
        job.future.add_done_callback(_log_failure)
        self._hand(job)

    def close(self) -> None:
        """Let the thread end after the jobs it has."""
        self._jobs.put(None)

    def _hand(self, job: _Job | _BlockingJob) -> None:
        self._handed += 1
        self._jobs.put(job)

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            self._ended += 1
            # Free again before the caller hears of it: its next job then finds this thread.
            stays = self._after is None or self._after(self)
            job.deliver()
            del job  # an idle thread must not keep the last job's arguments alive
            if not stays:
                return


class Threads:
    """Lends a daemon thread to each job; threads are made as needed and reused."""

    def __init__(self) -> None:
        self._idle: deque[Worker] = deque()
        self._lock = threading.Lock()
        self._running = 0

    @property
    def running(self) -> int:
        """Jobs that have not really ended, abandoned ones included."""
        return self._running

    def submit(
        self, function: Callable[[], T], on_end: Callable[[], None] | None = None
    ) -> asyncio.Future[T]:
        """Run ``function`` in a thread of its own; see :meth:`Worker.submit`."""
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            worker = Worker("relax-thread")
            worker._after = self._take_back
        with self._lock:
            self._running += 1
        return worker.submit(function, on_end)

    async def run(self, function: Callable[[], T]) -> T:
        """Run ``function`` in a thread and wait for it."""
        return await self.submit(function)

    def forget(self) -> None:
        """Begin anew: a fork takes this object along, and none of its threads."""
        self._idle.clear()
        self._lock = threading.Lock()
        self._running = 0

    def _take_back(self, worker: Worker) -> bool:
        with self._lock:
            self._running -= 1
            if len(self._idle) >= _MAX_IDLE:
                return False
            self._idle.append(worker)
            return True


THREADS = Threads()
"""The process's threads for sync tools and sync scoring functions."""
os.register_at_fork(after_in_child=THREADS.forget)

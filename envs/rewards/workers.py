"""Reward functions in processes that can be killed.

Some code hangs where no time limit reaches it: symbolic mathematics, a regular expression that
backtracks for ever. It runs in a worker, a process of its own
(:mod:`relax_agent.links`) that has imported the function's module and answers one call after the
other. A call that passes its limit is ended by killing the worker; the next call gets another one.

A :class:`WorkerPool` belongs to no event loop. Workers stay warm from one call to the next, also
across loops; the places (how many may work at once) are counted for each loop. Whoever waits for
a place does not use up its time limit. Idle workers end with the interpreter, or with
:func:`close_workers`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from relax_agent.envs.rewards.large import put_aside
from relax_agent.envs.tasks import Task
from relax_agent.envs.transcript import Score, Transcript
from relax_agent.errors import ConfigError, RewardError
from relax_agent.links import LinkedProcess
from relax_agent.messages import Message, to_record

_START_LIMIT_S = 60.0
_QUEUE_LIMIT_S = 120.0
_MOST_WORKERS = 4


class WorkerFailed(RewardError):
    """A call in a worker gave no value: too slow, crashed, or raised; says which."""


class WorkerPool:
    """Warm processes that call one function."""

    def __init__(
        self,
        target: str,
        *,
        size: int | None = None,
        memory_bytes: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare a pool; no process is started before the first call.

        Args:
            target: The function, as ``"package.module:name"``; called with keyword arguments that
                are plain JSON data, and returns plain JSON data.
            size: Most workers that run at once for one event loop; by default one for each CPU,
                at most 4.
            memory_bytes: Address space that a worker may use; more is a MemoryError.
            env: Variables that the workers get on top of this process's own.
        """
        self.target = target
        self.size = size or min(_MOST_WORKERS, os.cpu_count() or 1)
        self._memory_bytes = memory_bytes
        self._env = dict(env or {})
        self._begin()
        _POOLS.add(self)

    def _begin(self) -> None:
        """Have no workers: at the start, and in a process that was forked off."""
        self._idle: list[LinkedProcess] = []
        self._lock = threading.Lock()
        self._places: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    async def call(self, arguments: Mapping[str, Any], timeout_s: float) -> Any:
        """Call the function in a worker; cancelling this kills the worker.

        Args:
            arguments: Keyword arguments, plain JSON data.
            timeout_s: Seconds from the moment that a worker has the call.

        Raises:
            WorkerFailed: The function raised, was too slow, or all workers were busy for long.
            ChildDied: The worker crashed.
            ConfigError: The function cannot be imported.
        """
        async with self._place():
            worker = self._take() or await self._start()
            blobs: list[bytes] = []
            try:
                request = {"arguments": put_aside(arguments, blobs)}
                reply, _ = await worker.request(request, blobs, timeout_s=timeout_s)
            except BaseException:
                worker.abandon()
                raise
            self._give_back(worker, fit=not reply.get("retire", False))
        if "failed" in reply:
            raise WorkerFailed(reply["failed"])
        return reply["value"]

    def close(self) -> None:
        """Kill the idle workers. The pool may be used again; busy workers are not touched."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.abandon()

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        places = self._places.setdefault(loop, asyncio.Semaphore(self.size))
        try:
            async with asyncio.timeout(_QUEUE_LIMIT_S):
                await places.acquire()
        except TimeoutError:
            raise WorkerFailed(
                f"all {self.size} workers were busy for {_QUEUE_LIMIT_S:g} s"
            ) from None
        try:
            yield
        finally:
            places.release()

    def _take(self) -> LinkedProcess | None:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.alive:
                    return worker
        return None

    def _give_back(self, worker: LinkedProcess, *, fit: bool) -> None:
        with self._lock:
            if fit and worker.alive and len(self._idle) < self.size:
                self._idle.append(worker)
                return
        worker.abandon()

    async def _start(self) -> LinkedProcess:
        program = "relax_agent.envs.rewards.worker_main"
        return await LinkedProcess.start_async(
            f"the worker of {self.target.rpartition(':')[2]}",
            [sys.executable, "-m", program, self.target, str(self._memory_bytes or 0)],
            start_timeout_s=_START_LIMIT_S,
            env={"PYTHONPATH": _search_path(), "OMP_NUM_THREADS": "1", **self._env},
            failure=WorkerFailed,
        )


_POOLS: weakref.WeakSet[WorkerPool] = weakref.WeakSet()
_BY_TARGET: dict[str, WorkerPool] = {}


@atexit.register
def close_workers() -> None:
    """Kill all idle workers of this process; they start again when they are needed."""
    for pool in list(_POOLS):
        pool.close()


def _forget_workers() -> None:
    for pool in list(_POOLS):
        pool._begin()


os.register_at_fork(after_in_child=_forget_workers)


def named_target(function: Callable[..., Any] | str) -> str:
    """Return ``"module:name"``, by which another process can import the function.

    Raises:
        ConfigError: Another process could not find it.
    """
    if isinstance(function, str):
        module, _, name = function.partition(":")
        if module and name:
            return function
        raise ConfigError(f"{function!r} names no function", hint="'package.module:function'")
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    found: Any = sys.modules.get(module)
    for each in name.split("."):
        found = getattr(found, each, None)
    if found is not function or module == "__main__":
        raise ConfigError(
            f"another process cannot import {name or function!r} of {module}",
            hint="define it at the top of a module, or name it: 'package.module:function'",
        )
    return f"{module}:{name}"


async def call_in_process(
    target: str, task: Task, subject: Transcript | Sequence[Transcript], timeout_s: float
) -> Any:
    """Call a reward function in a worker and return what it returned."""
    pool = _BY_TARGET.get(target)
    if pool is None:
        pool = _BY_TARGET[target] = WorkerPool(target)
    arguments: dict[str, Any] = {"task": task_record(task)}
    if isinstance(subject, Transcript):
        arguments["transcript"] = subject.to_record()
    else:
        arguments["group"] = [each.to_record() for each in subject]
    value = await pool.call(arguments, timeout_s)
    return Score(value["reward"], value["metrics"]) if isinstance(value, dict) else value


def task_record(task: Task) -> dict[str, Any]:
    """Return a task as JSON data, for a process on the environment's own side."""
    prompt = task.prompt
    return {
        "id": task.id,
        "prompt": prompt if isinstance(prompt, str) else to_record(Message("user", prompt)),
        "answer": task.answer,
        "data": dict(task.data),
        "messages": [to_record(message) for message in task.messages],
    }


def _search_path() -> str:
    """Return this process's import path, so that a worker finds the same modules."""
    return os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path))  # noqa: PTH109

"""Environments written with plain functions, run without blocking the event loop.

Each environment has one daemon thread for its whole life, constructor included: libraries that
insist on one thread (browsers, simulators, SQLite) are content, and a blocking call delays no
other environment. A thread cannot be killed. When a call passes the time limit or its caller is
cancelled, the environment is dead: the thread is abandoned, and every later call says so.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from relax_agent.envs.core import Env, Info, StepResult, SyncEnv
from relax_agent.errors import EnvError
from relax_agent.messages import AssistantMessage, Observation
from relax_agent.threads import Worker

T = TypeVar("T")


class ThreadedEnv(Env):
    """Gives a plain environment its own thread and async ``reset``, ``step`` and ``close``."""

    def __init__(self, factory: Callable[[], SyncEnv], *, timeout_s: float = 300.0) -> None:
        self._timeout_s = timeout_s
        self._dead: str | None = None
        self._closed = False
        self._worker = Worker("relax-env")
        self.inner = self._construct(factory)
        self.tools = self.inner.tools
        self.tasks = self.inner.tasks

    def _construct(self, factory: Callable[[], SyncEnv]) -> SyncEnv:
        try:
            return self._worker.run_blocking(factory, self._timeout_s)
        except concurrent.futures.TimeoutError as error:
            raise EnvError(
                f"the environment's constructor took over {self._timeout_s:g} s"
            ) from error
        except BaseException:
            self._worker.close()
            raise

    @property
    def unwrapped(self) -> Any:
        """The plain environment itself."""
        return self.inner

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin an episode, in the environment's thread."""
        self.inner.seed_rng(seed)
        return await self._run("reset", partial(self.inner.reset, seed=seed, options=options))

    async def step(self, action: AssistantMessage) -> StepResult:
        """Take one assistant message, in the environment's thread."""
        return await self._run("step", partial(self.inner.step, action))

    async def close(self) -> None:
        """Close the environment in its thread, and end the thread."""
        if self._closed:
            return
        self._closed = True
        try:
            if inspect.iscoroutinefunction(self.inner.close):  # Env's own, which does nothing
                await self.inner.close()
            elif self._dead is None:
                await self._run("close", self.inner.close)
            else:  # as soon as the abandoned call has ended, if it ever does
                self._worker.post(self.inner.close)
        finally:
            self._worker.close()

    def __del__(self) -> None:
        if not self._closed:
            self._worker.close()

    async def _run(self, call: str, function: Callable[[], T]) -> T:
        if self._dead is not None:
            raise EnvError(f"the environment is dead: {self._dead}", hint="make() another one")
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await self._worker.run(function)
        except asyncio.CancelledError:
            self._dead = f"{call}() was cancelled while it ran"
            raise
        except TimeoutError:
            if not limit.expired():
                raise
            self._dead = f"{call}() took over {self._timeout_s:g} s"
            raise EnvError(f"the environment is dead: {self._dead}") from None

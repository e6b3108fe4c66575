"""Environments written with plain functions, run without blocking the event loop.

Each environment has one daemon thread for its whole life, constructor included: libraries that
insist on one thread (browsers, simulators, SQLite) are content, and a blocking call delays no
other environment. Functions that the author wrote as ``async def`` run in the event loop; which
is which is decided function by function, so a mixture works.

A thread cannot be killed. When the caller of a plain function is cancelled, as the loop that
drives an environment does past a time limit, the environment is dead: its thread is left behind
and counted (:func:`abandoned`), and every later call says so. Deadlines belong to that loop; here
only the constructor has one. Code that may hang for ever needs ``isolation="process"``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from relax_agent.envs.core import Env, Info, StepResult, SyncEnv, plain_calls
from relax_agent.errors import EnvError
from relax_agent.messages import AssistantMessage, Observation
from relax_agent.threads import Worker
from relax_agent.tools import AnyToolset

if TYPE_CHECKING:
    from relax_agent.envs.tasks import TaskSet
    from relax_agent.envs.transcript import Transcript

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
"""Seconds that a constructor may take where nothing else is said."""
_abandoned: set[Worker] = set()


def abandoned() -> int:
    """Count the threads that still run a call of an environment nobody waits for any more."""
    _abandoned.difference_update([worker for worker in _abandoned if not worker.busy])
    return len(_abandoned)


class ThreadedEnv(Env):
    """Gives the plain functions of an environment its own thread; all look async from outside."""

    _closed = True  # until there is a thread

    def __init__(
        self,
        factory: Callable[[], SyncEnv | Env],
        *,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Build the environment in its thread.

        Args:
            factory: Returns the environment.
            start_timeout_s: Seconds that it may take.
        """
        self._dead: str | None = None
        self._worker = Worker("relax-env")
        self._closed = False
        self.inner: Any = self._construct(factory, start_timeout_s)
        self._plain = plain_calls(type(self.inner))

    def _construct(self, factory: Callable[[], Any], timeout_s: float) -> Any:
        def build() -> Any:
            inner = factory()
            if self._dead is not None and "close" in plain_calls(type(inner)):
                inner.close()  # nobody waits for it any more
            return inner

        try:
            return self._worker.run_blocking(build, timeout_s)
        except concurrent.futures.TimeoutError as error:
            if not self._worker.busy:
                raise  # the constructor's own
            self._abandon(f"its constructor took over {timeout_s:g} s")
            raise EnvError(
                f"the environment's constructor took over {timeout_s:g} s",
                hint="make(…, start_timeout_s=…) gives it longer; slow work belongs into reset()",
            ) from error

    @property
    def tools(self) -> AnyToolset:  # type: ignore[override]
        """The environment's own tools, as of now."""
        tools: AnyToolset = self.inner.tools
        return tools

    @property
    def tasks(self) -> TaskSet | None:  # type: ignore[override]
        """The environment's own tasks."""
        tasks: TaskSet | None = self.inner.tasks
        return tasks

    @property
    def rng(self) -> random.Random:
        """The environment's own generator."""
        rng: random.Random = self.inner.rng
        return rng

    @property
    def unwrapped(self) -> Any:
        """The plain environment itself."""
        return self.inner

    def seed_rng(self, seed: int | None) -> None:
        """Seed the environment's own generator."""
        self.inner.seed_rng(seed)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin an episode."""
        self.inner.seed_rng(seed)  # for an author who does not call super().reset()
        result: tuple[Observation, Info] = await self._run(
            "reset", partial(self.inner.reset, seed=seed, options=options)
        )
        return result

    async def step(self, action: AssistantMessage) -> StepResult:
        """Take one assistant message."""
        result: StepResult = await self._run("step", partial(self.inner.step, action))
        return result

    async def score_group(self, task_id: str, members: Sequence[Transcript]) -> list[float]:
        """Ask the environment what the members of a group get beside their own rewards."""
        extra: list[float] = await self._run(
            "score_group", partial(self.inner.score_group, task_id, members)
        )
        return extra

    async def close(self) -> None:
        """Close the environment, and end its thread."""
        if self._closed:
            return
        self._closed = True
        try:
            if "close" not in self._plain:
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

    async def _run(self, call: str, function: Callable[[], Any]) -> Any:
        if self._dead is not None:
            raise EnvError(f"the environment is dead: {self._dead}", hint="make() another one")
        if call not in self._plain:
            return await function()
        try:
            result = await self._worker.submit(function)
        except asyncio.CancelledError:
            self._abandon(f"{call}() was cancelled while it ran")
            raise
        return await result if inspect.isawaitable(result) else result

    def _abandon(self, reason: str) -> None:
        self._dead = reason
        _abandoned.add(self._worker)
        logger.warning(
            "a plain environment is dead: %s (threads left behind: %d)", reason, abandoned()
        )

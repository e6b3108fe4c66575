"""Stepping: what ``make`` costs for a trivial environment, beside Gymnasium's and a thread hop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any

import gymnasium

from relax_agent.envs import Env, EnvSpec, SyncEnv, make
from relax_agent.envs.core import Info, StepResult
from relax_agent.messages import AssistantMessage, Observation, assistant, user

SAY = assistant("x")
_NEWS = [user("ok")]
_INFO: Info = {}


class Trivial(Env):
    """Says the same thing for ever."""

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin."""
        return list(_NEWS), {}

    async def step(self, action: AssistantMessage) -> StepResult:
        """Go on."""
        return [], 0.0, False, False, {}


class TrivialSync(SyncEnv):
    """The same with plain functions."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin."""
        return list(_NEWS), {}

    def step(self, action: AssistantMessage) -> StepResult:
        """Go on."""
        return [], 0.0, False, False, {}


class TrivialGymnasium(gymnasium.Env[int, int]):
    """The same for Gymnasium."""

    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Begin."""
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        """Go on."""
        return 0, 0.0, False, False, {}


def gymnasium_rate(steps: int) -> float:
    """Return steps per second through ``gymnasium.make`` with its default wrappers."""
    if "benchmarks/Trivial-v0" not in gymnasium.registry:
        gymnasium.register("benchmarks/Trivial-v0", TrivialGymnasium)
    env = gymnasium.make("benchmarks/Trivial-v0")
    env.reset()
    step = env.step
    step(0)  # the first step is checked more thoroughly
    started = time.perf_counter()
    for _ in range(steps):
        step(0)
    return steps / (time.perf_counter() - started)


def async_rate(steps: int) -> float:
    """Return steps per second of an async environment through ``make``."""
    return asyncio.run(_rate(EnvSpec("benchmarks/Trivial-v0", Trivial), steps))


def def_rate(steps: int) -> float:
    """Return steps per second of a plain environment through ``make``, in its own thread."""
    return asyncio.run(_rate(EnvSpec("benchmarks/TrivialSync-v0", TrivialSync), steps))


async def _rate(spec: EnvSpec, steps: int) -> float:
    async with make(spec) as env:
        await env.reset()
        step = env.step
        started = time.perf_counter()
        for _ in range(steps):
            await step(SAY)
        return steps / (time.perf_counter() - started)


def hop_rate(steps: int) -> float:
    """Return calls per second of the least that runs a function in another thread and waits."""
    return asyncio.run(_hops(steps))


async def _hops(steps: int) -> float:
    jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
    loop = asyncio.get_running_loop()

    def work() -> None:
        while (job := jobs.get()) is not None:
            job()

    thread = Thread(target=work, daemon=True)
    thread.start()
    env = TrivialSync()

    def hop() -> asyncio.Future[StepResult]:
        future: asyncio.Future[StepResult] = loop.create_future()
        jobs.put(lambda: loop.call_soon_threadsafe(future.set_result, env.step(SAY)) and None)
        return future

    try:
        started = time.perf_counter()
        for _ in range(steps):
            await hop()
        return steps / (time.perf_counter() - started)
    finally:
        jobs.put(None)
        thread.join()

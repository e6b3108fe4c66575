"""``benchmark_env``: how fast an environment steps, how long others wait, what it keeps."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relax_agent.envs.checking.lab import Hung, Lab
from relax_agent.envs.checking.report import Findings, Report
from relax_agent.envs.checking.running import Check, run_checks
from relax_agent.envs.checking.subject import Checkable
from relax_agent.envs.core import Env
from relax_agent.envs.policies import Policy, RandomPolicy, as_message
from relax_agent.errors import ConfigError
from relax_agent.limits import Watch, stop
from relax_agent.messages import Rewrite

_BEAT_S = 0.005
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What one environment reaches under random play, one episode after the other."""

    env: str
    steps: int
    episodes: int
    seconds: float
    """Time spent in ``reset`` and ``step``; what the policy takes is not counted."""
    steps_per_s: float
    reset_ms: float
    """Median time of ``reset``."""
    step_ms: dict[str, float]
    """Time of ``step`` at the 50th, 95th and 99th percentile, and the longest."""
    loop_lag_ms: dict[str, float]
    """How late the event loop was at other work, at the same percentiles."""
    memory_growth_kb: float
    """Resident memory after, minus after the first tenth."""

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        step = ", ".join(f"{name} {value:.3g}" for name, value in self.step_ms.items())
        lag = ", ".join(f"{name} {value:.3g}" for name, value in self.loop_lag_ms.items())
        return (
            f"{self.env}: {self.steps_per_s:,.0f} steps/s"
            f" ({self.steps:,} steps in {self.episodes:,} episodes, {self.seconds:.2f} s)\n"
            f"  step ms: {step}; reset ms: {self.reset_ms:.3g}\n"
            f"  event loop late by ms: {lag}\n"
            f"  memory grew by {self.memory_growth_kb:,.0f} kB"
        )


def benchmark_env(
    env: Checkable,
    *,
    seconds: float = 2.0,
    steps: int | None = None,
    policy: Policy | None = None,
    seed: int = 0,
    timeout_s: float = 30.0,
    **kwargs: Any,
) -> Benchmark:
    """Measure an environment under random play. May be called with or without an event loop.

    Args:
        env: An id, a spec, a class, a function that makes one, or an environment.
        seconds: How long to play.
        steps: Or how many steps to play.
        policy: Who plays; by default at random.
        seed: Seeds episodes and random play.
        timeout_s: Seconds that one call may take.
        **kwargs: Arguments of the environment's constructor.

    Raises:
        EnvCheckFailed: It failed meanwhile; ``check_env`` says more.
    """
    if seconds <= 0 or (steps is not None and steps < 1):
        raise ConfigError("a benchmark needs some seconds, or some steps")
    meter = _Meter(seconds, steps, policy or RandomPolicy(seed), seed)
    check = Check("benchmark", "measured", meter.run)
    report = run_checks(env, [check], raises=False, timeout_s=timeout_s, seed=seed, kwargs=kwargs)
    return meter.result(report)


class _Meter:
    """Plays and takes the times."""

    def __init__(self, seconds: float, steps: int | None, policy: Policy, seed: int) -> None:
        self._seconds = seconds
        self._limit = steps
        self._policy = policy
        self._seed = seed
        self._steps: list[float] = []
        self._resets: list[float] = []
        self._lags: list[float] = []
        self._memory: list[int] = []
        self._call = "reset"
        self._watch: Watch

    async def run(self, lab: Lab, tell: Findings) -> None:
        """Play until the time is over."""
        env = await lab.main()
        lab.sound(await lab.play(env))  # the form is right; imports are done
        beat = asyncio.create_task(self._beat())
        playing = asyncio.create_task(self._play(lab, env))
        self._watch = Watch(playing)
        try:
            if await self._watch.wait() and not self._watch.rang:
                playing.result()
            else:
                raise Hung(f"{self._call}()", lab.timeout_s, "")
        finally:
            self._watch.close()
            beat.cancel()
            await stop(playing)

    def _over(self, end: float) -> bool:
        if self._limit is not None:
            return len(self._steps) >= self._limit
        return time.perf_counter() >= end

    async def _play(self, lab: Lab, env: Env) -> None:
        end = time.perf_counter() + self._seconds
        while not self._over(end):
            await self._episode(lab, env, end)
            self._memory.append(_resident())
            await asyncio.sleep(0)

    async def _episode(self, lab: Lab, env: Env, end: float) -> None:
        seed = self._seed + len(self._resets)
        observation, _ = await self._timed(lab, "reset", self._resets, env.reset(seed=seed))
        view = list(observation.messages if isinstance(observation, Rewrite) else observation)
        while not self._over(end):
            said: Any = self._policy.act(list(view), lab.schemas(env))
            said = await said if inspect.isawaitable(said) else said
            action = as_message(said, len(self._steps) + 1)
            result = await self._timed(lab, "step", self._steps, env.step(action))
            observation, _, terminated, truncated, _ = result
            if terminated or truncated:
                return
            if isinstance(observation, Rewrite):
                view = list(observation.messages)
            else:
                view += [action, *observation]

    async def _timed(self, lab: Lab, name: str, into: list[float], call: Awaitable[Any]) -> Any:
        """Await a call of the environment and note how long it took."""
        self._call = name
        self._watch.start(lab.timeout_s)
        began = time.perf_counter()
        result = await call
        into.append(time.perf_counter() - began)
        self._watch.stop()
        return result

    async def _beat(self) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(_BEAT_S)
            self._lags.append(max(0.0, time.perf_counter() - began - _BEAT_S))

    def result(self, report: Report) -> Benchmark:
        """Return the figures, or raise what was wrong."""
        report.require()
        spent = sum(self._steps) + sum(self._resets)
        settled = self._memory[len(self._memory) // 10] if self._memory else 0
        grown = (self._memory[-1] - settled) / 1024 if self._memory else 0.0
        return Benchmark(
            env=report.env,
            steps=len(self._steps),
            episodes=len(self._resets),
            seconds=spent,
            steps_per_s=len(self._steps) / spent if spent else 0.0,
            reset_ms=_percentiles(self._resets)["p50"],
            step_ms=_percentiles(self._steps),
            loop_lag_ms=_percentiles(self._lags),
            memory_growth_kb=grown,
        )


def _percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds) or [0.0]
    last = len(ordered) - 1
    picks = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {name: 1000 * ordered[round(share * last)] for name, share in picks.items()}


def _resident() -> int:
    """Return the bytes of memory that this process holds; 0 where that is not told."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0

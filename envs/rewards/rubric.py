"""A rubric: weighted reward functions that together say what an episode was worth.

    Rubric(exact_match)
    Rubric((exact_match, 1.0), (polite, 0.2), step=[progress], group=[shortest], metrics=[length])

All functions of one moment run at the same time: those for a turn after every turn, the final ones
when the episode has ended, those for a group when all its members have. The reward is the sum of
weight times value, and each value is a metric under its function's name. A rubric keeps nothing
of an episode, so one rubric serves any number of environments.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any

from relax_agent.envs.rewards.reward import Item, Measure, Outcome, measures
from relax_agent.envs.tasks import Task
from relax_agent.envs.transcript import Score, Transcript
from relax_agent.errors import ConfigError, EnvError

_ROUNDING = 1e-9


class Rubric:
    """Weighted reward functions; see the module's docstring."""

    def __init__(
        self,
        *final: Item,
        step: Sequence[Item] = (),
        group: Sequence[Item] = (),
        metrics: Sequence[Item] = (),
        success: str | None = None,
        success_at: float = 1.0,
    ) -> None:
        """Put reward functions together.

        Args:
            *final: Called once, when the episode has ended.
            step: Called after every turn; their metrics are sums over the turns.
            group: Called with all members of a group, ``(task, transcripts)``; they return one
                value for each. Only training has groups.
            metrics: Called when the episode has ended; reported, not rewarded.
            success: Name of the function that says whether an episode succeeded; by default the
                first final one.
            success_at: The value from which on it did.

        Raises:
            ConfigError: A function or an option cannot be used.
        """
        self.final = measures(final)
        self.metrics = tuple(map(_unweighted, measures(metrics)))
        self.step = measures(step)
        self.group = measures(group, many=True)
        self._check_names()
        first = next((each.name for each in self.final if each.weight > 0), None)
        if success is not None and success not in [m.name for m in self.final + self.metrics]:
            raise ConfigError(f"success: no final function or metric is called {success!r}")
        self._success = success or first
        self._success_at = success_at - _ROUNDING

    def _check_names(self) -> None:
        everything = [*self.final, *self.metrics, *self.step, *self.group]
        if not everything:
            raise ConfigError("a rubric needs a function", hint="Rubric(exact_match)")
        name, count = Counter(each.name for each in everything).most_common(1)[0]
        if count > 1:
            raise ConfigError(
                f"{count} functions of a rubric are called {name!r}",
                hint="Reward(function, name='…') gives another name",
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all functions, which are those of their metrics."""
        everything = (*self.final, *self.metrics, *self.step, *self.group)
        return tuple(each.name for each in everything)

    def __repr__(self) -> str:
        kinds = {"step": self.step, "group": self.group, "metrics": self.metrics}
        said = [repr(each) for each in self.final]
        said += [f"{name}={list(found)}" for name, found in kinds.items() if found]
        return f"Rubric({', '.join(said)})"

    async def score(self, task: Task, transcript: Transcript) -> Score:
        """Judge a finished episode with the final functions and the metrics.

        Raises:
            EnvError: It cannot be judged; see ``Reward.on_failure``.
        """
        final = await self._outcomes(self.final + self.metrics, task, transcript)
        score = _total(final, self.final + self.metrics)
        value = {each.name: each.value for each in final}.get(self._success or "")
        if value is None:
            return score
        succeeded = {"success": float(value >= self._success_at)}
        return replace(score, metrics=succeeded | dict(score.metrics))

    async def measure(self, task: Task, transcript: Transcript) -> Score:
        """Ask the metrics alone, for an episode whose reward somebody else decides."""
        return _total(await self._outcomes(self.metrics, task, transcript), self.metrics)

    async def score_step(self, task: Task, transcript: Transcript) -> Score:
        """Judge the newest turn of a running episode."""
        return _total(await self._outcomes(self.step, task, transcript), self.step)

    async def score_group(self, task: Task, members: Sequence[Transcript]) -> list[Score]:
        """Judge the members of a group by comparison; one score each."""
        jobs = [each.of_group(task, members) for each in self.group]
        columns: list[list[Outcome]] = await _together(jobs)
        return [
            _total([column[number] for column in columns], self.group)
            for number in range(len(members))
        ]

    async def _outcomes(
        self, chosen: Sequence[Measure], task: Task, transcript: Transcript
    ) -> list[Outcome]:
        return await _together([each.of(task, transcript) for each in chosen])


async def _together(jobs: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run all jobs at once; the first error is raised by itself, when all have stopped."""
    if len(jobs) == 1:
        return [await jobs[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in jobs]
    except BaseExceptionGroup as error:
        raise error.exceptions[0] from error.exceptions[0].__cause__
    return [task.result() for task in tasks]


def _total(outcomes: Iterable[Outcome], chosen: Sequence[Measure]) -> Score:
    reward = 0.0
    metrics: dict[str, float] = {}
    failures: dict[str, str] = {}
    for outcome, each in zip(outcomes, chosen, strict=True):
        reward += each.weight * outcome.value
        metrics[outcome.name] = outcome.value
        metrics |= outcome.metrics
        if outcome.failure is not None:
            failures[outcome.name] = outcome.failure
    if not math.isfinite(reward):
        raise EnvError(f"the weighted sum of rewards is {reward}", hint="check the weights")
    return Score(reward, metrics, failures)


def _unweighted(measure: Measure) -> Measure:
    measure.weight = 0.0
    return measure

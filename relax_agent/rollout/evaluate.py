"""How well a policy does on given tasks: one episode each, greedy or sampled."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from relax_agent.episode import Episode
from relax_agent.rollout.groups import EpisodeRunner
from relax_agent.rollout.seeds import stable_seed

_TRIES = 2


@dataclass(slots=True)
class EvalReport:
    """What an evaluation found."""

    tasks: int
    success: float
    """Share of the tasks that were solved. A task whose episode failed counts as not solved."""
    reward: float
    """Mean reward, 0 for episodes that failed."""
    failures: int
    """Tasks whose env or engine failed, twice."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Means of the env's own metrics, over the episodes that report them."""
    statuses: dict[str, int] = field(default_factory=dict)
    episodes: list[Episode] = field(default_factory=list)
    """In the order of the tasks."""


async def evaluate(task_ids: Sequence[str], episodes: EpisodeRunner, *, name: str) -> EvalReport:
    """Run one episode of every task, as many at a time as the runner's pool allows.

    Args:
        task_ids: What to evaluate on.
        episodes: Runs them; its temperature makes the evaluation greedy (0) or sampled.
        name: Stands for the group in ids and seeds, e.g. ``eval-0``. The environments' seeds do
            not depend on it: the same tasks look the same in every evaluation.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_try(task_id, episodes, name)) for task_id in task_ids]
    return report([task.result() for task in tasks])


async def _try(task_id: str, episodes: EpisodeRunner, name: str) -> Episode:
    seed = stable_seed("eval", task_id)
    for attempt in range(_TRIES):
        episode = await episodes.run(task_id, f"{name}/{task_id}", seed, attempt=attempt)
        if episode.status.trainable:
            break
    return episode


def report(episodes: Sequence[Episode]) -> EvalReport:
    """Summarise finished episodes."""
    count = max(1, len(episodes))
    sound = [episode for episode in episodes if episode.status.trainable]
    values: dict[str, list[float]] = defaultdict(list)
    statuses: dict[str, int] = defaultdict(int)
    for episode in episodes:
        statuses[episode.status.value] += 1
    for episode in sound:
        for key, value in episode.metrics.items():
            values[key].append(value)
    return EvalReport(
        tasks=len(episodes),
        success=sum(success(episode) for episode in sound) / count,
        reward=sum(episode.reward for episode in sound) / count,
        failures=len(episodes) - len(sound),
        metrics={key: sum(found) / len(found) for key, found in values.items()},
        statuses=dict(statuses),
        episodes=list(episodes),
    )


def success(episode: Episode) -> float:
    """Return the env's own ``success``; without one, whether the reward is at least 1."""
    return episode.metrics.get("success", float(episode.reward >= 1))

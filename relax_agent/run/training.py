"""The training loop: lease, step, publish, acknowledge, save; until the last step.

It runs beside the producer that keeps groups coming. The order within a step matters: new weights
are published *before* the step is acknowledged, since an acknowledgement frees slots, and a group
that starts in one shall start on the new weights. A checkpoint is complete when its last file,
``conductor.json``, is there; only then are the acks before it made final.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from relax_agent.episode import Group
from relax_agent.errors import TrainerError
from relax_agent.monitor import RunMonitor
from relax_agent.queue.payload import load_group
from relax_agent.queue.protocol import Lease, LeasedGroup, TrajectoryQueue
from relax_agent.rollout import Fleet, GroupOutcome
from relax_agent.rollout.evaluate import success
from relax_agent.run.episodes import EpisodeLog
from relax_agent.run.folder import RunFolder, write_json
from relax_agent.run.recipe import Recipe
from relax_agent.timeline import Timeline
from relax_agent.trainers.client import TrainerProcess
from relax_agent.trainers.protocol import StepReport
from relax_agent.weights import publish

CHECKPOINT_STATE = "conductor.json"
_MOST_SKIPPED = 10


class Evaluator(Protocol):
    """Measures greedy success on held-out tasks."""

    async def __call__(self, step: int) -> float:
        """Return the success after ``step`` steps, and record it."""


@dataclass
class Progress:
    """Where a run stands; what a checkpoint holds of the conductor."""

    step: int = 0
    """Optimizer steps done."""
    version: int = 0
    """Weight version that the trainer stands at, and that the engines serve."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What the run wants to find again after a resume."""


class TrainingLoop:
    """The steps of one run. Owns the order in a step; the parts belong to the conductor."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        *,
        queue: TrajectoryQueue,
        trainer: TrainerProcess,
        fleet: Fleet,
        monitor: RunMonitor,
        episodes: EpisodeLog,
        progress: Progress,
        evaluate: Evaluator,
    ) -> None:
        self.recipe, self.folder = recipe, folder
        self.queue, self.trainer, self.fleet = queue, trainer, fleet
        self.monitor, self.episodes = monitor, episodes
        self.progress, self.evaluate = progress, evaluate
        self._finished: dict[str, Group] = {}
        self._timeline = Timeline()
        self._skipped = 0

    async def run(self) -> None:
        """Do all steps that are left, with checkpoints and evaluations between them."""
        self._timeline.lap()
        while self.progress.step < self.recipe.steps:
            await self._one_step(self.progress.step + 1)

    async def publish_weights(self, version: int) -> None:
        """Bring the trainer's weights to every engine as ``version``."""
        path = self.folder.version(version)
        await self.trainer.publish(path)
        with self.fleet.updating(version):
            await publish(self.fleet.engines, path, version, self.recipe.weights)
        self.progress.version = version
        await asyncio.to_thread(self.folder.drop_versions_before, version)

    async def save(self) -> None:
        """Write a checkpoint and make the acks before it final."""
        step = self.progress.step
        target = self.folder.checkpoint(step)
        await self.trainer.save(target)
        state = {"step": step, "version": self.progress.version, **self.progress.extra}
        await asyncio.to_thread(write_json, target / CHECKPOINT_STATE, state)
        await self.queue.commit(step)
        await asyncio.to_thread(self.folder.drop_old_checkpoints, self.recipe.checkpoint.keep)

    def on_group(self, outcome: GroupOutcome) -> None:
        """Keep a finished group for its step, so that it is not read again from the disk."""
        if outcome.reason is None:
            self._finished[outcome.group.id] = outcome.group

    async def _one_step(self, step: int) -> None:
        started = time.monotonic()
        with self._timeline.part("wait_data"):
            lease = await self.queue.lease(
                self.recipe.rollout.groups_per_step,
                step=step,
                timeout=self.recipe.queue.no_progress_s,
            )
            groups = [await self._group(leased) for leased in lease.groups]
        with self._timeline.part("train"):
            report = await self._train(lease)
        with self._timeline.part("publish"):
            if report.skipped is None:
                await self.publish_weights(self.progress.version + 1)
            self.queue.published(step)
        with self._timeline.part("acknowledge"):
            await self.queue.ack(lease, step)
        self.progress.step = step
        with self._timeline.part("record"):
            await asyncio.to_thread(self.episodes.write, step, groups)
        await self._save_and_evaluate(step)
        metrics = self._metrics(step, groups, report, time.monotonic() - started)
        with self._timeline.part("record"):  # of the next lap: this one's sum is in the metrics
            self.monitor.on_step(metrics)

    async def _group(self, leased: LeasedGroup) -> Group:
        group = self._finished.pop(leased.id, None)
        return await asyncio.to_thread(load_group, leased.path) if group is None else group

    async def _train(self, lease: Lease) -> StepReport:
        report = await self.trainer.step(
            lease.paths, version=self.progress.version, mask_older_than=lease.max_token_age
        )
        self._skipped = self._skipped + 1 if report.skipped else 0
        if self._skipped >= _MOST_SKIPPED:
            raise TrainerError(
                f"{self._skipped} steps in a row taught nothing: {report.skipped}",
                hint="are the rewards of a task's episodes ever different?",
            )
        return report

    async def _save_and_evaluate(self, step: int) -> None:
        last = step == self.recipe.steps
        if last or step % self.recipe.checkpoint.every == 0:
            with self._timeline.part("checkpoint"):
                await self.save()
        if self.recipe.eval.every and step % self.recipe.eval.every == 0 and not last:
            with self._timeline.part("evaluate"):
                await self.evaluate(step)

    def _metrics(
        self, step: int, groups: list[Group], report: StepReport, wall_s: float
    ) -> dict[str, Any]:
        episodes = [episode for group in groups for episode in group.episodes]
        data = report.to_json()
        trainer_time = data.pop("time_s")
        tokens = sum(group.sampled_tokens for group in groups)
        return {
            **data,
            "step": step,
            "version": self.progress.version,
            "success": fmean(success(episode) for episode in episodes),
            "reward": fmean(episode.reward for episode in episodes),
            "episodes": len(episodes),
            "turns": fmean(len(episode.turns) for episode in episodes),
            "trained_tokens": report.tokens,
            "tokens": tokens,
            "tokens_per_s": tokens / wall_s if wall_s else 0.0,
            "wall_s": wall_s,
            "time_s": self._timeline.lap(),
            "trainer_time_s": trainer_time,
            "statuses": _count(episode.status.value for episode in episodes),
        }


def _count(values: Any) -> Mapping[str, int]:
    counts: dict[str, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return counts


def read_progress(checkpoint: Path) -> Progress:
    """Read what :meth:`TrainingLoop.save` wrote."""
    import json

    state = json.loads((checkpoint / CHECKPOINT_STATE).read_text())
    return Progress(state.pop("step"), state.pop("version"), state)

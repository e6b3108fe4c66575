"""The training loop: lease, step, publish, acknowledge, save; until the last step.

It runs beside the producer that keeps groups coming. The order within a step matters:

- New weights are published *before* the step is acknowledged, since an acknowledgement frees
  slots, and a group that starts in one shall start on the new weights.
- Episodes and metrics of a step are written *before* its checkpoint, so a run that goes on from a
  checkpoint finds every step up to it on record.
- A checkpoint is complete when its last file is there; only then are the acks before it final.

A lap of the timeline goes from one line of metrics to the next, so checkpoint and evaluation after
step s are in the lap of step s + 1.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from statistics import fmean
from typing import Any, Protocol

from relax_agent.episode import Group
from relax_agent.errors import TrainerError
from relax_agent.monitor import RunMonitor
from relax_agent.monitor.display import TRAINING
from relax_agent.queue.payload import load_group
from relax_agent.queue.protocol import Lease, LeasedGroup, TrajectoryQueue
from relax_agent.rollout import Fleet, GroupOutcome
from relax_agent.rollout.evaluate import success
from relax_agent.run.checkpoints import Progress
from relax_agent.run.episodes import EpisodeLog
from relax_agent.run.folder import RunFolder
from relax_agent.run.recipe import Recipe
from relax_agent.run.tool_watch import ToolWatch
from relax_agent.timeline import Timeline
from relax_agent.trainers.client import TrainerProcess
from relax_agent.trainers.protocol import StepReport
from relax_agent.weights import publish

_MOST_SKIPPED = 10
"""So many steps in a row without an update end the run."""
_MOST_KEPT = 256
"""Finished groups that are kept in memory; others are read from their files."""


class Evaluator(Protocol):
    """Measures greedy success on held-out tasks."""

    async def __call__(self, step: int) -> float:
        """Return the success after ``step`` steps, and record it."""


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
        tools: ToolWatch,
        progress: Progress,
        evaluate: Evaluator,
    ) -> None:
        self.recipe, self.folder = recipe, folder
        self.queue, self.trainer, self.fleet = queue, trainer, fleet
        self.monitor, self.episodes, self.tools = monitor, episodes, tools
        self.progress, self.evaluate = progress, evaluate
        self._finished: OrderedDict[str, Group] = OrderedDict()
        self._timeline = Timeline()
        self._skipped = 0

    async def run(self) -> None:
        """Do all steps that are left, with checkpoints and evaluations between them."""
        self._timeline.lap()
        self.monitor.phase(TRAINING)
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
        checkpoints = self.folder.checkpoints
        await self.trainer.save(checkpoints.path(step))
        await asyncio.to_thread(checkpoints.complete, self.progress)
        await self.queue.commit(step)
        await asyncio.to_thread(checkpoints.keep_newest, self.recipe.checkpoint.keep)

    async def evaluate_if_due(self) -> None:
        """Evaluate in between, unless that was done before the run was interrupted."""
        step, every = self.progress.step, self.recipe.eval.every
        due = every and step % every == 0 and 0 < step < self.recipe.steps
        if due and not self.folder.eval_episodes(step).exists():
            with self._timeline.part("evaluate"):
                await self.evaluate(step)
            self.monitor.phase(TRAINING)

    def on_group(self, outcome: GroupOutcome) -> None:
        """Keep a finished group for its step, so that it is not read again from the disk."""
        if outcome.reason is not None:
            return
        self._finished[outcome.group.id] = outcome.group
        while len(self._finished) > _MOST_KEPT:  # groups that the queue has dropped stay here
            self._finished.popitem(last=False)

    async def _one_step(self, step: int) -> None:
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
        await self._record(step, groups, report)
        if step == self.recipe.steps or step % self.recipe.checkpoint.every == 0:
            with self._timeline.part("checkpoint"):
                await self.save()
        await self.evaluate_if_due()

    async def _record(self, step: int, groups: list[Group], report: StepReport) -> None:
        with self._timeline.part("record"):
            await asyncio.to_thread(self.episodes.write, step, groups)
            metrics = self._metrics(step, groups, report)
        lap = self._timeline.lap()
        wall_s = sum(lap.values())
        metrics |= {"wall_s": wall_s, "time_s": lap}
        metrics["tokens_per_s"] = metrics["tokens"] / wall_s if wall_s else 0.0
        with self._timeline.part("record"):  # of the next lap: this one's sum is in the line
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

    def _metrics(self, step: int, groups: list[Group], report: StepReport) -> dict[str, Any]:
        episodes = [episode for group in groups for episode in group.episodes]
        data = report.to_json()
        trainer_time = data.pop("time_s")
        return {
            **data,
            "step": step,
            "version": self.progress.version,
            "success": fmean(success(episode) for episode in episodes),
            "reward": fmean(episode.reward for episode in episodes),
            "episodes": len(episodes),
            "turns": fmean(len(episode.turns) for episode in episodes),
            "trained_tokens": report.tokens,
            "tokens": sum(group.sampled_tokens for group in groups),
            "tool_failures": self.tools.look(f"step {step}"),
            "trainer_time_s": trainer_time,
            "statuses": dict(Counter(episode.status.value for episode in episodes)),
        }

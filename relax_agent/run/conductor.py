"""The conductor of one run on one machine.

It makes or finds the model, starts the services (tool server, engines, trainer) under one
supervisor and drives them: warm start, evaluation, then the producer of groups and the training
loop side by side, and at the end evaluation, export and the judgement whether the run did its job.
Whatever ends the run, all its processes end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from relax_agent.engines.folder import read_model_facts
from relax_agent.errors import RunFailed
from relax_agent.models import environment_texts, resolve_model
from relax_agent.monitor import RunMonitor, read_metrics
from relax_agent.processes import supervise
from relax_agent.queue import LocalQueue
from relax_agent.rendering import Renderer, load_renderer
from relax_agent.rollout import (
    EnvPool,
    EpisodeRunner,
    EvalReport,
    ExpertSource,
    Fleet,
    GroupRunner,
    Producer,
    episode_options,
    evaluate,
)
from relax_agent.run.checkpoints import Checkpoint, Progress
from relax_agent.run.environment import env_maker, find_expert, require_expert, require_tasks
from relax_agent.run.episodes import EpisodeLog, episode_line, read_episodes, write_lines
from relax_agent.run.folder import RunFolder
from relax_agent.run.goal import Outcome, judge
from relax_agent.run.recipe import Recipe
from relax_agent.run.services import Services, start_services
from relax_agent.run.tool_watch import ToolWatch
from relax_agent.run.training import TrainingLoop
from relax_agent.run.warm_start import learn, play
from relax_agent.threads import THREADS
from relax_agent.tools.trace import trace_to

_SHOWN_EVERY_S = 0.5


async def conduct(
    recipe: Recipe, folder: RunFolder, monitor: RunMonitor, checkpoint: Checkpoint | None
) -> Outcome:
    """Do a run from the beginning, or from a checkpoint, to the end."""
    monitor.phase("model")
    model = await _find_model(recipe)
    monitor.message(model.renderer.summary)
    monitor.phase("starting engines and trainer")
    with trace_to(folder.tool_calls if recipe.tools.trace else None):
        return await _with_services(recipe, folder, monitor, checkpoint, model)


async def _with_services(
    recipe: Recipe,
    folder: RunFolder,
    monitor: RunMonitor,
    checkpoint: Checkpoint | None,
    model: Model,
) -> Outcome:
    async with (
        supervise(folder.logs) as children,
        start_services(recipe, folder, model.path, children) as services,
    ):
        conductor = Conductor(recipe, folder, services, monitor, model)
        async with contextlib.aclosing(conductor):
            return await conductor.run(checkpoint)


@dataclass(frozen=True)
class Model:
    """What a run knows of its model without loading it."""

    path: Path
    renderer: Renderer
    has_experts: bool
    """Whether tokens have routes."""


async def _find_model(recipe: Recipe) -> Model:
    texts = []
    if recipe.model.tiny is not None:
        async with env_maker(recipe)() as env:
            texts = await environment_texts(env, find_expert(env))
    # Not asyncio's own threads: those are waited for at the end, and a model takes seconds.
    work = recipe.runs / ".models"
    path = await THREADS.run(partial(resolve_model, recipe.model, work, texts))
    routes = read_model_facts(path).routes
    return Model(path, load_renderer(path, recipe.renderer), routes is not None)


class Conductor:
    """One run, with its services running."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        services: Services,
        monitor: RunMonitor,
        model: Model,
    ) -> None:
        self.recipe, self.folder, self.services, self.monitor = recipe, folder, services, monitor
        self.model = model
        self.fleet = Fleet(services.engines)
        self.tool_watch = ToolWatch(services.toolset, monitor.message)
        make_env = env_maker(recipe, services.toolset)
        self.env = make_env()
        self.tasks = require_tasks(self.env)
        self.envs = EnvPool(
            make_env.build,
            recipe.rollout.max_concurrent_episodes,
            timeout_s=recipe.rollout.env_timeout_s,
        )
        self.queue = LocalQueue(
            folder.queue, recipe.queue, groups_per_step=recipe.rollout.groups_per_step
        )
        self.replays_routes = model.has_experts and recipe.trainer.routing_replay

    async def aclose(self) -> None:
        """Let go of environments and the queue."""
        await self.env.close()
        await self.envs.close()
        await self.queue.close()

    async def run(self, checkpoint: Checkpoint | None) -> Outcome:
        """Do the run from the beginning or from a checkpoint to the end."""
        progress = Progress() if checkpoint is None else checkpoint.progress
        loop = TrainingLoop(
            self.recipe,
            self.folder,
            queue=self.queue,
            trainer=self.services.trainer,
            fleet=self.fleet,
            monitor=self.monitor,
            episodes=EpisodeLog(self.folder.episodes, last_step=progress.step),
            tools=self.tool_watch,
            progress=progress,
            evaluate=self.evaluate,
        )
        await self.queue.restore(progress.step)
        if checkpoint is None:
            await self._begin(loop)
        else:
            await self._go_on(loop, checkpoint.path)
        await self._train(loop)
        return await self._finish(loop)

    async def _begin(self, loop: TrainingLoop) -> None:
        """Do what comes before the first step, and save what has come of it."""
        if self.recipe.trainer.warm_start.enabled:
            await self._warm_start()
            await loop.publish_weights(loop.progress.version + 1)
        loop.progress.extra["greedy_before"] = await self.evaluate(0)
        await loop.save()

    async def _go_on(self, loop: TrainingLoop, checkpoint: Path) -> None:
        """Bring trainer and engines to where the checkpoint was made."""
        await self.services.trainer.restore(checkpoint)
        await loop.publish_weights(loop.progress.version)
        await loop.evaluate_if_due()

    async def _warm_start(self) -> None:
        settings, seed = self.recipe.trainer.warm_start, self.recipe.seed
        expert = require_expert(self.env, noise=settings.noise, seed=seed)
        files = await play(
            settings,
            self._runner(lambda: ExpertSource(expert, self.model.renderer)),
            self.folder.path / "warm_start",
            self.monitor,
            tasks=self.tasks.sample_order(seed),
        )
        self.tool_watch.look("the expert's episodes")
        await learn(settings, self.services.trainer, files, self.monitor, seed=seed)

    def _runner(
        self,
        source: Callable[[], ExpertSource] | None = None,
        *,
        temperature: float | None = None,
        return_routes: bool = False,
    ) -> EpisodeRunner:
        options = episode_options(
            self.recipe.rollout,
            run_seed=self.recipe.seed,
            temperature=temperature,
            return_routes=return_routes,
            paused=self.fleet.paused_s,
        )
        return EpisodeRunner(
            source or self.fleet, self.model.renderer, self.envs, options, env_id=self.recipe.env.id
        )

    async def _train(self, loop: TrainingLoop) -> None:
        """Run the producer and the training loop side by side until the last step is done."""
        groups = GroupRunner(
            self._runner(return_routes=self.replays_routes),
            size=self.recipe.rollout.group_size,
            keep_equal_rewards=self.recipe.rollout.keep_equal_rewards,
        )
        producer = Producer(
            self.queue,
            groups,
            self.tasks.sample_order(self.recipe.seed),
            max_episodes=self.recipe.rollout.max_concurrent_episodes,
            max_failures_in_a_row=self.recipe.rollout.max_failures_in_a_row,
            on_group=loop.on_group,
        )
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(producer.run(), name="producer"),
                tasks.create_task(self._show_progress(producer), name="progress"),
            ]
            try:
                await loop.run()
            finally:
                for task in running:
                    task.cancel()

    async def _show_progress(self, producer: Producer) -> None:
        try:
            while True:
                self.monitor.on_progress(in_flight=producer.running_episodes)
                await asyncio.sleep(_SHOWN_EVERY_S)
        finally:
            self.monitor.on_progress(in_flight=None)

    async def _finish(self, loop: TrainingLoop) -> Outcome:
        greedy_after = await self.evaluate(self.recipe.steps)
        await self.services.trainer.publish(self.folder.export)
        self._show_before_after()
        self.monitor.phase("finished")
        return judge(
            read_metrics(self.folder.path / "metrics.jsonl"),
            self.recipe.goal,
            greedy_before=loop.progress.extra.get("greedy_before"),
            greedy_after=greedy_after,
            replay=self.replays_routes,
        )

    async def evaluate(self, step: int) -> float:
        """Measure greedy success on held-out tasks, record it and keep the episodes.

        What was recorded before the run was interrupted is not measured again.
        """
        known = self._recorded_success(step)
        if known is not None:
            return known
        self.monitor.phase("evaluating")
        tasks = list(self.tasks.ids("eval"))[: self.recipe.eval.tasks]
        report = await evaluate(tasks, self._runner(temperature=0.0), name=f"eval-{step}")
        self.tool_watch.look("an evaluation")
        require_episodes(report)
        lines = [episode_line(episode, step=step) for episode in report.episodes]
        await asyncio.to_thread(write_lines, self.folder.eval_episodes(step), lines)
        self.monitor.on_eval(step, report.success, reward=report.reward)
        return report.success

    def _recorded_success(self, step: int) -> float | None:
        if not self.folder.eval_episodes(step).exists():
            return None
        lines = read_metrics(self.folder.path / "evals.jsonl")
        return next((line["success"] for line in lines if line["step"] == step), None)

    def _show_before_after(self) -> None:
        """Show one held-out task before and after, if possible one that training has solved."""
        before = read_episodes(self.folder.eval_episodes(0))
        after = {e.task_id: e for e in read_episodes(self.folder.eval_episodes(self.recipe.steps))}
        pairs = [(old, after[old.task_id]) for old in before if old.task_id in after]
        if pairs:
            chosen = max(pairs, key=lambda pair: pair[1].reward - pair[0].reward)
            self.monitor.show_before_after(*chosen)


def require_episodes(report: EvalReport) -> None:
    """Raise if an evaluation has measured nothing."""
    if report.failures == report.tasks:
        last = report.episodes[-1]
        raise RunFailed(
            f"all {report.tasks} episodes of an evaluation failed; the last one: {last.status}:"
            f" {last.detail}"
        )

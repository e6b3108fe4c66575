"""The conductor of one run on one machine.

It opens the run folder, makes or finds the model, starts the services (tool server, engines,
trainer) under one supervisor and drives them: warm start, evaluation, then the producer of groups
and the training loop side by side, and at the end evaluation, export and the judgement whether the
run did its job. Whatever ends the run, all its processes end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from relax_agent.engines.folder import read_model_facts
from relax_agent.envs import Env, TaskSet, make
from relax_agent.errors import ConfigError, RunFailed
from relax_agent.models import environment_texts, resolve_model
from relax_agent.monitor import RunMonitor, read_metrics
from relax_agent.processes import supervise
from relax_agent.queue import LocalQueue
from relax_agent.queue.waiting import first_cause
from relax_agent.rendering import Renderer, load_renderer
from relax_agent.rollout import (
    EnvPool,
    EpisodeRunner,
    ExpertSource,
    Fleet,
    GroupRunner,
    Producer,
    episode_options,
    evaluate,
)
from relax_agent.run.episodes import EpisodeLog, episode_line, read_episodes, write_lines
from relax_agent.run.folder import RunFolder
from relax_agent.run.goal import Outcome, judge
from relax_agent.run.recipe import Recipe
from relax_agent.run.services import Services, start_services
from relax_agent.run.training import Progress, TrainingLoop, read_progress
from relax_agent.run.warm_start import find_expert, warm_start

_SHOWN_EVERY_S = 0.5


def run(recipe: Recipe, *, resume: Path | None = None, quiet: bool = False) -> int:
    """Do a whole run and return the exit status.

    Args:
        recipe: What to do.
        resume: The folder of an earlier run to go on with.
        quiet: Show nothing but the result.

    Raises:
        RelaxError: The run could not start, or ended early; everything written so far is kept.
        RunFailed: It ended without reaching its goal.
    """
    if recipe.model.path is not None:
        resolve_model(recipe.model, recipe.runs)  # a missing model leaves no run folder behind
    folder = RunFolder.create(recipe) if resume is None else RunFolder.reopen(resume, recipe)
    try:
        outcome = asyncio.run(_with_signals(_run(recipe, folder, resume is not None, quiet)))
    except BaseExceptionGroup as failures:
        raise first_cause(failures) from None
    print(json.dumps({"run": str(folder.path), **outcome.to_json()}))
    if outcome.missed:
        raise RunFailed("; ".join(outcome.missed), hint=f"everything is in {folder.path}")
    return 0


async def _with_signals(work: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Let SIGTERM end the run as Ctrl-C does: in order, with nothing left behind."""
    task = asyncio.ensure_future(work)
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    try:
        return await task
    except asyncio.CancelledError:
        if stopped:
            raise RunFailed("the run was told to stop (SIGTERM)") from None
        raise


async def _run(recipe: Recipe, folder: RunFolder, resumed: bool, quiet: bool) -> Outcome:
    checkpoint = folder.latest_checkpoint() if resumed else None
    last_step = (checkpoint[0] if checkpoint else 0) if resumed else None
    with RunMonitor(
        folder.path,
        name=folder.path.name,
        total_steps=recipe.steps,
        last_step=last_step,
        quiet=quiet,
    ) as monitor:
        monitor.message(f"run folder {folder.path}")
        monitor.phase("model")
        model = await _find_model(recipe)
        monitor.phase("starting engines and trainer")
        async with (
            supervise(folder.logs) as children,
            start_services(recipe, folder, model, children) as services,
        ):
            conductor = Conductor(recipe, folder, services, monitor, model)
            async with contextlib.aclosing(conductor):
                return await conductor.run(checkpoint)


async def _find_model(recipe: Recipe) -> Path:
    env = _make_env(recipe, None)()
    try:
        texts = []
        if recipe.model.tiny is not None:
            texts = await environment_texts(env, find_expert(env))
        return await asyncio.to_thread(resolve_model, recipe.model, recipe.runs / ".models", texts)
    finally:
        await env.close()


def _make_env(recipe: Recipe, services: Services | None) -> Callable[[], Env]:
    for module in recipe.env.modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(f"env.modules: cannot import {module}: {error}") from None
    arguments = dict(recipe.env.args)
    if services is not None and services.toolset is not None:
        arguments["tools"] = services.toolset
    return lambda: make(recipe.env.id, **arguments)


def _require_tasks(env: Env) -> TaskSet:
    tasks = env.unwrapped.tasks
    if not isinstance(tasks, TaskSet):
        raise ConfigError(
            f"{env.spec.id if env.spec else env} has no tasks to train on",
            hint="give the environment a TaskSet",
        )
    return tasks


class Conductor:
    """One run, with its services running."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        services: Services,
        monitor: RunMonitor,
        model: Path,
    ) -> None:
        self.recipe, self.folder, self.services, self.monitor = recipe, folder, services, monitor
        self.renderer: Renderer = load_renderer(model, recipe.renderer)
        self.fleet = Fleet(services.engines)
        make_env = _make_env(recipe, services)
        self.env = make_env()
        self.tasks = _require_tasks(self.env)
        self.envs = EnvPool(make_env, recipe.rollout.max_concurrent_episodes)
        self.queue = LocalQueue(
            folder.queue, recipe.queue, groups_per_step=recipe.rollout.groups_per_step
        )
        self.has_experts = read_model_facts(model).routes is not None

    async def aclose(self) -> None:
        """Let go of environments and the queue."""
        await self.env.close()
        await self.envs.close()
        await self.queue.close()

    async def run(self, checkpoint: tuple[int, Path] | None) -> Outcome:
        """Do the run from the beginning or from a checkpoint to the end."""
        loop = TrainingLoop(
            self.recipe,
            self.folder,
            queue=self.queue,
            trainer=self.services.trainer,
            fleet=self.fleet,
            monitor=self.monitor,
            episodes=EpisodeLog(
                self.folder.path / "episodes.jsonl",
                last_step=checkpoint[0] if checkpoint else None,
            ),
            progress=Progress() if checkpoint is None else read_progress(checkpoint[1]),
            evaluate=self.evaluate,
        )
        await self._begin(loop, checkpoint)
        await self._train(loop)
        return await self._finish(loop)

    async def _begin(self, loop: TrainingLoop, checkpoint: tuple[int, Path] | None) -> None:
        """Bring trainer, engines and queue to the same point."""
        progress = loop.progress
        await self.queue.restore(progress.step)
        if checkpoint is not None:
            self.monitor.message(f"going on after step {progress.step}")
            await self.services.trainer.restore(checkpoint[1])
            await loop.publish_weights(progress.version)
            return
        if self.recipe.trainer.warm_start.enabled:
            await self._warm_start()
            await loop.publish_weights(progress.version + 1)
        progress.extra["greedy_before"] = await self.evaluate(0)

    async def _warm_start(self) -> None:
        settings = self.recipe.trainer.warm_start
        expert = find_expert(self.env, noise=settings.noise, seed=self.recipe.seed)
        if expert is None:
            raise ConfigError(
                f"{self.recipe.env.id} has no expert to learn from",
                hint="give the environment an expert() or set trainer.warm_start.steps=0",
            )
        await warm_start(
            settings,
            self.services.trainer,
            self._runner(lambda: ExpertSource(expert, self.renderer)),
            self.folder.path / "warm_start",
            self.monitor,
            tasks=self.tasks.sample_order(self.recipe.seed),
            seed=self.recipe.seed,
        )

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
            source or self.fleet, self.renderer, self.envs, options, env_id=self.recipe.env.id
        )

    async def _train(self, loop: TrainingLoop) -> None:
        """Run the producer and the training loop side by side until the last step is done."""
        groups = GroupRunner(
            self._runner(return_routes=self.has_experts and self.recipe.trainer.routing_replay),
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
        while True:
            self.monitor.on_progress(in_flight=producer.running_episodes)
            await asyncio.sleep(_SHOWN_EVERY_S)

    async def _finish(self, loop: TrainingLoop) -> Outcome:
        greedy_after = await self.evaluate(self.recipe.steps)
        await self.services.trainer.publish(self.folder.export)
        self._show_before_after()
        return judge(
            read_metrics(self.folder.path / "metrics.jsonl"),
            self.recipe.goal,
            greedy_before=loop.progress.extra.get("greedy_before"),
            greedy_after=greedy_after,
            replay=self.has_experts and self.recipe.trainer.routing_replay,
        )

    async def evaluate(self, step: int) -> float:
        """Measure greedy success on held-out tasks, record it and keep the episodes."""
        self.monitor.phase("evaluating")
        tasks = list(self.tasks.ids("eval"))[: self.recipe.eval.tasks]
        report = await evaluate(tasks, self._runner(temperature=0.0), name=f"eval-{step}")
        self.monitor.on_eval(step, report.success, reward=report.reward)
        lines = [episode_line(episode, step=step) for episode in report.episodes]
        await asyncio.to_thread(write_lines, self._eval_file(step), lines)
        return report.success

    def _eval_file(self, step: int) -> Path:
        return self.folder.path / f"eval-{step:06d}.jsonl"

    def _show_before_after(self) -> None:
        """Show one held-out task before and after, if possible one that training has solved."""
        before = read_episodes(self._eval_file(0))
        after = {e.task_id: e for e in read_episodes(self._eval_file(self.recipe.steps))}
        pairs = [(old, after[old.task_id]) for old in before if old.task_id in after]
        if pairs:
            chosen = max(pairs, key=lambda pair: pair[1].reward - pair[0].reward)
            self.monitor.show_before_after(*chosen)

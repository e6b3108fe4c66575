"""The warm start: supervised steps on episodes that an expert plays in the environment.

The environment is the source, not a text file: an expert plays through the same loop, renderer and
tool server as the model will, so what the model is taught is exactly what it will have to sample.
Episodes are stored a batch a file; supervised steps visit the files in seeded permutations.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from relax_agent.episode import Episode, Group
from relax_agent.errors import EnvError
from relax_agent.monitor import RunMonitor
from relax_agent.queue import save_group
from relax_agent.rollout import EpisodeRunner, evaluate
from relax_agent.trainers import WarmStartSettings
from relax_agent.trainers.client import TrainerProcess


async def play(
    settings: WarmStartSettings,
    expert: EpisodeRunner,
    folder: Path,
    monitor: RunMonitor,
    *,
    tasks: Iterator[str],
) -> list[Path]:
    """Let the expert play and store what it did.

    Args:
        settings: How many episodes, and how many of them go into a file.
        expert: Plays episodes.
        folder: Where the episodes are stored.
        monitor: Told how it went.
        tasks: Task ids to play.

    Returns:
        The files, each with the episodes of one supervised step.

    Raises:
        EnvError: The expert's episodes fail.
    """
    monitor.phase("expert plays")
    report = await evaluate(
        [next(tasks) for _ in range(settings.episodes)], expert, name="warm-start"
    )
    if report.failures:
        failed = next(e for e in report.episodes if not e.status.trainable)
        raise EnvError(
            f"{report.failures} of {settings.episodes} expert episodes failed; one was"
            f" {failed.status}: {failed.detail}"
        )
    monitor.message(f"warm start: {report.tasks} expert episodes, success {report.success:.2f}")
    return await asyncio.to_thread(_store, report.episodes, settings.batch_episodes, folder)


async def learn(
    settings: WarmStartSettings,
    trainer: TrainerProcess,
    files: Sequence[Path],
    monitor: RunMonitor,
    *,
    seed: int,
) -> None:
    """Take supervised steps on the expert's episodes.

    Args:
        settings: How many steps.
        trainer: Learns.
        files: What :func:`play` returned.
        monitor: Told how far it is.
        seed: Fixes the order of the files.
    """
    order = random.Random(seed)
    queue: list[Path] = []
    for step in range(settings.steps):
        queue = queue or order.sample(files, len(files))
        await trainer.sft_step([queue.pop()])
        monitor.phase("warm start", step + 1, settings.steps)


def _store(episodes: Sequence[Episode], size: int, folder: Path) -> list[Path]:
    """Write full batches of episodes as groups and return their paths."""
    folder.mkdir(exist_ok=True)
    paths = []
    for start in range(0, len(episodes) - size + 1, size):
        batch = list(episodes[start : start + size])
        path = folder / f"{start // size:05d}.safetensors"
        save_group(path, Group(path.stem, batch[0].env_id, "warm-start", batch))
        paths.append(path)
    return paths

"""The folder of an evaluation: every episode as it ended, so that one can go on later.

    eval.json           what is evaluated: environment, policy, limits; another one is refused
    episodes.jsonl      one line an episode, with index.html, pages/ and media/ for people
    summary.json        the report, written at the end

The episodes are stored as ``RecordEpisode`` stores them, labelled with the sample's number.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from relax_agent.envs.evaluation import EvalJob, EvalReport
from relax_agent.envs.playing import Play
from relax_agent.envs.wrappers.recording import RecordedEpisode, Recorder, read_episodes
from relax_agent.errors import ConfigError
from relax_agent.files import replace_file
from relax_agent.messages import AssistantMessage, Usage
from relax_agent.status import EpisodeStatus
from relax_agent.threads import THREADS


def free_folder(folder: Path, about: Mapping[str, Any], *, fresh: bool = False) -> Path:
    """Return the folder that goes on with an evaluation: ``folder``, or ``folder-2`` and so on.

    Args:
        folder: The first choice.
        about: What is evaluated.
        fresh: Take a folder that holds nothing yet.
    """
    wanted = json.loads(json.dumps(about))
    for number in itertools.count(1):
        chosen = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        if not (chosen / "episodes.jsonl").exists():
            return chosen
        if not fresh and _about_of(chosen) == wanted:
            return chosen
    raise AssertionError


def _about_of(folder: Path) -> Any:
    try:
        return json.loads((folder / "eval.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None


class EvaluationLog:
    """Writes an evaluation into a folder and finds what it holds already."""

    def __init__(self, folder: Path | str, about: Mapping[str, Any], *, html: bool = True) -> None:
        """Open a folder, or go on with one that holds a part of the same evaluation.

        Args:
            folder: Where it goes; made if need be.
            about: What is evaluated, as plain JSON data.
            html: Whether to write pages for people too.

        Raises:
            ConfigError: The folder holds another evaluation.
            StorageError: The folder cannot be made or written to.
        """
        self.folder = Path(folder)
        self._about = json.loads(json.dumps(about))
        self._require_the_same()
        self._recorder = Recorder(self.folder, html=html)
        replace_file(self.folder / "eval.json", _json(self._about))

    def _require_the_same(self) -> None:
        path = self.folder / "eval.json"
        if not path.exists() or not (self.folder / "episodes.jsonl").exists():
            return
        try:
            before = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        keys = sorted(set(before) | set(self._about))
        other = [key for key in keys if before.get(key) != self._about.get(key)]
        if other:
            told = ", ".join(f"{key} was {before.get(key)!r}" for key in other[:3])
            raise ConfigError(
                f"{self.folder} holds another evaluation: {told}", hint="--out names another one"
            )

    def plays(self, jobs: Sequence[EvalJob]) -> Iterator[tuple[EvalJob, Play]]:
        """Give those of the jobs that are on record, with the last episode of each."""
        if not (self.folder / "episodes.jsonl").exists():
            return
        wanted: dict[tuple[Any, Any, Any], EvalJob] = {
            (job.task, job.seed, job.sample): job for job in jobs
        }
        found: dict[EvalJob, Play] = {}
        for episode in read_episodes(self.folder):
            job = wanted.get(_key(episode))
            if job is not None:
                found[job] = from_recorded(episode)
        yield from found.items()

    async def add(self, job: EvalJob, play: Play, tools: Sequence[dict[str, Any]] = ()) -> None:
        """Write one episode.

        Raises:
            StorageError: The disk does not take it.
        """
        episode = to_recorded(play, tools=list(tools))
        episode.labels = {"sample": job.sample, "task": job.task}
        await THREADS.run(partial(self._recorder.write, episode))

    def finish(self, report: EvalReport) -> None:
        """Write the report."""
        replace_file(self.folder / "summary.json", _json({**self._about, **report.to_json()}))

    def close(self) -> None:
        """Write what the disk did not take before."""
        self._recorder.close()


def to_recorded(play: Play, *, tools: list[dict[str, Any]] | None = None) -> RecordedEpisode:
    """Return a played episode in the form in which episodes are stored."""
    return RecordedEpisode(
        env_id=play.env_id,
        seed=play.seed,
        task_id=play.task_id,
        tools=tools or [],
        messages=list(play.messages),
        rewrites=list(play.rewrites),
        actions=list(play.actions),
        rewards=list(play.rewards),
        status=play.status.value,
        detail=play.detail,
        terminated=play.terminated,
        truncated=play.truncated,
        metrics=dict(play.metrics),
        duration_s=play.duration_s,
    )


def from_recorded(episode: RecordedEpisode) -> Play:
    """Return a stored episode as it was played."""
    said = [episode.messages[index] for index in episode.actions]
    usages = [message.usage for message in said if isinstance(message, AssistantMessage)]
    return Play(
        env_id=episode.env_id,
        task_id=episode.task_id,
        seed=episode.seed,
        id=episode.id,
        status=EpisodeStatus(episode.status),
        detail=episode.detail,
        messages=list(episode.messages),
        rewrites=list(episode.rewrites),
        rewards=list(episode.rewards),
        turns=episode.turns,
        actions=list(episode.actions),
        metrics=dict(episode.metrics),
        terminated=episode.terminated,
        truncated=episode.truncated,
        usage=Usage(
            sum(usage.prompt_tokens for usage in usages),
            sum(usage.completion_tokens for usage in usages),
            usages[-1].tokens_left if usages else None,
        ),
        duration_s=episode.duration_s,
    )


def _key(episode: RecordedEpisode) -> tuple[Any, Any, Any]:
    return episode.labels.get("task"), episode.seed, episode.labels.get("sample")


def _json(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()

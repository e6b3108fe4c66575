"""``episodes.jsonl``: every episode of a run as people read it, one JSON object a line.

Written when a group is trained, so the file and the checkpoints tell of the same episodes: a
resumed run cuts off what came after its checkpoint. Token columns are not in here; they are in the
queue's payloads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from relax_agent.episode import Episode, Group, Turn
from relax_agent.errors import StorageError


class EpisodeLog:
    """Appends episodes to a file."""

    def __init__(self, path: Path, *, last_step: int | None = None) -> None:
        """Open the log; with ``last_step`` forget what later steps wrote."""
        self.path = path
        if last_step is not None and path.exists():
            kept = [line for line in _lines(path) if json.loads(line)["step"] <= last_step]
            write_lines(path, kept)

    def write(self, step: int, groups: Iterable[Group]) -> None:
        """Append the episodes of the groups that ``step`` trained.

        Raises:
            StorageError: The disk is full.
        """
        lines = [episode_line(episode, step=step) for group in groups for episode in group.episodes]
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(lines)
        except OSError as error:
            raise _storage_error(self.path, error) from None


def episode_line(episode: Episode, **more: object) -> str:
    """Return an episode as one line of JSON, newline included."""
    return json.dumps({**more, **episode.to_json()}) + "\n"


def read_episodes(path: Path) -> list[Episode]:
    """Read a file of episode lines; their token columns are empty."""
    if not path.exists():
        return []
    return [_readable(json.loads(line)) for line in _lines(path)]


def _readable(data: dict[str, Any]) -> Episode:
    """Rebuild what people read of an episode: everything but its token columns."""
    episode = Episode.load({**data, "segments": [], "turns": []}, {})
    episode.turns = [Turn(0, 0, 0, turn["finish_reason"], turn["reward"]) for turn in data["turns"]]
    return episode


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Replace a file by these lines, whole or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(lines)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise _storage_error(path, error) from None


def _lines(path: Path) -> Iterator[str]:
    """Yield whole lines; the last one is incomplete if the run was killed while writing."""
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            if line.endswith("\n"):
                yield line


def _storage_error(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot write {path}: {error.strerror or error}", hint="free space and resume the run"
    )

"""``episodes.jsonl``: every episode of a run as people read it, one JSON object a line.

Written when a group is trained, so the file and the checkpoints tell of the same episodes: a
resumed run cuts off what came after its checkpoint. Token columns are not in here; they are in the
queue's payloads. Whatever text an episode holds, a line is plain ASCII: no reader takes a line
separator inside a string (U+2028) for the end of a line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from relax_agent.episode import Episode, Group, Turn
from relax_agent.errors import StorageError
from relax_agent.files import append_to_file, replace_file
from relax_agent.monitor.metrics import to_line


class EpisodeLog:
    """Appends episodes to a file."""

    def __init__(self, path: Path, *, last_step: int | None = None) -> None:
        """Open the log; with ``last_step`` forget what later steps wrote."""
        self.path = path
        if last_step is not None and path.exists():
            kept = [line for line, data in _lines(path) if data.get("step", 0) <= last_step]
            write_lines(path, kept)

    def write(self, step: int, groups: Iterable[Group]) -> None:
        """Append the episodes of the groups that ``step`` trained, all or none.

        Raises:
            StorageError: The disk is full.
        """
        episodes = [episode for group in groups for episode in group.episodes]
        append_to_file(self.path, "".join(episode_line(e, step=step) for e in episodes).encode())


def episode_line(episode: Episode, **more: object) -> str:
    """Return an episode as one line of JSON, newline included."""
    return to_line({**more, **episode.to_json()})


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Replace a file by these lines, whole or not at all."""
    replace_file(path, "".join(lines).encode())


def read_episodes(path: Path) -> list[Episode]:
    """Read a file of episode lines; their token columns are empty.

    Raises:
        StorageError: The file cannot be read, or a line in its midst is not an episode.
    """
    return [_readable(data) for _, data in _lines(path)] if path.exists() else []


def _readable(data: dict[str, Any]) -> Episode:
    """Rebuild what people read of an episode: everything but its token columns."""
    metrics = {name: value for name, value in data["metrics"].items() if value is not None}
    episode = Episode.load({**data, "metrics": metrics, "segments": [], "turns": []}, {})
    episode.turns = [Turn(0, 0, 0, turn["finish_reason"], turn["reward"]) for turn in data["turns"]]
    return episode


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield whole lines; the last one is torn if the run was killed while writing."""
    with path.open(encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if line.endswith("\n"):
                yield line, _parse(path, number, line)


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise StorageError(f"{path}, line {number}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise StorageError(f"{path}, line {number}: not an object")
    return data

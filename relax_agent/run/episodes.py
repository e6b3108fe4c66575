"""``episodes.jsonl``: every episode of a run as people read it, one JSON object a line.

Written when a group is trained, so the file and the checkpoints tell of the same episodes: a
resumed run cuts off what came after its checkpoint. The token columns are packed beside what people
read (``columns``, about 8 bytes a token); routes are in the queue's payloads alone. Whatever text
an episode holds, a line is plain ASCII: no reader takes a line separator inside a string (U+2028)
for the end of a line.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from relax_agent.episode import Episode, Group
from relax_agent.errors import StorageError, one_line
from relax_agent.files import append_to_file, replace_file
from relax_agent.media import digest_of
from relax_agent.messages import from_record
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
    data = episode.to_json()
    for segment in data["segments"]:
        segment["spans"] = []  # of routes, which are not in here
    arrays = episode.to_arrays()
    columns = [
        {name: _packed(arrays[f"{index}.{name}"]) for name in _COLUMNS}
        for index in range(len(episode.segments))
    ]
    return to_line({**more, **data, "columns": columns})


_COLUMNS: dict[str, type[np.generic]] = {
    "token_ids": np.int32,
    "loss_mask": np.int8,
    "logprobs": np.float32,
    "weight_versions": np.int32,
}
_MOST_BYTES = 1 << 28
"""Of one column, unpacked."""


def _packed(column: npt.NDArray[Any]) -> str:
    return base64.b64encode(zlib.compress(column.tobytes(), 6)).decode()


def _unpacked(text: str, kind: type[np.generic]) -> npt.NDArray[Any]:
    data = zlib.decompressobj().decompress(base64.b64decode(text), _MOST_BYTES)
    return np.frombuffer(data, kind)


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Replace a file by these lines, whole or not at all."""
    replace_file(path, "".join(lines).encode())


def read_episodes(path: Path) -> list[Episode]:
    """Read a file of episode lines; routes are not in it.

    Raises:
        StorageError: The file cannot be read, or a line in its midst is not an episode.
    """
    return [episode for _, episode in read_steps(path)] if path.exists() else []


def read_steps(path: Path) -> Iterator[tuple[int | None, Episode]]:
    """Read a file of episode lines one after the other, each with the step that trained it.

    Raises:
        StorageError: As :func:`read_episodes`, or the file is missing.
    """
    try:
        for number, (_, data) in enumerate(_lines(path), 1):
            yield data.get("step"), _rebuilt(data, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"cannot read {path}: {error}") from None


def _rebuilt(data: dict[str, Any], where: str) -> Episode:
    try:
        metrics = {name: value for name, value in data["metrics"].items() if value is not None}
        arrays = {
            f"{index}.{name}": _unpacked(columns[name], kind)
            for index, columns in enumerate(data["columns"])
            for name, kind in _COLUMNS.items()
        }
        if data["media"]:
            arrays |= _media_of(data["messages"])
        episode = Episode.load({**data, "metrics": metrics}, arrays)
        episode.validate()
    except StorageError:
        raise
    except Exception as error:  # a file can hold anything
        reason = one_line(error)
        raise StorageError(f"{where}: not an episode of a run: {reason}") from None
    return episode


def _media_of(messages: list[dict[str, Any]]) -> dict[str, npt.NDArray[Any]]:
    """Return the media that messages hold, under the names that an episode gives them."""
    media = [medium for item in messages for medium in from_record(item).media]
    return {f"media.{digest_of(each)}": np.frombuffer(each.data, np.uint8) for each in media}


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

"""One finished group as one file: arrays as safetensors, everything else as JSON in its header.

The file is written beside its place, flushed to the disk and then renamed, so that a reader sees
either the whole group or nothing, and a full disk leaves nothing half-written behind. Reading
needs NumPy only: a trainer's rank, a viewer and a notebook open the same file.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from relax_agent.episode import Episode, Group
from relax_agent.errors import StorageError
from relax_agent.files import replace_file

FORMAT = "relax-agent-group/2"
"""Written into every file; a reader refuses another one."""

_HEADER_LIMIT = 32 * 2**20
"""Larger JSON (media travel in it) goes into an array: safetensors limits its header to 100 MB."""
_JSON_ARRAY = "json"

Arrays = dict[str, npt.NDArray[Any]]


def _sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_group(path: Path, group: Group) -> None:
    """Write a group to ``path``.

    Args:
        path: The file; its folder must exist.
        group: Any group, with running or failed episodes too.

    Raises:
        StorageError: the disk is full or refuses; nothing half-written stays.
    """
    import safetensors.numpy

    arrays: Arrays = {
        f"{number}.{name}": np.ascontiguousarray(column)
        for number, episode in enumerate(group.episodes)
        for name, column in episode.to_arrays().items()
    }
    text = json.dumps(_describe(group), ensure_ascii=False, separators=(",", ":"))
    metadata = {"format": FORMAT}
    if len(text) <= _HEADER_LIMIT:
        metadata["group"] = text
    else:
        arrays[_JSON_ARRAY] = np.frombuffer(text.encode(), np.uint8)
    replace_file(path, safetensors.numpy.save(arrays, metadata))
    _sync_folder(path.parent)


def load_group(path: Path) -> Group:
    """Read a group that :func:`save_group` wrote.

    Raises:
        StorageError: the file is missing, cut off, or of another format.
    """
    import safetensors
    import safetensors.numpy

    try:
        data = path.read_bytes()
        metadata = _metadata(data)
        arrays = safetensors.numpy.load(data)
    except (OSError, ValueError, struct.error, safetensors.SafetensorError) as error:
        raise StorageError(f"cannot read the group in {path}: {error}") from error
    if metadata.get("format") != FORMAT:
        raise StorageError(f"{path} is not a group file of format {FORMAT}")
    text = metadata.get("group") or arrays.pop(_JSON_ARRAY).tobytes().decode()
    return _rebuild(json.loads(text), arrays)


def _metadata(data: bytes) -> dict[str, str]:
    """Return the string pairs in the header of a safetensors file."""
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    return header.get("__metadata__") or {}


def _describe(group: Group) -> dict[str, Any]:
    return {
        "id": group.id,
        "env_id": group.env_id,
        "task_id": group.task_id,
        "episodes": [episode.to_json() for episode in group.episodes],
    }


def _rebuild(data: dict[str, Any], arrays: Arrays) -> Group:
    columns: list[Arrays] = [{} for _ in data["episodes"]]
    for name, column in arrays.items():
        number, _, rest = name.partition(".")
        columns[int(number)][rest] = column
    episodes = [
        Episode.load(item, own) for item, own in zip(data["episodes"], columns, strict=True)
    ]
    return Group(data["id"], data["env_id"], data["task_id"], episodes)


class PayloadFolder:
    """The payload files of one queue, named by the groups' numbers and never by their ids."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def path(self, number: int) -> Path:
        """Return where the group of this number is, or would be."""
        return self._folder / f"{number:08d}.safetensors"

    def delete(self, numbers: Iterable[int]) -> None:
        """Delete what is there of these groups."""
        for number in numbers:
            self.path(number).unlink(missing_ok=True)

    def keep_only(self, numbers: Iterable[int]) -> None:
        """Delete every other file: what a killed process left behind."""
        wanted = {self.path(number).name for number in numbers}
        for path in self._folder.iterdir():
            if path.name not in wanted:
                path.unlink(missing_ok=True)

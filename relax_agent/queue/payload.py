"""One finished group as one file: arrays as safetensors, everything else as JSON in its header.

The file is written beside its place, flushed to the disk and then renamed, so that a reader sees
either the whole group or nothing, and a full disk leaves nothing half-written behind. Reading
needs NumPy only: a trainer's rank, a viewer and a notebook open the same file.
"""

from __future__ import annotations

import json
import os
import struct
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from relax_agent.episode import Episode, Group
from relax_agent.errors import StorageError

FORMAT = "relax-agent-group/1"
"""Written into every file; a reader refuses another one."""

_HEADER_LIMIT = 32 * 2**20
"""Larger JSON (media travel in it) goes into an array: safetensors limits its header to 100 MB."""
_JSON_ARRAY = "json"

Arrays = dict[str, npt.NDArray[Any]]


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``, whole and flushed, or leave nothing (StorageError)."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}",
            hint="free some space or choose another run folder",
        ) from error


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
    write_atomically(path, safetensors.numpy.save(arrays, metadata))


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

"""Files that are whole or absent, whatever happens while they are written.

A file that is replaced is written beside its place, flushed to the disk and renamed. A file that
grows gets each addition in one write, and is cut back to what it was if the disk takes only a part
of it: a reader never meets half a line that a full disk left behind.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path

from relax_agent.errors import StorageError

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
"""What the system says when a disk takes no more."""


def replace_file(path: Path, data: bytes) -> None:
    """Write a file, whole and flushed; if that fails, the old one stays.

    Raises:
        StorageError: The file cannot be written, e.g. the disk is full.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise storage_error(path, error) from None


def append_to_file(path: Path, data: bytes) -> None:
    """Add to the end of a file, which is made if need be: all of ``data`` or nothing.

    Raises:
        StorageError: The file cannot be written, e.g. the disk is full.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            _write_or_cut_back(descriptor, data)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise storage_error(path, error) from None


def _write_or_cut_back(descriptor: int, data: bytes) -> None:
    size = os.fstat(descriptor).st_size
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


def require_whole_safetensors(file: Path) -> None:
    """Compare a file's size with what its header promises; the tensors themselves are not read.

    Raises:
        ValueError: It is cut off, or no safetensors file.
        OSError: It cannot be read.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > size:
            raise ValueError(f"{file.name} is cut off or no safetensors file")
        header = json.loads(stream.read(length))
    try:
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"]
        expected = 8 + length + max(ends, default=0)
    except (AttributeError, KeyError, TypeError, IndexError):
        raise ValueError(f"{file.name} is no safetensors file") from None
    if size != expected:
        raise ValueError(f"{file.name} has {size} bytes instead of {expected}")


def storage_error(path: Path, error: OSError) -> StorageError:
    """Return the error of the project's tree for one of the system's."""
    return StorageError(
        f"cannot write {path}: {error.strerror or error}", hint="free space and resume the run"
    )

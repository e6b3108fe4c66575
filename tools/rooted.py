"""A folder that no path leads out of, of limited size; failures are words for a model.

A path is relative, without ``..``, and is walked folder by folder from the root, each opened by
itself and never through a link, so that not even a link that appears meanwhile is followed. Only
plain files that have one name are read. A file is written beside its place and moved there: it is
whole, or it is the old one.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from relax_agent.errors import ConfigError, ToolError, ToolErrorKind
from relax_agent.files import NO_ROOM

_MAX_PATH = 512
_MAX_NAME_BYTES = 200
_ROOT = ("", ".", "./", "/")
"""How a model may name the whole folder."""
_PART = ".part-"
"""How the names of files begin that are being written."""


@dataclass(frozen=True, slots=True)
class FileLimits:
    """What a session's folder may hold, and what one call may give back."""

    max_file_bytes: int = 1 << 20
    max_total_bytes: int = 16 << 20
    """Size of all files together."""
    max_entries: int = 1000
    """Files and folders."""
    max_depth: int = 12
    """Folders within folders."""
    max_shown_chars: int = 20_000
    """Characters of one result; longer files are read in pieces."""
    max_matches: int = 50
    """Lines that a search shows."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")


class Entry(NamedTuple):
    """A file or a folder."""

    path: str
    """With a ``/`` at the end for a folder."""
    size: int


class RootedFolder:
    """A folder and what may be done in it."""

    def __init__(self, path: Path, limits: FileLimits) -> None:
        self.path = path
        self.limits = limits

    def entries(self, folder: str = "") -> list[Entry]:
        """Return everything below a folder, in order; links and special files are left out."""
        names = [] if folder.strip() in _ROOT else self._names(folder)
        prefix = "".join(f"{name}/" for name in names)
        with self._opened(names, folder) as place:
            return list(self._walk(place, prefix))

    def exists(self, path: str) -> bool:
        """Tell whether there is such a file."""
        try:
            self.read(path)
        except ToolError as error:
            if error.kind is ToolErrorKind.NOT_FOUND:
                return False
            raise
        return True

    def delete(self, path: str) -> None:
        """Delete a file, a link or an empty folder."""
        *folders, name = self._names(path)
        with self._opened(folders, path) as place, self._failures(path):
            status = os.stat(name, dir_fd=place, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                os.rmdir(name, dir_fd=place)
            else:
                os.unlink(name, dir_fd=place)

    def read(self, path: str) -> bytes:
        """Return what a plain file holds."""
        *folders, name = self._names(path)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe may not block
        with self._opened(folders, path) as place, self._failures(path):
            descriptor = os.open(name, flags, dir_fd=place)
        try:
            _require_plain(os.fstat(descriptor), path)
            with self._failures(path), os.fdopen(descriptor, "rb", closefd=False) as file:
                data = file.read(self.limits.max_file_bytes + 1)
        finally:
            os.close(descriptor)
        if len(data) > self.limits.max_file_bytes:
            raise self._too_large(path)
        return data

    def write(self, path: str, data: bytes) -> None:
        """Write a file; folders on the way are made, an older file is replaced."""
        if len(data) > self.limits.max_file_bytes:
            raise self._too_large(path)
        *folders, name = self._names(path)
        self._check_room(path, len(data))
        part = f"{_PART}{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._opened(folders, path, make=True) as place, self._failures(path):
            try:
                with os.fdopen(os.open(part, flags, 0o600, dir_fd=place), "wb") as file:
                    file.write(data)
                os.replace(part, name, src_dir_fd=place, dst_dir_fd=place)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(part, dir_fd=place)
                raise

    def _names(self, path: str) -> list[str]:
        """Return the names on a path, or raise ToolError if it is none of this folder."""
        if not path or len(path) > _MAX_PATH or "\0" in path or "\\" in path:
            raise _wrong(f"{path[:60]!r} is no path; write names with '/' between them")
        try:
            path.encode()
        except UnicodeError:
            raise _wrong("the path is not valid Unicode") from None
        names = [name for name in path.split("/") if name not in ("", ".")]
        if path.startswith(("/", "~")) or ".." in names or not names:
            raise ToolError(
                f"{path[:60]!r} leads out of your folder; write a path inside it, such as 'a.txt'",
                kind=ToolErrorKind.DENIED,
            )
        if len(names) > self.limits.max_depth:
            raise _wrong(f"more than {self.limits.max_depth} folders within each other")
        for name in names:
            if len(name.encode()) > _MAX_NAME_BYTES or name.startswith(_PART):
                raise _wrong(f"a file cannot be called {name[:60]!r}")
        return names

    @contextlib.contextmanager
    def _opened(self, names: list[str], path: str, *, make: bool = False) -> Iterator[int]:
        """Open a folder below the root, each on the way by itself; yields its descriptor."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.ExitStack() as stack, self._failures(path):
            place = os.open(self.path, flags)
            stack.callback(os.close, place)
            for name in names:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=place)
                place = os.open(name, flags, dir_fd=place)
                stack.callback(os.close, place)
            inner = stack.pop_all()
        with inner:
            yield place

    @contextlib.contextmanager
    def _failures(self, path: str) -> Iterator[None]:
        """Say in words what the system could not do."""
        try:
            yield
        except OSError as error:
            raise self._told(error, path) from error

    def _told(self, error: OSError, path: str) -> ToolError:
        shown = path[:60]
        if error.errno == errno.ENOENT:
            return ToolError(self._unknown(shown), kind=ToolErrorKind.NOT_FOUND)
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            words = f"{shown!r}: a part of this path is not a folder, or a link"
            return ToolError(words, kind=ToolErrorKind.DENIED)
        if error.errno in (errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST):
            return _wrong(f"{shown!r} is a folder" + " with files" * (error.errno != errno.EISDIR))
        if error.errno in NO_ROOM:
            return ToolError("the disk is full", kind=ToolErrorKind.UNAVAILABLE)
        reason = (error.strerror or "an error of the system").lower()
        return ToolError(f"{shown!r}: {reason}", kind=ToolErrorKind.DENIED)

    def _unknown(self, path: str) -> str:
        with contextlib.suppress(ToolError, OSError):
            known = [entry.path.rstrip("/") for entry in self.entries()]
            near = difflib.get_close_matches(path, known, n=1)
            if near:
                return f"there is no {path!r}; did you mean {near[0]!r}?"
        return f"there is no {path!r}; list_files shows what there is"

    def _walk(self, place: int, prefix: str) -> Iterator[Entry]:
        """Yield everything below an open folder, in order; links and special files are left out."""
        with os.scandir(place) as found:
            entries = sorted(found, key=lambda each: each.name)
        for each in entries:
            if each.name.startswith(_PART):
                continue
            path = prefix + each.name
            if each.is_file(follow_symlinks=False):
                yield Entry(path, each.stat(follow_symlinks=False).st_size)
            elif each.is_dir(follow_symlinks=False):
                yield Entry(f"{path}/", 0)
                if path.count("/") < 2 * self.limits.max_depth:  # others may have dug deeper
                    with contextlib.suppress(ToolError), self._opened(path.split("/"), path) as i:
                        yield from self._walk(i, f"{path}/")

    def _check_room(self, path: str, size: int) -> None:
        names = self._names(path)
        sizes = {entry.path: entry.size for entry in self.entries()}
        sizes |= {f"{'/'.join(names[:n])}/": 0 for n in range(1, len(names))}
        sizes["/".join(names)] = size
        limits, total = self.limits, sum(sizes.values())
        if len(sizes) > limits.max_entries or total > limits.max_total_bytes:
            raise ToolError(
                f"the folder would hold {len(sizes):,} files and folders with {total:,} bytes; at"
                f" most {limits.max_entries:,} with {limits.max_total_bytes:,}: delete some",
                kind=ToolErrorKind.TOO_LARGE,
            )

    def _too_large(self, path: str) -> ToolError:
        words = f"{path[:60]!r} has more than {self.limits.max_file_bytes:,} bytes"
        return ToolError(f"{words}; use several files", kind=ToolErrorKind.TOO_LARGE)


def _require_plain(status: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise _wrong(f"{path!r} is a folder; list_files shows what is in it")
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        raise ToolError(f"{path!r} is not a plain file", kind=ToolErrorKind.DENIED)


def _wrong(message: str) -> ToolError:
    return ToolError(message, kind=ToolErrorKind.INVALID_ARGUMENTS)

"""``FileTools``: a folder of the session's own, in which a model may read, write, list and search.

    env = MyEnv(tools=[FileTools])                                     # empty at first
    env = MyEnv(tools=[partial(FileTools, {"notes.md": "# Notes"})])   # or with files

Each session has a new folder, readable by its user alone, which is deleted with the session. What
a process that was killed left behind is deleted by the next one that makes such a folder.

No path leads out of it, and its size is limited: :mod:`relax_agent.tools.rooted`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from relax_agent.errors import ToolError, ToolErrorKind
from relax_agent.tools.declaration import tool
from relax_agent.tools.rooted import FileLimits, RootedFolder
from relax_agent.tools.temporary import delete_folder, new_folder
from relax_agent.tools.toolset import Toolset

__all__ = ["FileLimits", "FileTools"]


class FileTools:
    """One folder with the tools that belong to it; a session class."""

    def __init__(
        self,
        files: Mapping[str, str | bytes] | None = None,
        *,
        limits: FileLimits | None = None,
    ) -> None:
        """Make nothing yet: :meth:`open` does.

        Args:
            files: What the folder holds at first, by path.
            limits: Sizes.
        """
        self.limits = limits or FileLimits()
        self._files = dict(files or {})
        self._rooted: RootedFolder | None = None
        self._writing = threading.Lock()

    # -- the folder ------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """Where the files are, for a program: to bring more, or to look at what was written."""
        return self._root.path

    @property
    def _root(self) -> RootedFolder:
        if self._rooted is None:
            raise ToolError("the folder is closed", kind=ToolErrorKind.UNAVAILABLE)
        return self._rooted

    def open(self) -> None:
        """Make the folder with its first files; does nothing if that is done.

        Raises:
            ToolError: A first file has an impossible path or is too large.
        """
        if self._rooted is not None:
            return
        self._rooted = RootedFolder(new_folder("files"), self.limits)
        try:
            for path, content in self._files.items():
                data = content.encode() if isinstance(content, str) else bytes(content)
                self._root.write(path, data)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Delete the folder and all that is in it. May be called twice.

        Raises:
            OSError: Something could not be deleted.
        """
        rooted, self._rooted = self._rooted, None
        if rooted is not None:
            delete_folder(rooted.path)

    def toolset(self) -> Toolset:
        """Return the tools of this one folder, for an environment that opens and closes it."""
        return Toolset(
            [self.read_file, self.write_file, self.list_files, self.search_files, self.delete_file]
        )

    def __enter__(self) -> FileTools:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- tools -----------------------------------------------------------------------------------

    @tool(idempotent=True)
    def read_file(
        self, path: str, first_line: Annotated[int, Field(ge=1)] = 1, lines: int | None = None
    ) -> str:
        """Read a text file.

        Args:
            path: Its path, such as "notes/today.md".
            first_line: Where to begin.
            lines: How many lines; by default as many as fit.
        """
        if lines is not None and lines < 1:
            raise _wrong(f"lines must be at least 1, not {lines}")
        text = _text(self._root.read(path), path)
        every = text.splitlines(keepends=True)
        if first_line > max(1, len(every)):
            raise _wrong(f"{path} has {len(every)} lines; there is no line {first_line}")
        wanted = every[first_line - 1 :][:lines]
        shown = "".join(wanted)[: self.limits.max_shown_chars]
        if first_line == 1 and shown == text:
            return text or f"({path} is empty)"
        last = first_line + max(0, len(shown.splitlines()) - 1)
        cut = "; the last one is cut off" if len(shown) < len("".join(wanted)) else ""
        return f"{shown.rstrip()}\n\n(lines {first_line} to {last} of {len(every)}{cut})"

    @tool
    def write_file(self, path: str, text: str, append: bool = False) -> str:
        """Write a text file. Folders on the way are made; an older file is replaced.

        Args:
            path: Its path, such as "notes/today.md".
            text: All that the file shall hold.
            append: Add the text to the end of the file instead.
        """
        data = text.encode("utf-8", "replace")
        with self._writing:
            if append and self._root.exists(path):
                data = self._root.read(path) + data
            self._root.write(path, data)
        return f"{path} has {len(data):,} bytes now."

    @tool(idempotent=True)
    def list_files(self, folder: str = "") -> str:
        """List files and folders with their sizes, folders in folders too.

        Args:
            folder: Where to begin; by default everything.
        """
        entries = self._root.entries(folder)
        if not entries:
            return f"({folder.strip('./ ') or 'the folder'} is empty)"
        lines = [e.path if e.path.endswith("/") else f"{e.path} ({e.size:,} bytes)"
                 for e in entries]  # fmt: skip
        return _fitting(lines, self.limits.max_shown_chars)

    @tool(idempotent=True)
    def search_files(self, text: str, folder: str = "", ignore_case: bool = True) -> str:
        """Find the lines that hold a text, in all text files.

        Args:
            text: What to look for, as it stands there (no pattern).
            folder: Where to look; by default everywhere.
            ignore_case: Whether "Owl" finds "owl".
        """
        if not text.strip() or len(text) > 1000:
            raise _wrong("text must be a few words: not empty, at most 1,000 characters")
        wanted = text.casefold() if ignore_case else text
        found: list[str] = []
        for path, _ in self._root.entries(folder):
            if path.endswith("/"):
                continue
            with contextlib.suppress(ToolError):  # no text, or gone meanwhile
                found += self._matches(path, wanted, ignore_case)
            if len(found) > self.limits.max_matches:
                more = f"({self.limits.max_matches} lines are shown, there are more)"
                found = [*found[: self.limits.max_matches], more]
                break
        return _fitting(found, self.limits.max_shown_chars) or "Nothing was found."

    @tool
    def delete_file(self, path: str) -> str:
        """Delete a file, or a folder that is empty.

        Args:
            path: Its path.
        """
        self._root.delete(path)
        return f"{path} is deleted."

    def _matches(self, path: str, wanted: str, ignore_case: bool) -> Iterator[str]:
        for number, line in enumerate(_text(self._root.read(path), path).splitlines(), 1):
            if wanted in (line.casefold() if ignore_case else line):
                yield f"{path}:{number}: {line.strip()[:200]}"


def _text(data: bytes, path: str) -> str:
    if b"\0" in data[:8192]:
        raise _wrong(f"{path!r} is no text file")
    return data.decode("utf-8", "replace")


def _fitting(lines: list[str], limit: int) -> str:
    """Join lines as long as they fit, and say what is missing."""
    size = 0
    for number, line in enumerate(lines):
        size += len(line) + 1
        if size > limit:
            return "\n".join([*lines[:number], f"({len(lines) - number} more are not shown)"])
    return "\n".join(lines)


def _wrong(message: str) -> ToolError:
    return ToolError(message, kind=ToolErrorKind.INVALID_ARGUMENTS)

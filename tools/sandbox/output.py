"""Standard output of a sandbox, read while the code runs and kept within bounds.

The parent reads the pipes itself, so what was printed before a time-out or a crash is not lost, and
nothing that the code writes can grow anything: the first and the last part are kept, the middle is
counted. More than the flood limit ends the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

_CHUNK = 1 << 16
_DRAIN = 1 << 21
"""Bytes taken at the end of a call at most: twice what a pipe can hold."""


class Capture:
    """One pipe. Bound to an event loop only while a call runs."""

    def __init__(self, limit_chars: int, flood_bytes: int) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self._half = 2 * limit_chars  # bytes: half of the characters, up to 4 bytes each
        self._limit = limit_chars
        self._flood = flood_bytes
        self._on_flood: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._head, self._tail, self._size = bytearray(), bytearray(), 0

    def close_writer(self) -> None:
        """Let go of the end that the child has inherited."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def close(self) -> None:
        """Close the pipe. May be called twice."""
        self.detach()
        self.close_writer()
        if self.reader >= 0:
            os.close(self.reader)
            self.reader = -1

    def attach(self, on_flood: Callable[[], None]) -> None:
        """Begin a call: forget what was read, and read in the running loop from now on."""
        self._head, self._tail, self._size = bytearray(), bytearray(), 0
        self._on_flood = on_flood
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.reader, self._read)

    def detach(self) -> None:
        """Stop reading."""
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self.reader)

    def finish(self) -> str:
        """End a call: take what is still in the pipe and return the text."""
        self.detach()
        most = self._size + _DRAIN
        while self.reader >= 0 and self._size < most and self._take() > 0:
            pass
        return self._text()

    def _read(self) -> None:
        if self._take() == 0:
            self.detach()

    def _take(self) -> int:
        """Read once; return how much came, 0 at the end, -1 if there is nothing now."""
        try:
            data = os.read(self.reader, _CHUNK)
        except BlockingIOError:
            return -1
        except OSError:
            return 0
        self._keep(data)
        if self._size > self._flood and self._on_flood is not None:
            call, self._on_flood = self._on_flood, None
            call()
        return len(data)

    def _keep(self, data: bytes) -> None:
        self._size += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._half:
            del self._tail[: -self._half]

    def _text(self) -> str:
        if self._size == len(self._head) + len(self._tail):
            return shortened(bytes(self._head + self._tail).decode("utf-8", "replace"), self._limit)
        half = self._limit // 2
        head = self._head.decode("utf-8", "ignore")[:half]
        tail = self._tail.decode("utf-8", "ignore")[-half:]
        left = self._size - len(head.encode()) - len(tail.encode())
        return f"{head}\n[… {left:,} bytes left out …]\n{tail}"


def shortened(text: str, limit: int) -> str:
    """Return the text, or its beginning and its end if it is longer than ``limit`` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:]}"


def close_quietly(fd: int) -> None:
    """Close a descriptor that may be closed already."""
    with contextlib.suppress(OSError):
        os.close(fd)

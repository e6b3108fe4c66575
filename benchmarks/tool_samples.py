"""The tools that are measured: ``add``, and a session that holds what can leak."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import tempfile

from relax_agent import tool

FOLDER = "BENCHMARK_FOLDER"
"""The variable that names the folder in which sessions make theirs."""


@tool
async def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


class Holder:
    """A session with a folder, a socket pair and, one in eight, a process."""

    _made = 0

    def __init__(self) -> None:
        Holder._made += 1
        self._with_process = Holder._made % 8 == 0
        self._count = 0
        self._folder = ""
        self._sockets: tuple[socket.socket, ...] = ()
        self._process: asyncio.subprocess.Process | None = None

    async def open(self) -> None:
        """Take everything."""
        self._folder = tempfile.mkdtemp(dir=os.environ.get(FOLDER))
        self._sockets = socket.socketpair()
        if self._with_process:
            self._process = await asyncio.create_subprocess_exec(
                "sleep", "3600", stdin=subprocess.DEVNULL
            )

    async def close(self) -> None:
        """Give everything back."""
        for each in self._sockets:
            each.close()
        if self._folder:
            shutil.rmtree(self._folder)
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    @tool(timeout=60)
    async def count(self, by: int = 1) -> int:
        """Count on.

        Args:
            by: How far.
        """
        self._count += by
        return self._count

"""A child process with a thread that keeps it: no output, no zombie and no stray is left behind.

The daemon thread keeps the end of the child's output (a pipe that nobody drains would stop the
child, a file would grow), sees the child end, kills what it started and left behind, reaps it, and
tells whoever asked to be told. The process id stays taken until then, so that no signal can reach
a stranger. :mod:`relax_agent.links` puts a request socket on top.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import select
import signal
import subprocess
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from relax_agent import guardian
from relax_agent.errors import ConfigError
from relax_agent.processes import _GUARDIAN, child_environment

_TAIL_BYTES = 64 << 10
_POLL_MS = 100
"""How often to look for a child's end where the system cannot tell of it."""


class KeptChild:
    """The process, and the daemon thread that keeps its output and sees it end."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: Path | str | None,
        pass_fds: Sequence[int],
        on_output: Callable[[bytes], object] | None = None,
    ) -> None:
        self.name = name
        self._on_output = on_output
        self.on_end: Callable[[], None] | None = None
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.ended.set_running_or_notify_cancel()  # so that nobody who waits can cancel it
        self._output = bytearray()
        self._token = uuid.uuid4().hex
        self._signals = threading.Lock()
        self._exited = False
        self._owner = os.getpid()
        _GUARDIAN.watch(self._token)
        try:
            self._process = self._popen(argv, env, cwd, pass_fds)
        except BaseException:
            _GUARDIAN.forget_blocking(self._token)
            raise
        self.pid = self._process.pid
        _GUARDIAN.watch(self._token, self.pid)
        self._thread = threading.Thread(target=self._keep, name=f"relax-keep-{name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._end()
            raise

    def _popen(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: Path | str | None,
        pass_fds: Sequence[int],
    ) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=child_environment(env, self._token),
                cwd=cwd,
                pass_fds=tuple(pass_fds),
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise ConfigError(
                f"{self.name}: cannot start {argv[0]}: {error.strerror or error}",
                hint="check the program's path and that its file may be executed",
            ) from error

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -N if signal N ended it."""
        return self._process.returncode

    @property
    def is_ours(self) -> bool:
        """Whether this process started it; a fork takes the object along, but not the child."""
        return os.getpid() == self._owner

    def kill(self) -> None:
        """Send SIGKILL to the process group; what left the group is found by the thread."""
        if not self.is_ours:
            return
        with self._signals:
            if not self._exited:  # the id stays taken until the thread has reaped the process
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)

    async def wait(self, limit_s: float) -> bool:
        """Wait for the end, strays included; return whether it came."""
        if not self.ended.done():
            await asyncio.wait({asyncio.wrap_future(self.ended)}, timeout=limit_s)
        return self.ended.done()

    def tail(self, count: int) -> list[str]:
        """Return the last lines of its output that are not blank."""
        text = bytes(self._output[-_TAIL_BYTES:]).decode("utf-8", "replace")
        lines = [line.rstrip() for line in text.splitlines() if line.strip()]
        return lines[-count:] if count else []

    def last_words(self) -> str:
        """Return what its output ends with, for a message."""
        last = self.tail(1)
        return f"its last line was {last[0][:300]!r}" if last else "it said nothing"

    # -- the thread ---------------------------------------------------------------------------

    def _keep(self) -> None:
        try:
            self._drain_until_exit()
        finally:
            self._end()

    def _end(self) -> None:
        """Kill what is left, reap, and tell."""
        with contextlib.suppress(OSError):
            guardian.send(signal.SIGKILL, self.pid, self._token)
        with self._signals:
            self._exited = True
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self.ended.set_result(None)
        tell = self.on_end
        if tell is not None:
            tell()
        _GUARDIAN.forget_blocking(self._token)

    def _drain_until_exit(self) -> None:
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        os.set_blocking(output, False)
        exit_fd = _pidfd(self.pid)
        poll = select.poll()
        poll.register(output, select.POLLIN)
        if exit_fd is not None:
            poll.register(exit_fd, select.POLLIN)
        try:
            while not self._has_exited():
                ready = {fd for fd, _ in poll.poll(None if exit_fd is not None else _POLL_MS)}
                if output in ready and not self._drain(output):
                    poll.unregister(output)
            self._drain(output, most=_TAIL_BYTES)
        finally:
            if exit_fd is not None:
                os.close(exit_fd)

    def _has_exited(self) -> bool:
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT  # it stays a zombie, and its id ours
        return os.waitid(os.P_PID, self.pid, options) is not None

    def _drain(self, output: int, most: int = 1) -> bool:
        """Take what was written, up to about ``most`` bytes; return whether more may come."""
        while most > 0:
            try:
                data = os.read(output, _TAIL_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            most -= len(data)
            self._output += data
            if self._on_output is not None:
                with contextlib.suppress(Exception):  # the child must not stop for it
                    self._on_output(data)
            if len(self._output) > 2 * _TAIL_BYTES:
                del self._output[:-_TAIL_BYTES]
        return True


def _pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends; None where there is none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None

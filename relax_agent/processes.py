"""Child processes that never outlive their parent, and whose death is never overlooked.

A :class:`ChildProcess` runs in a session (and so a process group) of its own, writes to a log file
and is ended as a whole: SIGTERM, a time of grace, SIGKILL, and not only to the child but to all
that it started. :mod:`relax_agent.guardian` does the same when the parent was killed with SIGKILL
and cannot.

:func:`supervise` is the structured form for a run with several children::

    async with supervise(run_folder / "logs") as children:
        engine = await children.start("engine-0", argv)
        ...

A child that ends by itself cancels the body of the block, and the block raises
:class:`~relax_agent.errors.ChildDied` with the exit code and the last line of the log. However the
block is left (normally, by an error, by Ctrl-C), no process is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from relax_agent import guardian
from relax_agent.errors import ChildDied, ConfigError, RunFailed, StorageError

_POLL_S = 0.02
_KILL_LIMIT_S = 10.0
_SETTLE_S = 0.5
_TAIL_BYTES = 65536


class _GuardianLink:
    """This process's end of its guardian, which lives from the first child to the last."""

    def __init__(self) -> None:
        self._children: dict[str, int] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def watch(self, token: str, group: int = 0) -> None:
        """Name a child before it starts, and again with its group once it runs."""
        with self._lock:
            self._children[token] = group
            try:
                self._tell(token, group)
            except OSError:  # somebody ended the guardian: the next one hears of all children
                self._process = None
                self._tell(token, group)

    async def forget(self, token: str) -> None:
        """Strike a child off the list; the guardian ends with the last one."""
        process = self._strike(token)
        if process is not None:
            await asyncio.to_thread(process.wait, _KILL_LIMIT_S)

    def forget_blocking(self, token: str) -> None:
        """Do the same where no event loop runs: in the thread that keeps a linked process."""
        process = self._strike(token)
        if process is not None:
            process.wait(_KILL_LIMIT_S)

    def _strike(self, token: str) -> subprocess.Popen[bytes] | None:
        """Return the guardian if that was the last child: told to end, and to be waited for."""
        with self._lock:
            if self._children.pop(token, None) is None or self._process is None:
                return None
            with contextlib.suppress(OSError):
                self._tell(token, -1)
            if self._children:
                return None
            process, self._process = self._process, None
        assert process.stdin is not None
        process.stdin.close()
        return process

    def begin_anew(self) -> None:
        """Have no children: in a process that was forked off, whose parent keeps them.

        A copy of the pipe that stayed open here would hide the parent's end from the guardian.
        """
        process, self._process = self._process, None
        self._children, self._lock = {}, threading.Lock()
        if process is not None and process.stdin is not None:
            process.stdin.close()

    def _tell(self, token: str, group: int) -> None:
        lines = {token: group}
        if self._process is None:
            lines |= self._children
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", guardian.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                bufsize=0,
            )
        assert self._process.stdin is not None
        message = "".join(f"{each} {lines[each]}\n" for each in lines)
        self._process.stdin.write(message.encode())


_GUARDIAN = _GuardianLink()
"""Of this process; :mod:`relax_agent.links` names its children to it as well."""
os.register_at_fork(after_in_child=_GUARDIAN.begin_anew)


class ChildProcess:
    """One child with everything it starts. Made by :meth:`start`, ended by :meth:`terminate`."""

    def __init__(
        self, name: str, log: Path, token: str, process: asyncio.subprocess.Process
    ) -> None:
        self.name = name
        self.log = log
        """The file with its standard output and error."""
        self._token = token
        self._process = process
        self._ending = asyncio.Lock()
        self._gone = False

    @classmethod
    async def start(
        cls,
        name: str,
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        pass_fds: Sequence[int] = (),
    ) -> ChildProcess:
        """Start a child.

        Args:
            name: What messages call it.
            argv: The program and its arguments.
            log: Where its output goes; appended to, folders are made.
            env: Variables on top of this process's own.
            cwd: Its working directory.
            pass_fds: File descriptors that it inherits under the same numbers.

        Raises:
            ConfigError: The program cannot be started.
            StorageError: The log cannot be written.
        """
        token = uuid.uuid4().hex
        with _open_log(log) as output:
            _GUARDIAN.watch(token)
            try:
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=child_environment(env, token),
                    cwd=cwd,
                    pass_fds=tuple(pass_fds),
                    start_new_session=True,
                )
            except BaseException as error:
                await _GUARDIAN.forget(token)
                if isinstance(error, OSError):
                    raise ConfigError(
                        f"{name}: cannot start {argv[0]}: {error.strerror or error}",
                        hint="check the program's path and that its file may be executed",
                    ) from error
                raise
        _GUARDIAN.watch(token, process.pid)
        return cls(name, log, token, process)

    @property
    def pid(self) -> int:
        """Its process id, which is also the id of its process group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -N if signal N ended it."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for its end and return the exit code. What it started may still run."""
        return await self._process.wait()

    async def terminate(self, grace_s: float = 5.0) -> int:
        """End it and all that it started, and return the exit code. A second call does nothing.

        Cancelling this kills at once.

        Args:
            grace_s: Seconds between SIGTERM and SIGKILL.

        Raises:
            RunFailed: A process survived SIGKILL (it hangs inside the kernel).
        """
        async with self._ending:
            if not self._gone:
                try:
                    await self._end(grace_s)
                except BaseException:
                    guardian.send(signal.SIGKILL, self.pid, self._token)
                    raise
                self._gone = True
                await _GUARDIAN.forget(self._token)
        return await self.wait()

    def tail(self, count: int = 20) -> list[str]:
        """Return the last lines of its log that are not blank."""
        try:
            with self.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return []
        lines = [line.rstrip() for line in text.splitlines() if line.strip()]
        return lines[len(lines) - min(count, len(lines)) :]

    def death(self) -> ChildDied:
        """Return the error that tells of its end."""
        last = self.tail(50)
        told = [line for line in last if line.startswith("error:")]  # warnings may follow it
        said = f"its last line was {(told or last)[-1][:300]!r}; " if last else "it said nothing; "
        return ChildDied(self.name, self.exit_code, hint=f"{said}see {self.log}")

    async def _end(self, grace_s: float) -> None:
        await asyncio.to_thread(guardian.send, signal.SIGTERM, self.pid, self._token)
        if not await self._all_gone_within(grace_s):
            await asyncio.to_thread(guardian.send, signal.SIGKILL, self.pid, self._token)
            if not await self._all_gone_within(_KILL_LIMIT_S, kill=True):
                left = sorted(guardian.members(self.pid, self._token))
                raise RunFailed(
                    f"{self.name}: processes {left} survive SIGKILL",
                    hint="they hang inside the kernel; look at them with ps",
                )
        await self.wait()

    async def _all_gone_within(self, limit_s: float, *, kill: bool = False) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        while await asyncio.to_thread(guardian.members, self.pid, self._token):
            if loop.time() >= deadline:
                return False
            if kill:  # again: it may have forked between the look and the signal
                guardian.send(signal.SIGKILL, self.pid, self._token)
            await asyncio.sleep(_POLL_S)
        return True


class Supervisor:
    """The children of one run. Made by :func:`supervise`."""

    def __init__(self, logs: Path, grace_s: float, tasks: asyncio.TaskGroup) -> None:
        self._logs = logs
        self._grace_s = grace_s
        self._tasks = tasks
        self._children: dict[str, ChildProcess] = {}
        self._expected: set[ChildProcess] = set()

    @property
    def children(self) -> tuple[ChildProcess, ...]:
        """All children that were started and not stopped."""
        return tuple(self._children.values())

    async def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        pass_fds: Sequence[int] = (),
    ) -> ChildProcess:
        """Start a child that must not end by itself; its log is ``<logs>/<name>.log``.

        Raises:
            ConfigError: The program cannot be started, or the name is taken.
            StorageError: The log cannot be written.
        """
        if name in self._children:
            raise ConfigError(f"there is already a child named {name}")
        log = self._logs / f"{name}.log"
        child = await ChildProcess.start(name, argv, log=log, env=env, cwd=cwd, pass_fds=pass_fds)
        self._children[name] = child
        self._tasks.create_task(self._watch(child), name=f"watch {name}")
        return child

    def expect_exit(self, child: ChildProcess) -> None:
        """Let a child end by itself from now on, as after it was told to close."""
        self._expected.add(child)

    async def stop(self, child: ChildProcess, grace_s: float | None = None) -> int:
        """End a child with all that it started and return its exit code."""
        self.expect_exit(child)
        code = await child.terminate(self._grace_s if grace_s is None else grace_s)
        if self._children.get(child.name) is child:
            del self._children[child.name]
        return code

    async def stop_all(self) -> None:
        """End all children at the same time."""
        self._expected.update(self._children.values())
        async with asyncio.TaskGroup() as group:
            for child in self.children:
                group.create_task(self.stop(child))

    async def _close(self) -> None:
        try:
            await self.stop_all()
        except asyncio.CancelledError:  # which has killed them all: see each of them end
            await self.stop_all()
            raise

    async def _watch(self, child: ChildProcess) -> None:
        await child.wait()
        if child not in self._expected:
            raise child.death()

    async def _settle(self) -> None:
        """Give the death of a child, the likely cause of an error, the time to be noticed."""
        waiting = [asyncio.ensure_future(child.wait()) for child in self.children]
        if waiting:
            _, pending = await asyncio.wait(
                waiting, timeout=_SETTLE_S, return_when=asyncio.FIRST_COMPLETED
            )
            for task in pending:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


@contextlib.asynccontextmanager
async def supervise(logs: Path, *, grace_s: float = 5.0) -> AsyncIterator[Supervisor]:
    """Run children for the length of a block; see the module's docstring.

    Args:
        logs: The folder for the children's logs.
        grace_s: Seconds between SIGTERM and SIGKILL.

    Raises:
        ChildDied: A child ended by itself. If the body failed as well, its error is the cause.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            supervisor = Supervisor(logs, grace_s, tasks)
            try:
                yield supervisor
            except Exception:
                with contextlib.suppress(asyncio.CancelledError):  # the sign of such a death
                    await supervisor._settle()
                raise
            finally:
                await supervisor._close()
    except BaseExceptionGroup as group:
        _raise_root(group)


def _raise_root(group: BaseExceptionGroup[BaseException]) -> None:
    deaths, others = group.split(ChildDied)
    if deaths is not None:
        death: BaseException = deaths
        while isinstance(death, BaseExceptionGroup):
            death = death.exceptions[0]
        raise death from (others.exceptions[0] if others is not None else None)
    if len(group.exceptions) == 1:
        error = group.exceptions[0]
        raise error from error.__cause__  # without the group, which says nothing more
    raise group


def _open_log(log: Path) -> BinaryIO:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("ab", buffering=0)
    except OSError as error:
        raise StorageError(f"cannot write the log {log}: {error.strerror}") from error


def child_environment(extra: Mapping[str, str] | None, token: str) -> dict[str, str]:
    """Return this process's variables, those on top, and the token that finds descendants."""
    outer = os.environ.get(guardian.COOKIE)
    cookie = f"{outer}/{token}" if outer else token
    return {**os.environ, **(extra or {}), guardian.COOKIE: cookie}

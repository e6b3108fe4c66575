"""A session: one interpreter at a time, in which variables stay from call to call.

Whatever code does, a call returns a result within its time limit, and the next call works. Where
the interpreter had to be ended, the next call finds a new one and the result says so.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable

from relax_agent.closing import Closing
from relax_agent.errors import ToolError, ToolErrorKind
from relax_agent.tools.sandbox.interpreter import Garbage, Gone, Interpreter, Reply
from relax_agent.tools.sandbox.limits import Limits
from relax_agent.tools.sandbox.pool import SandboxPool
from relax_agent.tools.sandbox.result import ExecutionError, ExecutionResult, read_reply

_MAX_CODE_CHARS = 1 << 20
_MAX_TIMEOUT_S = 3600.0
_LOST = "the interpreter was restarted, variables, imports and files are lost"
_SIGNALS = {
    signal.SIGSEGV: "it read or wrote memory that is not its own (SIGSEGV), as endless recursion "
    "in compiled code does",
    signal.SIGKILL: "it was killed (SIGKILL)",
    signal.SIGXCPU: "it used up its processor time",
    signal.SIGABRT: "it aborted (SIGABRT)",
    signal.SIGXFSZ: "a file grew too large",
    signal.SIGSYS: "it made a system call of another processor (SIGSYS)",
}


class SandboxSession(Closing):
    """One session of a sandbox; ``async with sandbox.session() as session`` makes it."""

    def __init__(self, pool: SandboxPool, limits: Limits) -> None:
        self._pool = pool
        self._limits = limits
        self._leave: Callable[[], None] | None = None
        self._interpreter: Interpreter | None = None
        self._busy = asyncio.Lock()
        self._closed = False

    async def run(self, code: str, *, timeout_s: float | None = None) -> ExecutionResult:
        """Execute Python code and return what it gave. Calls run one after the other.

        Only cancellation raises (and ends the interpreter); what goes wrong is in the result.

        Args:
            code: Any number of statements; the value of a last expression is shown.
            timeout_s: Seconds that it may take; the sandbox's limit by default.

        Raises:
            ToolError: The session is closed, or no interpreter can be started (``unavailable``).
        """
        if len(code) > _MAX_CODE_CHARS:
            return _refused(f"the code is longer than {_MAX_CODE_CHARS:,} characters")
        async with self._busy:
            return await self._run(code, self._seconds(timeout_s))

    async def read_file(self, path: str) -> bytes:
        """Return a file's bytes, as the code inside sees it: a link leads nowhere outside.

        Args:
            path: A path inside; relative ones begin at the home folder.

        Raises:
            ToolError: There is no such file (``not_found``), it is too large, or reading failed.
        """
        reply = await self._file({"do": "read", "path": path})
        if "problem" in reply.body or len(reply.blobs) != 1:
            kind = ToolErrorKind.NOT_FOUND
            if reply.body.get("too_large"):
                kind = ToolErrorKind.TOO_LARGE
            raise ToolError(f"{path}: {str(reply.body.get('problem'))[:200]}", kind=kind)
        return reply.blobs[0]

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file for the code inside.

        Args:
            path: A path inside; relative ones begin at the home folder.
            data: Its content.

        Raises:
            ToolError: It cannot be written there.
        """
        if len(data) > self._limits.disk_mb << 20:
            raise ToolError(f"{path}: does not fit the sandbox", kind=ToolErrorKind.TOO_LARGE)
        reply = await self._file({"do": "write", "path": path}, data)
        if "problem" in reply.body:
            problem = str(reply.body["problem"])[:200]
            raise ToolError(f"{path}: {problem}", kind=ToolErrorKind.DENIED)

    async def close(self) -> None:
        """End the interpreter and wait until nothing of it is left. May be called twice."""
        self._closed = True
        interpreter, self._interpreter = self._interpreter, None
        try:
            if interpreter is not None:
                await interpreter.close()
        finally:
            leave, self._leave = self._leave, None
            if leave is not None:
                leave()

    def _seconds(self, timeout_s: float | None) -> float:
        seconds = self._limits.timeout_s if timeout_s is None else timeout_s
        if not 0 < seconds <= _MAX_TIMEOUT_S:
            raise ToolError(
                f"timeout_s must lie between 0 and {_MAX_TIMEOUT_S:g}, not {seconds}",
                kind=ToolErrorKind.INVALID_ARGUMENTS,
            )
        return seconds

    async def _run(self, code: str, seconds: float) -> ExecutionResult:
        interpreter = await self._ready()
        started = time.perf_counter()
        request = {"do": "run", "code": code}
        most = self._limits.image_mb << 20
        reply, failure = await self._ask(interpreter, request, seconds, most=most)
        limit = self._limits.output_chars
        value, error, notes, images = read_reply(reply.body, reply.blobs, limit)
        stdout, stderr = interpreter.stdout.finish(), interpreter.stderr.finish()
        if failure is not None:
            await self._drop(interpreter)
        duration = time.perf_counter() - started
        return ExecutionResult(stdout, stderr, value, images, failure or error, notes, duration)

    async def _file(self, body: dict[str, str], data: bytes = b"") -> Reply:
        async with self._busy:
            interpreter = await self._ready()
            seconds, most = self._limits.timeout_s, self._limits.disk_mb << 20
            reply, failure = await self._ask(interpreter, body, seconds, data, most=most)
            interpreter.stdout.finish(), interpreter.stderr.finish()
            if failure is not None:
                await self._drop(interpreter)
                raise ToolError(f"{body['path']}: {failure.message}", kind=failure.kind)
            return reply

    async def _ready(self) -> Interpreter:
        if self._interpreter is not None and not self._interpreter.alive:
            await self._drop(self._interpreter)
        self._check_open()
        if self._interpreter is None:
            self._interpreter = await self._new()
        return self._interpreter

    async def _new(self) -> Interpreter:
        if self._leave is None:
            self._leave = await self._pool.enter()
        taken = await self._pool.take()
        if self._closed:  # meanwhile
            await taken.close()
            await self.close()
        self._check_open()
        return taken

    def _check_open(self) -> None:
        if self._closed:
            raise ToolError("the sandbox session is closed", kind=ToolErrorKind.UNAVAILABLE)

    async def _drop(self, interpreter: Interpreter) -> None:
        self._interpreter = None
        await interpreter.close()

    async def _ask(
        self,
        interpreter: Interpreter,
        body: dict[str, str],
        seconds: float,
        data: bytes = b"",
        *,
        most: int,
    ) -> tuple[Reply, ExecutionError | None]:
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await interpreter.ask(body, data, most=most), None
        except TimeoutError:
            failure = _failure(ToolErrorKind.TIMEOUT, f"timed out after {seconds:g} s")
        except Garbage as error:
            words = f"the interpreter's connection was disturbed ({error})"
            failure = _failure(ToolErrorKind.CRASHED, words)
        except Gone:
            failure = await self._told_end(interpreter)
        except BaseException:
            await self._drop(interpreter)
            raise
        return Reply({}, []), failure

    async def _told_end(self, interpreter: Interpreter) -> ExecutionError:
        if self._closed:
            return _failure(ToolErrorKind.UNAVAILABLE, "the session was closed meanwhile")
        if interpreter.verdict:
            return _failure(ToolErrorKind.TOO_LARGE, f"the code {interpreter.verdict}")
        code = await interpreter.exit_code()
        if interpreter.ran_out_of_memory:
            words = f"the code used more than {self._limits.memory_mb:,} MB of memory"
            return _failure(ToolErrorKind.TOO_LARGE, words)
        if code is None:
            return _failure(ToolErrorKind.CRASHED, "the code closed the interpreter's connection")
        number = -code if code < 0 else code - 128
        if number in _SIGNALS:
            return _failure(ToolErrorKind.CRASHED, f"the interpreter ended: {_SIGNALS[number]}")  # type: ignore[index]
        return _failure(ToolErrorKind.CRASHED, f"the interpreter ended with exit code {code}")


def _failure(kind: ToolErrorKind, what: str) -> ExecutionError:
    return ExecutionError(kind, f"{what}; {_LOST}", restarted=True)


def _refused(what: str) -> ExecutionResult:
    return ExecutionResult(error=ExecutionError(ToolErrorKind.TOO_LARGE, what))

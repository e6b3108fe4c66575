"""A child process that answers requests, and that can be killed while it answers.

Code that may hang or crash (an environment, a reward, somebody's program) runs in a process of its
own, at the other end of a socket pair that the child inherits. A frame is

    4 bytes: length of the header | header: JSON with "id", "body" and "blobs": [sizes] | the blobs

so plain data travels as JSON, bytes as they are, and nothing is ever unpickled. Requests carry a
number; several may be under way at once, and :func:`serve_link` answers each in a task of its own.

    link = LinkedProcess.start("rewards", [sys.executable, "-m", "my_package.worker"])
    reply, blobs = await link.request({"score": "1/2"})      # cancelling this kills the child

What the parent can rely on:

* Start-up is part of the time limit: :meth:`LinkedProcess.start` returns when the child says that
  it is ready.
* Whatever a child hangs in, cancellation, a time-out or :meth:`LinkedProcess.kill` ends it with
  all that it started.
* A death is noticed at once, also while other processes still hold the child's end of the socket,
  and becomes a :class:`~relax_agent.errors.ChildDied` with the exit code and the last line said.
* The link belongs to no event loop: start it before there is one, use it from one
  ``asyncio.run`` after the other (but from one at a time).

Each child has a daemon thread that keeps the end of its output, sees it end, kills what it left
behind and reaps it. So no zombie stays, even if nobody asks. When the parent dies, the child reads
end-of-file and ends; one that does not is ended by the guardian (:mod:`relax_agent.guardian`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import itertools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeAlias

from relax_agent import errors, guardian
from relax_agent.errors import ChildDied, ConfigError, RelaxError, ToolError, ToolErrorKind
from relax_agent.processes import _GUARDIAN, child_environment
from relax_agent.threads import THREADS

Header: TypeAlias = dict[str, Any]
Reply: TypeAlias = tuple[Header, list[bytes]]
Handler: TypeAlias = Callable[[Header, list[bytes]], Awaitable[tuple[Header, Sequence[bytes]]]]
Step: TypeAlias = Callable[[], Any]
"""Something to do once; may be a coroutine function."""

LINK_FD = "RELAX_AGENT_LINK"
"""The environment variable with the number of the child's socket. In ``argv``, ``{link_fd}``
stands for the same number, for a program that clears the environment on the way.
"""
MAX_HEADER_BYTES = 32 << 20
MAX_BLOB_BYTES = 1 << 30
"""Of all blobs of one frame together."""
_START_LIMIT_S = 60.0
_GRACE_S = 5.0
_KILL_LIMIT_S = 10.0
_TAIL_BYTES = 64 << 10
_CHUNK = 1 << 18
_POLL_MS = 100
"""How often to look for a child's end where the system cannot tell of it."""
_READY = 0
"""The number of the child's first word, which answers no request."""


class FrameError(RelaxError):
    """What came over a link is no frame, or a frame is too large."""


class LinkedProcess:
    """A child that answers requests; see the module's promises. Made by :meth:`start`."""

    def __init__(self, child: _Child, ours: socket.socket, failure: type[RelaxError]) -> None:
        self._child = child
        self._socket = ours
        self._failure = failure
        self._frames = Frames()
        self._numbers = itertools.count(_READY + 1)
        self._pending: dict[int, asyncio.Future[Reply]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unsent: list[memoryview] = []
        self._reason: str | None = None
        self.hello: Header = {}
        """What the child's ``setup`` returned."""

    # -- start --------------------------------------------------------------------------------

    @classmethod
    def start(
        cls,
        name: str,
        argv: Sequence[str],
        *,
        start_timeout_s: float = _START_LIMIT_S,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        pass_fds: Sequence[int] = (),
        failure: type[RelaxError] = RelaxError,
    ) -> LinkedProcess:
        """Start a child and block until it is ready; needs no event loop, and works beside one.

        Args:
            name: What messages call it.
            argv: The program, which calls :func:`serve_link`; may begin with a sandbox's own
                program. ``{link_fd}`` in it becomes the number of the child's socket.
            start_timeout_s: Seconds until it must be ready.
            env: Variables on top of this process's own.
            cwd: Its working directory.
            pass_fds: More file descriptors that it inherits under the same numbers.
            failure: What to raise for an error that is none of this project's own.

        Raises:
            ConfigError: The program cannot be started.
            ChildDied: It ended before it was ready.
            RelaxError: It took too long (``failure``), or its ``setup`` raised.
        """
        link = cls._spawn(name, argv, env, cwd, pass_fds, failure)
        try:
            link._read_hello(time.monotonic() + start_timeout_s, start_timeout_s)
        except BaseException:
            link.abandon()
            raise
        return link

    @classmethod
    async def start_async(
        cls,
        name: str,
        argv: Sequence[str],
        *,
        start_timeout_s: float = _START_LIMIT_S,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        pass_fds: Sequence[int] = (),
        failure: type[RelaxError] = RelaxError,
    ) -> LinkedProcess:
        """Do what :meth:`start` does without blocking the event loop. Cancelling kills the child."""
        link = await THREADS.run(partial(cls._spawn, name, argv, env, cwd, pass_fds, failure))
        try:
            link.hello, _ = await link._wait_for(_READY, b"", start_timeout_s, "not ready")
        except BaseException:
            link.abandon()
            raise
        return link

    @classmethod
    def _spawn(
        cls,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None,
        cwd: Path | str | None,
        pass_fds: Sequence[int],
        failure: type[RelaxError],
    ) -> LinkedProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            number = str(theirs.fileno())
            words = [word.replace("{link_fd}", number) for word in argv]
            variables = {"PYTHONUNBUFFERED": "1", **(env or {}), LINK_FD: number}
            try:
                child = _Child(name, words, variables, cwd, [theirs.fileno(), *pass_fds])
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        return cls(child, ours, failure)

    def _read_hello(self, deadline: float, limit_s: float) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                self.kill(words := f"not ready within {limit_s:g} s")
                raise self._failure(f"{self.name} was {words}", hint=self._child.last_words())
            # In slices: somebody else may hold the dead child's end open.
            poll.poll(1000 * min(left, 0.25))
            ended = self._child.ended.done()
            for header, _ in self._received():
                self.hello = _opened(header, self._failure)
                return
            if ended:
                raise self._death()

    # -- use ----------------------------------------------------------------------------------

    async def request(
        self, header: Header, blobs: Sequence[bytes] = (), *, timeout_s: float | None = None
    ) -> Reply:
        """Ask the child, and return its reply. If this is cancelled, the child is killed.

        Args:
            header: Plain JSON data.
            blobs: Bytes that travel as they are.
            timeout_s: Seconds until the child is killed and ``failure`` raised.

        Raises:
            FrameError: The request is too large or not JSON; nothing was sent.
            ChildDied: The child ended by itself, before or meanwhile.
            RelaxError: What the child's handler raised.
        """
        number = next(self._numbers)
        frame = pack({"id": number, "body": header}, blobs)
        return await self._wait_for(number, frame, timeout_s, "did not answer")

    async def _wait_for(
        self, number: int, frame: bytes, timeout_s: float | None, complaint: str
    ) -> Reply:
        future = self._expect(number)
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                if frame:
                    self._write(frame)
                return await future
        except asyncio.CancelledError:
            self.kill("it was killed, because a call was cancelled")
            raise
        except TimeoutError:
            if not limit.expired():
                raise
            words = f"{complaint} within {timeout_s:g} s"
            self.kill(f"it {words}, and was killed")
            raise self._failure(
                f"{self.name} {words}, and was killed", hint=self._child.last_words()
            ) from None
        finally:
            self._pending.pop(number, None)
            if not self._pending:
                self._detach()

    def _expect(self, number: int) -> asyncio.Future[Reply]:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._pending and self._loop is not None and not self._loop.is_closed():
                raise RelaxError(f"{self.name} is in use by another event loop")
            self._pending.clear()
            self._unsent.clear()
        if self._child.ended.done() or self._socket.fileno() < 0:
            raise self._death()
        future = self._pending[number] = loop.create_future()
        if self._loop is not loop:
            self._loop = loop
            loop.add_reader(self._socket, self._read)
            self._child.on_end = partial(self._tell_end, loop)
        if self._child.ended.done():  # between the look and the telling
            self._fail_all(self._death())
        return future

    def _detach(self) -> None:
        """Let go of the event loop: nothing waits, and a link may be used by the next one."""
        loop, self._loop = self._loop, None
        self._child.on_end = None
        if loop is not None and not loop.is_closed() and self._socket.fileno() >= 0:
            loop.remove_reader(self._socket)
            loop.remove_writer(self._socket)

    def _write(self, frame: bytes) -> None:
        if not self._unsent:
            try:
                sent = self._socket.send(frame)
            except BlockingIOError:
                sent = 0
            except OSError:  # the child's end is closed: its death is on the way
                return
            if sent == len(frame):
                return
            frame = memoryview(frame)[sent:]  # type: ignore[assignment]
            assert self._loop is not None
            self._loop.add_writer(self._socket, self._write_more)
        self._unsent.append(memoryview(frame))

    def _write_more(self) -> None:
        try:
            sent = self._socket.send(self._unsent[0][:_CHUNK])
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()
            sent = 0
        if self._unsent:
            self._unsent[0] = self._unsent[0][sent:]
            if not self._unsent[0]:
                del self._unsent[0]
        if not self._unsent and self._loop is not None:
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            frames = list(self._received())
            for header, blobs in frames:
                self._take(header, blobs)
        except FrameError as error:
            self.kill(f"it sent what is no frame ({error.message})")
            self._fail_all(self._failure(f"{self.name} sent what is no frame: {error.message}"))

    def _received(self) -> Iterator[tuple[Header, list[bytes]]]:
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            yield from self._frames.feed(data)
        elif self._loop is not None:  # end-of-file: the child's end is told by its thread
            self._loop.remove_reader(self._socket)

    def _take(self, header: Header, blobs: list[bytes]) -> None:
        future = self._pending.get(header["id"])
        if future is None or future.done():
            return
        try:
            future.set_result((_opened(header, self._failure), blobs))
        except RelaxError as error:
            future.set_exception(error)

    # -- end ----------------------------------------------------------------------------------

    def _tell_end(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the child's thread: pass its end on to whoever waits."""
        with contextlib.suppress(RuntimeError):  # that loop is closed
            loop.call_soon_threadsafe(self._on_end)

    def _on_end(self) -> None:
        while self._socket.fileno() >= 0 and _readable(self._socket):  # its last replies
            before = self._frames.taken
            self._read()
            if self._frames.taken == before:
                break
        self._fail_all(self._death())

    def _fail_all(self, error: RelaxError) -> None:
        for future in self._pending.values():
            if not future.done():
                future.set_exception(error)

    def _death(self) -> RelaxError:
        if self._reason is not None:
            return self._failure(f"{self.name} is gone: {self._reason}", hint="start another one")
        if not self._child.ended.done():
            return self._failure(f"{self.name} closed its link", hint=self._child.last_words())
        return ChildDied(self.name, self.exit_code, hint=self._child.last_words())

    @property
    def name(self) -> str:
        """What messages call it."""
        return self._child.name

    @property
    def pid(self) -> int:
        """Its process id, which is also the id of its process group."""
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -N if signal N ended it."""
        return self._child.exit_code

    @property
    def alive(self) -> bool:
        """Whether requests can be answered: it has not ended and nobody has killed or closed it."""
        return self._reason is None and not self._child.ended.done()

    def tail(self, count: int = 20) -> list[str]:
        """Return the last lines of its output that are not blank."""
        return self._child.tail(count)

    def kill(self, reason: str = "it was killed") -> None:
        """Kill the child with all that it started, now; does not wait. A second call does nothing.

        Args:
            reason: What later requests say about it.
        """
        if self._reason is None and not self._child.ended.done():
            self._reason = reason
        self._child.kill()

    def abandon(self) -> None:
        """Kill the child and close the link without waiting; where nobody can wait."""
        self.kill()
        self._socket.close()

    async def close(self, grace_s: float = _GRACE_S) -> None:
        """Let the child end in order, and kill it if it does not. May be called twice.

        Args:
            grace_s: Seconds between the end of the link and SIGKILL.

        Raises:
            RelaxError: It survives SIGKILL, which only a hanging kernel can cause.
        """
        if self._reason is None and not self._child.ended.done():
            self._reason = "it was closed"
        try:
            if self._socket.fileno() >= 0:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_WR)
            if not await self._child.wait(grace_s):
                self._child.kill()
                if not await self._child.wait(_KILL_LIMIT_S):
                    raise self._failure(f"{self.name}: process {self.pid} survives SIGKILL")
        except BaseException:
            self._child.kill()
            raise
        finally:
            if not self._pending:
                self._socket.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __del__(self) -> None:
        # Nothing that waits or locks: this may run anywhere, even inside the event loop's own code.
        with contextlib.suppress(Exception):
            self.abandon()

    def __repr__(self) -> str:
        return f"<LinkedProcess {self.name} {self.pid}{'' if self.alive else ' (ended)'}>"


class _Child:
    """The process, and the daemon thread that keeps its output and sees it end."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: Path | str | None,
        pass_fds: Sequence[int],
    ) -> None:
        self.name = name
        self.on_end: Callable[[], None] | None = None
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.ended.set_running_or_notify_cancel()  # so that nobody who waits can cancel it
        self._output = bytearray()
        self._token = uuid.uuid4().hex
        self._signals = threading.Lock()
        self._exited = False
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
        return self._process.returncode

    def kill(self) -> None:
        """Send SIGKILL to the process group; what left the group is found by the thread."""
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
            if len(self._output) > 2 * _TAIL_BYTES:
                del self._output[:-_TAIL_BYTES]
        return True


def _pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends; None where there is none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _readable(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


# -- frames -----------------------------------------------------------------------------------


def pack(header: Header, blobs: Iterable[bytes] = ()) -> bytes:
    """Return one frame.

    Raises:
        FrameError: It is too large, or the header is not JSON.
    """
    blobs = list(blobs)
    sizes = [len(blob) for blob in blobs]
    try:
        text = json.dumps({**header, "blobs": sizes}, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"not JSON: {error}", hint="send plain data, and bytes as blobs") from None
    _check_size("header", len(text), MAX_HEADER_BYTES)
    _check_size("blobs", sum(sizes), MAX_BLOB_BYTES)
    return b"".join([struct.pack(">I", len(text)), text, *blobs])


class Frames:
    """Cuts a stream of bytes into frames. Whatever is wrong with them is a FrameError."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._header: Header | None = None
        self._missing = 4
        self.taken = 0
        """Bytes fed so far."""

    def feed(self, data: bytes) -> Iterator[tuple[Header, list[bytes]]]:
        """Take bytes in; yield every frame that is whole by now."""
        self._bytes += data
        self.taken += len(data)
        while len(self._bytes) >= self._missing:
            if self._missing == 4:
                (size,) = struct.unpack_from(">I", self._bytes)
                _check_size("header", size, MAX_HEADER_BYTES)
                self._missing = 4 + size
                if not size:
                    raise FrameError("a header is empty")
            elif self._header is None:
                self._header = _read_header(bytes(self._bytes[4 : self._missing]))
                del self._bytes[: self._missing]
                self._missing = sum(self._header["blobs"])
            if self._header is not None and len(self._bytes) >= self._missing:
                yield self._finish(self._header)

    def _finish(self, header: Header) -> tuple[Header, list[bytes]]:
        blobs, start = [], 0
        for size in header.pop("blobs"):
            blobs.append(bytes(self._bytes[start : start + size]))
            start += size
        del self._bytes[:start]
        self._header, self._missing = None, 4
        return header, blobs


def _read_header(text: bytes) -> Header:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a header is not JSON: {error}") from None
    if not isinstance(header, dict) or not isinstance(header.get("id"), int):
        raise FrameError("a header is not an object with an id")
    sizes = header.get("blobs")
    if not isinstance(sizes, list) or not all(type(s) is int and s >= 0 for s in sizes):
        raise FrameError("a header does not say how large its blobs are")
    _check_size("blobs", sum(sizes), MAX_BLOB_BYTES)
    return header


def _check_size(what: str, size: int, limit: int) -> None:
    if size > limit:
        raise FrameError(f"the {what} of a frame: {size:,} of at most {limit:,} bytes")


# -- errors that travel -----------------------------------------------------------------------


def error_to_json(error: BaseException) -> Header:
    """Return an error as plain data."""
    if not isinstance(error, RelaxError):
        return {"type": type(error).__name__, "message": describe(error)}
    data: Header = {"type": type(error).__name__, "message": error.message}
    if error.hint is not None:
        data["hint"] = error.hint
    if isinstance(error, ToolError):
        data["kind"] = error.kind.value
    return data


def error_from_json(data: object, failure: type[RelaxError] = RelaxError) -> RelaxError:
    """Return the error that :func:`error_to_json` told of: one of this project's, or ``failure``."""
    if not isinstance(data, dict):
        return failure("an error that cannot be read")
    kind = getattr(errors, str(data.get("type")), None)
    if not (isinstance(kind, type) and issubclass(kind, RelaxError)):
        kind = failure
    error: RelaxError = kind.__new__(kind)  # some take other arguments than the two that travel
    hint = data.get("hint")
    RelaxError.__init__(
        error, str(data.get("message", "")), hint=None if hint is None else str(hint)
    )
    if isinstance(error, ToolError):
        known = data.get("kind") in set(ToolErrorKind)
        error.kind = ToolErrorKind(data["kind"]) if known else ToolErrorKind.CRASHED
    return error


def describe(error: BaseException) -> str:
    """Tell an exception in one line, even if it cannot tell itself."""
    try:
        words = " ".join(str(error).split())
    except Exception:
        words = "(no message)"
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def _opened(header: Header, failure: type[RelaxError]) -> Header:
    if "error" in header:
        raise error_from_json(header["error"], failure)
    body = header.get("body")
    if not isinstance(body, dict):
        raise failure("a reply has no body")
    return body


# -- the child's side -------------------------------------------------------------------------


def serve_link(
    handler: Handler,
    *,
    setup: Step | None = None,
    teardown: Step | None = None,
    fd: int | None = None,
) -> None:
    """Answer the parent's requests until it closes the link; to be called by the child's program.

    Args:
        handler: Gets the header and the blobs of a request and returns those of the reply. Each
            request is a task of its own; what it raises is raised where the request was made.
        setup: Called once before the first request; while it runs the child is not ready. It may
            return a dict, which the parent finds as ``link.hello``.
        teardown: Called once after the last request.
        fd: The number of the socket; by default what the environment says.

    Raises:
        ConfigError: The process was not started by :class:`LinkedProcess`.
    """
    if fd is None:
        text = os.environ.pop(LINK_FD, "")
        if not text.isdigit():
            raise ConfigError("there is no link to serve", hint="LinkedProcess.start starts this")
        fd = int(text)
    os.set_inheritable(fd, False)  # what the child starts must not keep the link open
    with socket.socket(fileno=fd) as connection:
        connection.setblocking(False)
        asyncio.run(_Server(connection, handler).serve(setup, teardown))


class _Server:
    def __init__(self, connection: socket.socket, handler: Handler) -> None:
        self._socket = connection
        self._handler = handler
        self._sending = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop

    async def serve(self, setup: Step | None, teardown: Step | None) -> None:
        self._loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):  # the parent is gone
            if await self._begin(setup):
                try:
                    await self._answer_all()
                finally:
                    await _do(teardown)

    async def _begin(self, setup: Step | None) -> bool:
        try:
            hello = await _do(setup)
            frame = pack({"id": _READY, "body": hello if isinstance(hello, dict) else {}})
        except (Exception, SystemExit) as error:
            await self._send(pack({"id": _READY, "error": error_to_json(error)}))
            return False
        await self._send(frame)
        return True

    async def _answer_all(self) -> None:
        frames = Frames()
        tasks: set[asyncio.Task[None]] = set()
        try:
            while data := await self._loop.sock_recv(self._socket, _CHUNK):
                for header, blobs in frames.feed(data):
                    task = asyncio.create_task(self._answer(header, blobs))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
        finally:
            for task in list(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, header: Header, blobs: list[bytes]) -> None:
        number = header["id"]
        try:
            body, reply = await self._handler(header.get("body") or {}, blobs)
            frame = pack({"id": number, "body": body}, reply)
        except (Exception, SystemExit) as error:
            frame = pack({"id": number, "error": error_to_json(error)})
        with contextlib.suppress(ConnectionError):
            await self._send(frame)

    async def _send(self, frame: bytes) -> None:
        async with self._sending:
            await self._loop.sock_sendall(self._socket, frame)


async def _do(step: Step | None) -> Any:
    value = None if step is None else step()
    return await value if inspect.isawaitable(value) else value

"""One interpreter in a sandbox: its start, one exchange at a time, its end.

Everything that comes out of it is treated as written by an enemy. A reply is one frame, whose
length is checked before it is read and whose content is plain JSON of a known shape; anything else
ends the process. Between calls the process is stopped (SIGSTOP), and so is the first one of its
namespace, whose memory code can write to: what code leaves running uses no processor time. Other
processes that it left are ended.

``bwrap`` and that first process die with the *thread* that started them, in whatever way it ends
(the filter keeps code from changing that). So all are started by one thread that lives as long as
this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from relax_agent.errors import ToolError, ToolErrorKind
from relax_agent.keeper import KeptChild
from relax_agent.threads import THREADS, Worker
from relax_agent.tools.sandbox.layout import Launch
from relax_agent.tools.sandbox.limits import Level, Limits
from relax_agent.tools.sandbox.output import Capture, close_quietly
from relax_agent.tools.sandbox.watch import (
    WATCH,
    Watched,
    children,
    end_others,
    is_still,
    problem_of,
)

Body = dict[str, Any]

_CHUNK = 1 << 18
_KILL_LIMIT_S = 10.0
_EXIT_LIMIT_S = 0.5
_SETTLE_LIMIT_S = 5.0
_SPAWN_LIMIT_S = 60.0
_CLOSED = "was closed"
_MAX_BLOBS = 64
_STARTS = threading.BoundedSemaphore(4 * (os.cpu_count() or 1))
"""Interpreters that start at once: more would only make each other late."""


class Garbage(Exception):
    """The process sent what is no reply."""


class Gone(Exception):
    """The process has ended, or let go of its socket."""


@dataclass
class Reply:
    """What came back for one request."""

    body: Body
    blobs: list[bytes]


class Interpreter:
    """A started interpreter. Made by :func:`start`, ended by :meth:`close` or :meth:`kill`."""

    def __init__(
        self,
        child: KeptChild,
        ours: socket.socket,
        captures: tuple[Capture, Capture],
        launch: Launch,
        limits: Limits,
    ) -> None:
        self.child = child
        self._launch = launch
        self.limits = limits
        self.stdout, self.stderr = captures
        self.verdict = ""
        """Why it was killed from here; empty if it was not."""
        self._socket = ours
        self._number = 0
        self._worker: int | None = None
        self._worker_fd = -1
        self._first = 0
        self._first_fd = -1
        self._stopped = False
        self._asking = False

    @property
    def alive(self) -> bool:
        """Whether it can still be asked."""
        return not self.verdict and self.child.is_ours and not self.child.ended.done()

    # -- start --------------------------------------------------------------------------------

    def greet(self, level: Level, deadline: float) -> None:
        """Wait, blocking, until it is ready; see that it is held as its level says."""
        self._socket.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            number, reply = _parse(self._blocking(4), self._blocking, 0)
        except (OSError, Garbage, Gone) as error:
            self.child.kill()
            said = self.child.last_words()
            raise ToolError(
                f"the sandbox did not start ({error or type(error).__name__})",
                kind=ToolErrorKind.UNAVAILABLE,
                hint=said,
            ) from error
        if number != 0 or not isinstance(reply.body.get("pid"), int):
            raise _unavailable("the sandbox did not start")
        self._socket.setblocking(False)
        self._find_worker(level)

    def _find_worker(self, level: Level) -> None:
        """Learn which process runs the code: below ``bwrap`` and the namespace's first one."""
        self._first = self._worker = self.child.pid
        if level is not Level.STRONG:
            return
        for _ in range(2):
            below = children(self._worker)
            if len(below) != 1:
                raise _unavailable("the sandbox is not as it was built")
            self._first, self._worker = self._worker, below[0]
        self._first_fd = os.pidfd_open(self._first)
        self._worker_fd = os.pidfd_open(self._worker)
        for pid in (self._first, self._worker):
            if (wrong := problem_of(pid)) is not None:
                raise _unavailable(f"the sandbox does not hold: {wrong}")

    def _blocking(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = self._socket.recv(size - len(data))
            if not chunk:
                raise Gone("it ended")
            data += chunk
        return bytes(data)

    # -- use ----------------------------------------------------------------------------------

    async def ask(self, body: Body, blob: bytes = b"", *, most: int = 0) -> Reply:
        """Send one request and wait for its reply. The caller sets the time limit.

        ``most`` is how many bytes of blobs the reply may have.

        Whatever goes wrong, cancellation included, the process is killed or has ended.

        Raises:
            Gone: It ended meanwhile; ``verdict`` says whether it was killed for a reason.
            Garbage: It sent something else.
        """
        watched = self._watched()
        self._begin(watched)
        try:
            reply = await self._exchange(body, blob, most)
            await self._end_call()
        except Gone:
            raise  # it ends by itself: the caller asks how
        except BaseException:
            self.child.kill()
            raise
        finally:
            WATCH.remove(watched)
            self._asking = False
            closed, self.verdict = bool(self.verdict), self.verdict or watched.verdict
            if closed:
                self._release()
        return reply

    async def _exchange(self, body: Body, blob: bytes, most: int) -> Reply:
        self._number += 1
        loop = asyncio.get_running_loop()
        header = {"id": self._number, "body": body, "blobs": [len(blob)] if blob else []}
        text = json.dumps(header).encode()
        try:
            frame = b"".join([struct.pack(">I", len(text)), text, blob])
            await loop.sock_sendall(self._socket, frame)
            size = _header_size(await self._receive(4), self._most_header_bytes())
            number, sizes, answer = _header(await self._receive(size), most)
            blobs = [await self._receive(each) for each in sizes]
        except OSError as error:
            raise Gone(str(error)) from error
        if number != self._number:
            raise Garbage("a reply to another request")
        return Reply(answer, blobs)

    async def _receive(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        data = bytearray()
        while len(data) < size:
            chunk = await loop.sock_recv(self._socket, min(size - len(data), _CHUNK))
            if not chunk:
                raise Gone("it closed its socket")
            data += chunk
        return bytes(data)

    def _most_header_bytes(self) -> int:
        # A character is at most 12 bytes of JSON; the value and the traceback, and some room.
        return 2 * 12 * self.limits.output_chars + (64 << 10)

    def _watched(self) -> Watched:
        files = Path(f"/proc/{self._worker}/root/box") if self._worker_fd >= 0 else None
        return Watched(self._first, self.limits, self.child.kill, files)

    def _begin(self, watched: Watched) -> None:
        self._asking = True
        for capture in (self.stdout, self.stderr):
            capture.attach(partial(self._flooded, watched))
        WATCH.add(watched)
        if self._stopped:
            self._signal(signal.SIGCONT)
            self._stopped = False

    def _flooded(self, watched: Watched) -> None:
        watched.verdict = f"wrote more than {self.limits.flood_mb} MB of output"
        self.child.kill()

    async def _end_call(self) -> None:
        """Stop the process and end what else the call has left running."""
        if self._worker_fd < 0:
            return
        assert self._worker is not None
        self._signal(signal.SIGSTOP)
        self._stopped = True
        limit = asyncio.get_running_loop().time() + _SETTLE_LIMIT_S
        while not self._is_still() or end_others(self._first, self._worker):
            if asyncio.get_running_loop().time() > limit:
                raise Garbage("processes that cannot be ended")
            await asyncio.sleep(0.001)

    def _is_still(self) -> bool:
        return self._worker is not None and is_still(self._worker) and is_still(self._first)

    def _signal(self, signum: int) -> None:
        for fd in (self._worker_fd, self._first_fd):
            if fd >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, signum)

    # -- end ----------------------------------------------------------------------------------

    async def exit_code(self) -> int | None:
        """Return how it ended; None if it does not within a moment."""
        await self.child.wait(_EXIT_LIMIT_S)
        return self.child.exit_code

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether the kernel has killed something in it for want of memory."""
        group = self._launch.group
        if group is None:
            return False
        group.remove()  # which looks first
        return group.ran_out

    def kill(self) -> None:
        """End it with everything in it, without waiting. May be called twice."""
        if not self.child.is_ours:
            return  # a fork took this object along; its parent goes on with the process
        self.verdict = self.verdict or _CLOSED
        self.child.kill()
        self._signal(signal.SIGKILL)
        if not self._asking:
            self._release()
        elif self._socket.fileno() >= 0:  # whoever waits for a reply shall hear of it
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _release(self) -> None:
        self._socket.close()
        self.stdout.close()
        self.stderr.close()
        if self._worker_fd >= 0:
            close_quietly(self._worker_fd)
            self._worker_fd = -1

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._asking = False
            self.kill()
            if self._first_fd >= 0:
                close_quietly(self._first_fd)

    async def close(self) -> None:
        """End it and wait until nothing of it is left. May be called twice.

        Raises:
            ToolError: Something survives SIGKILL, which only a hanging kernel can cause.
        """
        self.kill()
        if not self.child.is_ours:
            return
        limit = asyncio.get_running_loop().time() + _KILL_LIMIT_S
        await self.child.wait(_KILL_LIMIT_S)
        while not (self.child.ended.done() and self._is_empty()):
            if asyncio.get_running_loop().time() > limit:
                raise ToolError(f"sandbox process {self.child.pid} survives SIGKILL")
            await asyncio.sleep(0.002)
        self._launch.clean_up()
        if self._first_fd >= 0:
            close_quietly(self._first_fd)
            self._first_fd = -1

    def _is_empty(self) -> bool:
        """Whether the namespace's first process has ended, which it does after all others."""
        if self._first_fd < 0:
            return True
        poll = select.poll()
        poll.register(self._first_fd, select.POLLIN)
        return bool(poll.poll(0))


def start(launch: Launch, level: Level, limits: Limits) -> Interpreter:
    """Start an interpreter and block until it is ready.

    ``{link_fd}``, ``{out_fd}`` and ``{err_fd}`` in the launch become its descriptors' numbers.

    Raises:
        ToolError: It did not start in time, or is not held as its level says (``unavailable``).
    """
    with _STARTS:
        interpreter = _spawn(launch, limits)
        try:
            interpreter.greet(level, time.monotonic() + limits.start_timeout_s)
        except BaseException:
            interpreter.kill()
            raise
    return interpreter


def _spawn(launch: Launch, limits: Limits) -> Interpreter:
    flood = limits.flood_mb << 20
    captures = (Capture(limits.output_chars, flood), Capture(limits.output_chars, flood))
    ours, theirs = socket.socketpair()
    fds = {"link_fd": theirs.fileno(), "out_fd": captures[0].writer, "err_fd": captures[1].writer}
    argv = launch.argv()
    for name, fd in fds.items():
        argv = [word.replace("{" + name + "}", str(fd)) for word in argv]
    begin = partial(KeptChild, "sandbox", argv, {}, None, tuple(fds.values()))
    try:
        child = _SPAWNER.run(begin)
    except BaseException:
        ours.close()
        for capture in captures:
            capture.close()
        launch.clean_up()
        raise
    finally:
        theirs.close()
    child.ended.add_done_callback(lambda _: launch.clean_up())
    for capture in captures:
        capture.close_writer()
    return Interpreter(child, ours, captures, launch, limits)


class _Spawner:
    """The one thread that starts sandboxes; made when it is first needed, also after a fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._process = 0

    def run(self, begin: Callable[[], KeptChild]) -> KeptChild:
        with self._lock:
            if self._worker is None or self._process != os.getpid():
                self._worker, self._process = Worker("relax-sandbox-spawner"), os.getpid()
            worker = self._worker
        return worker.run_blocking(begin, _SPAWN_LIMIT_S)


_SPAWNER = _Spawner()


class _Handover:
    """Lets a thread pass on an interpreter to somebody who may have gone meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refused = False
        self._made: Interpreter | None = None

    def make(self, starter: Callable[[], Interpreter]) -> Interpreter:
        made = starter()
        with self._lock:
            self._made = made
            if self._refused:
                made.kill()
        return made

    def refuse(self) -> None:
        with self._lock:
            self._refused = True
            if self._made is not None:
                self._made.kill()


async def start_async(starter: Callable[[], Interpreter]) -> Interpreter:
    """Run what starts an interpreter in a thread; cancelling ends the process."""
    handover = _Handover()
    try:
        return await THREADS.run(partial(handover.make, starter))
    except asyncio.CancelledError:
        handover.refuse()
        raise


def _unavailable(message: str) -> ToolError:
    return ToolError(message, kind=ToolErrorKind.UNAVAILABLE)


# -- frames -----------------------------------------------------------------------------------


def _header_size(data: bytes, most: int) -> int:
    (size,) = struct.unpack(">I", data)
    if not 0 < size <= most:
        raise Garbage(f"a header of {size:,} bytes")
    return int(size)


def _header(text: bytes, most: int) -> tuple[int, list[int], Body]:
    """Read a header: (number, sizes of the blobs, body)."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise Garbage("a header that is not JSON") from None
    if not isinstance(header, dict):
        raise Garbage("a header that is no object")
    number, sizes, body = header.get("id"), header.get("blobs"), header.get("body")
    if type(number) is not int or not isinstance(body, dict) or not isinstance(sizes, list):
        raise Garbage("a header without its parts")
    if len(sizes) > _MAX_BLOBS or any(type(size) is not int or size < 0 for size in sizes):
        raise Garbage("blobs without sizes")
    if sum(sizes) > most:
        raise Garbage(f"{sum(sizes):,} bytes of blobs")
    return number, sizes, body


def _parse(first: bytes, more: Any, most: int) -> tuple[int, Reply]:
    number, sizes, body = _header(more(_header_size(first, 1 << 16)), most)
    return number, Reply(body, [more(size) for size in sizes])

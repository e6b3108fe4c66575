"""A child process that answers requests, and that can be killed while it answers.

Code that may hang or crash (an environment, a reward, somebody's program) runs in a process of its
own, at the other end of a socket pair that the child inherits. Requests and replies are frames
(:mod:`relax_agent.frames`): plain data as JSON, bytes as they are, nothing pickled. They carry a
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
  ``asyncio.run`` after the other (but from one at a time). It belongs to one process: in a fork
  it is gone, and the parent's goes on.

Each child has a keeper (:mod:`relax_agent.keeper`), so no zombie stays, even if nobody asks. When
the parent dies, the child reads end-of-file and ends; one that does not is ended by the guardian
(:mod:`relax_agent.guardian`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import select
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import TypeAlias

from relax_agent.closing import Closing
from relax_agent.errors import ChildDied, RelaxError
from relax_agent.frames import CHUNK, FrameError, Frames, Header, error_from_json, pack
from relax_agent.keeper import KeptChild
from relax_agent.link_server import LINK_FD, READY, Handler, serve_link
from relax_agent.threads import THREADS

__all__ = ["Handler", "Header", "LinkedProcess", "Reply", "serve_link"]

Reply: TypeAlias = tuple[Header, list[bytes]]
_START_LIMIT_S = 60.0
_GRACE_S = 5.0
_KILL_LIMIT_S = 10.0
_LINGER_S = 1.0
"""How long a child may live on after it has closed its end of the link."""


class LinkedProcess(Closing):
    """A child that answers requests; see the module's promises. Made by :meth:`start`."""

    def __init__(self, child: KeptChild, ours: socket.socket, failure: type[RelaxError]) -> None:
        self._child = child
        self._socket = ours
        self._failure = failure
        self._frames = Frames()
        self._numbers = itertools.count(READY + 1)
        self._pending: dict[int, asyncio.Future[Reply]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unsent: list[memoryview] = []
        self._reason: str | None = None
        self._closed_by_child = False
        self.hello: Header = {}
        """What the child's ``setup`` returned."""
        _LINKS.add(self)

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
        on_output: Callable[[bytes], object] | None = None,
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
            on_output: Called with what the child prints, in its keeper's thread.

        Raises:
            ConfigError: The program cannot be started.
            ChildDied: It ended before it was ready.
            RelaxError: It took too long (``failure``), or its ``setup`` raised.
        """
        link = cls._spawn(name, argv, env, cwd, pass_fds, failure, on_output)
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
        on_output: Callable[[bytes], object] | None = None,
    ) -> LinkedProcess:
        """Do what :meth:`start` does without blocking the event loop; cancelling kills."""
        link = await THREADS.run(
            partial(cls._spawn, name, argv, env, cwd, pass_fds, failure, on_output)
        )
        try:
            link.hello, _ = await link._wait_for(READY, b"", start_timeout_s, "was not ready")
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
        on_output: Callable[[bytes], object] | None,
    ) -> LinkedProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            number = str(theirs.fileno())
            words = [word.replace("{link_fd}", number) for word in argv]
            variables = {"PYTHONUNBUFFERED": "1", **(env or {}), LINK_FD: number}
            try:
                child = KeptChild(
                    name, words, variables, cwd, [theirs.fileno(), *pass_fds], on_output
                )
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        return cls(child, ours, failure)

    def _read_hello(self, deadline: float, limit_s: float) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while not self._closed_by_child:
            left = deadline - time.monotonic()
            if left <= 0:
                self.kill(words := f"it was not ready within {limit_s:g} s")
                raise self._failure(f"{self.name}: {words}", hint=self._child.last_words())
            # In slices: somebody else may hold the dead child's end open.
            poll.poll(1000 * min(left, 0.25))
            ended = self._child.ended.done()
            try:
                for header, _ in self._received():
                    self.hello = _opened(header, self._failure)
                    return
            except FrameError as error:
                raise self._failure(f"{self.name} sent what is no frame: {error}") from None
            if ended:
                break
        futures.wait([self._child.ended], _LINGER_S)
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
            ChildDied: The child ended by itself, before or meanwhile.
            RelaxError: What the child's handler raised; ``failure`` if the request is too large
                or no JSON, and nothing was sent.
        """
        number = next(self._numbers)
        try:
            frame = pack({"id": number, "body": header}, blobs)
        except FrameError as error:
            raise self._failure(f"{self.name}: this request cannot be sent: {error}") from None
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
            if self._pending.pop(number, None) is future and future.done():
                future.cancelled() or future.exception()  # seen, whoever was cancelled meanwhile
            if not self._pending:
                self._detach()

    def _expect(self, number: int) -> asyncio.Future[Reply]:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._pending and self._loop is not None and not self._loop.is_closed():
                raise RelaxError(f"{self.name} is in use by another event loop")
            self._pending.clear()
            self._unsent.clear()
        if self._socket.fileno() < 0 or self._child.ended.done() or self._closed_by_child:
            raise self._death()
        future = self._pending[number] = loop.create_future()
        if self._loop is not loop:
            self._loop = loop
            loop.add_reader(self._socket, self._read)
            self._child.on_end = partial(self._tell_end, loop)
        if self._child.ended.done():  # between the look and the telling
            self._fail_all()
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
            sent = self._socket.send(self._unsent[0][:CHUNK])
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
            self.kill(f"it sent what is no frame ({error})")
            self._fail_all()

    def _received(self) -> Iterator[tuple[Header, list[bytes]]]:
        try:
            data = self._socket.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            yield from self._frames.feed(data)
        else:  # end-of-file: the child's end is told by its keeper, if it ends
            self._closed_by_child = True
            if self._loop is not None:
                self._loop.remove_reader(self._socket)
                self._loop.call_later(_LINGER_S, self._give_up)

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
        self._fail_all()

    def _give_up(self) -> None:
        """End a child that lives on without a link."""
        if not self._child.ended.done():
            self.kill("it closed its link, and was killed")
            self._fail_all()

    def _fail_all(self) -> None:
        for future in self._pending.values():
            if not future.done():
                future.set_exception(self._death())

    def _death(self) -> RelaxError:
        if self._reason is not None:
            return self._failure(f"{self.name} is gone: {self._reason}", hint="start another one")
        if not self._child.ended.done():
            return self._failure(f"{self.name} has closed its link", hint=self._child.last_words())
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
        if self._reason is not None or self._child.ended.done() or self._socket.fileno() < 0:
            return False
        # An idle child says nothing. What can be read is its end, before its thread tells of it.
        return bool(self._pending) or not _readable(self._socket)

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

    def _disown(self) -> None:
        """Leave the child to the process that this one was forked from.

        Two processes on one socket would take each other's replies. The event loop and what it
        waits with are the parent's too, so nothing is taken out of it.
        """
        self._reason = "it belongs to the process that this one was forked from"
        self._loop = None
        self._pending.clear()
        self._unsent.clear()
        self._socket.close()

    async def close(self, grace_s: float = _GRACE_S) -> None:
        """Let the child end in order, and kill it if it does not. May be called twice.

        Args:
            grace_s: Seconds between the end of the link and SIGKILL.

        Raises:
            RelaxError: It survives SIGKILL, which only a hanging kernel can cause.
        """
        if not self._child.is_ours:
            return
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
            self._fail_all()
            self._detach()
            self._socket.close()

    def __del__(self) -> None:
        # Nothing that waits or locks: this may run anywhere, even inside the event loop's own code.
        with contextlib.suppress(Exception):
            self.abandon()

    def __repr__(self) -> str:
        return f"<LinkedProcess {self.name} {self.pid}{'' if self.alive else ' (ended)'}>"


_LINKS: weakref.WeakSet[LinkedProcess] = weakref.WeakSet()


def _disown_all() -> None:
    for link in list(_LINKS):
        link._disown()


os.register_at_fork(after_in_child=_disown_all)


def _readable(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def _opened(header: Header, failure: type[RelaxError]) -> Header:
    if "error" in header:
        raise error_from_json(header["error"], failure)
    body = header.get("body")
    if not isinstance(body, dict):
        raise failure("a reply has no body")
    return body

"""The child's side of a link: answer the parent's requests until it closes the link.

A program that :class:`~relax_agent.links.LinkedProcess` starts calls :func:`serve_link` and does
nothing else. Standard output stays free for whatever the code prints: the parent keeps its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from relax_agent.errors import ConfigError
from relax_agent.frames import CHUNK, Frames, Header, error_to_json, pack

Handler: TypeAlias = Callable[[Header, list[bytes]], Awaitable[tuple[Header, Sequence[bytes]]]]
Step: TypeAlias = Callable[[], Any]
"""Something to do once; may be a coroutine function."""

LINK_FD = "RELAX_AGENT_LINK"
"""The environment variable with the number of the child's socket. In ``argv``, ``{link_fd}``
stands for the same number, for a program that clears the environment on the way.
"""
READY = 0
"""The number of the child's first word, which answers no request."""


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
            frame = pack({"id": READY, "body": hello if isinstance(hello, dict) else {}})
        except (Exception, SystemExit) as error:
            await self._send(pack({"id": READY, "error": error_to_json(error)}))
            return False
        await self._send(frame)
        return True

    async def _answer_all(self) -> None:
        frames = Frames()
        tasks: set[asyncio.Task[None]] = set()
        try:
            while data := await self._loop.sock_recv(self._socket, CHUNK):
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

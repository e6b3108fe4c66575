"""One environment for each WebSocket connection.

A request is a text frame, JSON with an ``id`` and an ``op``; its media follow as binary frames,
whose sizes stand in ``blobs``. A reply has the same form and the request's ``id``; a failure is
``{"id": …, "error": {"type", "message", "hint"}}``. Requests are answered one after the other.

The *handler* of a connection receives and answers. At the first call that takes a moment, a
*reader* takes over the receiving, so that a client's going away is noticed while a step runs;
connections whose steps are quick save themselves a task switch for each message. A
:class:`~relax_agent.limits.Watch` cancels the handler when a client is idle for too long, or when a
step takes too long, the sending of its result included; the *warden* ends the connection if the
environment does not even react to that. Whatever ends it, the environment is closed and its slot is
free.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import Any, Literal

from starlette.types import Message as Event
from starlette.types import Receive, Scope, Send

from relax_agent.envs.serving.leases import Lease, Leases, NoSlot
from relax_agent.envs.serving.wire import Blobs, Json, WireError, dumps, loads
from relax_agent.errors import EnvError
from relax_agent.frames import error_to_json
from relax_agent.limits import GRACE_S, Watch, stop
from relax_agent.tools.web import json_response

logger = logging.getLogger(__name__)

_AHEAD = 16
"""Frames that are read before they are needed; of large ones fewer."""
_MOMENT_S = 0.05
"""A call that takes longer may outlive its client, and is watched."""
_RETRY_AFTER_S = 1
_GOING_AWAY, _PROTOCOL, _TOO_LARGE, _FAILED, _RESTART = 1001, 1002, 1009, 1011, 1012

Phase = Literal["idle", "call", "send"]


class _Gone(Exception):
    """The client went away."""


class _Ended(Exception):
    """The connection is to be closed: with a code, and perhaps an error to tell."""

    def __init__(self, code: int, error: Exception | None = None, number: Any = None) -> None:
        super().__init__(code)
        self.code = code
        self.error = error
        self.number = number


class WebSocketEndpoint:
    """The ASGI application that serves one environment to each WebSocket connection."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection from its beginning to its end."""
        try:
            lease = self._leases.take()
        except NoSlot as error:
            headers = {"Retry-After": str(_RETRY_AFTER_S)}
            refusal = json_response({"error": error_to_json(error)}, 503, headers)
            await refusal(scope, receive, send)
            return
        try:
            await _Connection(lease, self._leases, receive, send).run()
        finally:
            await lease.end()


class _Connection:
    def __init__(self, lease: Lease, leases: Leases, receive: Receive, send: Send) -> None:
        self._lease = lease
        self._limits = leases.limits
        self._receive = receive
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._phase: Phase = "idle"
        self._number: Any = None
        self._calls = 0
        self._timer: asyncio.TimerHandle | None = None
        self._reader: asyncio.Task[None] | None = None
        self._inbox: deque[Event] = deque()
        self._held = 0
        self._waiting: asyncio.Future[None] | None = None
        self._room = asyncio.Event()

    async def run(self) -> None:
        """Serve until the client goes away or something ends the connection."""
        await self._receive()  # websocket.connect
        await self._send({"type": "websocket.accept"})
        handler = asyncio.create_task(self._handle())
        self._watch = Watch(handler)
        warden = asyncio.create_task(self._guard())
        try:
            await asyncio.wait({self._gone, warden}, return_when=asyncio.FIRST_COMPLETED)
            if not self._gone.done():  # it was closed from here: see the client take that in
                self._read_from_now_on()
                await asyncio.wait({self._gone}, timeout=GRACE_S)
        finally:
            self._watch.close()
            if self._timer is not None:
                self._timer.cancel()
            tasks = [task for task in (self._reader, warden) if task is not None]
            for task in tasks:
                task.cancel()
            await stop(handler)
            await asyncio.gather(*tasks, return_exceptions=True)

    # -- receiving ----------------------------------------------------------------------------

    async def _next(self) -> Event:
        if self._reader is None:
            event = await self._receive()
        else:
            event = await self._from_inbox()
        if event["type"] == "websocket.disconnect":
            self._note_gone()
            raise _Gone
        return event

    async def _from_inbox(self) -> Event:
        while not self._inbox:
            self._waiting = self._loop.create_future()
            await self._waiting
        event = self._inbox.popleft()
        if not self._inbox:
            self._held = 0
            self._room.set()
        return event

    def _note_gone(self) -> None:
        if not self._gone.done():
            self._gone.set_result(None)

    def _look(self, calls: int) -> None:
        """Watch the client from now on, if the call that ran a moment ago is still running."""
        self._timer = None
        if self._phase != "call":
            return
        if self._calls == calls:
            self._read_from_now_on()
        else:
            self._look_in_a_moment()

    def _look_in_a_moment(self) -> None:
        self._timer = self._loop.call_later(_MOMENT_S, self._look, self._calls)

    def _read_from_now_on(self) -> None:
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while True:
            event = await self._receive()
            if event["type"] == "websocket.disconnect":
                self._note_gone()
                return
            self._inbox.append(event)
            if self._waiting is not None and not self._waiting.done():
                self._waiting.set_result(None)
            self._held += len(event.get("bytes") or event.get("text") or "")
            if len(self._inbox) >= _AHEAD or self._held > self._limits.max_request_bytes:
                self._room.clear()
                await self._room.wait()

    # -- the handler --------------------------------------------------------------------------

    async def _handle(self) -> None:
        try:
            try:
                while True:
                    await self._serve_one()
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not self._watch.rang or task is None or task.uncancel() > 0:
                    raise  # the client is gone, or the server ends
                raise self._overdue() from None
        except _Ended as end:
            await self._close(end)
        except (_Gone, OSError):  # the latter while it was written to
            self._note_gone()
        except Exception as error:  # a fault of this program: the client must not wait for it
            logger.exception("a connection failed")
            await self._close(_Ended(_FAILED, error, self._number))

    async def _serve_one(self) -> None:
        watch, limits = self._watch, self._limits
        self._phase, self._number = "idle", None
        watch.start(limits.idle_timeout_s)
        request, blobs = await self._request()
        self._phase = "call"
        self._calls += 1
        if self._timer is None and self._reader is None:
            self._look_in_a_moment()
        watch.start(limits.step_timeout_s)
        media: Blobs = []
        try:
            reply, media = await self._lease.answer(request, blobs)
        except NoSlot as error:
            raise _Ended(_RESTART, error, self._number) from None
        except Exception as error:
            reply = {"error": error_to_json(error)}
        self._phase = "send"
        await self._reply(reply, media)

    async def _request(self) -> tuple[Json, Blobs]:
        """Read one request with its media; what is no request ends the connection."""
        event = await self._next()
        text = event.get("text")
        if text is None:
            error = WireError("a binary frame came before its request")
            raise _Ended(_PROTOCOL, error)
        if len(text) > self._limits.max_request_bytes:
            raise _Ended(_TOO_LARGE, WireError("the request is too large"))
        try:
            request = loads(text)
        except WireError as error:
            raise _Ended(_PROTOCOL, error) from None
        self._number = request.pop("id", None)
        sizes = request.pop("blobs", None)
        return request, await self._blobs(sizes) if sizes else []

    async def _blobs(self, sizes: object) -> Blobs:
        if not isinstance(sizes, list) or not all(type(n) is int and n >= 0 for n in sizes):
            error = WireError("blobs are the sizes of the binary frames that follow")
            raise _Ended(_PROTOCOL, error, self._number)
        if sum(sizes) > self._limits.max_request_bytes:
            most = self._limits.max_request_bytes
            error = WireError(f"the media of a request: {sum(sizes):,} of at most {most:,} bytes")
            raise _Ended(_TOO_LARGE, error, self._number)
        blobs = []
        for size in sizes:
            data = (await self._next()).get("bytes")
            if data is None or len(data) != size:
                error = WireError(f"a binary frame of {size:,} bytes did not follow")
                raise _Ended(_PROTOCOL, error, self._number)
            blobs.append(bytes(data))
        return blobs

    async def _reply(self, reply: Json, media: Blobs) -> None:
        reply = {"id": self._number, **reply}
        if media:
            reply["blobs"] = [len(blob) for blob in media]
        await self._send({"type": "websocket.send", "text": dumps(reply).decode()})
        for blob in media:
            await self._send({"type": "websocket.send", "bytes": blob})

    # -- the end ------------------------------------------------------------------------------

    def _overdue(self) -> _Ended:
        limits = self._limits
        if self._phase == "idle":
            error = EnvError(
                f"no request within {limits.idle_timeout_s:g} s, so the environment was given back",
                hint="serve it with a longer --idle-timeout",
            )
            return _Ended(_GOING_AWAY, error)
        if self._phase == "call":
            error = EnvError(f"no answer within {limits.step_timeout_s:g} s")
            return _Ended(_FAILED, error, self._number)
        return _Ended(_GOING_AWAY)

    async def _close(self, end: _Ended) -> None:
        self._watch.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(GRACE_S):
                if end.error is not None:
                    self._number = end.number
                    await self._reply({"error": error_to_json(end.error)}, [])
                await self._send({"type": "websocket.close", "code": end.code})

    async def _guard(self) -> None:
        """The warden: wait for the handler's end, and close in its place if it does not react."""
        if not await self._watch.wait():
            logger.warning("an environment does not react to its cancellation: left behind")
            await self._close(self._overdue())

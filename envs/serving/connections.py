"""The client's end: one environment at the other end of a WebSocket, or of HTTP requests.

aiohttp on both, with nothing per message but JSON and the socket. A connection belongs to the event
loop that opened it. The kernel watches over a quiet one (TCP keep-alive), not a timer of ours: a
program that computes for a minute between two steps loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import socket
from typing import Any, Protocol

import aiohttp
from aiohttp import WSMsgType

from relax_agent.envs.serving.wire import Blobs, Json, WireError, dumps, loads
from relax_agent.errors import EnvError
from relax_agent.frames import FrameError, Frames, error_from_json, pack

FRAME_TYPE = "application/x-relax-frame"
SESSION_HEADER = "X-Env-Session"
_MAX_REPLY_BYTES = 1 << 30
_CLOSE_S = 5.0
_BACKOFF_S, _MAX_BACKOFF_S = 0.05, 2.0
_KEEP_ALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class Lost(Exception):
    """The connection is gone. Internal: whether that matters depends on the episode."""


class Connection(Protocol):
    """One environment at the other end."""

    loop: asyncio.AbstractEventLoop

    @property
    def alive(self) -> bool:
        """Whether it can be asked from the running loop."""

    async def ask(self, request: Json, blobs: Blobs) -> tuple[Json, Blobs]:
        """Send a request and return its reply; raise what it failed with, or Lost."""

    async def close(self) -> None:
        """Let go of the environment."""

    async def interrupt(self) -> None:
        """Give up the request that runs, and the episode with it. Takes no time."""

    async def drop(self) -> None:
        """Let go of what was interrupted, or lost its loop."""


class SlotWait:
    """Waits between the tries to get an environment from a server that has none to give."""

    def __init__(self, url: str, limit_s: float) -> None:
        self._url = url
        self._limit_s = limit_s
        self._delay_s = _BACKOFF_S
        self._end = asyncio.get_running_loop().time() + limit_s

    async def again(self) -> None:
        """Wait a little longer than the last time, or raise EnvError if the time is over."""
        left = self._end - asyncio.get_running_loop().time()
        if left <= 0:
            raise EnvError(
                f"{self._url} had no free environment for {self._limit_s:g} s",
                hint="serve more of them (--slots), or run fewer episodes at once",
            )
        await asyncio.sleep(min(left, self._delay_s * random.uniform(0.5, 1.0)))
        self._delay_s = min(2 * self._delay_s, _MAX_BACKOFF_S)


class WebSocketConnection:
    """One environment at the other end of a WebSocket."""

    def __init__(
        self, url: str, session: aiohttp.ClientSession, ws: aiohttp.ClientWebSocketResponse
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._url = url
        self._session = session
        self._ws = ws
        self._number = 0
        self._lock = asyncio.Lock()
        self._broken = False

    @classmethod
    async def open(
        cls, url: str, token: str | None, timeout_s: float, slot_timeout_s: float
    ) -> WebSocketConnection:
        """Connect, waiting for a free environment if there is none."""
        session = _session(token, timeout_s)
        wait = SlotWait(url, slot_timeout_s)
        try:
            while True:
                async with asyncio.timeout(timeout_s):
                    ws = await _handshake(session, f"{url}/ws")
                if ws is not None:
                    _watch_over(ws.get_extra_info("socket"))
                    return cls(url, session, ws)
                await wait.again()
        except TimeoutError:
            await session.close()
            raise EnvError(f"{url} did not answer within {timeout_s:g} s") from None
        except BaseException as error:
            await session.close()
            if isinstance(error, (aiohttp.ClientError, OSError)):
                raise refusal(url, error) from error
            raise

    @property
    def alive(self) -> bool:
        """Whether it can be asked from the running loop."""
        return not (self._broken or self._ws.closed) and (self.loop is asyncio.get_running_loop())

    async def ask(self, request: Json, blobs: Blobs) -> tuple[Json, Blobs]:
        """Send a request and return its reply; raise what it failed with, or Lost."""
        async with self._lock:
            self._number += 1
            request = {"id": self._number, **request}
            if blobs:
                request["blobs"] = [len(blob) for blob in blobs]
            self._broken = True  # until all of the reply is there
            try:
                await self._ws.send_frame(dumps(request), WSMsgType.TEXT)
                for blob in blobs:
                    await self._ws.send_bytes(blob)
            except (aiohttp.ClientError, OSError) as error:
                raise Lost(f"{type(error).__name__}: {error}") from error
            message = await self._ws.receive()
            if message.type is not WSMsgType.TEXT:
                raise self._lost(message)
            reply = loads(message.data)
            if reply.pop("id", None) != self._number:
                raise self._stray(reply)
            sizes = reply.pop("blobs", None)
            media = await self._media(sizes) if sizes else []
            self._broken = False
        if "error" in reply:
            raise error_from_json(reply["error"], EnvError)
        return reply, media

    def _stray(self, reply: Json) -> Lost:
        if "error" in reply:  # the server ended it some time ago, and said why
            return Lost(error_from_json(reply["error"], EnvError).message)
        return Lost("a reply to another request")

    async def _media(self, sizes: object) -> Blobs:
        media = []
        for size in sizes if isinstance(sizes, list) else ():
            message = await self._ws.receive()
            if message.type is not WSMsgType.BINARY:
                raise self._lost(message)
            if len(message.data) != size:
                raise Lost(f"a binary frame of {len(message.data):,} bytes instead of {size!r:.80}")
            media.append(message.data)
        return media

    def _lost(self, message: aiohttp.WSMessage) -> Lost:
        if message.type in (WSMsgType.TEXT, WSMsgType.BINARY):
            return Lost("the server does not speak this protocol")
        code = self._ws.close_code
        told = f" (code {code}{_MEANING.get(code, '')})" if code else ""
        return Lost(f"the server closed the connection{told}")

    async def close(self) -> None:
        """Say goodbye, briefly."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._ws.close()
        except (TimeoutError, aiohttp.ClientError, OSError):
            pass
        finally:
            await self._session.close()

    async def interrupt(self) -> None:
        """Give up the request that runs: the server sees the connection end."""
        self._broken = True
        await self._session.close()

    async def drop(self) -> None:
        """Let go, also of a connection whose loop has ended."""
        if self.loop is asyncio.get_running_loop():
            await self._session.close()
        else:  # the socket closes with its last reference
            _disown(self._ws)
            self._session.detach()

    def __del__(self) -> None:
        if self.loop.is_closed():
            _disown(self._ws)
            self._session.detach()


class HttpConnection:
    """One environment behind HTTP requests, known by the id of its session in any event loop."""

    def __init__(
        self, url: str, token: str | None, timeout_s: float, slot_timeout_s: float
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._url = url
        self._token = token
        self._timeout_s = timeout_s
        self._slot_timeout_s = slot_timeout_s
        self._session = _session(token, timeout_s)
        self._id = secrets.token_urlsafe(18)
        self._asked = False
        self._lock = asyncio.Lock()
        self._stale = False

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return not self._stale

    def _client(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self.loop is not loop:
            self._session.detach()
            self._session = _session(self._token, self._timeout_s)
            self.loop, self._lock = loop, asyncio.Lock()
        return self._session

    async def ask(self, request: Json, blobs: Blobs) -> tuple[Json, Blobs]:
        """Send a request and return its reply; raise what it failed with, or Lost."""
        self._client()
        wait = SlotWait(self._url, self._slot_timeout_s)
        async with self._lock:
            while True:
                status, reply, media = await self._post(request, blobs)
                if status != 503:
                    break
                await wait.again()
        if status == 404:
            raise Lost(error_from_json(reply.get("error"), EnvError).message)
        if "error" in reply:
            raise error_from_json(reply["error"], EnvError)
        return reply, media

    async def _post(self, request: Json, blobs: Blobs) -> tuple[int, Json, Blobs]:
        body = {name: value for name, value in request.items() if name != "op"}
        headers = {SESSION_HEADER: self._id}
        self._asked = True
        if blobs:
            data, headers["Content-Type"] = pack({"id": 0, **body}, blobs), FRAME_TYPE
        else:
            data, headers["Content-Type"] = dumps(body), "application/json"
        try:
            async with self._client().post(
                f"{self._url}/{request['op']}", data=data, headers=headers
            ) as response:
                raw = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise Lost(f"{type(error).__name__}: {error}") from error
        if response.content_type == FRAME_TYPE:
            return response.status, *_unpack(raw)
        return response.status, loads(raw), []

    async def close(self) -> None:
        """Give the environment back."""
        try:
            if self._asked:
                async with asyncio.timeout(_CLOSE_S):
                    await self._post({"op": "close"}, [])
        except (TimeoutError, Lost):
            pass
        finally:
            await self._session.close()

    async def interrupt(self) -> None:
        """Give up the request that runs; the server hears of it at :meth:`drop`."""
        self._stale = True

    async def drop(self) -> None:
        """Give the environment back."""
        await self.close()


_MEANING = {
    1001: ": it gave the environment back",
    1006: ": it ended, or the network did",
    1009: ": a message was too large",
    1012: ": it ends",
}


def _session(token: str | None, timeout_s: float) -> aiohttp.ClientSession:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    # The server keeps idle connections for longer, so that none is found dead when it is used.
    connector = aiohttp.TCPConnector(keepalive_timeout=15, limit=4)
    # How long an environment may take is for its driver to say.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s)
    return aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout)


async def _handshake(
    session: aiohttp.ClientSession, url: str
) -> aiohttp.ClientWebSocketResponse | None:
    """Return the open WebSocket, or None if the server has no free environment."""
    try:
        return await session.ws_connect(
            url, max_msg_size=_MAX_REPLY_BYTES, timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S)
        )
    except aiohttp.WSServerHandshakeError as error:
        if error.status == 503:
            return None
        raise


def _watch_over(connection: Any) -> None:
    if connection is None:
        return
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _disown(ws: aiohttp.ClientWebSocketResponse) -> None:
    """Let the socket close with its last reference, which a loop that has ended cannot do for it.

    aiohttp offers no way to say so, and would complain of the loop when it is collected.
    """
    with contextlib.suppress(AttributeError):
        response = ws._response
        connection, response._connection = response._connection, None
        if connection is not None:
            connection._protocol = None


def refusal(url: str, error: Exception) -> EnvError:
    """Tell in plain words why a server cannot be used."""
    status = getattr(error, "status", None)
    if status == 401:
        return EnvError(
            f"{url} wants a bearer token",
            hint="make(…, token=…), or export RELAX_AGENT_ENV_TOKEN=…",
        )
    if status is not None:
        return EnvError(
            f"{url} answers with status {status}; it serves no environment",
            hint="the address is the one that `relax-agent envs serve` prints",
        )
    reason = " ".join(str(error).split()) or type(error).__name__
    return EnvError(
        f"{url} cannot be reached: {reason}", hint="is it served? relax-agent envs serve ENV"
    )


def _unpack(data: bytes) -> tuple[Json, Blobs]:
    with contextlib.suppress(FrameError):
        found = list(Frames().feed(data))
        if len(found) == 1:
            header, blobs = found[0]
            header.pop("id", None)
            return header, blobs
    raise WireError("the reply is not one frame")

"""What this project's web applications share: who may call, JSON answers, callers who go away."""

from __future__ import annotations

import asyncio
import hmac
import json
import weakref
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from starlette._utils import get_route_path
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

T = TypeVar("T")

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""What answers without a token."""
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def protect(app: FastAPI, token: str | None) -> None:
    """Let only those call who may: with the token, or from no foreign web page if there is none."""
    app.add_middleware(lambda inner: guarded(inner, token))


def guarded(app: ASGIApp, token: str | None) -> ASGIApp:
    """Return ``app`` for only those who may call."""
    return NoForeignPages(app) if token is None else BearerToken(app, token)


class BearerToken:
    """ASGI middleware: no token, no answer. Compared in constant time."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what carries the token."""
        if scope["type"] not in ("http", "websocket") or get_route_path(scope) in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
            return
        headers = {"WWW-Authenticate": "Bearer"}
        await json_response({"detail": "a valid bearer token is required"}, 401, headers)(
            scope, receive, send
        )


class NoForeignPages:
    """ASGI middleware for a server without a token: web pages from elsewhere cannot call it.

    Any page that a browser shows may post to the loopback; the browser says where it came from.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what no foreign web page asks."""
        origin = next(
            (value for name, value in scope.get("headers", ()) if name == b"origin"), None
        )
        if origin is None or _host_of(origin) in _LOOPBACK:
            await self._app(scope, receive, send)
            return
        reply = json_response({"detail": "web pages may not call this server without a token"}, 403)
        await reply(scope, receive, send)


def _host_of(origin: bytes) -> str | None:
    try:
        return urlsplit(origin.decode("latin-1")).hostname
    except ValueError:  # no browser sends that
        return None


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return an answer with a JSON body."""
    body = json.dumps(data, ensure_ascii=False).encode()
    return Response(body, status, headers, media_type="application/json")


class CallerWaits:
    """Cancels the task that enters it when the caller of its request hangs up.

    Looking for that costs a task, so it begins only when the work takes a moment; one timer looks
    at all that have begun.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._task: asyncio.Task[Any]
        self._entered: _Entered
        self._watcher: asyncio.Task[None] | None = None
        self.gone = False
        """Whether the caller has hung up."""

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._entered = _Entered.of(task.get_loop())
        self._entered.add(self)
        return self

    def watch(self) -> None:
        """Begin to look."""
        self._watcher = asyncio.ensure_future(self._wait())

    async def _wait(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            continue
        self.gone = True
        self._task.cancel()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._entered.discard(self)
        if self._watcher is not None:
            self._watcher.cancel()
        if self.gone and kind is not None and issubclass(kind, asyncio.CancelledError):
            return self._task.uncancel() == 0
        return False


class _Entered:
    """The callers of one event loop that are not looked after yet."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._new: dict[CallerWaits, None] = {}
        self._old: dict[CallerWaits, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Entered:
        found = _ENTERED.get(loop)
        if found is None:
            found = _ENTERED[loop] = cls(loop)
        return found

    def add(self, caller: CallerWaits) -> None:
        self._new[caller] = None
        if self._timer is None:
            self._arm()

    def discard(self, caller: CallerWaits) -> None:
        self._new.pop(caller, None)
        self._old.pop(caller, None)

    def _arm(self) -> None:
        loop = self._loop()
        self._timer = None if loop is None else loop.call_later(_LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        """Look after those that were there at the last look already."""
        self._timer = None
        for each in self._old:
            each.watch()
        self._old, self._new = self._new, {}
        if self._old:
            self._arm()


_ENTERED: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Entered] = (
    weakref.WeakKeyDictionary()
)
_LOOK_EVERY_S = 0.02
_MOST_DISCARDED, _DISCARD_S = 256 << 20, 10.0


async def read_body(request: Request, max_bytes: int) -> bytes | None:
    """Return a request's body; None if it is larger than it may be.

    The rest of such a one is read and thrown away, within reason: a caller whose connection closes
    while it still sends would never see the answer that tells it why.
    """
    chunks, size = [], 0
    stream = request.stream()
    try:
        async for chunk in stream:
            chunks.append(chunk)
            size += len(chunk)
            if size > max_bytes:
                chunks.clear()
                async with asyncio.timeout(_DISCARD_S):
                    while size < _MOST_DISCARDED and (chunk := await anext(stream, b"")):
                        size += len(chunk)
                return None
    except (TimeoutError, ClientDisconnect):
        return None
    return b"".join(chunks)


async def unless_gone(request: Request, run: Callable[[], Awaitable[T]]) -> T | None:
    """Run a call, and cancel it if its caller hangs up first; None then."""
    call = asyncio.ensure_future(run())
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({call, gone}, return_when=asyncio.FIRST_COMPLETED)
        return call.result() if call.done() else None
    finally:
        for task in (call, gone):
            task.cancel()
        await asyncio.gather(call, gone, return_exceptions=True)

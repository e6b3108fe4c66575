"""What this project's web applications share: who may call, JSON answers, callers who go away."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

T = TypeVar("T")

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""What answers without a token."""
_LOOPBACK = frozenset({b"localhost", b"127.0.0.1", b"::1"})


def protect(app: FastAPI, token: str | None) -> None:
    """Let only those call who may: with the token, or from no foreign web page if there is none."""
    if token is None:
        app.add_middleware(NoForeignPages)
    else:
        app.add_middleware(BearerToken, token=token)


class BearerToken:
    """ASGI middleware: no token, no answer. Compared in constant time."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what carries the token."""
        if scope["type"] not in ("http", "websocket") or scope["path"] in OPEN_PATHS:
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
        origin = dict(scope.get("headers", ())).get(b"origin")
        if origin is None or urlsplit(origin).hostname in _LOOPBACK:
            await self._app(scope, receive, send)
            return
        reply = json_response({"detail": "web pages may not call this server without a token"}, 403)
        await reply(scope, receive, send)


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return an answer with a JSON body."""
    body = json.dumps(data, ensure_ascii=False).encode()
    return Response(body, status, headers, media_type="application/json")


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

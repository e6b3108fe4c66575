"""FastAPI, with tool calls going straight to their tools.

A call passes a dozen layers of FastAPI that have nothing to do for it; they cost as much as all of
the call itself. As long as nobody has added middleware of their own, a ``POST`` to a tool's path
takes the short way: the same check of who may call, the same endpoint, the same answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette._utils import get_route_path
from starlette.types import ASGIApp, Receive, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]


class ToolApp(FastAPI):
    """The application of a tool server."""

    _chain: ASGIApp | None = None
    _endpoints: Mapping[str, Endpoint]
    _own_middleware = 0

    def go_straight(
        self, endpoints: Mapping[str, Endpoint], guard: Callable[[ASGIApp], ASGIApp]
    ) -> None:
        """Let requests for ``endpoints``, by path, pass nothing but ``guard``."""
        self._endpoints = endpoints
        self._own_middleware = len(self.user_middleware)
        self._chain = guard(self._answer)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._endpoints[get_route_path(scope)](Request(scope, receive))
        await response(scope, receive, send)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> Any:
        """Answer one request."""
        if (
            self._chain is not None
            and scope["type"] == "http"
            and scope["method"] == "POST"
            and len(self.user_middleware) == self._own_middleware
            and get_route_path(scope) in self._endpoints
        ):
            await self._chain(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

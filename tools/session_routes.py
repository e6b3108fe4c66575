"""The routes under ``/sessions``: open, lease, renew, close."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from pydantic import Field

from relax_agent.errors import ToolError
from relax_agent.tools.leases import MAX_LEASE_S, NoSession, TooManySessions
from relax_agent.tools.peers import LOCAL
from relax_agent.tools.schema import Arguments, arguments_of
from relax_agent.tools.service import ToolService
from relax_agent.tools.web import json_response, read_body
from relax_agent.tools.wire import ENDING, REFUSED, loads

_MAX_BODY = 1 << 20
Ids = Annotated[list[str], Field(max_length=10_000)]
LeaseSeconds = Annotated[float, Field(gt=0, le=MAX_LEASE_S)]


def _open(lease_s: LeaseSeconds | None = None) -> None:
    """Take the body of ``POST /sessions``."""


def _renew(sessions: Ids) -> None:
    """Take the body of ``POST /sessions/renew``."""


_OPEN = arguments_of(_open, "POST /sessions", skip=0, docs={"lease_s": "How long it lives unused."})
_RENEW = arguments_of(_renew, "POST /sessions/renew", skip=0, docs={"sessions": "Their ids."})


def add_session_routes(app: FastAPI, service: ToolService) -> None:
    """Add the routes to an application."""
    leases = service.leases

    @app.post("/sessions", status_code=201, **_about(_OPEN, 422, 429, 503))
    async def open_session(request: Request) -> Response:
        """Open a session for tools with state; it closes when nobody uses it for its lease."""

        async def run(lease_s: float | None = None) -> Response:
            lease = leases.open(lease_s)
            told = {"session": lease.id, "lease_s": lease.lease_s, "server": service.id}
            return json_response(told, 201)

        if service.draining:
            return _problem(
                503, "this tool server is about to end; open it elsewhere", refused=True
            )
        return await _with_body(request, _OPEN, run)

    @app.post("/sessions/renew", **_about(_RENEW, 422))
    async def renew_sessions(request: Request) -> Response:
        """Let many sessions live for another lease; tells which of them have ended."""

        async def run(sessions: list[str]) -> Response:
            lost = await service.renew_sessions(sessions)
            return json_response({"renewed": len(sessions) - len(lost), "lost": lost})

        return await _with_body(request, _RENEW, run)

    @app.post("/sessions/{session}/renew", **_about(None, 404))
    async def renew_session(session: str) -> Response:
        """Let a session live for another lease."""
        try:
            lease = leases.renew(session)
        except NoSession as error:
            return _problem(404, str(error))
        return json_response({"session": lease.id, "lease_s": lease.lease_s})

    @app.delete("/sessions/{session}", **_about(None, 404))
    async def close_session(session: str) -> Response:
        """Close a session, and say what of it could not be closed in time."""
        try:
            failures = await leases.close(session)
        except NoSession as error:
            return _problem(404, str(error))
        return json_response({"closed": not failures, "failures": failures})

    @app.get("/sessions")
    async def count_sessions(request: Request) -> dict[str, float]:
        """How many sessions there are, and what has become of the others."""
        return await service.numbers(alone=LOCAL in request.headers)


def _about(body: Arguments | None, *statuses: int) -> dict[str, Any]:
    """Return what a route says of itself in the OpenAPI description."""
    words = {404: "no such session", 422: "wrong body", 429: "too many", 503: "about to end"}
    about: dict[str, Any] = {
        "responses": {status: {"description": words[status]} for status in statuses},
        "response_class": Response,
    }
    if body is not None:
        schema = {**body.schema, "additionalProperties": False}
        content = {"application/json": {"schema": schema}}
        about["openapi_extra"] = {
            "requestBody": {"required": "required" in schema, "content": content}
        }
    return about


async def _with_body(
    request: Request, arguments: Arguments, run: Callable[..., Awaitable[Response]]
) -> Response:
    body = await read_body(request, _MAX_BODY)
    if body is None:
        return _problem(413, f"the body is larger than {_MAX_BODY:,} bytes")
    try:
        values = arguments.validate(loads(body) if body else {})
        return await run(**values)
    except ToolError as error:
        return _problem(422, str(error))
    except TooManySessions as error:
        return _problem(429, str(error), refused=True)


def _problem(status: int, words: str, *, refused: bool = False) -> Response:
    return json_response({"detail": words}, status, {REFUSED: ENDING} if refused else None)

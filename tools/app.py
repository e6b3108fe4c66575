"""The HTTP form of a toolset: one FastAPI route for each tool.

    POST /tools/{name}            the arguments as one JSON object → a tool result
    GET  /tools                   the manifest: schemas and limits
    POST /sessions                open a session; its id goes with the calls (X-Tool-Session)
    POST /sessions/{id}/renew     let it live for another lease; POST /sessions/renew for many
    DELETE /sessions/{id}         close it
    GET  /healthz                 the process lives;  GET /readyz  the tools are warm
    GET  /metrics                 counters and latencies, for Prometheus;  GET /docs  this, to read
    /mcp                          the same tools for MCP clients

A failed call answers with the same body as a good one, and with the status that its kind
deserves, so that ``curl -f`` and :class:`~relax_agent.tools.client.RemoteToolset` both work.
When a caller goes away, or the time that it stated is over, its call is cancelled. With a token,
everything but the two probes needs ``Authorization: Bearer …``; without one, web pages from
elsewhere are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.routing import Route
from starlette.types import ASGIApp

from relax_agent.errors import ToolError, ToolErrorKind
from relax_agent.messages import ToolCall
from relax_agent.tools.declaration import Tool
from relax_agent.tools.mcp_mount import McpMount
from relax_agent.tools.metrics import CONTENT_TYPE, joined
from relax_agent.tools.openapi import STATUS, describe_app, tool_description
from relax_agent.tools.peers import LOCAL, Forwarding, Peers
from relax_agent.tools.result import ToolResult
from relax_agent.tools.service import MAX_REQUEST_BYTES, ServiceLimits, ToolService
from relax_agent.tools.session_routes import add_session_routes
from relax_agent.tools.straight import Endpoint, ToolApp
from relax_agent.tools.toolset import Toolset, refuse
from relax_agent.tools.web import CallerWaits, guarded, json_response, protect, read_body
from relax_agent.tools.wire import (
    CALL_ID,
    DEADLINE,
    ENDING,
    EPISODE,
    FRAME_TYPE,
    NO_SESSION,
    REFUSED,
    SESSION,
    dump_result,
    load_arguments,
)

__all__ = ["MAX_REQUEST_BYTES", "ServiceLimits", "create_tool_app", "manifest"]

logger = logging.getLogger(__name__)

_ENDING = ToolResult.failure(
    ToolErrorKind.UNAVAILABLE, "this tool server is about to end; try again later"
)


def create_tool_app(
    toolset: Toolset,
    *,
    token: str | None = None,
    limits: ServiceLimits | None = None,
    max_request_bytes: int | None = None,
    worker: int | None = None,
    peers: Peers | None = None,
) -> FastAPI:
    """Return the FastAPI application that serves ``toolset``.

    Mount it in an application of your own: ``app.mount("/my", create_tool_app(toolset))``. FastAPI
    tells a mounted application nothing of its end; with sessions, close ``state.service`` at yours.

    Args:
        toolset: The tools.
        token: What callers must send as a bearer token; None lets everyone call.
        limits: Sizes, sessions and times.
        max_request_bytes: Size limit of one request's body, instead of the one in ``limits``.
        worker: The number of this process, if the server has several.
        peers: The other processes, then.
    """
    if max_request_bytes is not None:
        limits = replace(limits or ServiceLimits(), max_request_bytes=max_request_bytes)
    service = ToolService(toolset, limits, worker=worker, peers=peers)
    mcp = McpMount(service)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.open()
        try:
            yield
        finally:
            await mcp.close()
            await service.close()
            if peers is not None:
                await peers.close()

    app = ToolApp(title="Relax Agent tools", redoc_url=None, lifespan=lifespan)
    app.state.service = service
    endpoints = {f"/tools/{tool.name}": _endpoint(tool, service) for tool in toolset}
    for tool, (path, endpoint) in zip(toolset, endpoints.items(), strict=True):
        _add_tool(app, tool, path, endpoint)
    _add_probes(app, service)
    add_session_routes(app, service)
    _add_unknown(app, toolset)
    app.router.routes.append(Route("/mcp", mcp, include_in_schema=False))
    app.openapi = describe_app(app, toolset, has_token=token is not None)  # type: ignore[method-assign]
    forward = _forwarding(service)
    app.add_middleware(forward)
    protect(app, token)  # last, which is outermost: nothing is read for those who may not call
    app.go_straight(endpoints, lambda inner: guarded(forward(inner), token))
    return app


def _forwarding(service: ToolService) -> Callable[[ASGIApp], ASGIApp]:
    """Return what passes requests on to other processes, where there are any."""
    peers = service.peers
    if peers is None:
        return lambda inner: inner
    most = max(map(service.request_limit, service.toolset), default=MAX_REQUEST_BYTES)
    return lambda inner: Forwarding(inner, peers, most)


def manifest(toolset: Toolset) -> dict[str, Any]:
    """Return what a client needs to know: each tool's schema and limits."""
    return ToolService(toolset).manifest()


def _add_probes(app: FastAPI, service: ToolService) -> None:
    @app.get("/tools")
    async def tools() -> dict[str, Any]:
        """The manifest."""
        return service.manifest()

    @app.get("/healthz")
    async def healthz() -> dict[str, bool]:
        """The process lives."""
        return {"ok": True}

    @app.get("/readyz", responses={503: {"description": "not yet, or not any more"}})
    async def readyz() -> Response:
        """The tools are warm, and calls are taken."""
        service.start()  # where nobody told this application of its start
        body: dict[str, Any] = {"ready": service.ready, "tools": list(service.toolset.names)}
        if service.failure is not None:
            body["failure"] = str(service.failure)
        return json_response(body, 200 if service.ready else 503)

    @app.get("/metrics", response_class=Response)
    async def metrics(request: Request) -> Response:
        """Counters and latencies, in Prometheus' text format."""
        text = service.metrics_text()
        if service.peers is not None and LOCAL not in request.headers:
            others = await service.peers.ask_all("GET", "/metrics")
            text = joined([text, *(each.decode() for each in others)])
        return Response(text, media_type=CONTENT_TYPE)


class _ToolRoute(APIRoute):
    """A route that reads its request itself: nothing stands between the socket and the tool."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """Return the endpoint as it is."""
        return self.endpoint


def _add_tool(app: FastAPI, tool: Tool[..., Any], path: str, endpoint: Endpoint) -> None:
    app.router.add_api_route(
        path,
        endpoint,
        methods=["POST"],
        name=tool.name,
        operation_id=tool.name,
        summary=tool.description.splitlines()[0],
        description=tool.description,
        openapi_extra=tool_description(tool),
        response_class=Response,
        route_class_override=_ToolRoute,
    )


def _endpoint(tool: Tool[..., Any], service: ToolService) -> Endpoint:
    limit = service.request_limit(tool)

    async def endpoint(request: Request) -> Response:
        headers: dict[bytes, bytes] = dict(request.scope["headers"])
        body = None if service.draining else await read_body(request, limit)
        if service.draining:  # by now: a body may take its time
            service.metrics.refused += 1
            return _reply(_ENDING, headers, {REFUSED: ENDING, "Connection": "close"})
        if body is None:
            service.metrics.refused += 1
            words = f"{tool.name}: the arguments are larger than {limit:,} bytes"
            return _reply(ToolResult.failure(ToolErrorKind.TOO_LARGE, words), headers)
        try:
            call, options = _read(tool, headers, body)
        except ToolError as error:
            result = ToolResult.failure(error.kind, f"{tool.name}: {error}")
            service.metrics.add(tool.name, result)
            return _reply(result, headers)
        if options["session"] is not None and options["session"] not in service.leases:
            result = service.no_session(call, options["session"])
            service.metrics.add(tool.name, result)
            return _reply(result, headers, {REFUSED: NO_SESSION}, status=404)
        with CallerWaits(request):
            try:
                result = await service.call(call, **options)
            except asyncio.CancelledError:
                if not _ended_by_server(service):
                    raise
                return _reply(_ENDING, headers)
            if logger.isEnabledFor(logging.INFO):
                _log(call, result, len(body))
            late = result.error is ToolErrorKind.TIMEOUT and "timeout_s" in options
            return _reply(result, headers, status=408 if late else None)
        return Response(status_code=499)  # nobody reads it: the caller is gone

    return endpoint


def _ended_by_server(service: ToolService) -> bool:
    """Tell whether a call was cancelled because the server ends: its caller hears of that."""
    task = asyncio.current_task()
    return service.draining and task is not None and task.uncancel() == 0


def _read(
    tool: Tool[..., Any], headers: dict[bytes, bytes], body: bytes
) -> tuple[ToolCall, dict[str, Any]]:
    framed = headers.get(b"content-type", b"").startswith(_FRAME_TYPE)
    arguments = load_arguments(body, tool.parameters, framed=framed)
    options: dict[str, Any] = {
        "session": _text(headers, _SESSION),
        "episode": _text(headers, _EPISODE),
    }
    deadline = _text(headers, _DEADLINE)
    if deadline is not None:
        options["timeout_s"] = _seconds(deadline)
    return ToolCall(tool.name, arguments, _text(headers, _CALL_ID) or ""), options


_SESSION, _EPISODE, _DEADLINE, _CALL_ID = (
    name.lower().encode() for name in (SESSION, EPISODE, DEADLINE, CALL_ID)
)


_FRAME_TYPE = FRAME_TYPE.encode()


def _text(headers: dict[bytes, bytes], name: bytes) -> str | None:
    value = headers.get(name)
    return value[:200].decode("latin-1") or None if value is not None else None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ToolError(
            f"the header {DEADLINE} must be a number of seconds, not {text[:40]!r}",
            kind=ToolErrorKind.INVALID_ARGUMENTS,
        )
    return seconds


def _reply(
    result: ToolResult,
    headers: dict[bytes, bytes],
    more: dict[str, str] | None = None,
    *,
    status: int | None = None,
) -> Response:
    framed = _FRAME_TYPE in headers.get(b"accept", b"")
    body, content_type = dump_result(result, framed=framed)
    return Response(body, status or STATUS[result.error], more, media_type=content_type)


def _log(call: ToolCall, result: ToolResult, request_bytes: int) -> None:
    """Tell of a call without what it was about."""
    outcome = "ok" if result.error is None else result.error.value
    logger.info(
        "call",
        extra={
            "facts": {
                "tool": call.name,
                "outcome": outcome,
                "duration_s": round(result.duration_s, 6),
                "queued_s": round(result.queued_s, 6),
                "request_bytes": request_bytes,
                "result_bytes": result.size(),
            }
        },
    )


def _add_unknown(app: FastAPI, toolset: Toolset) -> None:
    @app.post("/tools/{name}", include_in_schema=False)
    async def unknown(name: str) -> Response:
        """Answer a call of a tool that does not exist as the toolset itself would."""
        result = refuse(ToolCall(name, {}), toolset.names)
        assert result is not None
        return _reply(result, {})

"""The HTTP form of a toolset: one FastAPI route for each tool.

    POST /tools/{name}   the arguments as one JSON object → a tool result
    GET  /tools          the manifest: schemas and limits
    GET  /healthz        the process lives;  GET /readyz  it takes calls;  GET /metrics  counters

A failed call answers with the same body as a good one, and with the status that its kind
deserves, so that ``curl -f`` and :class:`~relax_agent.tools.client.RemoteToolset` both work.
When a caller goes away, its call is cancelled. With a token, everything but the two probes needs
``Authorization: Bearer …``; without one, web pages from elsewhere are refused.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from fastapi import FastAPI, Request, Response

from relax_agent.errors import ToolErrorKind
from relax_agent.messages import ToolCall
from relax_agent.tools.declaration import Tool
from relax_agent.tools.result import ToolResult
from relax_agent.tools.toolset import Toolset, refuse
from relax_agent.tools.web import json_response, protect, unless_gone

MAX_REQUEST_BYTES = 1 << 20
"""Size of the arguments of one call."""
MANIFEST_VERSION = 1
_GONE = ToolResult.failure(ToolErrorKind.UNAVAILABLE, "the caller went away")
_STATUS = {
    None: 200,
    ToolErrorKind.INVALID_ARGUMENTS: 422,
    ToolErrorKind.NOT_FOUND: 404,
    ToolErrorKind.TIMEOUT: 504,
    ToolErrorKind.CRASHED: 500,
    ToolErrorKind.TOO_LARGE: 413,
    ToolErrorKind.DENIED: 403,
    ToolErrorKind.UNAVAILABLE: 503,
}


def create_tool_app(
    toolset: Toolset, *, token: str | None = None, max_request_bytes: int = MAX_REQUEST_BYTES
) -> FastAPI:
    """Return the FastAPI application that serves ``toolset``.

    Args:
        toolset: The tools.
        token: What callers must send as a bearer token; None lets everyone call.
        max_request_bytes: Size limit of one request's body.
    """
    app = FastAPI(title="Relax Agent tools", docs_url="/docs", redoc_url=None)
    counts: Counter[tuple[str, str]] = Counter()
    _add_probes(app, toolset, counts)
    for tool in toolset:
        _add_tool(app, tool, counts, max_request_bytes)
    _add_unknown(app, toolset)
    protect(app, token)
    return app


def manifest(toolset: Toolset) -> dict[str, Any]:
    """Return what a client needs to know: each tool's schema and limits."""
    return {
        "version": MANIFEST_VERSION,
        "tools": [
            {
                "schema": tool.schema(),
                "timeout_s": tool.limits.timeout_s,
                "queue_timeout_s": tool.limits.queue_timeout_s,
                "retries": tool.limits.retries,
                "idempotent": tool.limits.idempotent,
            }
            for tool in toolset
        ],
    }


def _reply(result: ToolResult) -> Response:
    return json_response(result.to_json(), _STATUS[result.error])


def _add_probes(app: FastAPI, toolset: Toolset, counts: Counter[tuple[str, str]]) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, bool]:
        """The process lives."""
        return {"ok": True}

    @app.get("/readyz")
    async def readyz() -> dict[str, Any]:
        """The server takes calls."""
        return {"ready": True, "tools": list(toolset.names)}

    @app.get("/tools")
    async def tools() -> dict[str, Any]:
        """The manifest."""
        return manifest(toolset)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Calls by tool and outcome, in Prometheus' text format."""
        lines = ["# TYPE relax_tool_calls_total counter"]
        for (name, outcome), count in sorted(counts.items()):
            lines.append(f'relax_tool_calls_total{{tool="{name}",outcome="{outcome}"}} {count}')
        return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


def _add_tool(
    app: FastAPI, tool: Tool[..., Any], counts: Counter[tuple[str, str]], max_bytes: int
) -> None:
    async def endpoint(request: Request) -> Response:
        arguments = await _arguments(request, max_bytes)
        if isinstance(arguments, ToolResult):
            result = arguments
        else:
            result = await unless_gone(request, lambda: tool.invoke(arguments)) or _GONE
        counts[tool.name, result.error.value if result.error else "ok"] += 1
        return _reply(result)

    app.add_api_route(
        f"/tools/{tool.name}",
        endpoint,
        methods=["POST"],
        name=tool.name,
        summary=tool.description.splitlines()[0],
        description=tool.description,
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": tool.parameters}},
            }
        },
    )


def _add_unknown(app: FastAPI, toolset: Toolset) -> None:
    @app.post("/tools/{name}", include_in_schema=False)
    async def unknown(name: str) -> Response:
        """Answer a call of a tool that does not exist as the toolset itself would."""
        result = refuse(ToolCall(name, {}), toolset.names)
        assert result is not None
        return _reply(result)


async def _arguments(request: Request, max_bytes: int) -> Any:
    """Return the parsed body, or the failure that it deserves."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            return ToolResult.failure(
                ToolErrorKind.TOO_LARGE, f"the arguments are larger than {max_bytes:,} bytes"
            )
    try:
        return json.loads(body) if body else {}
    except (ValueError, RecursionError) as error:
        message = f"the arguments are not JSON: {error}"
        return ToolResult.failure(ToolErrorKind.INVALID_ARGUMENTS, message)

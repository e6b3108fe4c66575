"""The same tools for MCP clients, by the official SDK: streamable HTTP, without its sessions.

MCP's newer protocol knows no sessions; state is named by a handle. So where tools have state, two
tools more are offered, ``open_tool_session`` and ``close_tool_session``, and those tools take the
handle as their argument ``tool_session``. Behind it is a session like any other, with a lease.
Media come back as images and audio, a video as an embedded resource.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from relax_agent.errors import MissingExtraError, ToolErrorKind
from relax_agent.messages import Audio, Image, Part, Text, ToolCall
from relax_agent.tools.declaration import Tool
from relax_agent.tools.leases import NoSession, TooManySessions
from relax_agent.tools.result import ToolResult
from relax_agent.tools.service import ToolService
from relax_agent.tools.web import CallerWaits, json_response, read_body
from relax_agent.tools.wire import media_part

try:
    from mcp import types
    from mcp.server.lowlevel import Server
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
except ImportError as error:
    raise MissingExtraError("mcp", "mcp") from error

OPEN, CLOSE, HANDLE = "open_tool_session", "close_tool_session", "tool_session"
ERROR_KIND = "relax_agent/error"
"""The key of a failed result's ``_meta`` that holds its kind."""
LEASE_S = 900.0
"""A person, or a slow model, may think between two calls."""
_HANDLE: dict[str, Any] = {"type": "string", "description": f"What {OPEN} returned."}


def make_server(service: ToolService) -> Server[Any]:
    """Return the SDK's server of a service's tools."""

    async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=_listed(service))

    async def call_tool(context: Any, params: Any) -> types.CallToolResult:
        return to_mcp(await _call(service, params.name, dict(params.arguments or {})))

    return Server("relax-agent", on_list_tools=list_tools, on_call_tool=call_tool)


def _listed(service: ToolService) -> list[types.Tool]:
    toolset = service.toolset
    tools = [
        types.Tool(
            name=tool.name,
            description=tool.description,
            input_schema=_with_handle(tool) if toolset.is_stateful(tool.name) else tool.parameters,
        )
        for tool in toolset
    ]
    if toolset.has_sessions:
        nothing: dict[str, Any] = {"type": "object", "properties": {}}
        words = f"Open a session for the tools that take {HANDLE}; returns its handle."
        tools.append(types.Tool(name=OPEN, description=words, input_schema=nothing))
        handle = {"type": "object", "properties": {HANDLE: _HANDLE}, "required": [HANDLE]}
        words = "Close a session and what its tools hold."
        tools.append(types.Tool(name=CLOSE, description=words, input_schema=handle))
    return tools


def _with_handle(tool: Tool[..., Any]) -> dict[str, Any]:
    schema = dict(tool.parameters)
    schema["properties"] = {**schema["properties"], HANDLE: _HANDLE}
    if tool.requires_session:
        schema["required"] = [*schema.get("required", ()), HANDLE]
    return schema


async def _call(service: ToolService, name: str, arguments: dict[str, Any]) -> ToolResult:
    toolset = service.toolset
    if service.draining:
        return ToolResult.failure(ToolErrorKind.UNAVAILABLE, "this tool server is about to end")
    if toolset.has_sessions and name == OPEN:
        try:
            return ToolResult.of(service.leases.open(LEASE_S).id)
        except TooManySessions as error:
            return ToolResult.failure(ToolErrorKind.UNAVAILABLE, str(error))
    session = None
    if name == CLOSE or (name in toolset and toolset.is_stateful(name)):
        session = str(arguments.pop(HANDLE, "")) or None
    if toolset.has_sessions and name == CLOSE:
        return await _close(service, session or "")
    return await service.call_anywhere(ToolCall(name, arguments), session)


async def _close(service: ToolService, session: str) -> ToolResult:
    try:
        failures = await service.close_session(session)
    except NoSession as error:
        return ToolResult.failure(ToolErrorKind.NOT_FOUND, str(error))
    return ToolResult.of("closed" if not failures else "; ".join(failures))


def to_mcp(result: ToolResult) -> types.CallToolResult:
    """Return a result in MCP's form."""
    content: list[Any] = [_content(part) for part in result.content]
    if result.error is None:
        return types.CallToolResult(content=content)
    meta = {ERROR_KIND: result.error.value}
    return types.CallToolResult.model_validate({"content": content, "isError": True, "_meta": meta})


def _content(part: Part) -> Any:
    if isinstance(part, Text):
        return types.TextContent(type="text", text=part.text)
    data = base64.b64encode(part.data).decode("ascii")
    if isinstance(part, Image):
        return types.ImageContent(type="image", data=data, mime_type=part.mime)
    if isinstance(part, Audio):
        return types.AudioContent(type="audio", data=data, mime_type=part.mime)
    resource = types.BlobResourceContents(uri="relax:video", blob=data, mime_type=part.mime)
    return types.EmbeddedResource(type="resource", resource=resource)


class McpEndpoint:
    """The ASGI application at ``/mcp``; made by :meth:`start`."""

    def __init__(self, service: ToolService) -> None:
        limits = service.limits
        self._most = max(limits.max_request_bytes, limits.max_media_request_bytes)
        self._manager = StreamableHTTPSessionManager(
            make_server(service),
            json_response=True,
            stateless=True,
            max_request_body_size=self._most,
        )
        self._stop = asyncio.Event()
        self._started = asyncio.Event()
        self._task: asyncio.Task[None]

    @classmethod
    async def start(cls, service: ToolService) -> McpEndpoint:
        """Make it, and start what it needs."""
        self = cls(service)
        self._task = asyncio.get_running_loop().create_task(self._run())
        waiting = asyncio.ensure_future(self._started.wait())
        try:
            await asyncio.wait({self._task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._task.done():
            self._task.result()
        return self

    async def _run(self) -> None:
        """Hold the SDK's task group, which one task must enter and leave."""
        async with self._manager.run():
            self._started.set()
            await self._stop.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; a caller that hangs up ends its call."""
        request = Request(scope, receive)
        body = await read_body(request, self._most)
        if body is None:
            await json_response({"detail": "the request is too large"}, 413)(scope, receive, send)
            return
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Any:
            if messages:
                return messages.pop()
            return await asyncio.get_running_loop().create_future()  # the caller is watched here

        with CallerWaits(request):
            await self._manager.handle_request(scope, replay, send)

    async def close(self) -> None:
        """End it. May be called twice."""
        self._stop.set()
        with contextlib.suppress(Exception):
            await self._task


def from_mcp(result: Any) -> ToolResult:
    """Return what any MCP server's tool gave back."""
    parts = [part for each in result.content for part in _parts(each)]
    if not parts and result.structured_content is not None:
        parts = [Text(json.dumps(result.structured_content, ensure_ascii=False))]
    if not result.is_error:
        return ToolResult(tuple(parts) or (Text("done"),))
    kind = (result.meta or {}).get(ERROR_KIND)
    known = ToolErrorKind(kind) if kind in set(ToolErrorKind) else _guessed(parts)
    if not parts or (isinstance(parts[0], Text) and not parts[0].text.startswith("Error")):
        parts = [Text("Error: "), *parts]
    return ToolResult(tuple(parts), known)


def _guessed(parts: list[Part]) -> ToolErrorKind:
    """Return the kind of a failure of which there are only words, as other servers send it."""
    said = parts[0].text[:300] if parts and isinstance(parts[0], Text) else ""
    if "validation error" in said:
        return ToolErrorKind.INVALID_ARGUMENTS
    return ToolErrorKind.NOT_FOUND if said.startswith("Unknown tool") else ToolErrorKind.CRASHED


def _parts(item: Any) -> list[Part]:
    kind = item.type
    if kind == "text":
        return [Text(item.text)]
    if kind in ("image", "audio"):
        return [media_part(kind, item.data, item.mime_type)]
    if kind == "resource":
        resource = item.resource
        if (text := getattr(resource, "text", None)) is not None:
            return [Text(text)]
        what = (resource.mime_type or "").partition("/")[0]
        if what in ("image", "audio", "video"):
            return [media_part(what, resource.blob, resource.mime_type)]
        return [Text(f"(a file of type {resource.mime_type}: {resource.uri})")]
    return [Text(f"({kind}: {getattr(item, 'uri', '')})")]

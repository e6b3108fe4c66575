"""``/mcp`` inside the tool server: built at its first request, as its SDK takes a while to load."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Receive, Scope, Send

from relax_agent.errors import MissingExtraError
from relax_agent.tools.service import ToolService
from relax_agent.tools.web import json_response


class McpMount:
    """An ASGI application that becomes the MCP endpoint when somebody asks for it."""

    def __init__(self, service: ToolService) -> None:
        self._service = service
        self._lock = asyncio.Lock()
        self._endpoint: Any = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        try:
            endpoint = await self._built()
        except MissingExtraError as error:
            await json_response({"detail": str(error)}, 501)(scope, receive, send)
            return
        await endpoint(scope, receive, send)

    async def _built(self) -> Any:
        async with self._lock:
            if self._endpoint is None:
                from relax_agent.tools.mcp_server import McpEndpoint

                self._endpoint = await McpEndpoint.start(self._service)
            return self._endpoint

    async def close(self) -> None:
        """End it. May be called twice."""
        async with self._lock:
            endpoint, self._endpoint = self._endpoint, None
            if endpoint is not None:
                await endpoint.close()

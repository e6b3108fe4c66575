"""Tools: typed functions that a model may call, in process or over HTTP.

``@tool`` declares one (:mod:`relax_agent.tools.declaration`), a :class:`Toolset` collects them,
``relax-agent tools serve MODULE`` puts a module of them behind HTTP, and :class:`RemoteToolset`
calls such a server with the interface of a Toolset. Importing this package loads no web library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relax_agent.errors import ToolError, ToolErrorKind
from relax_agent.tools.context import call_context, current_call
from relax_agent.tools.declaration import Tool, ToolLimits, tool
from relax_agent.tools.result import ToolResult
from relax_agent.tools.sessions import ToolSession
from relax_agent.tools.toolset import AnyToolset, Toolset
from relax_agent.tools.trace import JsonlTrace, ToolEvent, trace_calls

if TYPE_CHECKING:
    from relax_agent.tools.app import create_tool_app
    from relax_agent.tools.audio import AUDIO_TOOLS
    from relax_agent.tools.client import RemoteToolset
    from relax_agent.tools.files import FileTools
    from relax_agent.tools.http_get import HttpGet
    from relax_agent.tools.image import IMAGE_TOOLS
    from relax_agent.tools.mcp_toolset import McpToolset
    from relax_agent.tools.search import SearchIndex
    from relax_agent.tools.server import open_server, serve
    from relax_agent.tools.shelf import MediaShelf
    from relax_agent.tools.sql import SqlDatabase
    from relax_agent.tools.video import VIDEO_TOOLS

__all__ = [
    "AUDIO_TOOLS",
    "IMAGE_TOOLS",
    "VIDEO_TOOLS",
    "AnyToolset",
    "FileTools",
    "HttpGet",
    "JsonlTrace",
    "McpToolset",
    "MediaShelf",
    "RemoteToolset",
    "SearchIndex",
    "SqlDatabase",
    "Tool",
    "ToolError",
    "ToolErrorKind",
    "ToolEvent",
    "ToolLimits",
    "ToolResult",
    "ToolSession",
    "Toolset",
    "call_context",
    "create_tool_app",
    "current_call",
    "open_server",
    "serve",
    "tool",
    "trace_calls",
]

_LAZY = {
    "AUDIO_TOOLS": "relax_agent.tools.audio",
    "FileTools": "relax_agent.tools.files",
    "HttpGet": "relax_agent.tools.http_get",
    "IMAGE_TOOLS": "relax_agent.tools.image",
    "McpToolset": "relax_agent.tools.mcp_toolset",
    "MediaShelf": "relax_agent.tools.shelf",
    "RemoteToolset": "relax_agent.tools.client",
    "SearchIndex": "relax_agent.tools.search",
    "SqlDatabase": "relax_agent.tools.sql",
    "create_tool_app": "relax_agent.tools.app",
    "VIDEO_TOOLS": "relax_agent.tools.video",
    "open_server": "relax_agent.tools.server",
    "serve": "relax_agent.tools.server",
}


def __getattr__(name: str) -> Any:
    """Load the HTTP side and the ready-made tools when they are first asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)

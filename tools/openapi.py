"""The OpenAPI description of a tool server: what ``/docs`` shows and clients are generated from.

The schema of a tool's arguments is the one that stands in prompts, letter by letter; only its
definitions move to the document's components, where references are looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from relax_agent.errors import ToolErrorKind
from relax_agent.tools.declaration import Tool
from relax_agent.tools.toolset import Toolset
from relax_agent.tools.wire import DEADLINE, EPISODE, FRAME_TYPE, SESSION

STATUS: dict[ToolErrorKind | None, int] = {
    None: 200,
    ToolErrorKind.INVALID_ARGUMENTS: 422,
    ToolErrorKind.NOT_FOUND: 404,
    ToolErrorKind.TIMEOUT: 504,
    ToolErrorKind.CRASHED: 500,
    ToolErrorKind.TOO_LARGE: 413,
    ToolErrorKind.DENIED: 403,
    ToolErrorKind.UNAVAILABLE: 503,
}
_RESULT: dict[str, Any] = {
    "type": "object",
    "description": "What a tool gave back; a failure's content tells what to do.",
    "required": ["content", "error"],
    "properties": {
        "content": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type"],
                "properties": {
                    "type": {"enum": ["text", "image", "audio", "video"]},
                    "text": {"type": "string"},
                    "mime": {"type": "string"},
                    "data": {"type": "string", "contentEncoding": "base64"},
                },
            },
        },
        "error": {"enum": [None, *(kind.value for kind in ToolErrorKind)]},
        "duration_s": {"type": "number"},
        "queued_s": {"type": "number"},
    },
}
_HEADERS = {
    SESSION: ("The session that the call belongs to; POST /sessions opens one.", "string"),
    DEADLINE: ("Seconds after which the caller stops waiting: then the call is ended.", "number"),
    EPISODE: ("The episode that the call belongs to, for the trace.", "string"),
}
_MEANING = {
    200: "the tool's result",
    401: "no valid bearer token",
    403: "the tool needs a session, or denies this",
    404: "the tool found nothing under that name, or there is no such session",
    408: "the time that the caller stated was over",
    413: "the arguments, or the result, are too large",
    422: "wrong arguments; the text names the argument",
    500: "the tool crashed",
    503: "no place was free, or the server is about to end",
    504: "the tool took too long",
}


def tool_description(tool: Tool[..., Any]) -> dict[str, Any]:
    """Return what a tool's route says of itself beyond its name."""
    own = {key: value for key, value in tool.parameters.items() if key != "$defs"}
    content: dict[str, Any] = {"application/json": {"schema": _moved(own, tool.name)}}
    if tool.arguments.takes_media:
        content[FRAME_TYPE] = {"schema": {"type": "string", "format": "binary"}}
    required = bool(tool.parameters.get("required"))
    return {
        "requestBody": {"required": required, "content": content},
        "parameters": [_header(name, *about) for name, about in _HEADERS.items()],
        "responses": {str(status): _response(status, words) for status, words in _MEANING.items()},
    }


def _header(name: str, words: str, kind: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "pattern": "^[!-~]+$", "maxLength": 200}
    if kind == "number":
        schema = {"type": "number", "exclusiveMinimum": 0}
    return {
        "name": name,
        "in": "header",
        "required": False,
        "description": words,
        "schema": schema,
    }


def _response(status: int, words: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/ToolResult"}
    body = {"type": "object"} if status == 401 else schema
    return {"description": words, "content": {"application/json": {"schema": body}}}


def describe_app(app: FastAPI, toolset: Toolset, *, has_token: bool) -> Callable[[], Any]:
    """Return the function that gives the whole document."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            parts = document.setdefault("components", {})
            schemas = parts.setdefault("schemas", {})
            schemas["ToolResult"] = _RESULT
            for tool in toolset:
                for name, schema in tool.parameters.get("$defs", {}).items():
                    schemas[f"{tool.name}.{name}"] = _moved(schema, tool.name)
            if has_token:
                parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
                document["security"] = [{"token": []}]
            app.openapi_schema = document
        return app.openapi_schema

    return openapi


def _moved(schema: Any, prefix: str) -> Any:
    """Return a schema whose references lead to the components."""
    if isinstance(schema, list):
        return [_moved(each, prefix) for each in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: _moved(value, prefix) for key, value in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#/$defs/"):
        out["$ref"] = f"#/components/schemas/{prefix}.{target.removeprefix('#/$defs/')}"
    return out

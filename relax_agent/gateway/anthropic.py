"""The dialect of Anthropic's messages: functions from a body and to one."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from typing import Any

from relax_agent.gateway.dialect import (
    BadRequest,
    Call,
    max_tokens,
    readable,
    reasons,
    require_free_choice,
)
from relax_agent.gateway.session import Answer, ChatRequest
from relax_agent.messages import (
    AssistantMessage,
    Image,
    Message,
    Part,
    Text,
    ToolCall,
    assistant,
    system,
    user,
)

PATH, PREFIX = "/v1/messages", "msg_"
COUNT_PATH = "/v1/messages/count_tokens"
IGNORED = ("temperature", "top_p", "top_k", "stop_sequences", "thinking")
"""Parameters that the run sets, not the program."""
_FINISH = {"stop": "end_turn", "length": "max_tokens", "abort": "max_tokens"}
_THOUGHTS = ("thinking", "redacted_thinking")


def read(body: Any) -> Call:
    """Read the body of a request.

    Raises:
        BadRequest: It is malformed, or asks for what cannot be done.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    messages = _system(body.get("system"))
    items = body.get("messages")
    if not isinstance(items, list) or not items:
        raise BadRequest("messages must be a list with at least one message", "messages")
    for number, item in enumerate(items):
        messages += _messages(item, f"messages.{number}")
    return Call(
        request=ChatRequest(messages, _tools(body), max_tokens(body, "max_tokens")),
        model=str(body.get("model") or "policy"),
        stream=bool(body.get("stream")),
        ignored=[name for name in IGNORED if body.get(name) is not None],
    )


def _system(given: Any) -> list[Message]:
    if given is None or given == "" or given == []:
        return []
    if isinstance(given, str):
        return [system(given)]
    return [system([_text(block, "system") for block in _blocks(given, "system")])]


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(each, dict) for each in content):
        raise BadRequest(f"{where}: content must be a text or a list of blocks", where)
    return content


def _messages(item: Any, where: str) -> list[Message]:
    """Return one message as ours; results of tools are messages of their own here."""
    role = item.get("role") if isinstance(item, dict) else None
    if role not in ("user", "assistant"):
        raise BadRequest(f"{where}: the role must be user or assistant", where)
    blocks = _blocks(item.get("content"), where)
    if role == "assistant":
        return [_assistant(blocks, where)]
    found: list[Message] = []
    parts: list[Part] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            found += [user(parts)] if parts else []
            parts = []
            found.append(_result(block, where))
        else:
            parts.append(_part(block, where))
    return found + ([user(parts)] if parts or not found else [])


def _assistant(blocks: list[dict[str, Any]], where: str) -> AssistantMessage:
    texts, calls = [], []
    for block in blocks:
        if block.get("type") == "tool_use":
            name, arguments = block.get("name"), block.get("input")
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise BadRequest(f"{where}: a tool_use needs a name and an input object", where)
            calls.append(ToolCall(name, arguments, str(block.get("id") or "")))
        elif block.get("type") not in _THOUGHTS:
            texts.append(_text(block, where).text)
    return assistant("".join(texts), tool_calls=calls)


def _result(block: Mapping[str, Any], where: str) -> Message:
    content = block.get("content") or ""
    parts = tuple(_part(each, where) for each in _blocks(content, where))
    return Message("tool", parts, tool_call_id=str(block.get("tool_use_id") or "") or None)


def _part(block: Mapping[str, Any], where: str) -> Part:
    if block.get("type") != "image":
        return _text(block, where)
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") != "base64":
        raise BadRequest(f"{where}: an image must come as base64; nothing is fetched here", where)
    mime, data = source.get("media_type"), source.get("data")
    if not isinstance(mime, str) or not mime.startswith("image/") or not isinstance(data, str):
        raise BadRequest(f"{where}: an image needs a media_type and data", where)
    try:
        return Image(base64.b64decode(data, validate=True), mime)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"{where}: the image's data is damaged: {error}", where) from None


def _text(block: Mapping[str, Any], where: str) -> Text:
    text = block.get("text") if block.get("type") == "text" else None
    if not isinstance(text, str):
        kind = str(block.get("type"))[:40]
        raise BadRequest(f"{where}: a block of type {kind} cannot be read here", where)
    return Text(text)


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools, choice = body.get("tools") or [], body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else None
    require_free_choice(tools, kind)
    if not isinstance(tools, list):
        raise BadRequest("tools must be a list", "tools")
    return [] if kind == "none" else [_tool(each, number) for number, each in enumerate(tools)]


def _tool(tool: Any, number: int) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise BadRequest(f"tools.{number} has no name", "tools")
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise BadRequest(f"tools.{number} has no input_schema", "tools")
    function = {"name": tool["name"], "parameters": schema}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


# -- answers -------------------------------------------------------------------------------------


def body_of(call: Call, answer: Answer, completion: str) -> dict[str, Any]:
    """Return the answer as one object."""
    usage = answer.message.usage
    return {
        **_head(call, completion),
        "content": _content(answer.message),
        "stop_reason": _stop_reason(answer.message),
        "usage": {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens},
    }


def events(call: Call, answer: Answer, completion: str) -> Iterator[bytes]:
    """Yield the answer as server-sent events."""
    usage = answer.message.usage
    begun = {"input_tokens": usage.prompt_tokens, "output_tokens": 0}
    head = {**_head(call, completion), "content": [], "stop_reason": None, "usage": begun}
    yield _event("message_start", message=head)
    for index, block in enumerate(_content(answer.message)):
        empty, delta = _in_parts(block)
        yield _event("content_block_start", index=index, content_block=empty)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    ended = {"stop_reason": _stop_reason(answer.message), "stop_sequence": None}
    yield _event("message_delta", delta=ended, usage={"output_tokens": usage.completion_tokens})
    yield _event("message_stop")


def error_body(status: int, message: str, code: str, param: str | None) -> dict[str, Any]:
    """Return an error in Anthropic's shape."""
    return {"type": "error", "error": {"type": reasons(status), "message": message, "code": code}}


def error_event(body: dict[str, Any]) -> bytes:
    """Return an error in the midst of a stream."""
    return f"event: error\ndata: {json.dumps(body)}\n\n".encode()


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


ALIVE = _event("ping")
"""What a stream that waits for its answer sends now and then."""


def _head(call: Call, completion: str) -> dict[str, Any]:
    return {
        "id": completion,
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "stop_sequence": None,
    }


def _content(message: AssistantMessage) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.text:
        blocks.append({"type": "text", "text": message.text})
    for call in readable(message):
        blocks.append(
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
        )
    return blocks


def _in_parts(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a block as it begins, and what is then added to it."""
    if block["type"] == "tool_use":
        text = json.dumps(block["input"], ensure_ascii=False)
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": text}
    kind = block["type"]
    return {**block, kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}


def _stop_reason(message: AssistantMessage) -> str:
    return "tool_use" if readable(message) else _FINISH[message.finish_reason]

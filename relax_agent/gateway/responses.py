"""The dialect of OpenAI's responses: functions from a body and to one.

Here an answer is a list of items (reasoning, a message, calls), and so is a history. Items of the
assistant that lie beside each other are one message of ours. ``previous_response_id`` stands for
the whole conversation up to that answer; instructions that come with it replace the earlier ones,
and without any the earlier ones stay.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from relax_agent.gateway.dialect import ALIVE as ALIVE
from relax_agent.gateway.dialect import (
    BadRequest,
    Call,
    max_tokens,
    readable,
    require_free_choice,
)
from relax_agent.gateway.dialect import error_body as error_body
from relax_agent.gateway.session import Answer, ChatRequest
from relax_agent.messages import (
    AssistantMessage,
    Message,
    Part,
    Text,
    ToolCall,
    assistant,
    from_openai,
    parts,
    system,
    user,
)

PATH, PREFIX = "/v1/responses", "resp_"
IGNORED = ("temperature", "top_p", "reasoning", "truncation", "top_logprobs")
"""Parameters that the run sets, not the program."""
_TEXTS = ("input_text", "output_text", "text")


def read(body: Any) -> Call:
    """Read the body of a request.

    Raises:
        BadRequest: It is malformed, or asks for what cannot be done.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    _refuse(body)
    told = body.get("instructions")
    if not isinstance(told, str | None):
        raise BadRequest("instructions must be a text", "instructions")
    previous = body.get("previous_response_id")
    if not isinstance(previous, str | None):
        raise BadRequest("previous_response_id must be a text", "previous_response_id")
    messages = ([system(told)] if told else []) + _input(body.get("input"))
    limit = max_tokens(body, "max_output_tokens")
    return Call(
        request=ChatRequest(messages, _tools(body), limit, previous=previous),
        model=str(body.get("model") or "policy"),
        stream=bool(body.get("stream")),
        ignored=[name for name in IGNORED if body.get(name) is not None],
    )


def _refuse(body: Mapping[str, Any]) -> None:
    wanted = body.get("text")
    wanted = wanted.get("format") if isinstance(wanted, dict) else None
    if isinstance(wanted, dict) and wanted.get("type", "text") != "text":
        raise BadRequest("only a text.format of type text can be answered", "text")
    require_free_choice(body.get("tools"), body.get("tool_choice"))
    for name in ("background", "conversation", "prompt"):
        if body.get(name):
            raise BadRequest(f"{name} cannot be answered here: send the input itself", name)


def _input(given: Any) -> list[Message]:
    if isinstance(given, str):
        return [Message("user", parts(given))]
    if not isinstance(given, list) or not given:
        raise BadRequest("input must be a text or a list with at least one item", "input")
    found: list[Message] = []
    for number, item in enumerate(given):
        message = _item(item, f"input[{number}]")
        if message is None:
            continue
        last = found[-1] if found else None
        if isinstance(message, AssistantMessage) and isinstance(last, AssistantMessage):
            found[-1] = assistant(
                last.text + message.text, tool_calls=[*last.tool_calls, *message.tool_calls]
            )
        else:
            found.append(message)
    if not found:
        raise BadRequest("input holds no message", "input")
    return found


def _item(item: Any, where: str) -> Message | None:
    """Return one item as a message; None if it is a thought, which nobody needs to repeat."""
    if not isinstance(item, dict):
        raise BadRequest(f"{where} is not an object", where)
    kind = item.get("type", "message")
    if kind == "reasoning":
        return None
    if kind == "function_call":
        return assistant(tool_calls=[_call(item, where)])
    if kind == "function_call_output":
        call = item.get("call_id")
        content = _parts(item.get("output"), where)
        return Message("tool", content, tool_call_id=call if isinstance(call, str) else None)
    if kind != "message":
        raise BadRequest(f"{where}: an item of type {str(kind)[:40]} cannot be read here", where)
    role, content = item.get("role"), _parts(item.get("content"), where)
    if role == "assistant":
        return AssistantMessage(content=content)
    if role in ("system", "developer"):
        return system(content)
    if role != "user":
        raise BadRequest(f"{where}: there is no role {role!r:.40}", where)
    return user(content)


def _call(item: Mapping[str, Any], where: str) -> ToolCall:
    name, text = item.get("name"), item.get("arguments")
    try:
        arguments = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise BadRequest(f"{where}: a call needs a name and a JSON object as arguments", where)
    return ToolCall(name, arguments, str(item.get("call_id") or ""))


def _parts(content: Any, where: str) -> tuple[Part, ...]:
    if isinstance(content, str | None):
        return parts(content or "")
    if not isinstance(content, list):
        raise BadRequest(f"{where}: content must be a text or a list of parts", where)
    return tuple(_part(each, where) for each in content)


def _part(part: Any, where: str) -> Part:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXTS and isinstance(part.get("text"), str):
        return Text(part["text"])
    if kind != "input_image" or not isinstance(part.get("image_url"), str):
        raise BadRequest(f"{where}: a part of type {str(kind)[:40]} cannot be read here", where)
    url = {"type": "image_url", "image_url": {"url": part["image_url"]}}
    try:
        return from_openai({"role": "user", "content": [url]}).content[0]
    except ValueError as error:
        raise BadRequest(f"{where}: {error}", where) from None


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise BadRequest("tools must be a list", "tools")
    found = []
    for number, each in enumerate(tools):
        if not isinstance(each, dict) or each.get("type", "function") != "function":
            raise BadRequest(f"tools[{number}]: only functions can be called here", "tools")
        if not isinstance(each.get("name"), str):
            raise BadRequest(f"tools[{number}] has no name", "tools")
        known = {key: each[key] for key in ("name", "description", "parameters") if each.get(key)}
        found.append({"type": "function", "function": known})
    return [] if body.get("tool_choice") == "none" else found


# -- answers -------------------------------------------------------------------------------------


def body_of(call: Call, answer: Answer, completion: str) -> dict[str, Any]:
    """Return the answer as one object."""
    message, usage = answer.message, answer.message.usage
    cut = message.finish_reason != "stop" and not readable(message)
    return {
        **_head(call, completion, "incomplete" if cut else "completed"),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(message, completion),
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }


def events(call: Call, answer: Answer, completion: str) -> Iterator[bytes]:
    """Yield the answer as server-sent events."""
    numbers = count()

    def event(kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": next(numbers), **fields}
        return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()

    whole = body_of(call, answer, completion)
    begun = {**_head(call, completion, "in_progress"), "output": [], "usage": None}
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        for kind, fields in _item_events(item):
            yield event(kind, output_index=index, **fields)
    ended = "response.completed" if whole["status"] == "completed" else "response.incomplete"
    yield event(ended, response=whole)


def _item_events(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what tells of one item, from its beginning to its end."""
    name = {"item_id": item["id"]}
    added, done = "response.output_item.added", "response.output_item.done"
    if item["type"] == "function_call":
        text = item["arguments"]
        yield added, {"item": {**item, "arguments": "", "status": "in_progress"}}
        yield "response.function_call_arguments.delta", {**name, "delta": text}
        told = {**name, "name": item["name"], "arguments": text}
        yield "response.function_call_arguments.done", told
    elif item["type"] == "message":
        (part,) = item["content"]
        place = {**name, "content_index": 0}
        empty = {**part, "text": ""}
        yield added, {"item": {**item, "content": [], "status": "in_progress"}}
        yield "response.content_part.added", {**place, "part": empty}
        yield "response.output_text.delta", {**place, "delta": part["text"], "logprobs": []}
        yield "response.output_text.done", {**place, "text": part["text"], "logprobs": []}
        yield "response.content_part.done", {**place, "part": part}
    else:
        yield added, {"item": item}
    yield done, {"item": item}


def error_event(body: dict[str, Any]) -> bytes:
    """Return an error in the midst of a stream."""
    data = {"type": "error", "sequence_number": 0, **body["error"], **body}
    return f"event: error\ndata: {json.dumps(data)}\n\n".encode()


def _head(call: Call, completion: str, status: str) -> dict[str, Any]:
    return {
        "id": completion,
        "object": "response",
        "created_at": int(time.time()),
        "model": call.model,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": call.request.previous,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
    }


def _items(message: AssistantMessage, completion: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    name = completion.removeprefix(PREFIX)
    if message.reasoning:
        thought = [{"type": "summary_text", "text": message.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": thought})
    if message.text:
        part = {"type": "output_text", "text": message.text, "annotations": [], "logprobs": []}
        said = {"type": "message", "id": f"msg_{name}", "role": "assistant", "content": [part]}
        items.append({**said, "status": "completed"})
    for number, call in enumerate(readable(message)):
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{name}_{number}",
                "call_id": call.id,
                "name": call.name,
                "arguments": json.dumps(call.arguments, ensure_ascii=False),
                "status": "completed",
            }
        )
    return items

"""The dialect of OpenAI's chat completions: functions from a body and to one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
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
from relax_agent.messages import AssistantMessage, Message, from_openai

IGNORED = (
    "temperature",
    "top_p",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "seed",
    "stop",
)
"""Parameters that the run sets, not the program."""
_FORMATS = {"wav": "audio/wav", "mp3": "audio/mpeg"}
_FINISH = {"stop": "stop", "length": "length", "abort": "length"}


def read(body: Any) -> Call:
    """Read the body of a request.

    Raises:
        BadRequest: It is malformed, or asks for what cannot be done.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    _refuse(body)
    options = body.get("stream_options")
    return Call(
        request=ChatRequest(
            _messages(body),
            _tools(body),
            max_tokens(body, "max_completion_tokens", "max_tokens"),
        ),
        model=str(body.get("model") or "policy"),
        stream=bool(body.get("stream")),
        usage_in_stream=isinstance(options, dict) and bool(options.get("include_usage")),
        logprobs=bool(body.get("logprobs")),
        ignored=[name for name in IGNORED if body.get(name) is not None],
    )


def _refuse(body: Mapping[str, Any]) -> None:
    if body.get("n") not in (None, 1):
        raise BadRequest("n must be 1: an episode has one answer a turn", "n")
    wanted = body.get("response_format")
    if isinstance(wanted, dict) and wanted.get("type", "text") != "text":
        raise BadRequest("only response_format text can be answered", "response_format")
    require_free_choice(body.get("tools"), body.get("tool_choice"))


def _messages(body: Mapping[str, Any]) -> list[Message]:
    items = body.get("messages")
    if not isinstance(items, list) or not items:
        raise BadRequest("messages must be a list with at least one message", "messages")
    return [_message(item, f"messages[{number}]") for number, item in enumerate(items)]


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, dict):
        raise BadRequest(f"{where} is not an object", where)
    role = {"developer": "system", "function": "tool"}.get(str(item.get("role")), item.get("role"))
    if role not in ("system", "user", "assistant", "tool"):
        raise BadRequest(f"{where}: there is no role {role!r}", where)
    content = item.get("content")
    if isinstance(content, list):
        content = [_part(part, where) for part in content]
    elif not isinstance(content, str | None):
        raise BadRequest(f"{where}: content must be a text or a list of parts", where)
    try:
        return from_openai({**item, "role": role, "content": content})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadRequest(
            f"{where} cannot be read: {type(error).__name__}: {error}", where
        ) from None


def _part(part: Any, where: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise BadRequest(f"{where}: a part of its content is not an object", where)
    if part.get("type") != "input_audio":
        return part
    sound = part.get("input_audio")
    kind = _FORMATS.get(str(sound.get("format"))) if isinstance(sound, dict) else None
    if kind is None or not isinstance(sound, dict):
        raise BadRequest(f"{where}: input_audio must have data and a format (wav, mp3)", where)
    url = f"data:{kind};base64,{sound.get('data')}"
    return {"type": "audio_url", "audio_url": {"url": url}}


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise BadRequest("tools must be a list", "tools")
    for number, each in enumerate(tools):
        function = each.get("function") if isinstance(each, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"tools[{number}] has no function with a name", "tools")
    return [] if body.get("tool_choice") == "none" else tools


# -- answers -------------------------------------------------------------------------------------


PATH, PREFIX = "/v1/chat/completions", "chatcmpl-"


def body_of(call: Call, answer: Answer, completion: str) -> dict[str, Any]:
    """Return the answer as one object."""
    message = _said(answer.message)
    choice = {
        "index": 0,
        "message": {"role": "assistant", **message},
        "finish_reason": _finish(answer.message),
        "logprobs": _logprobs(answer) if call.logprobs else None,
    }
    head = _head(call, completion, "chat.completion")
    return {**head, "choices": [choice], "usage": _usage(answer.message)}


def _chunks(call: Call, answer: Answer, completion: str) -> Iterator[dict[str, Any]]:
    """Yield the answer as the chunks of a stream."""
    head = _head(call, completion, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    message = _said(answer.message)
    yield chunk({"role": "assistant", "content": ""})
    for name in ("reasoning_content", "content"):
        if message.get(name):
            yield chunk({name: message[name]})
    for number, each in enumerate(message.get("tool_calls", ())):
        yield chunk({"tool_calls": [{"index": number, **each}]})
    yield chunk({}, _finish(answer.message))
    if call.usage_in_stream:
        yield {**head, "choices": [], "usage": _usage(answer.message)}


def events(call: Call, answer: Answer, completion: str) -> Iterator[bytes]:
    """Yield the answer as server-sent events."""
    for chunk in _chunks(call, answer, completion):
        yield f"data: {json.dumps(chunk)}\n\n".encode()
    yield b"data: [DONE]\n\n"


def error_event(body: dict[str, Any]) -> bytes:
    """Return an error in the midst of a stream."""
    return f"data: {json.dumps(body)}\n\n".encode()


def _head(call: Call, completion: str, kind: str) -> dict[str, Any]:
    return {"id": completion, "object": kind, "created": int(time.time()), "model": call.model}


def _said(message: AssistantMessage) -> dict[str, Any]:
    said: dict[str, Any] = {"content": message.text or None}
    if message.reasoning:
        said["reasoning_content"] = message.reasoning
    calls = readable(message)
    if calls:
        said["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False),
                },
            }
            for call in calls
        ]
    return said


def _finish(message: AssistantMessage) -> str:
    return "tool_calls" if readable(message) else _FINISH[message.finish_reason]


def _usage(message: AssistantMessage) -> dict[str, int]:
    usage = message.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _logprobs(answer: Answer) -> dict[str, Any]:
    """Return log-probs by token id: what a token says by itself is not always a text."""
    return {
        "content": [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(answer.ids, answer.logprobs, strict=True)
        ]
    }

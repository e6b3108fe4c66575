"""Messages between verifiers' types and this project's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from relax_agent.errors import EnvError
from relax_agent.messages import (
    AssistantMessage,
    Message,
    ToolCall,
    from_openai,
)


def from_verifiers_message(message: Any) -> Message:
    """Return a message of verifiers' as one of ours.

    Raises:
        EnvError: A part of it cannot be shown, such as a picture that is only an address.
    """
    from verifiers.v1.dialects.chat import message_to_wire

    try:
        return from_openai(message_to_wire(message))
    except (KeyError, TypeError, ValueError) as error:
        raise EnvError(
            f"a {message.role} message cannot be shown: {error}",
            hint="pictures travel as data URLs: data:image/png;base64,…",
        ) from error


def typed(messages: str | Iterable[Any]) -> list[Any]:
    """Return a user's turn as a list of verifiers' messages; dicts are read."""
    from verifiers.v1.dialects import parse_message
    from verifiers.v1.types import UserMessage

    if isinstance(messages, str):
        return [UserMessage(content=messages)]
    return [parse_message(each) if isinstance(each, dict) else each for each in messages]


def opening(data: Any) -> list[Any]:
    """Return the messages that pose a task; none where its prompt is for the user to say."""
    from verifiers.v1.types import SystemMessage

    told = [] if data.prompt is None else typed(data.prompt)
    if data.system_prompt is not None:
        told.insert(0, SystemMessage(content=data.system_prompt))
    return told


def call_ids(action: AssistantMessage) -> list[str]:
    """Return an id for each call of a message; verifiers needs them to differ."""
    ids: list[str] = []
    for number, call in enumerate(action.tool_calls):
        ids.append(call.id if call.id and call.id not in ids else f"call_{number}")
    return ids


def to_response(action: AssistantMessage, number: int) -> Any:
    """Return what the policy said as verifiers' response of a model."""
    from verifiers.v1.types import AssistantMessage as Reply
    from verifiers.v1.types import Response, Usage
    from verifiers.v1.types import ToolCall as Call

    calls = [
        Call(id=name, name=call.name, arguments=_arguments(call))
        for name, call in zip(call_ids(action), action.tool_calls, strict=True)
    ]
    message = Reply(
        content=action.text or None, reasoning_content=action.reasoning, tool_calls=calls or None
    )
    usage = None
    if action.usage.prompt_tokens or action.usage.completion_tokens:
        usage = Usage(
            prompt_tokens=action.usage.prompt_tokens,
            completion_tokens=action.usage.completion_tokens,
        )
    reason = "length" if action.finish_reason == "length" else "tool_calls" if calls else "stop"
    return Response(
        id=f"turn-{number}",
        created=0,
        model="policy",
        message=message,
        finish_reason=reason,
        usage=usage,
    )


def _arguments(call: ToolCall) -> str:
    return json.dumps(call.arguments, ensure_ascii=False)


def to_tools(schemas: Sequence[dict[str, Any]]) -> list[Any]:
    """Return tool schemas in the form that a trace keeps."""
    from verifiers.v1.types import Tool

    return [
        Tool(
            name=item["function"]["name"],
            description=item["function"]["description"],
            parameters=item["function"]["parameters"],
        )
        for item in schemas
    ]

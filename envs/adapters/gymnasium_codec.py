"""Messages as strings, both ways: what crosses the border to Gymnasium.

Gymnasium's spaces know texts over a fixed alphabet, so a message is JSON in printable ASCII: every
other character is escaped, media are data URLs. An observation is a list of messages, or
``{"rewrite": […], "reason": …}``. An action is an assistant message; a string that is none counts
as one that says just that, so a plain answer needs no encoding.

    encode_action(assistant(tool_calls=[ToolCall("act", {"action": "left"})]))
    encode_action("42") == "42"
    decode_observation(observation)[0].text
"""

from __future__ import annotations

import json
from typing import Any

from relax_agent.messages import (
    AssistantMessage,
    Observation,
    Rewrite,
    assistant,
    from_openai,
    from_record,
    to_record,
)

ALPHABET = "".join(map(chr, range(32, 127)))
"""Printable ASCII: all that an encoded message is made of."""


def encode_observation(observation: Observation) -> str:
    """Return an observation as JSON in printable ASCII."""
    if isinstance(observation, Rewrite):
        messages = [to_record(message) for message in observation.messages]
        return json.dumps({"rewrite": messages, "reason": observation.reason})
    return json.dumps([to_record(message) for message in observation])


def decode_observation(text: str) -> Observation:
    """Return the observation that :func:`encode_observation` wrote."""
    data = json.loads(text)
    if isinstance(data, dict):
        return Rewrite(tuple(from_record(each) for each in data["rewrite"]), data["reason"])
    return [from_record(each) for each in data]


def encode_action(action: AssistantMessage | str) -> str:
    """Return an action as a string of the action space; a string stands for a plain answer."""
    if isinstance(action, AssistantMessage):
        return json.dumps(to_record(action))
    if set(action) <= set(ALPHABET) and _message(action) is None:
        return action
    return json.dumps(to_record(assistant(action)))


def decode_action(text: str) -> AssistantMessage:
    """Return the message that a string means: encoded, in OpenAI's format, or the plain text."""
    return _message(text) or assistant(text)


def _message(text: str) -> AssistantMessage | None:
    """Read an encoded assistant message; None if the string is something else."""
    if not text.startswith("{"):
        return None
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("role") != "assistant":
            return None
        message = from_record(data) if _is_record(data) else from_openai(data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return message if isinstance(message, AssistantMessage) else None


def _is_record(data: dict[str, Any]) -> bool:
    return all("name" in call for call in data.get("tool_calls") or ())


__all__ = [
    "ALPHABET",
    "decode_action",
    "decode_observation",
    "encode_action",
    "encode_observation",
]

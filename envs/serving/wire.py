"""How requests to an environment and its replies travel: plain JSON, with media beside it as bytes.

A message on the wire is an object: ``role``, ``content`` (a text, or a list of parts) and what else
is not empty. A part is ``{"type": "text", "text": …}``, or ``{"type": "image", "mime": …,
"blob": 0}`` (also ``audio``, ``video``): ``blob`` counts the byte strings that travel beside the
JSON, so no picture is ever base64. An observation is a list of messages, or
``{"rewrite": [messages], "reason": …}``.

Everything that comes in is validated against :mod:`relax_agent.envs.serving.protocol`.
An ``info`` must be JSON in the end: enums, paths, dates, tuples, sets, dataclasses and NumPy values
are converted, keys become text and NaN becomes null; any other value is an error that names its
key, as losing it silently would make a served environment another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, from_json, to_json

from relax_agent.envs.core import Info, StepResult
from relax_agent.envs.serving.protocol import (
    MANIFEST,
    RESET_REPLY,
    REWARDS,
    STEP_REPLY,
    TOOL_REPLY,
    TOOLS,
    Manifest,
    MediaPart,
    TextPart,
    WireCall,
    WireMessage,
    WireRewrite,
    WireTranscript,
    WireUsage,
)
from relax_agent.envs.transcript import Transcript
from relax_agent.errors import EnvError
from relax_agent.messages import (
    AssistantMessage,
    Audio,
    Image,
    Message,
    Observation,
    Part,
    Rewrite,
    Text,
    ToolCall,
    Usage,
    Video,
)
from relax_agent.tools import ToolResult

T = TypeVar("T")
Json: TypeAlias = dict[str, Any]
Blobs: TypeAlias = list[bytes]

_MEDIA: dict[str, type[Image] | type[Audio] | type[Video]] = {
    "image": Image,
    "audio": Audio,
    "video": Video,
}
_KINDS: dict[type, Literal["image", "audio", "video"]] = {
    Image: "image",
    Audio: "audio",
    Video: "video",
}
_NO_USAGE = Usage()
_ATOMS = frozenset((str, int, bool, type(None)))


class WireError(EnvError):
    """What came over the wire is not what the protocol allows."""


# -- JSON -------------------------------------------------------------------------------------


def dumps(data: Json) -> bytes:
    """Return JSON as bytes; half a surrogate pair, which no socket takes, becomes ``?``."""
    try:
        return to_json(data, inf_nan_mode="null", fallback=_numpy)
    except PydanticSerializationError as error:
        if "surrogates" not in str(error):
            raise
        return to_json(_encodable(data), inf_nan_mode="null", fallback=_numpy)


def loads(text: str | bytes) -> Json:
    """Return the JSON object that a text holds, or raise WireError."""
    try:
        data = from_json(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}") from None
    if not isinstance(data, dict):
        raise WireError(f"not a JSON object but a {type(data).__name__}")
    return data


def plain_info(call: str, info: Mapping[str, Any]) -> Json:
    """Return an info as JSON data, or raise EnvError naming what cannot travel."""
    if all(type(key) is str and type(value) in _ATOMS for key, value in info.items()):
        return dict(info)  # the usual case
    try:
        data: Json = from_json(dumps(dict(info)))
        return data
    except (PydanticSerializationError, ValueError, RecursionError):
        for key, value in info.items():
            _require_json(call, key, value)
        raise EnvError(f"the info of {call}() is not JSON") from None


def _require_json(call: str, key: object, value: Any) -> None:
    try:
        dumps({"value": value})
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        kind, reason = type(value).__name__, " ".join(str(error).split())
        raise EnvError(
            f"info[{key!r}] of {call}() cannot travel, a {kind}: {reason}",
            hint="put plain data into info; media belong into messages",
        ) from None


def _numpy(value: Any) -> Any:
    """Convert what NumPy's and PyTorch's values can tell of themselves."""
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is not plain data")


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encodable(item) for item in value]
    return value


def check(adapter: TypeAdapter[T], data: object, what: str) -> T:
    """Validate what came in, or raise WireError naming what is wrong."""
    try:
        checked: T = adapter.validator.validate_python(data)  # what validate_python itself calls
        return checked
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        deepest = max(found, key=lambda item: len(item["loc"]))  # of a union: the nearest branch
        where = "".join(f"{step}: " for step in [".".join(map(str, deepest["loc"]))] if step)
        raise WireError(f"{what}: {where}{deepest['msg']}") from None


# -- messages ---------------------------------------------------------------------------------


def message_to_wire(message: Message, blobs: Blobs) -> Json:
    """Return a message as JSON data; its media are appended to ``blobs``."""
    out: Json = {"role": message.role, "content": _content_to_wire(message.content, blobs)}
    if message.name is not None:
        out["name"] = message.name
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        if message.reasoning is not None:
            out["reasoning"] = message.reasoning
        if message.tool_calls:
            out["tool_calls"] = [call_to_wire(call) for call in message.tool_calls]
        if message.usage != _NO_USAGE:
            usage = message.usage
            out["usage"] = {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "tokens_left": usage.tokens_left,
            }
        if message.finish_reason != "stop":
            out["finish_reason"] = message.finish_reason
    return out


def _content_to_wire(content: Sequence[Part], blobs: Blobs) -> str | list[Json]:
    if not content:
        return ""
    if len(content) == 1 and isinstance(content[0], Text) and content[0].text:
        return content[0].text
    return [_part_to_wire(part, blobs) for part in content]


def _part_to_wire(part: Part, blobs: Blobs) -> Json:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    blobs.append(part.data)
    return {"type": _KINDS[type(part)], "mime": part.mime, "blob": len(blobs) - 1}


def call_to_wire(call: ToolCall) -> Json:
    """Return a tool call as JSON data."""
    out: Json = {"name": call.name, "arguments": call.arguments, "id": call.id}
    if call.error is not None:
        out["error"] = call.error
    return out


def message_from_wire(data: WireMessage, blobs: Sequence[bytes]) -> Message:
    """Return the message that validated data stands for."""
    content = _content_from_wire(data.get("content", ""), blobs)
    if data["role"] != "assistant":
        return Message(data["role"], content, data.get("name"), data.get("tool_call_id"))
    usage = data.get("usage")
    return AssistantMessage(
        content=content,
        name=data.get("name"),
        tool_call_id=data.get("tool_call_id"),
        reasoning=data.get("reasoning"),
        tool_calls=tuple([call_from_wire(call) for call in data.get("tool_calls", ())]),
        usage=_NO_USAGE if usage is None else _usage(usage),
        finish_reason=data.get("finish_reason", "stop"),
    )


def _usage(data: WireUsage) -> Usage:
    left = data.get("tokens_left")
    return Usage(data.get("prompt_tokens", 0), data.get("completion_tokens", 0), left)


def _content_from_wire(
    content: str | Sequence[TextPart | MediaPart], blobs: Sequence[bytes]
) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (Text(content),) if content else ()
    return tuple([_part_from_wire(part, blobs) for part in content])


def _part_from_wire(part: TextPart | MediaPart, blobs: Sequence[bytes]) -> Part:
    if part["type"] == "text":
        return Text(part["text"])
    if not 0 <= part["blob"] < len(blobs):
        raise WireError(f"blob {part['blob']} of {len(blobs)} does not exist")
    return _MEDIA[part["type"]](blobs[part["blob"]], part["mime"])


def call_from_wire(data: WireCall) -> ToolCall:
    """Return the tool call that validated data stands for."""
    return ToolCall(data["name"], data["arguments"], data.get("id", ""), data.get("error"))


def action_from_wire(data: WireMessage, blobs: Sequence[bytes]) -> AssistantMessage:
    """Return the action that validated data stands for, or raise WireError for another role."""
    message = message_from_wire(data, blobs)
    if not isinstance(message, AssistantMessage):
        raise WireError(f"an action has the role assistant, not {message.role}")
    return message


def observation_to_wire(observation: Observation, blobs: Blobs) -> list[Json] | Json:
    """Return an observation as JSON data."""
    if isinstance(observation, Rewrite):
        messages = [message_to_wire(message, blobs) for message in observation.messages]
        return {"rewrite": messages, "reason": observation.reason}
    return [message_to_wire(message, blobs) for message in observation]


def observation_from_wire(
    data: list[WireMessage] | WireRewrite, blobs: Sequence[bytes]
) -> Observation:
    """Return the observation that validated data stands for."""
    if isinstance(data, list):
        return [message_from_wire(item, blobs) for item in data]
    messages = tuple(message_from_wire(item, blobs) for item in data["rewrite"])
    return Rewrite(messages, data["reason"])


# -- replies, as the asking side reads them ---------------------------------------------------


def read_reset(data: Json, blobs: Sequence[bytes]) -> tuple[Observation, Info]:
    """Return what a reply to ``reset`` says."""
    reply = check(RESET_REPLY, data, "the reply to reset()")
    return observation_from_wire(reply["observation"], blobs), reply["info"]


def read_step(data: Json, blobs: Sequence[bytes]) -> StepResult:
    """Return what a reply to ``step`` says."""
    reply = check(STEP_REPLY, data, "the reply to step()")
    observation = observation_from_wire(reply["observation"], blobs)
    ends = reply["terminated"], reply["truncated"]
    return observation, reply["reward"], *ends, reply["info"]


def read_tool(data: Json, blobs: Sequence[bytes]) -> ToolResult:
    """Return what a reply to ``call_tool`` says."""
    reply = check(TOOL_REPLY, data, "the reply of a tool")
    content = _content_from_wire(reply["content"], blobs)
    return ToolResult(content, reply["failure"], reply["duration_s"], reply["queued_s"])


def read_rewards(data: Json) -> list[float]:
    """Return what a reply to ``score_group`` says."""
    return check(REWARDS, data.get("rewards"), "the reply to score_group()")


def read_tools(data: object) -> list[Json]:
    """Return the schemas of tools that came over the wire."""
    return check(TOOLS, data, "the tools")


def read_manifest(data: object) -> Manifest:
    """Return a manifest that came over the wire."""
    return check(MANIFEST, data, "the manifest")


def tool_to_wire(result: ToolResult, blobs: Blobs) -> Json:
    """Return what a tool gave back as JSON data."""
    return {
        "content": [_part_to_wire(part, blobs) for part in result.content],
        "failure": result.error,
        "duration_s": result.duration_s,
        "queued_s": result.queued_s,
    }


def transcript_to_wire(member: Transcript, blobs: Blobs) -> Json:
    """Return one member of a group as JSON data."""
    return {
        "messages": [message_to_wire(message, blobs) for message in member],
        "errors": [result.error for _, result in member.calls],
        "reward": member.reward,
        "metrics": dict(member.metrics),
    }


def transcript_from_wire(data: WireTranscript, blobs: Sequence[bytes]) -> Transcript:
    """Return the member of a group that validated data stands for."""
    member = Transcript(message_from_wire(item, blobs) for item in data["messages"])
    if len(data["errors"]) == len(member.calls):
        member.calls = [
            (call, ToolResult(result.content, kind))
            for (call, result), kind in zip(member.calls, data["errors"], strict=True)
        ]
    member.reward, member.metrics = data["reward"], dict(data["metrics"])
    return member

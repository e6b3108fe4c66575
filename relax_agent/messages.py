"""Messages: what an environment, a model and a tool say to each other.

A :class:`Message` has a role and a list of content parts (text, image, audio, video).
An :class:`AssistantMessage` is what a policy says: besides content it has reasoning,
structured tool calls and its token :class:`Usage`. An **observation** is the list of *new*
messages since the last action, or a :class:`Rewrite`, the one signal that history was edited.

Plain data without torch or network. ``to_openai`` and ``from_openai`` speak the chat format
that templates and SDKs know; media travel there as data URLs. ``to_record`` and ``from_record``
are the same with everything in it that the chat format has no place for.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias

from relax_agent.references import media_schema, read_media

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of text."""

    text: str
    """Always valid Unicode: half a surrogate pair, which no tokenizer, socket or file takes,
    becomes ``?``.
    """

    def __post_init__(self) -> None:
        if not self.text.isascii():
            object.__setattr__(self, "text", self.text.encode("utf-8", "replace").decode())


@dataclass(frozen=True, slots=True)
class _Media:
    data: bytes
    """The encoded file (PNG, WAV, MP4, …), not decoded samples."""
    mime: str
    """The media type, e.g. ``image/png``."""

    def data_url(self) -> str:
        """Return the media as ``data:<mime>;base64,…``."""
        return f"data:{self.mime};base64,{base64.b64encode(self.data).decode('ascii')}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Let pydantic read the medium that an argument of a tool names."""
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(partial(read_media, cls=cls))

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> dict[str, Any]:
        return media_schema(cls.__name__.lower())


@dataclass(frozen=True, slots=True)
class Image(_Media):
    """A still picture."""

    mime: str = "image/png"


@dataclass(frozen=True, slots=True)
class Audio(_Media):
    """A sound clip."""

    mime: str = "audio/wav"


@dataclass(frozen=True, slots=True)
class Video(_Media):
    """A moving picture, with or without sound."""

    mime: str = "video/mp4"


Part: TypeAlias = Text | Image | Audio | Video
_KINDS = frozenset((Text, Image, Audio, Video))
_MEDIA_TYPES: dict[str, type[Image] | type[Audio] | type[Video]] = {
    "image_url": Image,
    "audio_url": Audio,
    "video_url": Video,
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool, as the policy asked for it."""

    name: str
    arguments: dict[str, Any]
    """Parsed JSON object. Not validated: the toolset does that."""
    id: str = ""
    """Stable within its message; ties a tool message to its call."""
    error: str | None = None
    """Why the call could not be parsed; a toolset answers it with a soft error."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one assistant message."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    tokens_left: int | None = None
    """What remains of the episode's token budget; None if there is none."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message. ``content`` may be given as a plain string."""

    role: Role
    content: tuple[Part, ...] = ()
    name: str | None = None
    """For a tool message: the tool's name."""
    tool_call_id: str | None = None
    """For a tool message: the call that it answers."""

    def __post_init__(self) -> None:
        if type(self.content) is not tuple or not _KINDS.issuperset(map(type, self.content)):
            object.__setattr__(self, "content", parts(self.content))

    @property
    def text(self) -> str:
        """All text parts, joined."""
        return "".join(part.text for part in self.content if isinstance(part, Text))

    @property
    def media(self) -> tuple[Image | Audio | Video, ...]:
        """All parts that are not text, in order."""
        return tuple(part for part in self.content if not isinstance(part, Text))


@dataclass(frozen=True, slots=True)
class AssistantMessage(Message):
    """What a policy says: the action of an environment."""

    role: Role = "assistant"
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    usage: Usage = field(default_factory=Usage)
    finish_reason: Literal["stop", "length", "abort"] = "stop"


@dataclass(frozen=True, slots=True)
class Rewrite:
    """An edited history: the episode forks here and goes on from ``messages``."""

    messages: tuple[Message, ...]
    reason: str


Observation: TypeAlias = list[Message] | Rewrite


def parts(content: str | Part | Sequence[Part | str]) -> tuple[Part, ...]:
    """Return content in its one canonical form, a tuple of parts."""
    if isinstance(content, str):
        return (Text(content),) if content else ()
    if isinstance(content, (Text, Image, Audio, Video)):
        return (content,)
    found = tuple(Text(item) if isinstance(item, str) else item for item in content)
    for item in found:
        if not isinstance(item, (Text, _Media)):
            raise TypeError(f"a message holds text, images, sound or film, not {item!r:.60}")
    return found


def system(content: str | Sequence[Part | str]) -> Message:
    """Return a system message."""
    return Message("system", parts(content))


def user(content: str | Part | Sequence[Part | str]) -> Message:
    """Return a user message."""
    return Message("user", parts(content))


def tool_message(content: str | Part | Sequence[Part | str], call: ToolCall) -> Message:
    """Return the tool message that answers ``call``."""
    return Message("tool", parts(content), name=call.name, tool_call_id=call.id)


def assistant(
    content: str = "", *, tool_calls: Sequence[ToolCall] = (), reasoning: str | None = None
) -> AssistantMessage:
    """Return an assistant message, as a script or a person would write it."""
    return AssistantMessage(
        content=parts(content), reasoning=reasoning, tool_calls=tuple(tool_calls)
    )


def _part_to_openai(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    kind = next(key for key, cls in _MEDIA_TYPES.items() if isinstance(part, cls))
    return {"type": kind, kind: {"url": part.data_url()}}


def to_openai(message: Message) -> dict[str, Any]:
    """Return the message in OpenAI's chat format. Arguments stay an object, as templates want."""
    out: dict[str, Any] = {"role": message.role}
    if message.media:
        out["content"] = [_part_to_openai(part) for part in message.content]
    else:
        out["content"] = message.text
    if message.name is not None:
        out["name"] = message.name
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        if message.reasoning:
            out["reasoning_content"] = message.reasoning
        if message.tool_calls:
            out["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in message.tool_calls
            ]
    return out


def _part_from_openai(item: dict[str, Any]) -> Part:
    kind = item.get("type", "text")
    if kind == "text":
        return Text(str(item.get("text") or ""))
    if kind not in _MEDIA_TYPES:
        raise ValueError(f"unknown content part {kind!r}")
    head, _, body = item[kind]["url"].partition(",")
    if not head.startswith("data:") or not head.endswith(";base64"):
        raise ValueError(f"{kind}: only base64 data URLs are read here")
    return _MEDIA_TYPES[kind](base64.b64decode(body), head[5:-7])


def _call_from_openai(index: int, item: dict[str, Any]) -> ToolCall:
    function = item.get("function") or item
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            return ToolCall(function["name"], {}, item.get("id") or f"call_{index}", str(error))
    return ToolCall(function["name"], arguments, item.get("id") or f"call_{index}")


def from_openai(item: dict[str, Any]) -> Message:
    """Return a message from OpenAI's chat format. ``content`` and ``tool_calls`` may be absent."""
    content = item.get("content") or ""
    body = parts(content if isinstance(content, str) else [_part_from_openai(p) for p in content])
    if item["role"] != "assistant":
        return Message(item["role"], body, item.get("name"), item.get("tool_call_id"))
    return AssistantMessage(
        content=body,
        reasoning=item.get("reasoning_content"),
        tool_calls=tuple(
            _call_from_openai(i, call) for i, call in enumerate(item.get("tool_calls") or ())
        ),
    )


def to_record(message: Message) -> dict[str, Any]:
    """Return the whole message as plain JSON data; :func:`from_record` gives an equal one."""
    out = to_openai(message)
    if message.content != parts(message.text):
        out["content"] = [_part_to_openai(part) for part in message.content]
    if not isinstance(message, AssistantMessage):
        return out
    if message.tool_calls:
        out["tool_calls"] = [asdict(call) for call in message.tool_calls]
    return out | {
        "reasoning_content": message.reasoning,
        "finish_reason": message.finish_reason,
        "usage": asdict(message.usage),
    }


def from_record(data: dict[str, Any]) -> Message:
    """Return the message that :func:`to_record` wrote."""
    message = from_openai(data)
    if not isinstance(message, AssistantMessage):
        return message
    return replace(
        message,
        name=data.get("name"),
        tool_call_id=data.get("tool_call_id"),
        tool_calls=tuple(ToolCall(**call) for call in data.get("tool_calls") or ()),
        usage=Usage(**data.get("usage") or {}),
        finish_reason=data.get("finish_reason") or "stop",
    )

"""The protocol of a served environment, as types that pydantic validates.

Five requests (``reset``, ``step``, ``call_tool``, ``score_group``, ``close``), their replies, and
the manifest, which tells of an environment before its first episode. How they are written and read
is :mod:`relax_agent.envs.serving.wire`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

from relax_agent.errors import ToolErrorKind

PROTOCOL_VERSION = 1

_STRICT = ConfigDict(extra="forbid", strict=True)


class TextPart(TypedDict):
    """A piece of text."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]
    type: Literal["text"]
    text: str


class MediaPart(TypedDict):
    """A picture, a sound or a video; its bytes travel beside the JSON."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]
    type: Literal["image", "audio", "video"]
    mime: str
    blob: int


class WireCall(TypedDict):
    """One tool call."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]
    name: str
    arguments: dict[str, Any]
    id: NotRequired[str]
    error: NotRequired[str | None]


class WireUsage(TypedDict):
    """Tokens of an assistant message."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]
    prompt_tokens: NotRequired[int]
    completion_tokens: NotRequired[int]
    tokens_left: NotRequired[int | None]


WirePart = Annotated[TextPart | MediaPart, Field(discriminator="type")]


class WireMessage(TypedDict):
    """One message; the last four keys are an assistant's."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]
    role: Literal["system", "user", "assistant", "tool"]
    content: NotRequired[str | list[WirePart]]
    name: NotRequired[str | None]
    tool_call_id: NotRequired[str | None]
    reasoning: NotRequired[str | None]
    tool_calls: NotRequired[list[WireCall]]
    usage: NotRequired[WireUsage]
    finish_reason: NotRequired[Literal["stop", "length", "abort"]]


class WireRewrite(TypedDict):
    """An edited history."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]
    rewrite: list[WireMessage]
    reason: str


WireObservation = list[WireMessage] | WireRewrite


WireErrorKind = Annotated[ToolErrorKind, Field(strict=False)]


class WireTranscript(TypedDict):
    """One member of a group."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]
    messages: list[WireMessage]
    errors: list[WireErrorKind | None]
    reward: float
    metrics: dict[str, float]


class Reset(TypedDict):
    """Begin an episode."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]
    op: Literal["reset"]
    seed: NotRequired[int | None]
    options: NotRequired[dict[str, Any] | None]


class Step(TypedDict):
    """Take one assistant message."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]
    op: Literal["step"]
    action: WireMessage


class CallTool(TypedDict):
    """Run one of the environment's tools, outside the episode's messages."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]
    op: Literal["call_tool"]
    call: WireCall


class ScoreGroup(TypedDict):
    """Ask what the members of a group get beside their own rewards."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]
    op: Literal["score_group"]
    task_id: str
    members: list[WireTranscript]


class Close(TypedDict):
    """Close the environment."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]
    op: Literal["close"]


class ResetReply(TypedDict):
    """What ``reset`` gives; ``tools`` only when they are others than before."""

    observation: WireObservation
    info: dict[str, Any]
    tools: NotRequired[list[dict[str, Any]]]


class StepReply(TypedDict):
    """What ``step`` gives."""

    observation: WireObservation
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    tools: NotRequired[list[dict[str, Any]]]


class ToolReply(TypedDict):
    """What a tool gave back."""

    content: list[WirePart]
    failure: WireErrorKind | None
    duration_s: float
    queued_s: float


class WireTasks(TypedDict):
    """The ids of all tasks, and the fingerprint of what stays on the environment's side."""

    train: list[str]
    eval: list[str]
    fingerprint: str


class Manifest(TypedDict):
    """What one needs to know of an environment before the first episode."""

    version: int
    id: str
    about: NotRequired[str]
    tools: list[dict[str, Any]]
    tasks: WireTasks | None
    step_timeout_s: NotRequired[float]
    slots: NotRequired[int]
    max_request_bytes: NotRequired[int]


REQUESTS: dict[str, TypeAdapter[Any]] = {
    "reset": TypeAdapter(Reset),
    "step": TypeAdapter(Step),
    "call_tool": TypeAdapter(CallTool),
    "score_group": TypeAdapter(ScoreGroup),
    "close": TypeAdapter(Close),
}
RESET_REPLY = TypeAdapter(ResetReply)
STEP_REPLY = TypeAdapter(StepReply)
TOOL_REPLY = TypeAdapter(ToolReply)
MANIFEST = TypeAdapter(Manifest)
TOOLS = TypeAdapter(list[dict[str, Any]])
REWARDS = TypeAdapter(list[float])

"""What a tool call gave back: content parts, or a failure that is a value.

A failure has a :class:`~relax_agent.errors.ToolErrorKind` for programs and a text for the model,
which says what to do next. Both travel the same way, in process or over HTTP (``to_json``).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticSerializationError, to_jsonable_python

from relax_agent.errors import ToolError, ToolErrorKind
from relax_agent.messages import Audio, Image, Message, Part, Text, ToolCall, Video, parts

_MEDIA: dict[str, type[Image] | type[Audio] | type[Video]] = {
    "image": Image,
    "audio": Audio,
    "video": Video,
}


_ENCODER = json.JSONEncoder(ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The outcome of one tool call."""

    content: tuple[Part, ...]
    """What the model gets to see; for a failure, what went wrong and what to do."""
    error: ToolErrorKind | None = None
    """Why the call failed; None if it did not."""
    duration_s: float = 0.0
    """Seconds that the caller waited."""
    queued_s: float = 0.0
    """Seconds of these before anything ran: until its session and one of its places were free."""

    @property
    def ok(self) -> bool:
        """Whether the call succeeded."""
        return self.error is None

    @property
    def text(self) -> str:
        """All text parts, joined."""
        return "".join(part.text for part in self.content if isinstance(part, Text))

    @classmethod
    def of(cls, value: Any) -> ToolResult:
        """Turn what a tool function returned into a result.

        Strings and media parts stay as they are, also in lists; everything else becomes JSON.
        """
        if isinstance(value, ToolResult):
            return value
        return cls(_content(value))

    @classmethod
    def failure(cls, kind: ToolErrorKind, message: str, duration_s: float = 0.0) -> ToolResult:
        """Return a failed result with a message that a model can act on."""
        return cls((Text(f"Error: {message}"),), kind, duration_s)

    def timed(self, duration_s: float, queued_s: float | None = None) -> ToolResult:
        """Return the same result with other times."""
        queued_s = self.queued_s if queued_s is None else queued_s
        return ToolResult(self.content, self.error, duration_s, queued_s)

    def size(self) -> int:
        """Bytes of content: UTF-8 text and encoded media."""
        return sum(
            len(part.text.encode()) if isinstance(part, Text) else len(part.data)
            for part in self.content
        )

    def to_message(self, call: ToolCall) -> Message:
        """Return the tool message that answers ``call``."""
        return Message("tool", self.content, name=call.name, tool_call_id=call.id)

    def to_json(self, write: Callable[[Part], dict[str, Any]] | None = None) -> dict[str, Any]:
        """Return plain JSON data; media travel as base64 unless ``write`` has another way."""
        write = write or part_to_json
        return {
            "content": [write(part) for part in self.content],
            "error": None if self.error is None else self.error.value,
            "duration_s": self.duration_s,
            "queued_s": self.queued_s,
        }

    @classmethod
    def from_json(
        cls, data: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Part] | None = None
    ) -> ToolResult:
        """Rebuild a result from :meth:`to_json`. Raises ValueError on anything else."""
        read = read or part_from_json
        try:
            error = data.get("error")
            return cls(
                tuple([read(item) for item in data["content"]]),
                None if error is None else ToolErrorKind(error),
                float(data.get("duration_s", 0.0)),
                float(data.get("queued_s", 0.0)),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a tool result: {error!r}") from error


def _content(value: Any) -> tuple[Part, ...]:
    if isinstance(value, (str, Text, Image, Audio, Video)):
        return parts(value)
    if isinstance(value, (list, tuple)) and _holds_parts(value):
        return tuple(Text(item) if isinstance(item, str) else item for item in value)
    if value is None:
        return (Text("done"),)
    try:
        plain = to_jsonable_python(value)
        return (Text(_ENCODER.encode(plain)),)
    except (PydanticSerializationError, TypeError, ValueError) as error:
        raise ToolError(f"its result of type {type(value).__name__} is not JSON: {error}") from None


def _holds_parts(items: list[Any] | tuple[Any, ...]) -> bool:
    known = (str, Text, Image, Audio, Video)
    media = (Text, Image, Audio, Video)
    return all(isinstance(i, known) for i in items) and any(isinstance(i, media) for i in items)


def part_to_json(part: Part) -> dict[str, Any]:
    """Return a part as plain JSON data, a medium as base64."""
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    kind = next(name for name, cls in _MEDIA.items() if isinstance(part, cls))
    return {"type": kind, "mime": part.mime, "data": base64.b64encode(part.data).decode("ascii")}


def part_from_json(item: Mapping[str, Any]) -> Part:
    """Return the part that :func:`part_to_json` wrote."""
    if item["type"] == "text":
        return Text(str(item["text"]))
    return _MEDIA[item["type"]](base64.b64decode(item["data"], validate=True), str(item["mime"]))

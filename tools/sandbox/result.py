"""What a call of a sandbox gave."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relax_agent.errors import ToolErrorKind
from relax_agent.messages import Image, Part, Text
from relax_agent.tools.result import ToolResult
from relax_agent.tools.sandbox.output import shortened

_PNG = b"\x89PNG\r\n\x1a\n"
_MAX_PIXELS = 50_000_000
_MAX_NOTES = 8
_NOTE_CHARS = 300


@dataclass(frozen=True, slots=True)
class ExecutionError:
    """Why a call did not do what its code says."""

    kind: ToolErrorKind
    message: str
    """A traceback, or a sentence that says what happened and what to do."""
    type: str = ""
    """The exception's class; empty if the interpreter was ended."""
    restarted: bool = False
    """Whether the interpreter is a new one: variables, imports and files are lost."""


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """The outcome of one call: all that the code printed and gave, or how it failed."""

    stdout: str = ""
    """The beginning and the end, if it is long."""
    stderr: str = ""
    value: str | None = None
    """``repr`` of the last expression's value; None if there is none."""
    images: tuple[Image, ...] = ()
    """Figures that were drawn, and a picture as the last expression, as PNG."""
    error: ExecutionError | None = None
    notes: tuple[str, ...] = ()
    """What else the caller should know, as a sentence each."""
    duration_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the code ran to its end."""
        return self.error is None

    @property
    def text(self) -> str:
        """Everything but the images as one text, as a terminal would show it."""
        error = None if self.error is None else self.error.message
        pieces = [self.stdout, self.stderr, self.value, error, *self.notes]
        return "\n".join(piece.rstrip("\n") for piece in pieces if piece)

    def to_tool_result(self) -> ToolResult:
        """Return what a tool gives back: the text, then the images."""
        text = self.text or ("" if self.images else "done (nothing was printed)")
        content: list[Part] = [Text(text)] if text else []
        kind = None if self.error is None else self.error.kind
        return ToolResult((*content, *self.images), kind, self.duration_s)


def read_reply(
    body: Mapping[str, Any], blobs: list[bytes], limit: int
) -> tuple[str | None, ExecutionError | None, tuple[str, ...], tuple[Image, ...]]:
    """Return (value, error, notes, images) of a reply, whatever is in it."""
    value = body.get("value")
    notes = body.get("notes")
    told = [n for n in notes if isinstance(n, str)] if isinstance(notes, list) else []
    images = tuple(Image(blob) for blob in blobs if _is_picture(blob))
    return (
        shortened(_valid(value), limit) if isinstance(value, str) else None,
        _error(body.get("error"), limit),
        tuple(_valid(note[:_NOTE_CHARS]) for note in told[:_MAX_NOTES]),
        images,
    )


def _error(data: object, limit: int) -> ExecutionError | None:
    if data is None:
        return None
    name, text = "", ""
    if isinstance(data, dict):
        name, text = str(data.get("type", ""))[:100], str(data.get("text", ""))
    return ExecutionError(
        ToolErrorKind.CRASHED, shortened(_valid(text or name or "failed"), limit), _valid(name)
    )


def _valid(text: str) -> str:
    """Return the text without halves of surrogate pairs, which no file and no socket takes."""
    return text.encode("utf-8", "replace").decode()


def _is_picture(data: bytes) -> bool:
    """Whether this begins as a PNG does, and would not fill the memory when it is decoded."""
    if len(data) < 24 or not data.startswith(_PNG):
        return False
    width, height = struct.unpack(">II", data[16:24])
    return 0 < width * height <= _MAX_PIXELS

"""What a trainer's rank and its parent say to each other: one JSON object a line.

    parent → rank   {"id": 7, "command": "step", "groups": [...], "version": 3}
    rank → parent   {"id": 7, "result": {...}}   or   {"id": 7, "error": {...}}

Tensors never travel here: groups are named by the paths of their payloads, weights by a folder.
"""

from __future__ import annotations

import json
from typing import Any

from relax_agent import errors
from relax_agent.errors import RelaxError, TrainerError

LINE_BYTES = 1 << 22
"""Longest line: a step names its groups by path, a report is a few kilobytes."""


def encode(message: dict[str, Any]) -> bytes:
    """Return one line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Return the message of one line."""
    message = json.loads(line)
    if not isinstance(message, dict):
        raise TrainerError(f"a message is a JSON object, not {type(message).__name__}")
    return message


def error_to_json(error: BaseException) -> dict[str, Any]:
    """Return an error as plain data: its class, one line, and the hint."""
    if isinstance(error, RelaxError):
        return {
            "class": type(error).__name__,
            "message": _first_line(error.message),
            "hint": error.hint,
        }
    message = f"{type(error).__name__}: {_first_line(str(error))}"
    return {"class": "TrainerError", "message": message, "hint": "see the trainer's log"}


def error_from_json(data: dict[str, Any], where: str) -> RelaxError:
    """Return the error again, of the same class, with ``where`` in front of its message."""
    kind = getattr(errors, data["class"], TrainerError)
    plain = isinstance(kind, type) and issubclass(kind, RelaxError)
    if not plain or kind.__init__ is not RelaxError.__init__:
        kind = TrainerError  # its constructor wants more than a message
    return kind(f"{where}: {data['message']}", hint=data.get("hint"))


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:500] if text.strip() else "no message"

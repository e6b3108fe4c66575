"""What a judge is shown, and the mark that its reply gives."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from relax_agent.envs.transcript import Transcript
from relax_agent.messages import AssistantMessage, Message, Text

_THOUGHTS = re.compile(r"<think>.*?</think>", re.DOTALL)
_LOOSE = re.compile(
    r"\b(?:mark|score|rating)\b[\"'*\s]{0,4}[:=][\"'*\s]{0,4}(\d{1,4}(?:\.\d{1,4})?)(?:\s?/\s?(\d+))?",
    re.IGNORECASE,
)
_MOST_OBJECTS = 50


def read_mark(text: str, best: int) -> float | None:
    """Return the one mark that a judge's reply gives; None if there is none, or not only one."""
    text = _THOUGHTS.sub("", text).rpartition("</think>")[2]
    found = [as_number(item.get("mark", item.get("score"))) for item in _objects(text)]
    if not found:
        found = [
            as_number(mark) if not of or int(of) == best else None
            for mark, of in _LOOSE.findall(text)
        ]
    marks = set(found)
    mark = marks.pop() if len(marks) == 1 else None
    return mark if mark is not None and 0 <= mark <= best else None


def _objects(text: str) -> Iterator[Mapping[str, Any]]:
    """Find the JSON objects in a text that hold a mark."""
    decoder, position = json.JSONDecoder(), 0
    for _ in range(_MOST_OBJECTS):
        position = text.find("{", position)
        if position < 0:
            return
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            position += 1
            continue
        if "mark" in value or "score" in value:
            yield value


def as_number(value: Any) -> float | None:
    """Return a number, also one that is written as text; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def verdict_format(best: int) -> dict[str, Any]:
    """Return the ``response_format`` of a verdict."""
    properties = {
        "reason": {"type": "string"},
        "mark": {"type": "integer", "enum": list(range(best + 1))},
    }
    schema = {
        "type": "object",
        "properties": properties if best <= 100 else {**properties, "mark": {"type": "integer"}},
        "required": ["reason", "mark"],
        "additionalProperties": False,
    }
    return {
        "type": "json_schema",
        "json_schema": {"name": "verdict", "strict": True, "schema": schema},
    }


def told(transcript: Transcript) -> str:
    """Return a conversation as text, without system prompts and hidden reasoning."""
    lines = []
    for message in transcript:
        if message.role == "system":
            continue
        lines.append(f"[{message.role}] {written(message)}")
        if isinstance(message, AssistantMessage):
            lines += [
                f"[call] {call.name}({json.dumps(call.arguments, ensure_ascii=False, default=str)})"
                for call in message.tool_calls
            ]
    return "\n".join(lines)


def written(message: Message) -> str:
    """Return a message's content as text; media are named only."""
    said = [
        part.text if isinstance(part, Text) else f"[{type(part).__name__.lower()}]"
        for part in message.content
    ]
    return " ".join(said)


def shortened(text: str, limit: int) -> str:
    """Return a text without its middle, if it has more than ``limit`` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"

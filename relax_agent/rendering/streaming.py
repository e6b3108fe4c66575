"""One sampled turn read as its ids come: what is certain is told at once.

Ids become text as soon as their bytes are whole characters, and the text goes through the format's
parser. A format that no parser reads is told at the end, from all of its ids. A stop token at the
end is no text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from relax_agent.messages import AssistantMessage, ToolCall
from relax_agent.rendering.parsers import (
    TOOL_PARSERS,
    CallRead,
    Event,
    ReasoningDelta,
    TextDelta,
    ToolParser,
    tool_parser,
)
from relax_agent.rendering.parsers.reasoning import Reasoning
from relax_agent.rendering.tokens import TokenIds

TAGS = ("<think>", "</think>")
"""The tags around reasoning that parsers know."""
PROBE = ToolCall("zqx_look", {"where": "zqxthere"}, "call_0")
"""A call that every format can write."""
PROBE_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "zqx_look",
            "description": "Look.",
            "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
        },
    }
]
_BROKEN = "\ufffd"


class OutputStream:
    """Reads one turn as it comes: :meth:`feed` ids, then :meth:`finish`."""

    def __init__(
        self,
        tokenizer: TokenIds,
        stops: Collection[int],
        parser: ToolParser | None,
        parse: Callable[[Sequence[int]], AssistantMessage],
        tools: Sequence[dict[str, Any]] = (),
        tags: tuple[str, str] = TAGS,
    ) -> None:
        """Begin a turn.

        Args:
            tokenizer: Decodes.
            stops: Tokens that end a turn.
            parser: Reads the text; None if no parser reads this format.
            parse: Reads all ids at once, for that case.
            tools: Schemas of the tools.
            tags: The tags around reasoning.
        """
        self._tokenizer, self._stops, self._parse, self._tags = tokenizer, stops, parse, tags
        self._stream = None if parser is None else parser.stream(tools)
        self._ids: list[int] = []
        self._start = self._read = 0
        self._held = ""

    def feed(self, ids: Sequence[int]) -> list[Event]:
        """Take more ids and return what is certain now."""
        self._ids += ids
        if self._stream is None:
            return []
        until = len(self._ids)
        while until > self._read and self._ids[until - 1] in self._stops:
            until -= 1
        text = self._whole(until)
        return self._stream.feed(self._translated(text)) if text else []

    def finish(self) -> list[Event]:
        """Return what the end of the turn makes certain."""
        if self._stream is None:
            return _told(self._parse(self._ids))
        until = len(self._ids) - bool(self._ids and self._ids[-1] in self._stops)
        rest = self._held + self._text(self._start, until)[len(self._text(self._start)) :]
        self._held, self._tags = "", TAGS  # what is left is no part of a tag
        return self._stream.feed(rest) + self._stream.finish()

    def _text(self, start: int, until: int | None = None) -> str:
        return self._tokenizer.decode(self._ids[start : self._read if until is None else until])

    def _whole(self, until: int) -> str:
        """Return the text of ids that were not read yet, if it ends in a whole character."""
        before, now = self._text(self._start), self._text(self._start, until)
        if len(now) <= len(before) or now.endswith(_BROKEN):
            return ""
        self._start, self._read = self._read, until
        return now[len(before) :]

    def _translated(self, text: str) -> str:
        """Return text with the tags that parsers know, holding back what may begin another."""
        if self._tags == TAGS:
            return text
        text = self._held + text
        for theirs, ours in zip(self._tags, TAGS, strict=True):
            text = text.replace(theirs, ours)
        begun = max(_begun(text, tag) for tag in self._tags)
        self._held = text[len(text) - begun :]
        return text[: len(text) - begun]


def parser_of(text: str, reasoning: Reasoning) -> ToolParser | None:
    """Return the first parser that reads :data:`PROBE` from a format's own text of it."""
    for name in TOOL_PARSERS:
        parser = tool_parser(name, reasoning)
        calls = parser.parse(text, PROBE_TOOLS).tool_calls
        if [(call.name, call.arguments) for call in calls] == [(PROBE.name, PROBE.arguments)]:
            return parser
    return None


def _told(message: AssistantMessage) -> list[Event]:
    events: list[Event] = []
    if message.reasoning:
        events.append(ReasoningDelta(message.reasoning))
    if message.text:
        events.append(TextDelta(message.text))
    return [*events, *map(CallRead, message.tool_calls)]


def _begun(text: str, tag: str) -> int:
    """Return how many characters at the end may begin a tag."""
    sizes = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((size for size in sizes if tag.startswith(text[-size:])), 0)

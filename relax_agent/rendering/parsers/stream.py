"""One output read as it comes: events, and the message that they make.

The text goes through two readers, each a generator over a :class:`~.tape.Tape`: the first separates
the reasoning, the second is the format's own and finds the calls. Calls are numbered as they come,
``call_0``, ``call_1``, so their ids are the same however the text was cut.

A call is one event, sent when the whole of it is there: whoever acts on events never runs half a
call. What is not part of a call is content, in order, with the white space at both ends removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from relax_agent.errors import RenderError
from relax_agent.messages import AssistantMessage, ToolCall, parts
from relax_agent.rendering.parsers.reasoning import Reasoning, split
from relax_agent.rendering.parsers.tape import Piece, Steps, Tape, Thought


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the message's content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the message's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallRead:
    """A whole call. If it has an ``error``, it is to be answered and not run."""

    call: ToolCall


Event: TypeAlias = TextDelta | ReasoningDelta | CallRead
Tools: TypeAlias = Sequence[dict[str, Any]]
Reader: TypeAlias = Callable[[Tape, Tools], Steps[None]]


@dataclass(frozen=True, slots=True)
class ToolParser:
    """Reads the tool calls of one format from text. Holds no state; share it freely."""

    name: str
    read: Reader
    """The format: a generator over the text after the reasoning."""
    opener: str | None
    """The marker that nothing but a call begins with; None if the format has none."""
    reasoning: Reasoning = "tagged"
    """Where reasoning is: ``tagged`` between ``<think>`` tags at the beginning, ``opened`` if the
    prompt ended with the opening tag already, ``none`` if tags are ordinary text."""

    def parse(self, text: str, tools: Tools = ()) -> AssistantMessage:
        """Return the message of a whole output. Never raises because of the text.

        Args:
            text: What the model said, without its stop token.
            tools: Schemas of the tools; formats without types of their own need them.
        """
        stream = self.stream(tools)
        return fold(stream.feed(text) + stream.finish())

    def stream(self, tools: Tools = ()) -> ToolStream:
        """Return a reader for one output that arrives in pieces."""
        return ToolStream(self, tools)


class ToolStream:
    """Reads one output as it comes: :meth:`feed` each piece, then :meth:`finish`."""

    def __init__(self, parser: ToolParser, tools: Tools = ()) -> None:
        self._thoughts = _Machine(lambda tape: split(tape, parser.reasoning, parser.opener))
        self._body = _Machine(lambda tape: parser.read(tape, tools))
        self._content, self._reasoning = _Trimmed(), _Trimmed()
        self._calls = 0
        self._finished = False

    @property
    def work(self) -> int:
        """Characters copied or looked at so far."""
        return self._thoughts.tape.work + self._body.tape.work

    def feed(self, text: str) -> list[Event]:
        """Take the next piece of the output and return what is certain now.

        Raises:
            RenderError: the stream was finished before.
        """
        if self._finished:
            raise RenderError("this output has ended", hint="start a stream for each output")
        if not text.isascii():  # half surrogate pairs, which no socket or file takes
            text = text.encode("utf-8", "replace").decode()
        return self._events(self._thoughts.feed(text))

    def finish(self) -> list[Event]:
        """Return what the end of the output makes certain. May be called twice."""
        if self._finished:
            return []
        self._finished = True
        events = self._events(self._thoughts.finish())
        return events + self._named(self._body.finish())

    def _events(self, pieces: Iterable[Piece]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            found = self._body.feed(piece) if isinstance(piece, str) else [piece]
            events += self._named(found)
        return events

    def _named(self, pieces: Iterable[Piece]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            if isinstance(piece, ToolCall):
                events.append(CallRead(replace(piece, id=f"call_{self._calls}")))
                self._calls += 1
            elif isinstance(piece, Thought):
                events += [ReasoningDelta(text) for text in self._reasoning.more(piece.text)]
            else:
                events += [TextDelta(text) for text in self._content.more(piece)]
        return events


def fold(
    events: Iterable[Event], finish_reason: Literal["stop", "length", "abort"] = "stop"
) -> AssistantMessage:
    """Return the message that events tell of."""
    text: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for event in events:
        if isinstance(event, TextDelta):
            text.append(event.text)
        elif isinstance(event, ReasoningDelta):
            reasoning.append(event.text)
        else:
            calls.append(event.call)
    return AssistantMessage(
        content=parts("".join(text)),
        reasoning="".join(reasoning) or None,
        tool_calls=tuple(calls),
        finish_reason=finish_reason,
    )


class _Machine:
    """A reader and its tape, driven by what comes."""

    def __init__(self, read: Callable[[Tape], Steps[None]]) -> None:
        self.tape = Tape()
        self._steps = read(self.tape)

    def feed(self, text: str) -> list[Piece]:
        self.tape.add(text)
        return self._go_on()

    def finish(self) -> list[Piece]:
        self.tape.ended = True
        return self._go_on()

    def _go_on(self) -> list[Piece]:
        found: list[Piece] = []
        for piece in self._steps:
            if piece is None:
                break
            found.append(piece)
        return found


class _Trimmed:
    """Removes the white space at both ends of a text that comes in pieces."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self._begun = False

    def more(self, text: str) -> list[str]:
        """Return what is certain not to be at the end, as one text or none."""
        body = text.rstrip()
        space = text[len(body) :]
        if not body:
            self._held.append(space)
            return []
        shown = "".join((*self._held, body)) if self._begun else body.lstrip()
        self._held = [space]
        self._begun = True
        return [shown]

"""What reward functions read and return: the conversation of an episode, and a score.

A :class:`Transcript` is a list of messages that also knows every tool call with its result. One
that grows with its episode is filled by :class:`~relax_agent.envs.tool_env.ToolEnv`; one made of
the messages of a finished episode finds the calls and their results in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from relax_agent.errors import ToolErrorKind
from relax_agent.messages import AssistantMessage, Message, ToolCall, from_record, to_record
from relax_agent.tools import ToolResult

_FAILURE = "Error: "
"""How the text of a failed :class:`ToolResult` begins."""


@dataclass(frozen=True, slots=True)
class Score:
    """What an episode, or one turn of it, was worth."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Reported beside the reward; ``success`` is 1.0 or 0.0, by default whether reward ≥ 1."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Reward functions that failed and count with the value stated for that, and why."""


class Transcript(list[Message]):
    """The conversation of one episode, with what a reward usually asks of it."""

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        super().__init__(messages)
        self.calls: list[tuple[ToolCall, ToolResult]] = _paired(self)
        """Every tool call with its result, in order."""
        self.reward = 0.0
        """What the episode has earned; in a group's members, before the group's own reward."""
        self.metrics: dict[str, float] = {}
        """What was measured beside the reward; filled when the episode has ended."""

    @property
    def answer(self) -> str:
        """The final answer: the last assistant message's text, empty if it calls tools."""
        last = next((m for m in reversed(self) if isinstance(m, AssistantMessage)), None)
        if last is None or last.tool_calls:
            return ""
        return last.text.strip()

    @property
    def turns(self) -> int:
        """Assistant messages so far."""
        return sum(isinstance(message, AssistantMessage) for message in self)

    @property
    def tool_errors(self) -> int:
        """Tool calls that failed."""
        return sum(not result.ok for _, result in self.calls)

    @property
    def successful_calls(self) -> list[tuple[ToolCall, ToolResult]]:
        """Tool calls that did not fail."""
        return [(call, result) for call, result in self.calls if result.ok]

    def to_record(self) -> dict[str, Any]:
        """Return the transcript as plain JSON data; :meth:`from_record` gives an equal one."""
        return {
            "messages": [to_record(message) for message in self],
            "errors": [result.error for _, result in self.calls],
            "reward": self.reward,
            "metrics": self.metrics,
        }

    @classmethod
    def from_record(cls, data: Mapping[str, Any]) -> Transcript:
        """Rebuild what :meth:`to_record` wrote."""
        self = cls(from_record(item) for item in data["messages"])
        errors: Sequence[str | None] = data["errors"]
        if len(errors) == len(self.calls):
            self.calls = [
                (call, ToolResult(result.content, None if kind is None else ToolErrorKind(kind)))
                for (call, result), kind in zip(self.calls, errors, strict=True)
            ]
        self.reward, self.metrics = float(data["reward"]), dict(data["metrics"])
        return self


def _paired(messages: Sequence[Message]) -> list[tuple[ToolCall, ToolResult]]:
    """Find the calls in a conversation, each with the tool message that answers it.

    Messages do not say why a call failed: such a result counts as crashed.
    """
    found: list[tuple[ToolCall, ToolResult]] = []
    waiting: list[ToolCall] = []
    for message in messages:
        if isinstance(message, AssistantMessage):
            waiting = list(message.tool_calls)
        elif message.role == "tool" and waiting:
            same = (n for n, call in enumerate(waiting) if call.id == message.tool_call_id)
            call = waiting.pop(next(same, 0))
            failed = message.text.startswith(_FAILURE)
            kind = ToolErrorKind.CRASHED if failed else None
            found.append((call, ToolResult(message.content, kind)))
    return found

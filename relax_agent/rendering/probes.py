"""Does a chat template only ever append? Asked of the template itself, at start-up.

A few conversations are rendered whole, and what the renderer would have appended after each turn
is looked for in them: reasoning, several calls and their answers, a user's words behind a tool's,
a turn of system. Three answers are possible:

``stable``   a whole rendering holds every turn as it was sampled and everything that was appended
``bridged``  it would rewrite the inside of earlier turns (drop their reasoning, as a rule), or does
             not end them with a stop token; what was sampled stays, what is between is appended
``forked``   it would rewrite what users, tools or the system said, or move it
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from relax_agent.errors import ConfigError, RenderError
from relax_agent.messages import (
    AssistantMessage,
    Message,
    ToolCall,
    assistant,
    system,
    tool_message,
    user,
)
from relax_agent.rendering.template_text import TemplateText

Kind = Literal["stable", "bridged", "forked"]
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
_MARK = re.compile(r"zqx(?:said|where|thought)\d+xqz")


@dataclass(frozen=True, slots=True)
class Handling:
    """How a template will be handled, and why."""

    kind: Kind
    why: str = ""
    refused: tuple[str, ...] = ()
    """What the template does not take at all, e.g. system messages."""


def prove(text: TemplateText) -> Handling:
    """Render probes and say how the template will be handled.

    Raises:
        ConfigError: the template does not even take a question, an answer and a question.
    """
    refused: list[str] = []
    bridged = ""
    for name, messages in _conversations():
        try:
            flaw, bridge = _check(text, messages)
        except RenderError as error:
            if name == "questions":
                raise ConfigError(f"chat template {text.template.name}: {error}") from error
            refused.append(name)
            continue
        if flaw:
            return Handling("forked", f"{flaw} ({name})", tuple(refused))
        bridged = bridged or bridge
    if not bridged and not text.tail([user("?")], ()).stop:
        bridged = "it ends a turn with no stop token"
    return Handling("bridged" if bridged else "stable", bridged, tuple(refused))


def _conversations() -> Iterator[tuple[str, list[Message]]]:
    """Yield what is probed, under the name that a refusal gets."""
    yield "questions", _numbered("u a u a u")
    yield "tool calls", _numbered("u c t a u c t a u")
    yield "several calls at once", _numbered("u C t t a u")
    yield "a user behind a tool", _numbered("u c t u a u")
    yield "several tools and a user", _numbered("u C t t u a u")
    yield "reasoning", _numbered("u r u r u")
    yield "reasoning with calls", _numbered("u R t R t r u r u")
    yield "system messages", _numbered("s u a u c t a u")
    yield "later system messages", _numbered("u a s u a u")


def _numbered(kinds: str) -> list[Message]:
    messages: list[Message] = []
    calls: list[ToolCall] = []
    for i, kind in enumerate(kinds.split()):
        said = f"zqxsaid{i}xqz"
        if kind == "u":
            messages.append(user(said))
        elif kind == "s":
            messages.append(system(said))
        elif kind == "t":
            messages.append(tool_message(said, calls.pop(0)))
        else:
            thought = f"zqxthought{i}xqz" if kind in "rR" else None
            count = {"c": 1, "R": 1, "C": 2}.get(kind, 0)
            calls = [
                ToolCall("zqx_look", {"where": f"zqxwhere{i}{j}xqz"}, f"call_{j}")
                for j in range(count)
            ]
            messages.append(assistant(said, tool_calls=calls, reasoning=thought))
    return messages


def _check(text: TemplateText, messages: list[Message]) -> tuple[str, str]:
    """Return why the template must be forked, and why it must be bridged; empty if it need not."""
    whole = text.prompt(messages, PROBE_TOOLS)
    turns = [i for i, each in enumerate(messages) if isinstance(each, AssistantMessage)]
    if not whole.startswith(text.prompt(messages[: turns[0]], PROBE_TOOLS, prompt=False)):
        return "it rewrites the beginning when more is said", ""
    bridge = ""
    for i, until in zip(turns, [*turns[1:], len(messages)], strict=True):
        flaw, found = _check_turn(text, whole, messages[i], messages[i + 1 : until])
        if flaw:
            return flaw, ""
        bridge = bridge or found
    return "", bridge


def _check_turn(
    text: TemplateText, whole: str, turn: Message, new: Sequence[Message]
) -> tuple[str, str]:
    assert isinstance(turn, AssistantMessage)
    if not new:
        return "", ""
    marks = [turn.text, *(call.arguments["where"] for call in turn.tool_calls)]
    found = [whole.find(mark) for mark in marks]
    if whole.count(turn.text) > 1:
        return "it writes an answer twice", ""
    at = max(found)
    if at < 0:
        return "it leaves out earlier answers", ""
    rest = whole[at:]
    tail = text.tail(new, PROBE_TOOLS, prompt=False)
    begin = rest.find(tail.stop + tail.text)
    passed = rest[len(marks[found.index(at)]) : max(begin, 0)]
    if begin < 0 or _MARK.search(passed):
        return "what it writes behind a turn depends on what else was said", ""
    if turn.reasoning and turn.reasoning not in whole:
        return "", "it drops earlier reasoning"
    asked = text.tail(new, PROBE_TOOLS)
    if not rest[begin:].startswith(asked.stop + asked.text):
        return "", "it begins an answer in another way than it tells one"
    return "", ""

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
from typing import Literal

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
from relax_agent.rendering.streaming import PROBE_TOOLS
from relax_agent.rendering.template_text import Tail, TemplateText

Kind = Literal["stable", "bridged", "forked"]
_LATER = "later system messages"
_MARK = re.compile(r"zqx(?:said|where|thought)\d+xqz")


@dataclass(frozen=True, slots=True)
class Handling:
    """How a template will be handled, and why."""

    kind: Kind
    why: str = ""
    refused: tuple[str, ...] = ()
    """What the template does not take at all, e.g. system messages."""
    moves_system: bool = False
    """Whether a system message behind a turn is moved to the beginning."""
    dropped: tuple[str, ...] = ()
    """Roles whose messages the template leaves out without a word."""
    shows_tools: bool = True
    """Whether the model gets to see which tools there are."""


def prove(text: TemplateText) -> Handling:
    """Render probes and say how the template will be handled.

    Raises:
        ConfigError: the template does not even take a question, an answer and a question.
    """
    dropped = tuple(role for role in ("tool", "system") if _drops(text, role))
    refused: list[str] = []
    bridged = ""
    moves_system = False
    for name, messages in _conversations():
        if _uses(messages, dropped):
            continue
        try:
            flaw, bridge = _check(text, messages)
        except RenderError as error:
            if name == "questions":
                raise ConfigError(f"chat template {text.template.name}: {error}") from error
            refused.append(name)
            continue
        if flaw and name == _LATER:
            moves_system = True
        elif flaw:
            return Handling("forked", f"{flaw} ({name})", tuple(refused))
        bridged = bridged or bridge
    if not bridged and not text.tail([user("?")], ()).stop:
        bridged = "it ends a turn with no stop token"
    shows_tools = "zqx_look" in text.prompt([user("?")], PROBE_TOOLS)
    kind: Kind = "bridged" if bridged else "stable"
    return Handling(kind, bridged, tuple(refused), moves_system, dropped, shows_tools)


def _drops(text: TemplateText, role: str) -> bool:
    """Return whether what a role says is left out."""
    call = ToolCall("zqx_look", {"where": "zqxwhere0xqz"}, "call_0")
    told = "zqxsaid9xqz"
    try:
        if role == "system":
            return told not in text.prompt([system(told), user("?")], ())
        return told not in text.tail([tool_message(told, call)], PROBE_TOOLS).text
    except RenderError:
        return False


def _uses(messages: Sequence[Message], roles: Sequence[str]) -> bool:
    return any(message.role in roles for message in messages)


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
    yield _LATER, _numbered("u a s u a u")


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
    # Some templates end a finished conversation in another way, so both of its ends are tried.
    begins = (text.prompt(messages[: turns[0]], PROBE_TOOLS, prompt=p) for p in (True, False))
    if not any(map(whole.startswith, begins)):
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
    rest = whole[at + len(marks[found.index(at)]) :]
    asked = text.tail(new, PROBE_TOOLS)
    if _stands(asked, rest):
        lost = turn.reasoning is not None and turn.reasoning not in whole
        return "", "it drops earlier reasoning" if lost else ""
    if _stands(text.tail(new, PROBE_TOOLS, prompt=False), rest):
        return "", "it begins an answer in another way than it tells one"
    return "what it writes behind a turn depends on what else was said", ""


def _stands(tail: Tail, rest: str) -> bool:
    """Return whether a text goes on with a tail before it goes on with any other message."""
    begin = rest.find(tail.stop + tail.text)
    return begin >= 0 and not _MARK.search(rest[:begin])

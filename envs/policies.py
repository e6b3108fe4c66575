"""Policies that are not models: scripts and random play.

A :class:`Policy` sees what a model would see, the messages and the tools' schemas, and returns an
assistant message. Experts for a warm start, baselines, tests, people at a keyboard and models
behind an API are all policies; :func:`relax_agent.envs.play` lets one play an episode.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

from relax_agent.envs.arguments import random_arguments
from relax_agent.errors import ConfigError, PolicyError
from relax_agent.messages import AssistantMessage, Message, ToolCall, assistant

Reply: TypeAlias = str | AssistantMessage | ToolCall | Sequence[ToolCall]
"""What a script may say in one turn: text, calls of tools, or the whole message."""
Schemas: TypeAlias = list[dict[str, Any]]
Script: TypeAlias = Sequence[Reply] | Callable[[list[Message], Schemas], Reply | Awaitable[Reply]]


@runtime_checkable
class Policy(Protocol):
    """Anything that answers messages with an assistant message."""

    def act(self, messages: list[Message], tools: list[dict[str, Any]]) -> Reply | Awaitable[Reply]:
        """Return the next assistant message, or what :func:`as_message` makes one of.

        A plain function runs in the event loop and must not wait for anything; one that waits is
        ``async def``.
        """


class ScriptedPolicy:
    """Says what a script says: a list of replies, one a turn, or a function of the conversation.

    A reply is a text, a ``ToolCall``, a list of them, or a whole ``AssistantMessage``; calls
    without an id get one. A list is played once: asked for more than it has, it raises
    ``PolicyError`` instead of repeating anything. ``rewind()`` begins it again.
    """

    def __init__(self, script: Script) -> None:
        """Take the script.

        Args:
            script: ``["Hello", ToolCall("look", {}), "Bye"]``, or
                ``lambda messages, tools: "…"``, which may be ``async``.
        """
        if isinstance(script, (str, ToolCall, Message)):
            raise ConfigError(
                f"a script is a list of replies, not a {type(script).__name__}",
                hint="ScriptedPolicy([…])",
            )
        self._function = script if callable(script) else None
        self._replies: list[Reply] = [] if callable(script) else list(script)
        self._turn = 0

    @property
    def remaining(self) -> int | None:
        """Replies that are left; None for a function."""
        return None if self._function else len(self._replies) - self._turn

    def rewind(self) -> None:
        """Begin the script again, for another episode."""
        self._turn = 0

    def act(
        self, messages: list[Message], tools: list[dict[str, Any]]
    ) -> AssistantMessage | Awaitable[AssistantMessage]:
        """Return the next reply as a message."""
        self._turn += 1
        if self._function is None:
            return self._message(self._next())
        said = self._function(messages, tools)
        return self._later(said) if inspect.isawaitable(said) else self._message(said)

    async def _later(self, said: Awaitable[Reply]) -> AssistantMessage:
        return self._message(await said)

    def _next(self) -> Reply:
        if self._turn > len(self._replies):
            raise PolicyError(
                f"the script has {len(self._replies)} replies and was asked for another one",
                hint="make it longer, or one ScriptedPolicy for each episode",
            )
        return self._replies[self._turn - 1]

    def _message(self, reply: Any) -> AssistantMessage:
        return as_message(reply, self._turn, "a script")


def as_message(reply: object, turn: int, who: str = "the policy") -> AssistantMessage:
    """Return what a policy said as a message: a text, a tool call or a list of them make one.

    Args:
        reply: What it said.
        turn: The number of the turn; calls without an id are named after it.
        who: Who said it, for the error.

    Raises:
        PolicyError: It is nothing of that kind.
    """
    if type(reply) is AssistantMessage and not reply.tool_calls:
        return reply
    if isinstance(reply, str):
        return assistant(reply)
    if isinstance(reply, ToolCall):
        reply = [reply]
    if isinstance(reply, (list, tuple)) and all(isinstance(c, ToolCall) for c in reply):
        reply = assistant(tool_calls=reply)
    if not isinstance(reply, AssistantMessage):
        raise PolicyError(
            f"{who} says {reply!r:.80}, a {type(reply).__name__}",
            hint="a reply is a str, a ToolCall, a list of ToolCall or an AssistantMessage",
        )
    calls = tuple(
        call if call.id else replace(call, id=f"call_{turn}_{number}")
        for number, call in enumerate(reply.tool_calls)
    )
    return reply if calls == reply.tool_calls else replace(reply, tool_calls=calls)


class RandomPolicy:
    """Calls random tools with random arguments that fit their schemas, or answers nonsense."""

    def __init__(self, seed: int = 0, *, call_share: float = 0.7) -> None:
        """Prepare a policy whose choices follow from ``seed``.

        Args:
            seed: Equal seeds make equal choices.
            call_share: How often it calls a tool rather than answer.
        """
        self._rng = random.Random(seed)
        self._call_share = call_share

    def act(self, messages: list[Message], tools: list[dict[str, Any]]) -> AssistantMessage:
        """Return a random tool call or a random answer."""
        if not tools or self._rng.random() >= self._call_share:
            return assistant(str(self._rng.randint(-100, 100)))
        function = self._rng.choice(tools)["function"]
        arguments = random_arguments(function.get("parameters") or {}, self._rng)
        return assistant(
            tool_calls=[ToolCall(function["name"], arguments, f"call_{len(messages)}")]
        )

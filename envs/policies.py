"""Policies that are not models: scripts, random play, and the loop that lets one play.

A :class:`ScriptedPolicy` sees what a model would see, the messages and the tools' schemas, and
returns an assistant message. Experts for a warm start, baselines and tests are written this way.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from relax_agent.envs.core import Env
from relax_agent.messages import AssistantMessage, Message, Rewrite, ToolCall, assistant


class ScriptedPolicy(Protocol):
    """Anything that answers messages with an assistant message."""

    def act(
        self, messages: list[Message], tools: list[dict[str, Any]]
    ) -> AssistantMessage | Awaitable[AssistantMessage]:
        """Return the next assistant message; may be ``async def``."""


class RandomPolicy:
    """Calls random tools with random arguments of the right types, or answers nonsense."""

    def __init__(self, seed: int = 0, *, call_share: float = 0.7) -> None:
        self._rng = random.Random(seed)
        self._call_share = call_share

    def act(self, messages: list[Message], tools: list[dict[str, Any]]) -> AssistantMessage:
        """Return a random tool call or a random answer."""
        if not tools or self._rng.random() >= self._call_share:
            return assistant(str(self._rng.randint(-100, 100)))
        function = self._rng.choice(tools)["function"]
        schema = function["parameters"]
        arguments = {
            name: self._value(item, schema.get("$defs", {}))
            for name, item in schema.get("properties", {}).items()
        }
        call = ToolCall(function["name"], arguments, f"call_{len(messages)}")
        return assistant(tool_calls=[call])

    def _value(self, schema: dict[str, Any], defs: dict[str, Any]) -> Any:
        if "$ref" in schema:
            return self._value(defs[schema["$ref"].rpartition("/")[2]], defs)
        for choices in ("enum", "anyOf"):
            if schema.get(choices):
                choice = self._rng.choice(schema[choices])
                return choice if choices == "enum" else self._value(choice, defs)
        return self._plain(schema, defs)

    def _plain(self, schema: dict[str, Any], defs: dict[str, Any]) -> Any:
        kind = schema.get("type")
        if kind == "integer":
            return self._rng.randint(-10, 10)
        if kind == "number":
            return self._rng.uniform(-10, 10)
        if kind == "boolean":
            return self._rng.random() < 0.5
        if kind == "array":
            return [
                self._value(schema.get("items", {}), defs) for _ in range(self._rng.randint(0, 3))
            ]
        if kind == "object":
            items = schema.get("properties", {}).items()
            return {name: self._value(item, defs) for name, item in items}
        if kind == "null":
            return None
        return f"{self._rng.randint(0, 99)}+{self._rng.randint(0, 99)}"


@dataclass(slots=True)
class Play:
    """What happened when a policy played one episode."""

    task_id: str | None
    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    turns: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


async def play(
    env: Env,
    policy: ScriptedPolicy,
    *,
    task: str | None = None,
    seed: int | None = None,
    max_turns: int = 100,
) -> Play:
    """Let a policy play one episode at the level of messages, without a model.

    Args:
        env: The environment; it stays open.
        policy: Who answers.
        task: The task's id; by default the environment chooses.
        seed: The environment's seed.
        max_turns: Assistant messages after which the episode is cut off here.
    """
    options = None if task is None else {"task": task}
    observation, info = await env.reset(seed=seed, options=options)
    record = Play(info.get("task", task))
    _observe(record, observation)
    while not (record.terminated or record.truncated):
        answer = policy.act(list(record.messages), env.tools.schemas())
        action = await answer if inspect.isawaitable(answer) else answer
        record.messages.append(action)
        observation, reward, record.terminated, record.truncated, info = await env.step(action)
        _observe(record, observation)
        record.reward += reward
        record.turns += 1
        record.truncated = record.truncated or record.turns >= max_turns
    record.metrics = dict(info.get("metrics", {}))
    return record


def _observe(record: Play, observation: Sequence[Message] | Rewrite) -> None:
    if isinstance(observation, Rewrite):
        record.messages = list(observation.messages)
    else:
        record.messages.extend(observation)

"""``SystemPrompt``: another system prompt for an environment that has one already, or has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, get_args

from relax_agent.envs.core import Env, Info, StepResult, Wrapper
from relax_agent.errors import ConfigError
from relax_agent.messages import AssistantMessage, Message, Observation, Rewrite, Text, system

Mode: TypeAlias = Literal["replace", "prepend", "append"]


class SystemPrompt(Wrapper):
    """Replaces the system prompt, or adds to its beginning or end.

    It is done to the first messages of every episode, and to every rewritten history that comes
    from inside, which starts the conversation anew.
    """

    def __init__(self, env: Env, text: str, mode: Mode = "replace") -> None:
        super().__init__(env)
        if mode not in get_args(Mode):
            raise ConfigError(
                f"mode cannot be {mode!r}", hint=f"one of {', '.join(get_args(Mode))}"
            )
        if not text and mode != "replace":
            raise ConfigError("the text to add to the system prompt is empty")
        self.text = text
        self.mode = mode

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin an episode under the changed prompt."""
        observation, info = await self.env.reset(seed=seed, options=options)
        if isinstance(observation, Rewrite):
            return self._rewritten(observation), info
        return self._changed(observation), info

    async def step(self, action: AssistantMessage) -> StepResult:
        """Step; a rewritten history gets the changed prompt as well."""
        result = await self.env.step(action)
        if not isinstance(result[0], Rewrite):
            return result
        return (self._rewritten(result[0]), *result[1:])

    def _rewritten(self, rewrite: Rewrite) -> Rewrite:
        return replace(rewrite, messages=tuple(self._changed(rewrite.messages)))

    def _changed(self, messages: Sequence[Message]) -> list[Message]:
        old = [message for message in messages if message.role == "system"]
        rest = [message for message in messages if message.role != "system"]
        parts = [part for message in old for part in message.content]
        if self.mode == "replace":
            return [system(self.text), *rest] if self.text else rest
        gap = "\n\n" if parts else ""
        if self.mode == "prepend":
            return [system([Text(self.text + gap), *parts]), *rest]
        return [system([*parts, Text(gap + self.text)]), *rest]

"""Wrappers that any environment can wear."""

from __future__ import annotations

from typing import Any

from relax_agent.envs.core import Env, Info, StepResult, Wrapper
from relax_agent.errors import ConfigError
from relax_agent.messages import AssistantMessage, Observation


class TimeLimit(Wrapper):
    """Truncates an episode after ``max_turns`` assistant messages.

    ``ToolEnv`` has a limit of its own; this one is for every other environment.
    """

    def __init__(self, env: Env, max_turns: int) -> None:
        super().__init__(env)
        if max_turns < 1:
            raise ConfigError(f"max_turns must be ≥ 1, not {max_turns}")
        self.max_turns = max_turns
        self._turns = 0

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin an episode and count from zero."""
        self._turns = 0
        return await self.env.reset(seed=seed, options=options)

    async def step(self, action: AssistantMessage) -> StepResult:
        """Step, and truncate at the limit unless the task ended by itself."""
        observation, reward, terminated, truncated, info = await self.env.step(action)
        self._turns += 1
        over = self._turns >= self.max_turns and not terminated
        return observation, reward, terminated, truncated or over, info

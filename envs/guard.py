"""The guard that ``make`` puts around every environment: the contract, checked as it runs.

``step`` outside an episode, an action that is not an AssistantMessage and a malformed return value
are named at once, where they happen. What an environment raises by itself arrives as an
:class:`~relax_agent.errors.EnvError` that says which environment and which call, with the original
as its cause.
"""

from __future__ import annotations

import math
from typing import Any

from relax_agent.envs.core import Env, Info, StepResult, Wrapper
from relax_agent.errors import EnvError, InvalidAction, RelaxError, ResetNeeded
from relax_agent.messages import AssistantMessage, Message, Observation, Rewrite


class Guard(Wrapper):
    """Checks order, actions and results; knows whether an episode is running."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self._running = False
        self._closed = False

    def wrapper_spec(self) -> None:
        """A guard is no part of a spec: ``make`` puts one around every environment."""

    @property
    def label(self) -> str:
        """The environment's id, or its class."""
        return self.spec.id if self.spec else type(self.unwrapped).__name__

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin an episode."""
        if self._closed:
            raise ResetNeeded(f"{self.label} is closed", hint="make() another one")
        self._running = False
        try:
            result = await self.env.reset(seed=seed, options=options)
        except Exception as error:
            raise self._blame("reset", error) from error
        if not isinstance(result, tuple) or len(result) != 2:
            raise EnvError(f"{self.label}: reset() must return (observation, info)")
        self._check_observation("reset", result[0])
        self._check_info("reset", result[1])
        self._running = True
        return result

    async def step(self, action: AssistantMessage) -> StepResult:
        """Take one assistant message."""
        if not self._running:
            raise ResetNeeded(
                f"{self.label}: step() outside an episode", hint="await env.reset() first"
            )
        if not isinstance(action, AssistantMessage):
            raise InvalidAction(
                f"{self.label}: step() takes an AssistantMessage, not {type(action).__name__}",
                hint="relax_agent.messages.assistant('…') makes one",
            )
        try:
            result = await self.env.step(action)
        except Exception as error:
            self._running = False
            raise self._blame("step", error) from error
        self._check_step(result)
        self._running = not (result[2] or result[3])
        return result

    async def close(self) -> None:
        """Close the environment, once."""
        self._running = False
        if not self._closed:
            self._closed = True
            await self.env.close()

    def _blame(self, call: str, error: Exception) -> RelaxError:
        if isinstance(error, RelaxError):
            return error
        return EnvError(f"{self.label}: {call}() raised {type(error).__name__}: {error}")

    def _check_step(self, result: Any) -> None:
        if not isinstance(result, tuple) or len(result) != 5:
            raise EnvError(
                f"{self.label}: step() must return"
                " (observation, reward, terminated, truncated, info)"
            )
        observation, reward, terminated, truncated, info = result
        self._check_observation("step", observation)
        self._check_info("step", info)
        if isinstance(reward, bool) or not isinstance(reward, (int, float)):
            raise EnvError(f"{self.label}: the reward {reward!r} is not a number")
        if not math.isfinite(reward):
            raise EnvError(f"{self.label}: the reward is {reward}")
        if not isinstance(terminated, bool) or not isinstance(truncated, bool):
            raise EnvError(f"{self.label}: terminated and truncated must be bool")

    def _check_observation(self, call: str, observation: Any) -> None:
        if isinstance(observation, Rewrite):
            return
        if not isinstance(observation, list) or not all(
            isinstance(message, Message) for message in observation
        ):
            raise EnvError(
                f"{self.label}: {call}() must return a list of Message as its observation",
                hint="e.g. [relax_agent.messages.user('…')]",
            )

    def _check_info(self, call: str, info: Any) -> None:
        if not isinstance(info, dict):
            raise EnvError(f"{self.label}: the info of {call}() must be a dict")

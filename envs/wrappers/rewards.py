"""Wrappers that change rewards. ``info["raw_reward"]`` keeps what the environment gave."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from relax_agent.envs.core import Env, Info, StepResult, Wrapper
from relax_agent.envs.specs import WrapperSpec
from relax_agent.envs.wrappers.functions import function_name, load_function, plain_arguments
from relax_agent.errors import ConfigError, EnvError
from relax_agent.messages import AssistantMessage, Observation

if TYPE_CHECKING:
    from relax_agent.envs.tool_env import Transcript

Shape: TypeAlias = Callable[
    [float, AssistantMessage, Observation, Info], "float | Awaitable[float]"
]
"""``(reward, action, observation, info) -> reward``; may be ``async def``."""


class RewardScale(Wrapper):
    """Multiplies every reward, those of ``score_group`` included."""

    def __init__(self, env: Env, scale: float) -> None:
        super().__init__(env)
        if not math.isfinite(scale):
            raise ConfigError(f"the scale of a reward must be finite, not {scale}")
        self.scale = scale

    async def step(self, action: AssistantMessage) -> StepResult:
        """Step and scale the reward."""
        result = await self.env.step(action)
        return _with_reward(result, result[1] * self.scale)

    async def score_group(self, task_id: str, members: Sequence[Transcript]) -> list[float]:
        """Scale the rewards of a whole group."""
        rewards = await self.env.score_group(task_id, members)
        return [reward * self.scale for reward in rewards]


class RewardClip(Wrapper):
    """Keeps every single reward between ``low`` and ``high``, those of ``score_group`` included.

    What is clipped is the reward of a step, not the sum of an episode.
    """

    def __init__(self, env: Env, low: float = -1.0, high: float = 1.0) -> None:
        super().__init__(env)
        if not low < high:
            raise ConfigError(f"low must be less than high, not {low} and {high}")
        self.low = low
        self.high = high

    async def step(self, action: AssistantMessage) -> StepResult:
        """Step and clip the reward."""
        result = await self.env.step(action)
        return _with_reward(result, self._clip(result[1]))

    async def score_group(self, task_id: str, members: Sequence[Transcript]) -> list[float]:
        """Clip the rewards of a whole group."""
        return [self._clip(reward) for reward in await self.env.score_group(task_id, members)]

    def _clip(self, reward: float) -> float:
        return min(max(reward, self.low), self.high)


class RewardShaping(Wrapper):
    """Replaces every reward by what a function makes of it.

    The function gets ``(reward, action, observation, info)`` and returns the new reward; it may be
    ``async def``. Given by name, ``"my_module:my_function"``, or defined at the top of a module, it
    goes with the spec; a lambda works here but not elsewhere. A plain function runs in the event
    loop: what takes long must be async.
    """

    def __init__(self, env: Env, function: Shape | str) -> None:
        super().__init__(env)
        self.function: Shape = load_function(function)

    def wrapper_spec(self) -> WrapperSpec | None:
        """Describe this wrapper; a function goes by its name."""
        return plain_arguments(super().wrapper_spec())

    async def step(self, action: AssistantMessage) -> StepResult:
        """Step and ask the function for the reward.

        Raises:
            EnvError: the function raised, or returned something that is no finite number.
        """
        result = await self.env.step(action)
        observation, reward, _, _, info = result
        name = function_name(self.function)
        try:
            shaped = self.function(reward, action, observation, info)
            value: Any = await shaped if inspect.isawaitable(shaped) else shaped
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise EnvError(f"the reward shaping {name} raised {reason}") from error
        if not _is_finite_number(value):
            raise EnvError(
                f"the reward shaping {name} returned {value!r}", hint="return a finite number"
            )
        return _with_reward(result, float(value))


def _is_finite_number(value: Any) -> bool:
    try:
        return not isinstance(value, (bool, str)) and math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        return False


def _with_reward(result: StepResult, reward: float) -> StepResult:
    observation, raw, terminated, truncated, info = result
    return observation, reward, terminated, truncated, {"raw_reward": raw} | info

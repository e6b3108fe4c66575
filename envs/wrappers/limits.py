"""Limits from outside: turns, tokens and time.

A limit truncates: the step that reaches it is still done and its reward still counts, then the
episode is over with ``truncated``, and ``info["status"]`` (a value of
:class:`~relax_agent.status.EpisodeStatus`) and ``info["detail"]`` say by what. An episode that
ends by itself in that very step has terminated, not been truncated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from relax_agent.envs.core import Env, Info, StepResult, Wrapper
from relax_agent.envs.wrappers.tokens import completion_tokens, estimated_tokens
from relax_agent.errors import ConfigError, EnvError
from relax_agent.limits import Overrun, TimeBudget, bounded
from relax_agent.messages import AssistantMessage, Observation, Rewrite


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
        result = await self.env.step(action)
        self._turns += 1
        if self._turns < self.max_turns:
            return result
        return _truncated(result, "turns", f"{self.max_turns} turns are used")


class TokenLimit(Wrapper):
    """Truncates an episode that has used up its tokens, by the usage that messages carry.

    ``info["tokens_left"]`` and the ``usage.tokens_left`` of the messages that go inwards tell what
    remains. A message without usage (a script's, a person's) is counted by an estimate, four bytes
    a token, so that the limit holds for it too; ``info["tokens_estimated"]`` says so.
    """

    def __init__(
        self, env: Env, max_tokens: int | None = None, max_context: int | None = None
    ) -> None:
        """Put the limit on.

        Args:
            env: The environment.
            max_tokens: Tokens that all assistant messages together may have.
            max_context: Tokens that the conversation may have, everything in it counted.
        """
        super().__init__(env)
        limits = [limit for limit in (max_tokens, max_context) if limit is not None]
        if not limits or min(limits) < 1:
            raise ConfigError(
                f"TokenLimit(max_tokens={max_tokens}, max_context={max_context}) limits nothing",
                hint="give at least one of them, each ≥ 1",
            )
        self.max_tokens = max_tokens
        self.max_context = max_context
        self._spoken = 0
        self._context = 0

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin an episode and count from zero."""
        self._spoken = self._context = 0
        observation, info = await self.env.reset(seed=seed, options=options)
        self._hear(observation)
        return observation, info | {"tokens_left": self._left()}

    async def step(self, action: AssistantMessage) -> StepResult:
        """Count the message, step, and truncate if no token is left."""
        told = action.usage.completion_tokens > 0
        self._spoken += completion_tokens(action)
        if told:
            self._context = action.usage.prompt_tokens + action.usage.completion_tokens
        else:
            self._context += completion_tokens(action)
        known = action.usage.tokens_left
        left = self._left() if known is None else min(self._left(), known)
        result = await self.env.step(replace(action, usage=replace(action.usage, tokens_left=left)))
        self._hear(result[0])
        info = result[4] | {"tokens_left": self._left()}
        if not told:
            info["tokens_estimated"] = True
        result = (*result[:4], info)
        if self._left() > 0:
            return result
        return _truncated(result, "tokens", "no tokens are left")

    def _hear(self, observation: Observation) -> None:
        """Add what comes in; the next message's usage replaces the estimate."""
        if isinstance(observation, Rewrite):
            self._context = sum(estimated_tokens(message) for message in observation.messages)
        else:
            self._context += sum(estimated_tokens(message) for message in observation)

    def _left(self) -> int:
        left = [
            limit - used
            for limit, used in (
                (self.max_tokens, self._spoken),
                (self.max_context, self._context),
            )
            if limit is not None
        ]
        return max(0, min(left))


class WallClock(Wrapper):
    """Truncates an episode that lasts longer than ``seconds``, counted from its ``reset``.

    Whoever answers is on the clock too. By default the limit acts between steps: a step that runs
    is waited for, and truncated when it returns. With ``hard`` a running step is cancelled when the
    time is over (what it would have said or earned is lost), and none is begun after it; a plain
    ``def`` environment, whose thread cannot be stopped, is dead after that.
    """

    def __init__(
        self,
        env: Env,
        seconds: float,
        *,
        hard: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Put the limit on.

        Args:
            env: The environment.
            seconds: How long an episode may last.
            hard: Whether a running step is cancelled at the limit.
            clock: Tells the time in seconds; for tests.
        """
        super().__init__(env)
        if not seconds > 0:
            raise ConfigError(f"seconds must be positive, not {seconds}")
        self.seconds = seconds
        self.hard = hard
        self._clock = clock
        self._end = 0.0

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin an episode and start the clock.

        Raises:
            EnvError: with ``hard``, the environment's own reset took longer than the limit.
        """
        self._end = self._clock() + self.seconds
        call = self.env.reset(seed=seed, options=options)
        if not self.hard:
            return await call
        try:
            return await bounded(call, TimeBudget(self.seconds).left)
        except Overrun:
            raise EnvError(
                f"reset() took longer than the {self.seconds:g} s of a whole episode",
                hint="raise WallClock's seconds, or make reset() faster",
            ) from None

    async def step(self, action: AssistantMessage) -> StepResult:
        """Step, and truncate if the time is over."""
        left = self._end - self._clock()
        detail = f"the {self.seconds:g} s of an episode are over"
        try:
            result = await (self._hard_step(action, left) if self.hard else self.env.step(action))
        except Overrun:
            result = [], 0.0, False, False, {}
            return _truncated(result, "time", f"{detail}; a running step was cancelled")
        return _truncated(result, "time", detail) if self._clock() >= self._end else result

    async def _hard_step(self, action: AssistantMessage, left: float) -> StepResult:
        if left <= 0:
            raise Overrun
        return await bounded(self.env.step(action), TimeBudget(left).left)


def _truncated(result: StepResult, by: str, detail: str) -> StepResult:
    """Mark a step as the last one, unless it is so already."""
    observation, reward, terminated, truncated, info = result
    if terminated or truncated:
        return result
    told = {"status": f"truncated_{by}", "detail": detail}
    return observation, reward, False, True, info | told

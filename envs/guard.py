"""The guard that ``make`` puts around every environment: the contract, checked as it runs.

``step`` outside an episode, two calls at once, an action that is not an AssistantMessage and a
malformed return value are named at once, where they happen. What an environment raises by itself
arrives as an :class:`~relax_agent.errors.EnvError` that says which environment and which call,
with the original as its cause.

A well-formed step passes through a few identity checks and nothing else: the guard stands on
every step of every episode. All that deviates takes the slow way, where numbers and flags of
array libraries become plain ones and the rest is refused in words.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, NoReturn

from relax_agent.envs.core import Env, Info, StepResult, Wrapper
from relax_agent.errors import (
    EnvBusy,
    EnvError,
    InvalidAction,
    RelaxError,
    ResetNeeded,
    at_line,
    one_line,
)
from relax_agent.limits import STOPS
from relax_agent.messages import AssistantMessage, Message, Observation, Rewrite

if TYPE_CHECKING:
    from relax_agent.envs.transcript import Transcript

_NEW = "step() outside an episode"
_ENDED = "step() after the episode's end"
_FAILED = "step() after a call that failed"
_CUT = "step() after a call that was cancelled"
_BUSY = ("reset", "step")


class Guard(Wrapper):
    """Checks order, actions and results; knows whether an episode is running."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self._bar: str | None = _NEW
        """What stands against a step: the call that runs, or the words of an error; None: go."""
        self._rest: str | None = None
        """What bars a step between two calls of an episode: nothing, until the guard is closed."""
        self._closed = False

    def wrapper_spec(self) -> None:
        """A guard is no part of a spec: ``make`` puts one around every environment."""

    @property
    def label(self) -> str:
        """The environment's id, or its class."""
        spec = self.spec
        return spec.id if spec else type(self.unwrapped).__name__

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin an episode."""
        if self._closed or self._bar in _BUSY:
            self._refuse_call("reset")
        self._bar = "reset"
        try:
            result = await self.env.reset(seed=seed, options=options)
        except BaseException as error:
            self._fail("reset", error)
            raise
        self._bar = _FAILED
        result = self._checked_reset(result)
        self._bar = self._rest
        return result

    async def step(self, action: AssistantMessage) -> StepResult:
        """Take one assistant message."""
        if self._bar is not None or type(action) is not AssistantMessage:
            self._check_call(action)
        self._bar = "step"
        try:
            result = await self.env.step(action)
        except BaseException as error:
            self._fail("step", error)
            raise
        if type(result) is tuple:
            try:
                observation, reward, terminated, truncated, info = result
            except ValueError:
                return self._settled(result)
            if (
                terminated is False
                and truncated is False
                and type(reward) is float
                and reward - reward == 0.0  # neither NaN nor infinite
                and type(info) is dict
                and type(observation) is list
            ):
                for message in observation:
                    if type(message) is not Message:
                        break
                else:
                    self._bar = self._rest
                    return result
        return self._settled(result)

    async def score_group(self, task_id: str, members: Sequence[Transcript]) -> list[float]:
        """Ask the environment what the members of a group get beside their own rewards."""
        try:
            extra = await self.env.score_group(task_id, members)
        except BaseException as error:
            self._blame("score_group", error)
            raise
        if not isinstance(extra, (list, tuple)) or len(extra) != len(members):
            raise EnvError(
                f"{self.label}: score_group() must return one number for each of the"
                f" {len(members)} members, not {extra!r:.80}"
            )
        return [self._number("what score_group() returned", value) for value in extra]

    async def close(self) -> None:
        """Close the environment, once."""
        if self._closed:
            return
        self._closed = True
        self._bar = self._rest = _NEW
        try:
            await self.env.close()
        except BaseException as error:
            self._blame("close", error)
            raise

    # -- before a call -----------------------------------------------------------------------

    def _check_call(self, action: object) -> None:
        """Raise what stands against this step; return for an action of a subclass."""
        if self._bar is not None:
            self._refuse_call("step")
        if not isinstance(action, AssistantMessage):
            raise InvalidAction(
                f"{self.label}: step() takes an AssistantMessage, not {type(action).__name__}",
                hint="relax_agent.messages.assistant('…') makes one",
            )

    def _refuse_call(self, call: str) -> NoReturn:
        if self._closed:
            raise ResetNeeded(f"{self.label} is closed", hint="make() another one")
        if self._bar in _BUSY:
            raise EnvBusy(
                f"{self.label}: {call}() while its {self._bar}() still runs",
                hint="one environment runs one episode, one call at a time; make() one for each",
            )
        raise ResetNeeded(f"{self.label}: {self._bar}", hint="await env.reset() first")

    # -- after a call ------------------------------------------------------------------------

    def _fail(self, call: str, error: BaseException) -> None:
        """Note that the episode is over, and raise what the caller gets to see instead."""
        self._bar = _FAILED
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is None or task.cancelling():
                self._bar = _CUT
            else:
                raise EnvError(
                    f"{self.label}: {call}() was cancelled from inside",
                    hint="something that it awaits was cancelled; catch CancelledError there",
                ) from error
        self._blame(call, error)

    def _blame(self, call: str, error: BaseException) -> None:
        """Raise an EnvError that names the call in the place of what an author's code raised."""
        if not isinstance(error, (RelaxError, *STOPS)):
            words = f"{self.label}: {call}() raised {one_line(error)}{at_line(error)}"
            raise EnvError(words) from error

    def _settled(self, result: Any) -> StepResult:
        """Check a result that is not of the plainest form, and bring it into that form."""
        self._bar = _FAILED
        if not isinstance(result, tuple) or len(result) != 5:
            raise EnvError(
                f"{self.label}: step() must return"
                f" (observation, reward, terminated, truncated, info), not {_shape(result)}"
            )
        observation, reward, terminated, truncated, info = result
        observation = self._observation("step", observation)
        reward = self._number("the reward", reward)
        terminated = self._flag("terminated", terminated)
        truncated = self._flag("truncated", truncated)
        self._check_info("step", info)
        self._bar = _ENDED if terminated or truncated else self._rest
        return observation, reward, terminated, truncated, info

    def _checked_reset(self, result: Any) -> tuple[Observation, Info]:
        if not isinstance(result, tuple) or len(result) != 2:
            raise EnvError(
                f"{self.label}: reset() must return (observation, info), not {_shape(result)}"
            )
        observation, info = result
        self._check_info("reset", info)
        return self._observation("reset", observation), info

    def _observation(self, call: str, value: Any) -> Observation:
        messages = value.messages if isinstance(value, Rewrite) else value
        if not isinstance(messages, (list, tuple)):
            raise EnvError(
                f"{self.label}: {call}() must return a list of Message as its observation,"
                f" not {_article(value)}",
                hint=_remedy(value),
            )
        for message in messages:
            if not isinstance(message, Message):
                raise EnvError(
                    f"{self.label}: {call}() must return a list of Message as its observation;"
                    f" there is {_article(message)} in it",
                    hint=_remedy(message),
                )
        return value if isinstance(value, (list, Rewrite)) else list(value)

    def _number(self, what: str, value: Any) -> float:
        plain = _plain(value)
        if isinstance(plain, bool) or not isinstance(plain, Real):
            raise EnvError(
                f"{self.label}: {what} is {value!r:.80}, which is not a number",
                hint="return a float" if not isinstance(plain, bool) else "return float(…)",
            )
        try:
            number = float(plain)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise EnvError(f"{self.label}: {what} is {number}", hint="it must be finite")
        return number

    def _flag(self, name: str, value: Any) -> bool:
        plain = _plain(value)
        if not isinstance(plain, bool):
            raise EnvError(
                f"{self.label}: terminated and truncated must be bool; {name} is {value!r:.80}",
                hint=f"return bool({name})",
            )
        return plain

    def _check_info(self, call: str, info: Any) -> None:
        if not isinstance(info, dict):
            raise EnvError(
                f"{self.label}: the info of {call}() must be a dict, not {_article(info)}",
                hint="return {} if there is nothing to say",
            )


def _plain(value: Any) -> Any:
    """Return the plain number or flag in a scalar of NumPy or PyTorch."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value


def _article(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _shape(result: object) -> str:
    if isinstance(result, tuple):
        return f"{len(result)} values"
    return _article(result)


def _remedy(value: object) -> str:
    """Say what an author should return instead."""
    if isinstance(value, str):
        return "wrap it: [relax_agent.messages.user('…')]"
    if isinstance(value, Message):
        return "wrap it in a list"
    if value is None:
        return "return [] if there is nothing new"
    if isinstance(value, dict):
        return "relax_agent.messages.from_openai(…) makes a Message of a chat dict"
    return "e.g. [relax_agent.messages.user('…')]"

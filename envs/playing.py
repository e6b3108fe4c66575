"""Playing one episode at the level of messages, without a model's tokens.

:func:`play` lets any policy play: a script, random choices, a person, a model behind an API. The
caller always gets a :class:`Play`: whatever goes wrong becomes its status, with the conversation
up to there. Every wait has a limit.

    env raises, breaks its contract or hangs    env_failure (tool_failure for a ToolError)
    policy raises, hangs or says no message     engine_failure
    the last message was cut                    truncated_tokens
    env truncates, or max_turns is reached      truncated_turns, or what info["status"] says
    the time is over                            truncated_time

The episode runs in one task of its own, and a second one waits for it: an environment that does
not even react to its cancellation is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
from collections.abc import Awaitable, Mapping
from typing import Any, TypeAlias

from relax_agent.envs.core import Env, Info, SyncEnv, whole_seed
from relax_agent.envs.guard import Guard
from relax_agent.envs.plays import Play, PlayLimits
from relax_agent.envs.policies import Policy, as_message
from relax_agent.errors import (
    ConfigError,
    PolicyError,
    PromptTooLong,
    ToolError,
    at_line,
    one_line,
)
from relax_agent.limits import GRACE_S, Overrun, TimeBudget, Watch, bounded, stop
from relax_agent.messages import (
    AssistantMessage,
    Message,
    Observation,
    Rewrite,
    Usage,
)
from relax_agent.status import TRUNCATIONS, EpisodeStatus
from relax_agent.tools import call_context

__all__ = ["Play", "PlayLimits", "Policies", "play"]

logger = logging.getLogger(__name__)

Policies: TypeAlias = Policy | Mapping[str, Policy]
"""One policy, or one for every role that ``info["role"]`` names."""

_BREATHER = 32
"""Turns after which an episode that never waits lets others run."""


async def play(
    env: Env | SyncEnv,
    policy: Policies,
    *,
    task: str | None = None,
    seed: int | None = None,
    limits: PlayLimits | None = None,
    record: Play | None = None,
) -> Play:
    """Let a policy play one episode, and say how it went.

    A failure of the environment, a tool or the policy does not raise: it is the ``status`` of what
    is returned. The environment stays open, unless it did not answer in time: then it is closed.

    Args:
        env: An environment that nobody else uses meanwhile.
        policy: Who answers; a mapping of roles to policies where ``info["role"]`` says whose turn
            it is.
        task: The task's id; by default the environment chooses.
        seed: The environment's seed.
        limits: What ends the episode from outside; by default :class:`PlayLimits`.
        record: Filled in place of a new one, so that a caller who is cancelled still holds it.

    Raises:
        ConfigError: ``env`` is no environment, or ``policy`` no policy.
        asyncio.CancelledError: after the record has ended as cancelled.
    """
    record = Play() if record is None else record
    record.require_running()
    _require_policy(policy)
    guarded = env if isinstance(env, Guard) else Guard(env)  # type: ignore[arg-type]
    record.env_id, record.task_id = guarded.label, task
    record.seed = None if seed is None else whole_seed(seed)
    await _Player(guarded, policy, record, limits or PlayLimits()).run()
    return record


def _require_policy(policy: object) -> None:
    """Raise ConfigError for what people hand over in the place of a policy."""
    for each in policy.values() if isinstance(policy, Mapping) else (policy,):
        if isinstance(each, type):
            raise ConfigError(f"{each.__name__} is a class", hint=f"{each.__name__}(…)")
        if not callable(getattr(each, "act", None)):
            hint = "ScriptedPolicy(…) makes one of a function or a list of replies"
            raise ConfigError(f"{each!r:.80} is no policy: it has no act()", hint=hint)


class _Ended(Exception):
    """The episode is over; says how. Internal."""

    def __init__(self, status: EpisodeStatus, detail: str = "") -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


class _Player:
    """The state of one running episode."""

    def __init__(self, env: Guard, policy: Policies, record: Play, limits: PlayLimits) -> None:
        self._env = env
        self._policy = policy
        self._record = record
        self._limits = limits
        self._view: list[Message] = []
        self._tools: Any = None
        self._schemas: list[dict[str, Any]] = []
        self._watch: Watch
        self._waits_for = ""
        self._left_behind = False

    async def run(self) -> None:
        """Run the episode in a task of its own and see it end, or leave it behind."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        episode = loop.create_task(self._episode())
        self._watch = Watch(episode, self._limits.timeout_s)
        try:
            if await self._watch.wait():
                episode.result()
            else:
                self._leave(episode)
        except BaseException as error:
            await self._cancel(episode, error)
            raise
        finally:
            self._watch.close()
            self._record.duration_s = loop.time() - began
        if self._watch.rang and self._waits_for != "policy":
            await self._close_env()

    async def _cancel(self, episode: asyncio.Task[None], error: BaseException) -> None:
        """End the record as cancelled, and the episode's task with it."""
        if self._record.status is EpisodeStatus.RUNNING:  # else it ended in the same moment
            self._finish(EpisodeStatus.CANCELLED, one_line(error))
        await stop(episode)

    def _leave(self, episode: asyncio.Task[None]) -> None:
        """Go on without a task that does not react to its cancellation."""
        logger.warning("%s did not stop within %g s", self._waits_for, GRACE_S)
        episode.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen
        late = self._late()
        self._finish(late.status, f"{late.detail}; it did not react to its cancellation either")

    async def _close_env(self) -> None:
        """Close an environment that did not answer in time; say so if even that takes too long."""
        try:
            await bounded(self._env.close(), TimeBudget(GRACE_S).left)
        except Overrun:
            self._record.detail += f"; it did not close within {GRACE_S:g} s"
        except Exception as error:
            self._record.detail += f"; its close() failed: {one_line(error)}"

    def _finish(self, status: EpisodeStatus, detail: str) -> None:
        self._left_behind = True
        self._record.finish(status, detail)

    # -- in the episode's own task -----------------------------------------------------------

    async def _episode(self) -> None:
        try:
            with call_context(episode=self._record.id):
                await self._play()
        except _Ended as end:
            if not self._left_behind:
                self._finish(end.status, end.detail)

    async def _play(self) -> None:
        record, env, seconds = self._record, self._env, self._limits.step_timeout_s
        options = None if record.task_id is None else {"task": record.task_id}
        observation, info = await self._limited(
            "reset", env.reset(seed=record.seed, options=options), seconds
        )
        if record.task_id is None and (task := info.get("task")) is not None:
            record.task_id = str(task)
        self._observe(observation)
        while True:
            action = await self._ask(info)
            self._hear(action)
            observation, reward, record.terminated, record.truncated, info = await self._limited(
                "step", env.step(action), seconds
            )
            record.rewards.append(reward)
            self._observe(observation)
            self._measure(info)
            self._end_if_over(action, info)
            if record.turns % _BREATHER == 0:
                await asyncio.sleep(0)

    async def _ask(self, info: Info) -> AssistantMessage:
        """Ask whose turn it is for a message."""
        schemas = self._current_schemas()
        try:
            said: Any = self._policy_for(info).act(list(self._view), schemas)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            raise _blamed("policy", error) from error
        if type(said) is AssistantMessage:
            return said
        if inspect.isawaitable(said):
            said = await self._limited("policy", said, self._limits.policy_timeout_s)
        try:
            return as_message(said, self._record.turns + 1)
        except PolicyError as error:
            raise _blamed("policy", error) from None

    def _policy_for(self, info: Info) -> Policy:
        if not isinstance(self._policy, Mapping):
            return self._policy
        role = info.get("role")
        found = self._policy.get(role) if isinstance(role, str) else None
        if found is None:
            names = ", ".join(map(str, self._policy)) or "none"
            raise PolicyError(f"no policy plays the role {role!r}", hint=f"there is: {names}")
        return found

    def _current_schemas(self) -> list[dict[str, Any]]:
        try:
            tools = self._env.tools
            if tools is not self._tools:
                self._tools, self._schemas = tools, tools.schemas()
        except Exception as error:
            words = f"its tools cannot be told: {one_line(error)}"
            raise _Ended(EpisodeStatus.ENV_FAILURE, words) from error
        return self._schemas

    async def _limited(self, name: str, call: Awaitable[Any], seconds: float) -> Any:
        """Await ``call``; past its limit the watch cancels this task. Failures end the episode."""
        watch = self._watch
        self._waits_for = name
        try:
            watch.start(seconds)
        except Overrun:
            with contextlib.suppress(AttributeError):
                call.close()  # type: ignore[attr-defined]  # a coroutine that never begins
            raise self._late() from None
        try:
            result = await call
        except asyncio.CancelledError:
            if watch.rang:
                raise self._late() from None
            if self._left_behind:
                raise
            raise _blamed(name, RuntimeError("the call was cancelled from inside")) from None
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            if watch.rang:  # it was cancelled: what it raised then is not why it ends
                raise self._late() from error
            raise _blamed(name, error) from error
        watch.stop()
        if watch.rang:
            raise self._late()
        return result

    def _late(self) -> _Ended:
        """Say whose time was over: the episode's or that of one call."""
        if self._watch.over:
            return _Ended(
                EpisodeStatus.TRUNCATED_TIME,
                f"{self._limits.timeout_s:g} s are over (during {self._waits_for})",
            )
        if self._waits_for == "policy":
            words = f"policy: no answer within {self._limits.policy_timeout_s:g} s"
            return _Ended(EpisodeStatus.ENGINE_FAILURE, words)
        words = f"{self._waits_for}: no answer within {self._limits.step_timeout_s:g} s"
        return _Ended(EpisodeStatus.ENV_FAILURE, words)

    def _hear(self, action: AssistantMessage) -> None:
        record = self._record
        record.actions.append(len(record.messages))
        record.messages.append(action)
        self._view.append(action)
        record.turns += 1
        so_far, new = record.usage, action.usage
        if new != _NO_USAGE:
            record.usage = Usage(
                so_far.prompt_tokens + new.prompt_tokens,
                so_far.completion_tokens + new.completion_tokens,
                new.tokens_left,
            )

    def _observe(self, observation: Observation) -> None:
        if isinstance(observation, Rewrite):
            self._record.rewrites.append((len(self._record.messages), observation.reason))
            self._record.messages.extend(observation.messages)
            self._view = list(observation.messages)
        else:
            self._record.messages.extend(observation)
            self._view.extend(observation)

    def _measure(self, info: Info) -> None:
        metrics = info.get("metrics")
        if not metrics:
            return
        try:
            found = {str(name): _finite(value) for name, value in metrics.items()}
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            words = f"step: info['metrics'] must be numbers by name, finite ones: {error}"
            raise _Ended(EpisodeStatus.ENV_FAILURE, words) from error
        self._record.metrics.update(found)

    def _end_if_over(self, action: AssistantMessage, info: Info) -> None:
        record = self._record
        if record.terminated or record.truncated:
            if action.finish_reason == "length":
                raise _Ended(EpisodeStatus.TRUNCATED_TOKENS, "the last message was cut")
            if record.terminated:
                raise _Ended(EpisodeStatus.COMPLETED)
            raise _truncated(info)
        if record.turns >= self._limits.max_turns:
            record.truncated = True
            words = f"{self._limits.max_turns} turns are used"
            raise _Ended(EpisodeStatus.TRUNCATED_TURNS, words)


_NO_USAGE = Usage()


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"there is {number}")
    return number


def _blamed(name: str, error: BaseException) -> _Ended:
    """Say how an episode ends whose ``reset``, ``step`` or policy failed."""
    if isinstance(error, PromptTooLong) and name == "policy":
        return _Ended(EpisodeStatus.TRUNCATED_TOKENS, str(error))
    status = EpisodeStatus.ENV_FAILURE
    if name == "policy":
        status = EpisodeStatus.ENGINE_FAILURE
    elif isinstance(error, ToolError):
        status = EpisodeStatus.TOOL_FAILURE
    return _Ended(status, f"{name}: {one_line(error)}{at_line(error)}")


def _truncated(info: Info) -> _Ended:
    """Return how an episode ended that the env truncated: as it says, else by its turns."""
    stated = TRUNCATIONS.get(str(info.get("status")), EpisodeStatus.TRUNCATED_TURNS)
    detail = info.get("detail")
    return _Ended(stated, str(detail) if detail else "the environment truncated the episode")

"""The laboratory: builds environments, calls them within limits, and plays episodes on record.

Every call has a time limit, every failure is told with the place in the author's code, and every
value is checked for its form before anything else looks at it.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from relax_agent.envs.checking.forms import Problem, reset_problems, step_problems
from relax_agent.envs.checking.places import (
    place_of_error,
    place_of_method,
    place_of_named,
)
from relax_agent.envs.checking.subject import Subject, authors_class
from relax_agent.envs.core import Env
from relax_agent.envs.policies import Policy, RandomPolicy, as_message
from relax_agent.errors import RelaxError
from relax_agent.limits import Overrun, TimeBudget, bounded
from relax_agent.messages import AssistantMessage, Message, Rewrite

T = TypeVar("T")

_EPISODE_S = 1.5
"""Seconds that an episode may take where fewer turns would do."""
_LEAST_TURNS = 3


class CallFailed(Exception):
    """A call of the environment raised."""

    def __init__(self, call: str, error: BaseException, where: str) -> None:
        words = " ".join(f"{type(error).__name__}: {error}".split())
        super().__init__(f"{call} raised {words[:300]}")
        self.call, self.error, self.where = call, error, where
        self.kind = type(error).__name__


class OutOfTime(Exception):
    """The time that all checks together may take is used up."""


class Hung(Exception):
    """A call did not return; nothing more can be learned from this environment."""

    def __init__(self, call: str, seconds: float, where: str) -> None:
        super().__init__(f"{call} did not return within {seconds:g} s")
        self.call, self.where = call, where


class BrokenForm(Exception):
    """What a call returned cannot be worked with; the checks of form tell it."""


@dataclass(slots=True)
class Turn:
    """One answer of the environment: to ``reset`` (the first) or to an action."""

    action: AssistantMessage | None
    observation: list[Message] | Rewrite
    """As it was then: a copy."""
    info: Any
    """As it was then: a deep copy."""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    given: tuple[Any, Any] = (None, None)
    """The very objects that were returned as observation and info."""
    comparable: bool = True
    """Whether the copy of the info was equal to the info; objects of one's own may not be."""

    @property
    def messages(self) -> list[Message]:
        """The new messages, or the rewritten history."""
        seen = self.observation
        return list(seen.messages) if isinstance(seen, Rewrite) else seen

    @property
    def ended(self) -> bool:
        """Whether the episode was over."""
        return self.terminated or self.truncated


@dataclass(slots=True)
class Trace:
    """One episode on record."""

    turns: list[Turn] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    """What was wrong with the form of what was returned."""

    @property
    def actions(self) -> list[AssistantMessage]:
        """What was said to the environment."""
        return [turn.action for turn in self.turns if turn.action is not None]

    @property
    def ended(self) -> bool:
        """Whether the environment ended the episode."""
        return bool(self.turns) and self.turns[-1].ended

    def broken(self) -> bool:
        """Whether the form was so wrong that the episode could not go on."""
        return any(problem.fatal for problem in self.problems)


class Replay:
    """A policy that says again what was said before."""

    def __init__(self, actions: Sequence[AssistantMessage]) -> None:
        self._actions = list(actions)

    def act(self, messages: list[Message], tools: list[dict[str, Any]]) -> AssistantMessage:
        """Return the next of the actions."""
        return self._actions.pop(0)


class Lab:
    """What all checks of one environment share."""

    def __init__(
        self, subject: Subject, *, timeout_s: float, seed: int, max_turns: int = 12
    ) -> None:
        self.subject = subject
        self.timeout_s = timeout_s
        self.seed = seed
        self.max_turns = max_turns
        self.running: list[tuple[str, float]] = []
        """The calls of an environment that run now, for whoever watches the event loop."""
        self.notes: dict[str, Any] = {}
        """What one check has found out for the others."""
        self.failures: list[CallFailed] = []
        """Every call that raised, whatever a check made of it."""
        self.deadline = math.inf
        """When no episode is to go on any more, on the monotonic clock."""
        self._main: Env | None = None
        self._step_s = 0.0

    # -- environments ------------------------------------------------------------------------

    async def main(self) -> Env:
        """Return the one environment that checks share which do not need one of their own."""
        if self._main is None:
            self._main = self._build()
        return self._main

    def _build(self, *, here: bool = False) -> Env:
        began = time.monotonic()
        entry = ("the constructor", began)
        self.running.append(entry)
        try:
            return self.subject.build(here=here)
        except Exception as error:
            raise CallFailed("the constructor", error, place_of_error(error)) from error
        finally:
            self.running.remove(entry)

    @property
    def single(self) -> bool:
        """Whether there is only one environment, which cannot be built anew."""
        return self.subject.only is not None

    @contextlib.asynccontextmanager
    async def fresh(self, *, here: bool = False) -> AsyncIterator[Env]:
        """Build an environment for one check and close it afterwards."""
        if self.single:
            yield await self.main()
            return
        env = self._build(here=here)
        try:
            yield env
        finally:
            await self.close(env)

    async def close(self, env: Env) -> None:
        """Close an environment; that it may fail is for the check of ``close`` to tell."""
        with contextlib.suppress(CallFailed, Hung):
            await self.call(env, "close", env.close)

    async def finish(self) -> None:
        """Close what is shared."""
        env, self._main = self._main, None
        if env is not None and not self.single:
            await self.close(env)

    # -- calls -------------------------------------------------------------------------------

    async def call(self, env: Env, name: str, function: Callable[[], Awaitable[T]]) -> T:
        """Await one call of an environment within the time limit.

        Raises:
            CallFailed: It raised.
            Hung: It did not return.
        """
        entry = (f"{name}()", time.monotonic())
        self.running.append(entry)
        try:
            return await bounded(function(), TimeBudget(self.timeout_s).left)
        except Overrun:
            where = place_of_method(authors_class(env), name)
            raise Hung(f"{name}()", self.timeout_s, where) from None
        except (Exception, SystemExit) as error:
            kind = authors_class(env)
            where = place_of_error(error) or place_of_named(kind, error)
            failed = CallFailed(f"{name}()", error, where or place_of_method(kind, name))
            self.failures.append(failed)
            raise failed from error
        finally:
            self.running.remove(entry)

    async def reset(self, env: Env, seed: int | None, options: dict[str, Any] | None = None) -> Any:
        """Call ``reset`` and return what it returned, whatever that is."""
        self._require_time()
        return await self.call(env, "reset", lambda: env.reset(seed=seed, options=options))

    async def step(self, env: Env, action: AssistantMessage) -> Any:
        """Call ``step`` and return what it returned, whatever that is."""
        self._require_time()
        began = time.monotonic()
        result = await self.call(env, "step", lambda: env.step(action))
        self._step_s = max(0.5 * self._step_s, time.monotonic() - began)
        return result

    def _require_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTime

    def turns(self, wanted: int) -> int:
        """Return how many turns to play where so many are wanted: fewer if steps are slow."""
        if self._step_s * wanted <= _EPISODE_S:
            return wanted
        return min(wanted, max(_LEAST_TURNS, round(_EPISODE_S / self._step_s)))

    # -- episodes ----------------------------------------------------------------------------

    def options(self, task: str | None) -> dict[str, Any] | None:
        """Return the reset options that choose a task."""
        return None if task is None else {"task": task}

    async def play(
        self,
        env: Env,
        policy: Policy | None = None,
        *,
        seed: int | None = None,
        task: str | None = None,
        max_turns: int | None = None,
        exactly: bool = False,
        after: Callable[[Turn], Any] | None = None,
    ) -> Trace:
        """Play one episode and return its trace, cut where the form is broken.

        Args:
            env: The environment.
            policy: Who answers; by default random play that follows from the laboratory's seed.
            seed: The environment's seed; by default the laboratory's.
            task: The task's id.
            max_turns: Actions at most; by default the laboratory's number.
            exactly: Play as many also where steps are slow.
            after: Called with every turn; may be async.
        """
        policy = policy or RandomPolicy(self.seed)
        trace = Trace()
        result = await self.reset(env, self.seed if seed is None else seed, self.options(task))
        trace.problems += reset_problems(result)
        if trace.broken():
            return trace
        turn = _turn(None, (result[0], 0.0, False, False, result[1]))
        view = list(turn.messages)
        trace.turns.append(turn)
        await _then(after, turn)
        wanted = max_turns or self.max_turns
        for number in range(wanted):
            if not exactly and number >= self.turns(wanted):
                break
            action: Any = policy.act(list(view), self.schemas(env))
            if inspect.isawaitable(action):
                action = await bounded(action, TimeBudget(self.timeout_s).left)
            action = as_message(action, number + 1)
            result = await self.step(env, action)
            trace.problems += step_problems(result, action, trace.turns[0].messages)
            if trace.broken():
                return trace
            turn = _turn(action, result)
            trace.turns.append(turn)
            await _then(after, turn)
            if turn.ended:
                break
            if isinstance(turn.observation, Rewrite):
                view = turn.messages
            else:
                view += [action, *turn.messages]
        return trace

    async def replay(self, env: Env, trace: Trace, *, seed: int, **options: Any) -> Trace:
        """Say to an environment what was said in another episode."""
        actions = trace.actions
        if not actions:
            return await self._only_reset(env, seed, **options)
        options |= {"seed": seed, "max_turns": len(actions), "exactly": True}
        return await self.play(env, Replay(actions), **options)

    async def _only_reset(self, env: Env, seed: int, task: str | None = None) -> Trace:
        result = await self.reset(env, seed, self.options(task))
        trace = Trace(problems=reset_problems(result))
        if not trace.broken():
            trace.turns.append(_turn(None, (result[0], 0.0, False, False, result[1])))
        return trace

    def schemas(self, env: Env) -> list[dict[str, Any]]:
        """Return the tools' schemas as of now; an empty list if they cannot be had."""
        try:
            found = env.tools.schemas()
            return [item for item in found if isinstance(item, dict) and "function" in item]
        except Exception:  # the check of tools tells it
            return []

    def expert(self, env: Env) -> Policy | None:
        """Return the policy that the author's class offers for its own tasks, if it has one."""
        maker = getattr(authors_class(env), "expert", None)
        if not callable(maker):
            return None
        try:
            made = maker()
        except TypeError:  # it wants arguments that are not known here
            return None
        return made if isinstance(made, Policy) else None

    def sound(self, trace: Trace) -> Trace:
        """Return a trace whose form is right, or raise BrokenForm."""
        if trace.broken():
            raise BrokenForm
        return trace


def _turn(action: AssistantMessage | None, result: tuple[Any, ...]) -> Turn:
    observation, reward, terminated, truncated, info = result
    seen = observation if isinstance(observation, Rewrite) else list(observation)
    copied = _copied(info)
    return Turn(
        action,
        seen,
        copied,
        float(reward),
        bool(terminated),
        bool(truncated),
        (observation, info),
        _equal(copied, info),
    )


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # arrays, for one, are not simply equal or not
        return False


def _copied(info: Any) -> Any:
    try:
        return copy.deepcopy(info)
    except Exception:  # what cannot be copied is not plain data, which the check of info tells
        return dict(info)


async def _then(after: Callable[[Turn], Any] | None, turn: Turn) -> None:
    if after is not None:
        result = after(turn)
        if inspect.isawaitable(result):
            await result


def is_clear(error: BaseException) -> bool:
    """Whether an exception is one of the project's own, which says what is wrong."""
    return isinstance(error, RelaxError)


async def breathe(times: int) -> None:
    """Let other tasks run, a stated number of times."""
    for _ in range(times):
        await asyncio.sleep(0)

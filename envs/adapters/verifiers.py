"""``relax/Verifiers-v0``: the tasksets of verifiers, its v1 API, as environments.

    env = from_verifiers("my_package.tasks:MyTaskset", config={"split": "train"}, eval_share=0.1)
    env = from_verifiers("textarena", config={"game": "Hangman-v0"}, limit=1000)

Every task of the taskset is a task here. Its toolsets' methods are the tools, with the names,
schemas and results that a model sees through verifiers. An episode is played by verifiers' own
code: a taskset that brings an ``Env`` for its tasks, such as a game that answers each move, plays
through that. At the end there is a verifiers ``Trace`` (``env.unwrapped.trace``), and the task's
own ``@reward``, ``@metric``, ``@stop`` and judges have looked at it: the reward is their weighted
sum, and each of them is a metric beside it. A stop condition ends an episode (``terminated``), as
does a reply without a tool call where nobody answers it; ``max_turns`` and the task's own time
limit cut it off (``truncated``). What raises in scoring is the environment's failure, never a
reward of 0.

Gold answers stay on the environment's side, unless a task's own words give them away.

There is no container and no runtime here: tasks that need one, toolsets and harnesses of their own,
``@intercept`` hooks, and Envs of several agents are refused when the environment is made. A reward
that needs a runtime is refused too, or left out (and named in ``info["skipped"]``) with
``skip_signals=True``; a metric that needs one is always left out and named.

Tasks of verifiers may be code that was written for a process of its own: ``isolation="process"``
gives it one. The environments of the older API, ``vf.load_environment`` of verifiers 0.1, are not
read. Tested with verifiers 0.4.0.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from relax_agent.envs.adapters.common import PrivateRandomness, StepTools
from relax_agent.envs.adapters.verifiers_episode import LIMITS, Episode, Exchange, Limits, Seat
from relax_agent.envs.adapters.verifiers_loop import RANDOMNESS, OwnLoop, own_loop
from relax_agent.envs.adapters.verifiers_tasks import Loaded, Wish, load, reference
from relax_agent.envs.adapters.verifiers_tools import Tools, peek
from relax_agent.envs.core import Env, Info, StepResult
from relax_agent.envs.registration import make
from relax_agent.envs.tasks import TaskSet
from relax_agent.errors import ConfigError, EnvError, ResetNeeded
from relax_agent.messages import AssistantMessage, Observation

T = TypeVar("T")

_GRACE_S = 5.0


class VerifiersEnv(Env):
    """The tasks of a taskset. See the module's docstring."""

    tasks: TaskSet

    def __init__(
        self,
        taskset: str,
        *,
        config: Mapping[str, Any] | None = None,
        eval_config: Mapping[str, Any] | None = None,
        eval_share: float = 0.0,
        select: Mapping[str, Any] | None = None,
        limit: int | None = None,
        env_config: Mapping[str, Any] | None = None,
        skip_signals: bool = False,
        max_turns: int = 50,
        setup_timeout_s: float = 60.0,
        tool_timeout_s: float = 60.0,
        score_timeout_s: float = 120.0,
    ) -> None:
        """Load the taskset.

        Args:
            taskset: ``module:MyTaskset``, or the id of an installed package of verifiers'.
            config: Fields of its config, as plain data; ``{"task": {…}}`` is that of its tasks.
            eval_config: Fields that differ for the tasks to hold out, e.g. ``{"split": "test"}``.
            eval_share: Or hold out a share of the tasks, chosen by a hash of the id.
            select: Which tasks: fields of verifiers' SelectConfig, e.g. ``{"shuffle": True}``.
            limit: At most so many tasks a split; a taskset without an end needs it.
            env_config: Fields of the config of the taskset's own Env, if it has one.
            skip_signals: Leave rewards out that need a runtime.
            max_turns: Assistant messages after which an episode is truncated.
            setup_timeout_s: Seconds that preparing a task and its tools may take.
            tool_timeout_s: Seconds that one call of a tool may take.
            score_timeout_s: Seconds that scoring may take; this, like the first, where the task
                itself states no limit.

        Raises:
            MissingExtraError: verifiers, or what the taskset needs, is not installed.
            UnknownEnv: There is no such taskset.
            ConfigError: It cannot run here, and why; or an argument is wrong.
        """
        if max_turns < 1 or min(setup_timeout_s, tool_timeout_s, score_timeout_s) <= 0:
            raise ConfigError("max_turns and the time limits must be positive")
        if eval_config is not None and eval_share:
            raise ConfigError("eval_config and eval_share both say what to hold out")
        self._limits = Limits(max_turns, setup_timeout_s, tool_timeout_s, score_timeout_s)
        wish = Wish(
            taskset,
            _plain("config", dict(config or {})),
            _plain("eval_config", None if eval_config is None else dict(eval_config)),
            _plain("select", dict(select or {})),
            limit,
            eval_share,
            skip_signals,
        )
        self._loaded: Loaded = load(wish)
        self.tasks = self._loaded.tasks
        self._inner, self._seat_name, self._seat_config = _env(self._loaded, env_config or {})
        self._randomness = PrivateRandomness(0)
        self._loop: OwnLoop | None = None
        self._shared: Tools | None = None
        self._episode: Episode | None = None
        self._left: weakref.finalize[Any, Any] | None = None
        self._task_id = ""
        self.trace: Any = None
        """Verifiers' trace of the last episode."""
        self.tools = StepTools(_first_tools(self._loaded, setup_timeout_s))

    # -- an episode ----------------------------------------------------------------------------

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin the episode of ``options["task"]``, or of a task that the seed chooses."""
        await super().reset(seed=seed, options=options)
        await self._end()
        given = dict(options or {})
        task_id, split = given.pop("task", None), given.pop("split", "train")
        if given:
            raise EnvError(f"unknown reset option {next(iter(given))!r}", hint="task or split")
        self._task_id = self._choose(task_id, split)
        drawn = self.rng.getrandbits(64) if seed is None else seed
        self._randomness.seed(f"{drawn}/{self._task_id}")
        self._loop = await self._ready()
        seat = Seat(self._seat_name, self._seat_config, Exchange(), self._limits)
        if self._shared is not None:
            seat.shared = type(self._loaded.taskset).task_type(), self._shared
        task = self._loaded.by_id[self._task_id]
        self._episode = Episode(self._inner, seat, task)
        told = await self._do(self._episode.begin(), "beginning an episode")
        self.trace = self._episode.trace
        if list(self._episode.schemas) != self.tools.schemas():
            self.tools = StepTools(self._episode.schemas)
        return told, self._info()

    def _choose(self, task_id: str | None, split: Any) -> str:
        if task_id is None:
            if not self.tasks.ids(split):
                raise EnvError(f"{self._loaded.taskset!r} has no tasks in its {split} split")
            return self.rng.choice(self.tasks.ids(split))
        if task_id not in self.tasks:
            raise EnvError(f"there is no task {task_id!r}", hint=f"e.g. {self.tasks.ids()[0]!r}")
        return task_id

    async def step(self, action: AssistantMessage) -> StepResult:
        """Hand the message to verifiers' code: run its calls, or let it be answered or scored."""
        if self._episode is None:
            raise ResetNeeded("step() outside an episode", hint="await env.reset() first")
        told, ended = await self._do(self._episode.go_on(action), "a turn")
        if not ended:
            return told, 0.0, False, False, self._info()
        failed = self._episode.tool_errors
        await self._end()
        truncated = self.trace.stop_condition in LIMITS
        return told, self._reward(), not truncated, truncated, self._account(failed)

    async def _do(self, call: Coroutine[Any, Any, T], what: str) -> T:
        """Run verifiers' code; however that fails, the episode is over."""
        assert self._loop is not None
        limits = self._limits
        patience = limits.setup_s + 2 * limits.score_s + 16 * limits.tool_s + _GRACE_S
        token = RANDOMNESS.set(self._randomness)
        try:
            result = await self._loop.run(call, f"{what} of task {self._task_id}", patience)
        except BaseException:
            self._abandon()
            raise
        finally:
            RANDOMNESS.reset(token)
        episode = self._episode
        if self._left is None and episode is not None and episode.runner is not None:
            # Nobody may be left to end it: an environment need not be closed.
            self._left = weakref.finalize(self, self._loop.soon, episode.runner)
        return result

    def _abandon(self) -> None:
        episode, self._episode = self._episode, None
        if self._left is not None:
            self._left.detach()
            self._left = None
        if episode is not None and episode.runner is not None and self._loop is not None:
            self._loop.soon(episode.runner)

    async def _end(self) -> None:
        """End the running episode, if there is one, and wait for it."""
        episode = self._episode
        self._abandon()
        if episode is not None and self._loop is not None and not self._loop.stuck:
            await self._loop.run(episode.end(), "ending an episode", self._limits.tool_s)

    # -- what the episode was worth --------------------------------------------------------------

    def _reward(self) -> float:
        if not any(value is not None for value in self.trace.rewards.values()):
            raise EnvError(
                f"task {self._task_id} was not scored: nothing has recorded a reward",
                hint="a @reward of the task, or record_reward in its finalize or Env",
            )
        return float(self.trace.reward)

    def _info(self) -> Info:
        return {"task": self._task_id}

    def _account(self, tool_errors: int) -> Info:
        """Say how the episode ended and what counted."""
        trace = self.trace
        rewards = {key: each for key, each in trace.rewards.items() if each is not None}
        measured = {key: float(each) for key, each in trace.metrics.items() if each is not None}
        info = self._info() | {
            "stop_condition": trace.stop_condition,
            "rewards": {
                key: {"score": each.score, "weight": each.weight} for key, each in rewards.items()
            },
            "metrics": {
                "success": float(trace.reward >= 1),
                "turns": float(trace.num_turns),
                "tool_calls": float(self._calls()),
                "tool_errors": float(tool_errors),
                **{key: each.score for key, each in rewards.items()},
                **measured,
            },
        }
        if self._loaded.skipped:
            info["skipped"] = list(self._loaded.skipped)
        return info

    def _calls(self) -> int:
        return sum(len(each.tool_calls or ()) for each in self.trace.assistant_messages)

    # -- what outlasts an episode ----------------------------------------------------------------

    async def _ready(self) -> OwnLoop:
        """Start what all episodes share; anew where the loop that it lived in is gone."""
        loop = own_loop()
        if loop is self._loop and self._shared is not None:
            return loop
        self._shared = await loop.run(self._start(), "starting", self._limits.setup_s)
        return loop

    async def _start(self) -> Tools:
        shared, taskset = Tools(), self._loaded.taskset
        await shared.add(taskset.toolsets(taskset.config), None)
        await self._inner.start()
        return shared

    async def close(self) -> None:
        """End the episode and what all of them shared."""
        await self._end()
        shared, self._shared = self._shared, None
        if shared is not None and self._loop is not None and not self._loop.stuck:
            await self._loop.run(self._stop(shared), "stopping", self._limits.setup_s)

    async def _stop(self, shared: Tools) -> None:
        try:
            await self._inner.stop()
        finally:
            await shared.close()


def _plain(name: str, value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} must be plain data: {error}") from error


def _env(loaded: Loaded, fields: Mapping[str, Any]) -> tuple[Any, str, Any]:
    """Make the Env that plays the tasks; return it, and its one agent's name and config.

    Its constructor is not called: it would load a harness, and the taskset once more by its id.
    """
    from pydantic import ValidationError
    from verifiers.v1 import Env as Base
    from verifiers.v1 import EnvConfig
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.generic import concrete_type

    config_type = concrete_type(loaded.env, EnvConfig, origin=Base) or EnvConfig
    try:
        config = config_type.model_validate(dict(fields))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"env_config: {where}: {first['msg']}") from error
    agents = agent_config_fields(config)
    if len(agents) != 1:
        raise ConfigError(
            f"{loaded.env.__name__} plays with {len(agents)} agents ({', '.join(agents)}); here an"
            " episode has one",
            hint="run it with verifiers itself",
        )
    env: Any = object.__new__(loaded.env)
    env.config, env.taskset = config, loaded.taskset
    ((name, agent),) = agents.items()
    return env, name, agent


def _first_tools(loaded: Loaded, timeout_s: float) -> list[dict[str, Any]]:
    """Return the tools as they are before any task has begun."""
    task = next(iter(loaded.by_id.values()))
    taskset = loaded.taskset
    toolsets = (*task.toolsets(task.config), *taskset.toolsets(taskset.config))
    if not toolsets:
        return []
    return own_loop().wait(peek(toolsets, task.data), "asking for the tools", timeout_s)


def from_verifiers(taskset: str | type[Any], **options: Any) -> Env:
    """Make a taskset of verifiers an environment for agents.

    Args:
        taskset: ``module:MyTaskset``, the class itself, or the id of an installed package.
        **options: As of :class:`VerifiersEnv`, e.g. ``config={…}, limit=1000, eval_share=0.1``.
    """
    return make("relax/Verifiers-v0", taskset=reference(taskset), **options)

"""``ToolEnv``: tools, tasks and a score make an environment.

The base class that most people use. An author states the tools, the tasks and what an episode is
worth; this class does the rest: it asks the task's question, runs the tool calls of a message
concurrently, turns every failure of a tool into a message that the model can read, ends on an
answer without tool calls, and truncates after ``max_turns`` messages.

What an episode is worth is said by a :class:`~relax_agent.envs.rewards.Rubric` (``rubric = …``) or
by a method ``score``; the one that the more derived class has decides. Everything else is a hook
that may be left out, and, ``first_messages`` apart, may be plain or ``async def``:

    setup(task)                  give the environment its state, before anything is said
    first_messages(task)         pose the task
    follow_up(task, transcript)  reply to a message without tool calls, instead of ending
    score(task, transcript)      say what the episode was worth
    teardown()                   give back what ``setup`` took; called once for each ``setup``, also
                                 where that was cut off by a limit, and never cut off itself

Tools may be methods (``@tool def move(self, …)``): they see the environment's state, and each
instance has its own. Tools whose state is no business of the environment's, such as an interpreter
or a browser, are classes (``tools = [calculator, PythonSession]``): each episode has an instance of
its own, ``self.session`` holds them, and it is closed with the episode. A model may hand a picture
of the conversation to a tool (``image:1``).

An exception in a hook or in ``score`` is the environment's failure: the episode is not trained on.
A ``score`` that takes over ``score_timeout`` seconds is given up and counts 0, and so is a rubric's
function that fails in whatever way, with the value that it states for that.

Before the first episode of a process the tools' warm-up hooks run, so that no call pays for them.

Plain hooks, scores and tools run in threads that change from call to call. What insists on one
thread (a SQLite connection, a browser) wants ``async def``, or a :class:`SyncEnv`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeAlias

from relax_agent.envs.core import Env, Info, StepResult
from relax_agent.envs.rewards.calling import MAX_WORDS, Late, call_within, number
from relax_agent.envs.rewards.rubric import Rubric
from relax_agent.envs.tasks import Task, TaskSet
from relax_agent.envs.transcript import Score, Transcript
from relax_agent.errors import (
    ConfigError,
    EnvError,
    InvalidAction,
    ResetNeeded,
    ToolErrorKind,
    one_line,
)
from relax_agent.messages import AssistantMessage, Message, Observation, ToolCall, system, user
from relax_agent.references import conversation
from relax_agent.tools import AnyToolset, Tool, ToolResult, Toolset
from relax_agent.tools.toolset import warm_up

__all__ = ["Score", "ToolEnv", "ToolSource", "Transcript"]

logger = logging.getLogger(__name__)

ToolSource: TypeAlias = AnyToolset | Iterable[Tool[..., Any] | Callable[..., Any]]
Reply: TypeAlias = str | Message | Sequence[Message] | None
"""What ``follow_up`` returns: text of the user, messages, or None for the end."""


class _TookTooLong(EnvError):
    """A hook passed its time limit."""


class ToolEnv(Env):
    """An environment made of tools, tasks and a score; see the module's docstring."""

    tools: Any = ()
    """A list of tools or a toolset; on an instance always a toolset."""
    max_turns: int = 8
    """Assistant messages after which an episode is truncated."""
    max_calls: int = 16
    """Tool calls of one message that are run; more are refused."""
    rubric: Rubric | None = None
    """The functions that say what an episode is worth, instead of :meth:`score`."""
    score_timeout: float = 30.0
    """Seconds that :meth:`score` may take; functions of a rubric have limits of their own."""
    hook_timeout: float = 60.0
    """Seconds that ``setup``, ``follow_up`` and ``teardown`` may take."""
    system_prompt: str = ""
    over: bool = False
    """A tool or ``follow_up`` sets it where the episode is to end with the current turn."""
    _tool_methods: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        *,
        tools: ToolSource | None = None,
        tasks: TaskSet | Iterable[Task] | None = None,
        rubric: Rubric | None = None,
        max_turns: int | None = None,
        system_prompt: str | None = None,
    ) -> None:
        """Make the environment; every argument replaces the class's attribute of that name."""
        self.tools = self._own_tools() if tools is None else _toolset(tools)
        found = self.tasks if tasks is None else tasks
        if found is None:
            raise ConfigError(f"{type(self).__name__} has no tasks", hint="tasks = TaskSet([...])")
        self.tasks: TaskSet = found if isinstance(found, TaskSet) else TaskSet(found)
        if max_turns is not None:
            self.max_turns = max_turns
        for limit in ("max_turns", "max_calls"):
            if getattr(self, limit) < 1:
                raise ConfigError(f"{limit} must be ≥ 1, not {getattr(self, limit)}")
        for limit in ("score_timeout", "hook_timeout"):
            if not getattr(self, limit) > 0:
                raise ConfigError(f"{limit} must be > 0 seconds, not {getattr(self, limit)}")
        self._by_rubric = self._choose_judge(rubric)
        if system_prompt is not None:
            self.system_prompt = system_prompt
        self.task: Task | None = None
        self.transcript = Transcript()
        self.session: Any = None
        """The episode's own tools, where some of them have state; otherwise None."""
        self._running = False
        self._is_set_up = False
        self._leaving: asyncio.Future[None] | None = None
        self._turn = 0
        self._sums: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        members: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            members |= vars(base)
        found = [name for name, member in members.items() if isinstance(member, Tool)]
        cls._tool_methods = tuple(found)

    def require_built(self) -> None:
        """Raise EnvError if this constructor has not run."""
        if "_by_rubric" not in vars(self):
            raise EnvError(
                f"{type(self).__name__}.__init__() does not call its base class's",
                hint="super().__init__(…) in its first line; it takes tools=, tasks=, rubric=, …",
            )

    def _own_tools(self) -> AnyToolset:
        """Tools of the class attribute, then the class's own methods that are tools."""
        given = self.tools
        methods = [getattr(self, name) for name in self._tool_methods]
        if not methods and isinstance(given, AnyToolset):
            return given
        if not isinstance(given, Iterable):
            raise ConfigError(
                f"{type(self).__name__} has a remote toolset and tools of its own",
                hint="choose one of the two; a single tool is a list of one: tools = [my_tool]",
            )
        return Toolset([*given, *methods])

    def _choose_judge(self, given: Rubric | None) -> bool:
        """Say whether the rubric's final functions decide; otherwise :meth:`score` does."""
        name = type(self).__name__
        by_score = type(self).score is not ToolEnv.score
        if given is not None:
            self.rubric = given
            return bool(given.final) or not by_score
        if self.rubric is None and not by_score:
            raise ConfigError(
                f"{name} has neither a rubric nor a score",
                hint="rubric = Rubric(exact_match), or def score(self, task, transcript)",
            )
        if self.rubric is None or not by_score:
            return not by_score
        for each in type(self).__mro__:
            has_rubric = "rubric" in vars(each) and bool(self.rubric.final)
            if has_rubric and "score" in vars(each):
                raise ConfigError(
                    f"{each.__name__} has a rubric and a score",
                    hint="keep one, or give the rubric only step, group and metrics",
                )
            if has_rubric or "score" in vars(each):
                return has_rubric
        return False

    def setup(self, task: Task) -> Awaitable[None] | None:
        """Give the environment its state for an episode of ``task``. By default nothing."""
        return None

    def teardown(self) -> Awaitable[None] | None:
        """Give back what :meth:`setup` took: at the end, the next reset, or ``close``."""
        return None

    def first_messages(self, task: Task) -> list[Message]:
        """Return the messages that pose the task; the system prompt is put before them."""
        return task.to_messages()

    def follow_up(self, task: Task, transcript: Transcript) -> Reply | Awaitable[Reply]:
        """Reply to a message without tool calls, as a user would; None ends the episode."""
        return None

    def score(self, task: Task, transcript: Transcript) -> float | Score | Awaitable[float | Score]:
        """Say what the finished episode was worth. By default the rubric says it."""
        assert self.rubric is not None
        return self.rubric.score(task, transcript)

    async def _hook(self, name: str, *args: Any) -> Any:
        try:
            return await call_within(self.hook_timeout, getattr(self, name), *args)
        except Late:
            raise _TookTooLong(
                f"{type(self).__name__}.{name}() took over {self.hook_timeout:g} s"
            ) from None

    async def _set_up(self, task: Task) -> None:
        """Call ``setup``. What one that was cut off has taken is given back, like all else."""
        try:
            await self._hook("setup", task)
        except _TookTooLong:
            raise
        except Exception:
            self._is_set_up = False
            raise

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin the episode of ``options["task"]``, or of a task that the seed chooses.

        Args:
            seed: Seeds ``self.rng``.
            options: ``task`` (an id) or ``split`` (``train`` or ``eval``, to choose from).
        """
        self.require_built()
        self._running = self.over = False
        await self._leave()
        await warm_up(self.tools)
        self.seed_rng(seed)
        task = self.task = await self.tasks.fetch(self._choose(dict(options or {})))
        self.transcript = Transcript()
        self._turn, self._sums, self._failed = 0, Counter(), Counter()
        if getattr(self.tools, "has_sessions", False):
            self.session = self.tools.session()
        self._is_set_up = True
        if type(self).setup is not ToolEnv.setup:
            await self._set_up(task)
        messages = self._messages("first_messages", self.first_messages(task))
        if self.system_prompt:
            told: list[Any] = [self.system_prompt]
            if messages and messages[0].role == "system":  # a task's own: templates take just one
                told += ["\n\n", *messages.pop(0).content]
            messages = [system(told), *messages]
        self.transcript.extend(messages)
        self._running = True
        return list(messages), {"task": task.id}

    def _choose(self, options: dict[str, Any]) -> str:
        task_id, split = options.pop("task", None), options.pop("split", "train")
        if options:
            raise EnvError(f"unknown reset option {next(iter(options))!r}", hint="task or split")
        if task_id is not None:
            return str(task_id)
        ids = self.tasks.ids(split)
        if not ids:
            raise EnvError(f"{type(self).__name__} has no tasks in its {split} split")
        return self.rng.choice(ids)

    async def step(self, action: AssistantMessage) -> StepResult:
        """Run the message's tool calls, or end the episode with its answer."""
        if not self._running:
            raise ResetNeeded("step() outside an episode", hint="await env.reset() first")
        if not isinstance(action, AssistantMessage):
            raise InvalidAction(
                f"step() takes an AssistantMessage, not {type(action).__name__}",
                hint="relax_agent.messages.assistant('…') makes one",
            )
        self._turn += 1
        self.transcript.append(action)
        if action.tool_calls:
            messages = await self._run_calls(action.tool_calls)
        else:
            messages = await self._reply()
        terminated = self.over or not (action.tool_calls or messages)
        truncated = not terminated and self._turn >= self.max_turns
        info: Info = {"task": self._task().id, "turn": self._turn}
        reward = 0.0
        if self.rubric is not None and self.rubric.step:
            reward = await self._score_step(self.rubric, info)
            self.transcript.reward += reward
        if terminated or truncated:
            self._running = False
            reward += await self._finish(info)
        return messages, reward, terminated, truncated, info

    def _task(self) -> Task:
        assert self.task is not None
        return self.task

    async def _run_calls(self, calls: tuple[ToolCall, ...]) -> list[Message]:
        results = await self._results(calls[: self.max_calls])
        refusal = f"only {self.max_calls} tool calls of one message are run; call it again"
        for _ in calls[self.max_calls :]:
            results.append(ToolResult.failure(ToolErrorKind.DENIED, refusal))
        self.transcript.calls.extend(zip(calls, results, strict=True))
        messages = [result.to_message(call) for call, result in zip(calls, results, strict=True)]
        self.transcript.extend(messages)
        return messages

    async def _results(self, calls: tuple[ToolCall, ...]) -> list[ToolResult]:
        tools: AnyToolset = self.session or self.tools
        with conversation(self.transcript):
            if len(calls) == 1:
                return [await tools.call(calls[0])]
            async with asyncio.TaskGroup() as group:
                jobs = [group.create_task(tools.call(call)) for call in calls]
            return [job.result() for job in jobs]

    async def _reply(self) -> list[Message]:
        if type(self).follow_up is ToolEnv.follow_up:
            return []
        said = await self._hook("follow_up", self._task(), self.transcript)
        messages = self._messages("follow_up", said)
        self.transcript.extend(messages)
        return messages

    def _messages(self, hook: str, said: Any) -> list[Message]:
        """Read what a hook wants to be said to the model."""
        given = [said] if isinstance(said, (str, Message)) else said or ()
        if not isinstance(given, (list, tuple)):
            given = [None]
        messages: list[Any] = [user(item) if isinstance(item, str) else item for item in given]
        answers = hook == "follow_up"  # only a task may begin with what was said before
        for each in messages:
            if not isinstance(each, Message) or (answers and each.role == "assistant"):
                raise EnvError(
                    f"{type(self).__name__}.{hook}() returned {said!r:.80}",
                    hint="return the user's text or a list of messages",
                )
        return messages

    async def _leave(self) -> None:
        """Call ``teardown`` once for each ``setup``; its failure cannot undo an episode."""
        session, self.session = self.session, None
        try:
            await self._tear_down()
        finally:
            if session is not None:
                await session.close()

    async def _tear_down(self) -> None:
        if self._is_set_up:
            self._is_set_up = False
            if type(self).teardown is not ToolEnv.teardown:
                self._leaving = asyncio.ensure_future(self._give_back())
        # Who is cancelled here does not cut it short: the next reset or close waits for it.
        if self._leaving is not None and not self._leaving.done():
            await asyncio.shield(self._leaving)

    async def _give_back(self) -> None:
        try:
            await self._hook("teardown")
        except Exception as error:
            logger.warning("%s.teardown(): %s", type(self).__name__, one_line(error, MAX_WORDS))

    async def _score_step(self, rubric: Rubric, info: Info) -> float:
        score = await rubric.score_step(self._task(), self.transcript)
        self._sums.update(score.metrics)
        self._note_failures(score, info)
        return score.reward

    async def _finish(self, info: Info) -> float:
        score = await self._final_score()
        self._note_failures(score, info)
        metrics = {
            "success": float(self._decisive(score) >= 1),
            "turns": float(self._turn),
            "tool_calls": float(len(self.transcript.calls)),
            "tool_errors": float(self.transcript.tool_errors),
            **self._sums,
            **score.metrics,
        }
        if self.rubric is not None:
            metrics["reward_failures"] = float(self._failed.total())
            metrics |= {f"{name}_failed": float(n) for name, n in self._failed.items()}
        info["metrics"] = metrics
        self.transcript.metrics = dict(metrics)
        self.transcript.reward += score.reward
        await self._leave()
        return score.reward

    def _decisive(self, score: Score) -> float:
        """The reward that tells a success: the final one, or without one that of all turns."""
        if self._by_rubric and self.rubric is not None and not self.rubric.final:
            return self.transcript.reward
        return score.reward

    def _note_failures(self, score: Score, info: Info) -> None:
        self._failed.update(dict.fromkeys(score.failures, 1))
        if score.failures:
            info["reward_failures"] = info.get("reward_failures", {}) | dict(score.failures)

    async def _final_score(self) -> Score:
        task, rubric = self._task(), self.rubric
        if rubric is not None and self._by_rubric:
            return await rubric.score(task, self.transcript)
        score = await self._own_score(task)
        if rubric is None or not rubric.metrics:
            return score
        beside = await rubric.measure(task, self.transcript)
        return Score(score.reward, {**beside.metrics, **score.metrics}, beside.failures)

    async def _own_score(self, task: Task) -> Score:
        place = f"{type(self).__name__}.score()"
        try:
            value = await call_within(self.score_timeout, self.score, task, self.transcript)
        except Late:
            return Score(0.0, {"score_timeout": 1.0})
        try:
            if not isinstance(value, Score):
                return Score(number(value))
            metrics = {name: number(each) for name, each in value.metrics.items()}
            return Score(number(value.reward), metrics, value.failures)
        except ValueError as error:
            raise EnvError(f"{place} {str(error).removeprefix('it ')}") from None

    @property
    def scores_groups(self) -> bool:
        """Whether :meth:`score_group` has anything to say."""
        own = type(self).score_group is not ToolEnv.score_group
        return own or (self.rubric is not None and bool(self.rubric.group))

    async def score_group(self, task_id: str, members: Sequence[Transcript]) -> list[float]:
        """Return what the rubric's group functions add to each member's reward.

        Their values become metrics of the members, ``member.metrics``.
        """
        if self.rubric is None or not self.rubric.group:
            return [0.0] * len(members)
        scores = await self.rubric.score_group(await self.tasks.fetch(task_id), members)
        for member, score in zip(members, scores, strict=True):
            failed = {f"{name}_failed": 1.0 for name in score.failures}
            member.metrics |= {**score.metrics, **failed}
        return [score.reward for score in scores]

    async def close(self) -> None:
        """End the episode, its session included. The toolset belongs to whoever made it."""
        self._running = False
        await self._leave()


def _toolset(tools: ToolSource) -> AnyToolset:
    return tools if isinstance(tools, AnyToolset) else Toolset(tools)

"""``ToolEnv``: tools, tasks and a score make an environment.

The base class that most people use. An author states the tools, the tasks and how an episode is
scored; this class does the rest: it asks the task's question, runs the tool calls of a message
concurrently, turns every failure of a tool into a message that the model can read, ends on an
answer without tool calls, and truncates after ``max_turns`` messages.

Tools may be methods (``@tool def move(self, …)``): they see the environment's state, and each
instance has its own. The score may be sync (it then runs in a thread) or async; one that hangs is
abandoned after ``score_timeout`` seconds and counts as a failure.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeAlias

from relax_agent.envs.core import Env, Info, StepResult
from relax_agent.envs.tasks import Task, TaskSet
from relax_agent.errors import (
    ConfigError,
    EnvError,
    InvalidAction,
    ResetNeeded,
    ToolErrorKind,
)
from relax_agent.messages import (
    AssistantMessage,
    Message,
    Observation,
    ToolCall,
    system,
)
from relax_agent.threads import THREADS
from relax_agent.tools import AnyToolset, Tool, ToolResult, Toolset

ToolSource: TypeAlias = AnyToolset | Iterable[Tool[..., Any] | Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Score:
    """What an episode was worth."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Reported beside the reward; ``success`` is 1.0 or 0.0, by default whether reward ≥ 1."""


class Transcript(list[Message]):
    """The conversation of one episode, with what a score usually asks of it."""

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        super().__init__(messages)
        self.calls: list[tuple[ToolCall, ToolResult]] = []
        """Every tool call with its result, in order."""

    @property
    def answer(self) -> str:
        """The final answer: the last assistant message's text, empty if it calls tools."""
        last = self[-1] if self else None
        if not isinstance(last, AssistantMessage) or last.tool_calls:
            return ""
        return last.text.strip()

    @property
    def turns(self) -> int:
        """Assistant messages so far."""
        return sum(isinstance(message, AssistantMessage) for message in self)

    @property
    def tool_errors(self) -> int:
        """Tool calls that failed."""
        return sum(not result.ok for _, result in self.calls)

    @property
    def successful_calls(self) -> list[tuple[ToolCall, ToolResult]]:
        """Tool calls that did not fail."""
        return [(call, result) for call, result in self.calls if result.ok]


class ToolEnv(Env, ABC):
    """An environment made of tools, tasks and a score."""

    tools: Any = ()
    """A list of tools or a toolset; on an instance always a toolset."""
    max_turns: int = 8
    """Assistant messages after which an episode is truncated."""
    max_calls: int = 16
    """Tool calls of one message that are run; more are refused."""
    score_timeout: float = 30.0
    """Seconds that :meth:`score` may take."""
    system_prompt: str = ""
    _tool_methods: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        *,
        tools: ToolSource | None = None,
        tasks: TaskSet | Iterable[Task] | None = None,
        max_turns: int | None = None,
        system_prompt: str | None = None,
    ) -> None:
        self.tools = self._own_tools() if tools is None else _toolset(tools)
        found = self.tasks if tasks is None else tasks
        if found is None:
            raise ConfigError(f"{type(self).__name__} has no tasks", hint="tasks = TaskSet([...])")
        self.tasks: TaskSet = found if isinstance(found, TaskSet) else TaskSet(found)
        if max_turns is not None:
            self.max_turns = max_turns
        if self.max_turns < 1:
            raise ConfigError(f"max_turns must be ≥ 1, not {self.max_turns}")
        if system_prompt is not None:
            self.system_prompt = system_prompt
        self.task: Task | None = None
        self.transcript = Transcript()
        self._running = False
        self._turn = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        members: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            members |= vars(base)
        found = [name for name, member in members.items() if isinstance(member, Tool)]
        cls._tool_methods = tuple(found)

    def _own_tools(self) -> AnyToolset:
        """Tools of the class attribute, then the class's own methods that are tools."""
        given = self.tools
        methods = [getattr(self, name) for name in self._tool_methods]
        if not methods and isinstance(given, AnyToolset):
            return given
        if not isinstance(given, Iterable):
            raise ConfigError(
                f"{type(self).__name__} has a remote toolset and tools of its own",
                hint="choose one of the two",
            )
        return Toolset([*given, *methods])

    def first_messages(self, task: Task) -> list[Message]:
        """Return the messages that pose the task; the system prompt is put before them."""
        return task.to_messages()

    @abstractmethod
    def score(self, task: Task, transcript: Transcript) -> float | Score | Awaitable[float | Score]:
        """Say what the finished episode was worth. May be ``async def``."""

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin the episode of ``options["task"]``, or of a task that the seed chooses.

        Args:
            seed: Seeds ``self.rng``.
            options: ``task`` (an id) or ``split`` (``train`` or ``eval``, to choose from).
        """
        self.seed_rng(seed)
        self.task = await self.tasks.fetch(self._choose(dict(options or {})))
        messages = self.first_messages(self.task)
        if self.system_prompt:
            messages = [system(self.system_prompt), *messages]
        self.transcript = Transcript(messages)
        self._running, self._turn = True, 0
        return list(messages), {"task": self.task.id}

    def _choose(self, options: dict[str, Any]) -> str:
        task_id, split = options.pop("task", None), options.pop("split", "train")
        if options:
            raise EnvError(f"unknown reset option {next(iter(options))!r}", hint="task or split")
        if task_id is not None:
            return task_id
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
        messages = await self._run_calls(action.tool_calls)
        terminated = not action.tool_calls
        truncated = not terminated and self._turn >= self.max_turns
        info: Info = {"task": self._task().id, "turn": self._turn}
        reward = 0.0
        if terminated or truncated:
            self._running = False
            reward, info["metrics"] = await self._final_score()
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
        if len(calls) == 1:
            return [await self.tools.call(calls[0])]
        async with asyncio.TaskGroup() as group:
            jobs = [group.create_task(self.tools.call(call)) for call in calls]
        return [job.result() for job in jobs]

    async def _final_score(self) -> tuple[float, dict[str, float]]:
        limit = asyncio.timeout(self.score_timeout)
        try:
            async with limit:
                score = await self._score()
        except TimeoutError:
            if not limit.expired():
                raise
            score = Score(0.0, {"score_timeout": 1.0})
        if not math.isfinite(score.reward):
            raise EnvError(f"{type(self).__name__}.score() returned {score.reward}")
        metrics = {
            "success": float(score.reward >= 1),
            "turns": float(self._turn),
            "tool_calls": float(len(self.transcript.calls)),
            "tool_errors": float(self.transcript.tool_errors),
        }
        return score.reward, metrics | {k: float(v) for k, v in score.metrics.items()}

    async def _score(self) -> Score:
        function: Callable[[], Any] = partial(self.score, self._task(), self.transcript)
        if inspect.iscoroutinefunction(self.score):
            value = await function()
        else:
            value = await THREADS.run(function)
        return value if isinstance(value, Score) else Score(float(value))

    async def close(self) -> None:
        """End the episode. The toolset belongs to whoever made it."""
        self._running = False


def _toolset(tools: ToolSource) -> AnyToolset:
    return tools if isinstance(tools, AnyToolset) else Toolset(tools)

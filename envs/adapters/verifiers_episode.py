"""One episode: verifiers' own code plays a task, with our policy in the place of its agent.

What a taskset does in an episode is a coroutine, its environment's ``run(task, agents)``. For most
that is one line, ``await agents.agent.run(task)``; a game plays on, turn by turn. Here the agent of
that coroutine is a :class:`Seat`: where a model would be asked, it hands out the new messages and
waits for the reply. :class:`Episode` is the other end of that exchange, which the environment's
``reset`` and ``step`` hold.

Everything in this module runs in :mod:`relax_agent.envs.adapters.verifiers_loop`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from relax_agent.envs.adapters.verifiers_chat import (
    call_ids,
    from_verifiers_message,
    opening,
    to_response,
    to_tools,
    typed,
)
from relax_agent.envs.adapters.verifiers_tools import Tools
from relax_agent.errors import ConfigError, EnvError
from relax_agent.messages import AssistantMessage, Message

LIMITS = ("max_turns", "agent_timeout")
"""Ends that come from outside the task."""


@dataclass(frozen=True)
class Limits:
    """What an episode may take, where its task says nothing else."""

    max_turns: int
    setup_s: float
    tool_s: float
    score_s: float


class NoRuntime:
    """Stands where verifiers gives a container or a process; whatever is asked of it fails."""

    def __getattr__(self, name: str) -> Any:
        raise EnvError(
            f"the task uses a runtime ({name}), and there is none here",
            hint="run it with verifiers itself",
        )


class Rollout:
    """What the agent has been told and has said in a task, and verifiers' trace of it."""

    def __init__(self, task: Any, limits: Limits, tools: Tools) -> None:
        from verifiers.v1 import AgentConfig, AgentInfo, SubprocessConfig, Trace, TraceTask
        from verifiers.v1.session import RolloutLimits, RolloutSession, hook_boundary
        from verifiers.v1.state import state_cls
        from verifiers.v1.types import Request, Response

        self.task, self.limits, self.tools = task, limits, tools
        self.trace = Trace(
            task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            state=state_cls(type(task))(),
            agent=AgentInfo(config=AgentConfig(model="policy", runtime=SubprocessConfig())),
        )
        stops: dict[type, list[Any]] = {Trace: [], Request: [], Response: []}
        for hook in task.hooks("stop"):
            stops[hook_boundary(hook, allow_trace=True)].append(hook)
        self._session = RolloutSession(
            ctx=None,
            trace=self.trace,
            limits=RolloutLimits(max_turns=limits.max_turns),
            trace_stops=stops[Trace],
            request_stops=stops[Request],
            response_stops=stops[Response],
        )
        self.conversation: list[Any] = []
        self._began = 0.0
        self._turn: Any = None

    async def open(self) -> None:
        """Let the task prepare itself, and its tools."""
        from verifiers.v1.utils.decorators import invoke

        own = self.task.data.timeout.setup or self.limits.setup_s
        async with self._stage("setup", own):
            await invoke(self.task.setup, {"trace": self.trace, "runtime": NoRuntime()})
            await self.tools.add(self.task.toolsets(self.task.config), self.task.data)
        self._began = time.monotonic()
        self.trace.timing.agent.start = time.time()

    @asynccontextmanager
    async def _stage(self, name: str, timeout_s: float) -> AsyncIterator[None]:
        """Name the stage in whatever goes wrong in it."""
        try:
            async with asyncio.timeout(timeout_s) as limit:
                yield
        except (EnvError, ConfigError):
            raise
        except Exception as error:
            where = f"{type(self.task).__name__}: {name}"
            if limit.expired():
                raise EnvError(f"{where} took over {timeout_s:g} s") from error
            raise EnvError(f"{where} raised {type(error).__name__}: {error}") from error

    async def may_speak(self) -> bool:
        """Say whether the agent gets another turn; what ends it is noted on the trace."""
        from verifiers.v1.graph import prepare_turn
        from verifiers.v1.types import Request

        limit = self.task.data.timeout.agent
        if limit is not None and time.monotonic() - self._began > limit:
            self.trace.record_timeout("agent")
        async with self._stage("a stop condition", self.limits.score_s):
            if self._session.stopped or await self._session.refused() is not None:
                return False
            tools = to_tools(self.tools.schemas)
            request = Request(messages=self.conversation, tools=tools or None)
            _, _, stopped = await self._session.rewrite_request(request)
        self._turn = prepare_turn(self.trace, self.conversation, tools)
        if stopped is not None:
            self._turn.commit_prompt()
            self.trace.stop(stopped)
        return stopped is None

    async def take(self, action: AssistantMessage) -> list[Message] | None:
        """Take a reply and run its calls; return their results, None where it has none."""
        from verifiers.v1 import ModelCall

        response = to_response(action, self.trace.num_turns)
        async with self._stage("a stop condition", self.limits.score_s):
            response, _, stopped = await self._session.rewrite_response(response)
            node = self._turn.commit(response)
            self.trace.calls.append(
                ModelCall(node=node, finish_reason=response.finish_reason, usage=response.usage)
            )
            self.conversation = [*self.conversation, response.message]
            stopped = stopped or await self._session.gate_tool_calls(node)
        if stopped is not None:
            self.trace.stop(stopped)
            return None
        return await self._run_calls(action) if action.tool_calls else None

    async def _run_calls(self, action: AssistantMessage) -> list[Message]:
        shown = []
        for call_id, call in zip(call_ids(action), action.tool_calls, strict=True):
            result = await self.tools.call(call, call_id, self.trace, self.limits.tool_s)
            self.conversation = [*self.conversation, result]
            shown.append(replace(from_verifiers_message(result), tool_call_id=call.id))
        return shown

    async def close(self) -> None:
        """Finish the task and let it score the trace."""
        from verifiers.v1.utils.decorators import invoke

        self.trace.timing.agent.end = time.time()
        await self.tools.close()
        limits = self.task.data.timeout
        async with self._stage("finalize", limits.finalize or self.limits.score_s):
            await invoke(self.task.finalize, {"trace": self.trace, "runtime": NoRuntime()})
        async with self._stage("scoring", limits.scoring or self.limits.score_s):
            await self.task.score(self.trace, None)
        self.trace.is_completed = self.trace.ok = True


class Exchange:
    """Where an agent that verifiers' code runs meets the environment's reset and step."""

    def __init__(self) -> None:
        self._told: asyncio.Queue[list[Message]] = asyncio.Queue()
        self._said: asyncio.Queue[AssistantMessage] = asyncio.Queue()
        self.unanswered: list[Message] = []
        """What was to be told when the episode ended."""

    async def ask(self, messages: list[Message]) -> AssistantMessage:
        """Tell the policy something and wait for its reply."""
        self._told.put_nowait(messages)
        return await self._said.get()

    async def next(self, runner: asyncio.Task[Any]) -> list[Message] | None:
        """Wait for what is told next; None once the episode has ended."""
        told = asyncio.ensure_future(self._told.get())
        try:
            await asyncio.wait([told, runner], return_when=asyncio.FIRST_COMPLETED)
            return told.result() if told.done() else None
        finally:
            told.cancel()

    def reply(self, action: AssistantMessage) -> None:
        """Hand over what the policy has said."""
        self._said.put_nowait(action)


class Interaction:
    """The agent's side of a conversation, as verifiers' code holds it."""

    def __init__(self, rollout: Rollout, exchange: Exchange) -> None:
        self._rollout, self._exchange = rollout, exchange
        self._begun = self._over = False

    @property
    def trace(self) -> Any:
        """The trace so far."""
        return self._rollout.trace

    async def turn(self, message: Any = None) -> Any:
        """Say something to the agent and run it until it answers without a call."""
        from verifiers.v1 import Segment
        from verifiers.v1 import ToolMessage as Result

        if self._over:
            raise RuntimeError("the exchange is over; read interaction.trace")
        rollout = self._rollout
        before, turns = len(rollout.conversation), rollout.trace.num_turns
        await self._converse(self._opening(message))
        if rollout.trace.num_turns == turns:
            self._over = True
            return Segment(messages=[], terminated=True)
        found = [
            each
            for each in rollout.conversation[before:]
            if each.role == "assistant" or isinstance(each, Result)
        ]
        return Segment(messages=found)

    def _opening(self, message: Any) -> list[Message]:
        """Return what is new to the agent, and note it."""
        told: list[Any] = []
        data = self._rollout.task.data
        first, self._begun = not self._begun, True
        if first:
            told = opening(data)
        if (message is None) != (first and data.prompt is not None):
            raise ValueError(
                "the task's prompt opens the exchange: take the first reply with turn()"
                if message is not None
                else "turn() needs the user's next message"
            )
        if message is not None:
            told += typed(message)
        self._rollout.conversation = [*self._rollout.conversation, *told]
        return [from_verifiers_message(each) for each in told]

    async def _converse(self, new: list[Message] | None) -> None:
        while new is not None:
            if not await self._rollout.may_speak():
                self._exchange.unanswered = new
                return
            new = await self._rollout.take(await self._exchange.ask(new))

    async def send(self, *_: Any, **__: Any) -> Any:
        """Refuse: nobody hears what is said while a turn runs."""
        raise EnvError("messages in the middle of a turn are not possible here", hint="turn(…)")

    steer = send


class Seat:
    """The agent of an episode."""

    def __init__(self, name: str, config: Any, exchange: Exchange, limits: Limits) -> None:
        self.name, self.config, self.trainable = name, config, True
        self.exchange, self.limits = exchange, limits
        self.completed: list[Any] = []
        self.rollout: Rollout | None = None
        self.shared: tuple[type[Any], Tools] | None = None

    async def run(self, task: Any, **options: Any) -> Any:
        """Let the agent do a task that has a prompt; return the scored trace."""
        async with self.interaction(task, **options) as held:
            await held.turn()
            held.trace.stop("agent_completed")
        return held.trace

    @asynccontextmanager
    async def interaction(
        self, task: Any, *, on_trace: Any = None, **options: Any
    ) -> AsyncIterator[Interaction]:
        """Hold a conversation with the agent; at its end the task scores it."""
        strange = [name for name, value in options.items() if value]
        if strange:
            raise EnvError(f"an agent with {strange[0]}=… of its own is not possible here")
        if self.rollout is not None:
            raise EnvError(
                "its Env runs the agent several times in one episode, and an episode is one"
                " conversation here",
                hint="run it with verifiers itself",
            )
        tools = Tools()
        if self.shared is not None and isinstance(task, self.shared[0]):
            tools.share(self.shared[1])
        rollout = self.rollout = Rollout(task, self.limits, tools)
        rollout.trace.agent.name, rollout.trace.agent.trainable = self.name, self.trainable
        if on_trace is not None:
            on_trace(rollout.trace)
        try:
            await rollout.open()
            yield Interaction(rollout, self.exchange)
            rollout.trace.stop("user_closed")
            await rollout.close()
            self.completed.append(rollout.trace)
        finally:
            await tools.close()

    def provision(self, task: Any = None) -> Any:
        """Refuse: there is no box to give."""
        raise EnvError("its Env wants a box of its own, and there is none here")


class Seats:
    """An Env's agents by name, as its ``run`` expects them."""

    def __init__(self, seat: Seat) -> None:
        setattr(self, seat.name, seat)


class Episode:
    """An episode that is under way."""

    def __init__(self, env: Any, seat: Seat, task: Any) -> None:
        self._env, self._seat, self._task = env, seat, task
        self._runner: asyncio.Task[None] | None = None

    @property
    def trace(self) -> Any:
        """Verifiers' trace of the episode; None before the agent is asked for the first time."""
        return None if self._seat.rollout is None else self._seat.rollout.trace

    @property
    def tool_errors(self) -> int:
        """Calls of tools that failed."""
        return 0 if self._seat.rollout is None else self._seat.rollout.tools.errors

    @property
    def runner(self) -> asyncio.Task[None] | None:
        """The task that plays the episode."""
        return self._runner

    @property
    def schemas(self) -> Sequence[dict[str, Any]]:
        """The tools of this episode."""
        return () if self._seat.rollout is None else self._seat.rollout.tools.schemas

    async def begin(self) -> list[Message]:
        """Start playing; return what the agent is told first."""
        self._runner = asyncio.create_task(self._play())
        told = await self._seat.exchange.next(self._runner)
        if told is None:
            self._runner.result()
            raise EnvError("the episode has ended before the agent was asked anything")
        return told

    async def go_on(self, action: AssistantMessage) -> tuple[list[Message], bool]:
        """Hand over a reply; return what the agent is told now, and whether that is the end."""
        assert self._runner is not None
        self._seat.exchange.reply(action)
        told = await self._seat.exchange.next(self._runner)
        if told is not None:
            return told, False
        self._runner.result()
        return self._seat.exchange.unanswered, True

    async def _play(self) -> None:
        from verifiers.v1 import EnvInfo, TraceTask
        from verifiers.v1.episode import Episode as Record

        task, seats = self._task, Seats(self._seat)
        try:
            await self._env.setup(seats)
            await self._env.run(task, seats)
            done = self._seat.completed
            told = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
            record = Record(env=EnvInfo(), task=told, traces=done, ok=True)
            await self._env.finalize(task, record)
        except (EnvError, ConfigError):
            raise
        except Exception as error:
            raise EnvError(
                f"{type(self._env).__name__} raised {type(error).__name__}: {error}"
            ) from error

    async def end(self) -> None:
        """Stop playing."""
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait([self._runner])
            if not self._runner.cancelled():
                self._runner.exception()

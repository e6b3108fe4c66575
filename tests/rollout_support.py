"""Fakes for queue and rollout: a clock that jumps, an environment, a renderer, an engine."""

import asyncio
import heapq
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np

from relax_agent.engines.protocol import GenerateRequest, GenerateResult, SamplingParams
from relax_agent.envs import Env
from relax_agent.episode import Episode, EpisodeStatus, Group
from relax_agent.errors import EngineUnavailable
from relax_agent.messages import AssistantMessage, Message, ToolCall, assistant, parts, user
from relax_agent.rendering import Rendered
from relax_agent.rollout import EnvPool, EpisodeLimits, EpisodeOptions, EpisodeRunner
from relax_agent.tools import Toolset

STOP = 0
GENERATE = 1
"""The generation prompt of the fake format."""


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer as soon as everything waits.

    Hours of time limits pass in microseconds. Threads run inline, since the clock must not jump
    while one works. When everything waits and no timer is set, the program is in a deadlock.
    """

    def __init__(self):
        super().__init__()
        self.now = 1000.0

    def time(self):
        return self.now

    def run_in_executor(self, executor, func, *args):
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _run_once(self):
        while self._scheduled and self._scheduled[0]._cancelled:
            self._scheduled[0]._scheduled = False
            heapq.heappop(self._scheduled)
            self._timer_cancelled_count -= 1
        if not self._ready and not self._stopping:
            if not self._scheduled:
                raise AssertionError("deadlock: everything waits, and for no timer")
            self.now = max(self.now, self._scheduled[0]._when)
        super()._run_once()


def run(main: Awaitable[Any]) -> Any:
    """Run a coroutine under a clock that jumps."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(main)


def now() -> float:
    return asyncio.get_running_loop().time()


# -- groups --------------------------------------------------------------------------------------


def make_episode(group_id="g", task_id="t", *, reward=1.0, version=0, tokens=3, routes=False):
    """A finished episode of one turn."""
    episode = Episode("toy", task_id, group_id, 7)
    episode.messages.append(user("hi"))
    episode.add_prompt([5, 6])
    said = assistant("ok")
    turn = episode.add_sampled([9] * tokens, [-0.5] * tokens, [version] * tokens, "stop", said)
    turn.reward = reward
    if routes:
        shape = (len(episode) - 1, 2, 2)
        episode.add_routes(0, np.arange(np.prod(shape), dtype=np.uint8).reshape(shape))
    episode.metrics["success"] = reward
    episode.finish(EpisodeStatus.COMPLETED)
    return episode


def make_group(group_id="g", task_id="t", *, size=2, version=0, routes=False):
    episodes = [
        make_episode(group_id, task_id, reward=float(i), version=version, routes=routes)
        for i in range(size)
    ]
    return Group(group_id, "toy", task_id, episodes)


# -- renderer ------------------------------------------------------------------------------------


class FakeRenderer:
    """One token per character; ``0`` ends a turn, a newline separates, ``1`` asks for an answer."""

    def __init__(self):
        self.stop_token_ids = [STOP]

    def _encode(self, message: Message) -> list[int]:
        text = message.text
        return [ord(c) for c in f"{message.role[0]}:{text}"]

    def start(self, messages, tools):
        ids = []
        for message in messages:
            ids += [*self._encode(message), STOP, 10]
        return Rendered([*ids, GENERATE])

    def extend(self, sampled_ids, new_messages, tools, history=()):
        cut = [] if sampled_ids and sampled_ids[-1] == STOP else [STOP]
        return Rendered([*cut, 10, *self.start(new_messages, tools).ids])

    def parse(self, output_ids, tools):
        text = "".join(chr(i) for i in output_ids if i != STOP)
        if not text.startswith("call "):
            return AssistantMessage(content=parts(text))
        try:
            arguments = json.loads(text[5:])
        except ValueError as error:
            return AssistantMessage(tool_calls=(ToolCall("add", {}, "c0", str(error)),))
        return AssistantMessage(tool_calls=(ToolCall("add", arguments, "c0"),))

    def completion(self, message):
        if message.tool_calls:
            return ids_of("call " + json.dumps(message.tool_calls[0].arguments))
        return ids_of(message.text)


def ids_of(text: str) -> list[int]:
    """What a policy samples to say ``text``."""
    return [*map(ord, text), STOP]


# -- environment ---------------------------------------------------------------------------------


class FakeEnv(Env):
    """Says "more" until ``turns`` messages have come, then ends; the reward is the last message."""

    def __init__(self, turns=1, *, on_step=None, on_reset=None):
        self.tools = Toolset()
        self.turns = turns
        self.seen: list[AssistantMessage] = []
        self.tasks_seen: list[tuple[int, str]] = []
        self.closed = 0
        self._on_step = on_step
        self._on_reset = on_reset

    async def reset(self, *, seed=None, options=None):
        self.seen = []
        self.tasks_seen.append((seed, options["task"]))
        if self._on_reset is not None:
            await self._on_reset(self)
        return [user(f"task {options['task']}")], {}

    async def step(self, action):
        self.seen.append(action)
        if self._on_step is not None:
            answer = await self._on_step(self, action)
            if answer is not None:
                return answer
        done = len(self.seen) >= self.turns
        reward = float(action.text == "good") if done else 0.0
        info = {"metrics": {"success": reward, "turns": len(self.seen)}} if done else {}
        return ([] if done else [user("more")]), reward, done, False, info

    async def close(self):
        self.closed += 1


# -- engine --------------------------------------------------------------------------------------


def result(ids, *, finish="stop", version=0, request=None, logprob=-0.5) -> GenerateResult:
    """An answer; with routes if the request asks for them."""
    routes = None
    if request is not None and request.return_routes:
        count = max(0, len(request.input_ids) + len(ids) - 1 - request.routes_start)
        rows = np.arange(request.routes_start, request.routes_start + count) % 8
        routes = np.broadcast_to(rows.astype(np.uint8)[:, None, None], (count, 2, 2)).copy()
    return GenerateResult(
        list(ids),
        [logprob] * len(ids),
        finish,
        [version] * len(ids),
        routes,
        len(request.input_ids) if request is not None else 0,
    )


class FakeEngine:
    """Answers what ``script(request)`` says: text, a GenerateResult, an error or a coroutine."""

    def __init__(self, script: Any = "good", *, name="fake", version=0):
        self.script = script
        self.name = name
        self.version = version
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str | None] = []
        self.running = 0

    async def generate(self, request):
        self.requests.append(request)
        self.running += 1
        try:
            answer = self.script(request) if callable(self.script) else self.script
            if isinstance(answer, Awaitable):
                answer = await answer
            if isinstance(answer, BaseException):
                raise answer
            if isinstance(answer, GenerateResult):
                return answer
            ids = ids_of(answer)
            limit = request.sampling.max_new_tokens
            finish = "stop" if len(ids) <= limit else "length"
            return result(ids[:limit], finish=finish, version=self.version, request=request)
        finally:
            self.running -= 1

    async def abort(self, rid=None):
        self.aborted.append(rid)

    async def model_info(self):
        return {"weight_version": str(self.version)}


def replies(*answers: Any) -> Callable[[GenerateRequest], Any]:
    """A script that gives one answer after the other; callables get the request."""
    left = list(answers)

    def script(request):
        answer = left.pop(0)
        return answer(request) if callable(answer) else answer

    return script


def dead(request) -> EngineUnavailable:
    return EngineUnavailable("the engine is gone")


def options(**changes) -> EpisodeOptions:
    limits = {k: changes.pop(k) for k in list(changes) if k in EpisodeLimits.__slots__}
    return replace(EpisodeOptions(SamplingParams(64), EpisodeLimits(**limits)), **changes)


def runner(engine, make_env=FakeEnv, *, pool=8, on_episode=None, **changes) -> EpisodeRunner:
    return EpisodeRunner(
        engine,
        FakeRenderer(),
        EnvPool(make_env, pool),
        options(**changes),
        env_id="toy",
        on_episode=on_episode,
    )

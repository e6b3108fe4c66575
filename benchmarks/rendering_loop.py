"""The episode loop's own cost: a scripted engine and an environment that does nothing.

A thousand episodes run at the same time on one core. Beside them the same calls of engine and
environment are made by a bare loop; what the episodes take more is the episode loop's own.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.envs import Result, in_turns, show
from relax_agent.engines.protocol import GenerateRequest, GenerateResult, SamplingParams
from relax_agent.envs import Env
from relax_agent.envs.core import Info, StepResult
from relax_agent.episode import Episode, EpisodeStatus
from relax_agent.messages import AssistantMessage, Message, Observation, assistant, user
from relax_agent.rendering import Rendered
from relax_agent.rollout.episode_loop import EpisodeOptions, run_episode
from relax_agent.tools import Toolset

EPISODES, TURNS = 1000, 4
_PROMPT, _ANSWER = list(range(20, 60)), [5, 6, 7, 8, 9, 10, 11, 2]
_LOOP, _BARE = "episodes", "the same calls, bare"


class Nothing(Env):
    """Says one word a turn."""

    tools = Toolset()
    tasks = None

    def __init__(self) -> None:
        self.turn = 0

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin."""
        return [user("go")], {}

    async def step(self, action: AssistantMessage) -> StepResult:
        """Go on."""
        self.turn += 1
        return [user("on")], 0.0, self.turn == TURNS, False, {}


class Fixed:
    """A renderer whose prompts never change."""

    summary = "fixed"

    def __init__(self) -> None:
        self.stop_token_ids = [2]

    def start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Rendered:
        """Return the prompt."""
        return Rendered(_PROMPT)

    def extend(
        self,
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        history: Sequence[Message] = (),
    ) -> Rendered:
        """Return the prompt again."""
        return Rendered(_PROMPT)

    def parse(self, output_ids: Sequence[int], tools: Sequence[dict[str, Any]]) -> AssistantMessage:
        """Return one message, whatever came."""
        return _SAID

    def stream(self, tools: Sequence[dict[str, Any]] = ()) -> Any:
        """Do not stream."""
        raise NotImplementedError


_SAID = assistant("yes")


class Scripted:
    """An engine that gives one answer to everything, a turn of the event loop later."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Answer."""
        await asyncio.sleep(0)
        count = len(_ANSWER)
        return GenerateResult(list(_ANSWER), [-1.0] * count, "stop", [0] * count)

    async def abort(self, rid: str | None = None) -> None:
        """Do nothing: no request lasts."""


async def _episodes() -> None:
    engine, options = Scripted(), EpisodeOptions(SamplingParams(16))
    episodes = [Episode("e", str(number), "g", 0) for number in range(EPISODES)]
    runs = (run_episode(Nothing(), engine, Fixed(), each, options) for each in episodes)
    await asyncio.gather(*runs)
    assert all(each.status is EpisodeStatus.COMPLETED for each in episodes)


async def _bare_episode(engine: Scripted, name: int) -> None:
    env, ids = Nothing(), list(_PROMPT)
    await env.reset()
    for turn in range(TURNS):
        request = GenerateRequest(
            list(ids), SamplingParams(16, stop_token_ids=[2]), f"{name}.{turn}"
        )
        ids += (await engine.generate(request)).output_ids
        await env.step(_SAID)
        ids += _PROMPT


async def _bare() -> None:
    engine = Scripted()
    await asyncio.gather(*(_bare_episode(engine, number) for number in range(EPISODES)))


def _cpu_ms(main: Any) -> float:
    """Return CPU milliseconds a turn."""
    start = time.process_time()
    asyncio.run(main())
    return (time.process_time() - start) * 1e3 / (EPISODES * TURNS)


def measure(quick: bool) -> Result:
    """Measure both in turns."""
    values = in_turns(
        {_LOOP: lambda: _cpu_ms(_episodes), _BARE: lambda: _cpu_ms(_bare)}, 1 if quick else 5
    )
    show(values, "ms a turn")
    own = [loop - bare for loop, bare in zip(values[_LOOP], values[_BARE], strict=True)]
    return {"loop_ms_per_turn": round(statistics.median(own), 3)}

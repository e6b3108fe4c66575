"""Steps with one tool call, and many episodes at once: ours, a lower bound, the peers."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from relax_agent.envs import EnvSpec, PlayLimits, Task, TaskSet, ToolEnv, make, play
from relax_agent.messages import ToolCall, assistant
from relax_agent.tools import tool

FOLDER = Path(__file__).parent / "contestants"
PEERS = Path(__file__).parents[1] / "build" / "peers"
CALL = assistant(tool_calls=[ToolCall("add", {"a": 2, "b": 3}, "call_0")])
ANSWER = assistant("5")
TEXT = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
TURNS = 8


@tool(inline=True)
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


@tool(timeout=60)
async def slow(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "done"


class Sums(ToolEnv):
    """One question, one tool."""

    tools = (add, slow)
    tasks = TaskSet([Task("sum", "2 + 3?", "5")])
    max_turns = 10**9

    async def score(self, task: Task, transcript: Any) -> float:
        """Compare."""
        return float(transcript.answer == task.answer)


SPEC = EnvSpec("benchmarks/Sums-v0", Sums)


class Floor:
    """The least that finds a call in a text and runs it; it validates nothing."""

    _pattern = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Run the call."""
        found = self._pattern.search(text)
        assert found is not None
        arguments = json.loads(found[1])["arguments"]
        return str(arguments["a"] + arguments["b"]), 0.0, False, False, {}


def floor_rate(steps: int) -> float:
    """Return steps per second of the plain class."""
    step = Floor().step
    started = time.perf_counter()
    for _ in range(steps):
        step(TEXT)
    return steps / (time.perf_counter() - started)


def tool_step_rate(steps: int) -> float:
    """Return steps per second through ``make``, each with one validated call."""
    return asyncio.run(_tool_steps(steps))


async def _tool_steps(steps: int) -> float:
    async with make(SPEC) as env:
        await env.reset()
        observation, *_ = await env.step(CALL)
        assert observation[0].text == "5", observation
        step = env.step
        started = time.perf_counter()
        for _ in range(steps):
            await step(CALL)
        return steps / (time.perf_counter() - started)


class Script:
    """Calls the tool in every turn but the last."""

    def __init__(self, call: Any, turns: int) -> None:
        self.call, self.left = call, turns

    def act(self, messages: Any, tools: Any) -> Any:
        """Return the next message."""
        self.left -= 1
        return ANSWER if self.left < 0 else self.call


async def episodes(call: Any, count: int, *, turns: int = TURNS) -> float:
    """Play so many episodes at the same time and return the seconds it took."""
    envs = [make(SPEC) for _ in range(count)]
    limits = PlayLimits(timeout_s=600)
    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        runs = [group.create_task(play(env, Script(call, turns), limits=limits)) for env in envs]
    seconds = time.perf_counter() - started
    for run in runs:
        record = run.result()
        assert record.reward == 1.0 and record.turns == turns + 1, record.detail
    for env in envs:
        await env.close()
    return seconds


def episode_rate(count: int) -> float:
    """Return steps per second of whole episodes, ``count`` at the same time."""
    return TURNS * count / asyncio.run(episodes(CALL, count))


async def sleeps(seconds: float, count: int, *, turns: int = TURNS) -> float:
    """Return the seconds that bare tasks take which only sleep as often."""

    async def one() -> None:
        for _ in range(turns):
            await asyncio.sleep(seconds)

    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    return time.perf_counter() - started


def waiting(seconds: float) -> Any:
    """Return a message that calls the slow tool."""
    return assistant(tool_calls=[ToolCall("slow", {"seconds": seconds}, "call_0")])


def contestant(peer: str, script: str, *arguments: int) -> dict[str, Any]:
    """Run a peer's script in its own venv and return what it prints."""
    python = PEERS / peer / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"{peer} is not there: make peers PEERS={peer}")
    argv = [str(python), str(FOLDER / script), *map(str, arguments)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=600)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result

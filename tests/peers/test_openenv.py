"""Environments behind an OpenEnv server, against the real package."""

import asyncio
import base64
import contextlib
import socket
import threading
import time
from typing import Any

import pytest
import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import (
    Action,
    CallToolAction,
    CallToolObservation,
    Environment,
    MCPEnvironment,
    Observation,
    State,
    create_fastapi_app,
)
from peer_support import assert_pinned, run_snippets

from relax_agent.envs import ScriptedPolicy, make_vec, play
from relax_agent.envs.adapters import from_openenv
from relax_agent.errors import EnvError
from relax_agent.messages import ToolCall, assistant

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGP4z8DwHwAFAAH/iZk9HQAAAABJRU5ErkJggg=="
)


class Guess(Action):
    """Guess the number."""

    number: int
    aside: str = ""


class Told(Observation):
    text: str = ""
    tries: int = 0
    picture: str = ""


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._number, self._tries = 0, 0

    def reset(self, seed=None, episode_id=None, largest=10, **kwargs: Any):
        self._number, self._tries = (7 * (seed or 0) + 3) % largest, 0
        url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
        return Told(text=f"Guess from 0 to {largest - 1}.", picture=url)

    def step(self, action, timeout_s=None, **kwargs: Any):
        self._tries += 1
        if action.number == 13:
            raise ValueError("thirteen is not said here")
        if action.number == self._number:
            return Told(text="Right.", tries=self._tries, reward=1.0, done=True)
        word = "higher" if action.number < self._number else "lower"
        return Told(text=word, tries=self._tries, reward=-0.1)

    @property
    def state(self):
        return State(step_count=self._tries)


class Say(Action):
    message: str


class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs: Any):
        return Told(text="Say something.")

    def step(self, action, timeout_s=None, **kwargs: Any):
        return Told(text=action.message.upper(), reward=len(action.message), done=True)

    @property
    def state(self):
        return State()


class Sums(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        tools = FastMCP("sums")

        @tools.tool()
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(tools)

    def reset(self, seed=None, episode_id=None, **kwargs: Any):
        return Observation()

    def _step_impl(self, action, timeout_s=None, **kwargs: Any):
        return Observation()

    @property
    def state(self):
        return State()


@contextlib.contextmanager
def served(factory, action, observation, port=0):
    app = create_fastapi_app(factory, action, observation, max_concurrent_envs=32)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)


@pytest.fixture(scope="module")
def guessing():
    with served(Guessing, Guess, Told) as url:
        yield url


def guess(number, **more):
    return ToolCall("act", {"number": number, **more})


def run(env, policy, **how):
    async def go():
        async with env:
            return await play(env, policy, **how)

    return asyncio.run(go())


def test_the_library_is_the_pinned_one():
    assert_pinned("openenv")


def test_the_action_s_schema_is_the_tool_and_steps_have_rewards(guessing):
    env = from_openenv(guessing, prompt="Be quick.")
    (schema,) = env.tools.schemas()
    assert schema["function"]["description"] == "Guess the number."
    assert set(schema["function"]["parameters"]["properties"]) == {"number", "aside"}
    record = run(env, ScriptedPolicy([guess(1), [guess(9), guess(0)], guess(0, aside="!")]), seed=1)
    assert record.status == "completed" and record.rewards == pytest.approx([-0.1, 0.9])
    assert record.messages[0].text.startswith("Be quick.") and "0 to 9." in record.messages[0].text
    assert record.messages[0].media[0].data == PNG


def test_calls_of_one_message_are_done_in_order_and_their_rewards_add_up(guessing):
    calls = [guess(3), guess(5), guess(0), guess(9)]
    record = run(from_openenv(guessing), ScriptedPolicy([calls]), seed=1)
    assert record.rewards == pytest.approx([-0.1 - 0.1 + 1.0])
    told = [m.text for m in record.messages if m.role == "tool"]
    assert "lower" in told[0] and "Right" in told[2] and "the episode is over" in told[3]
    assert record.metrics == {"success": 0.0, "turns": 1.0}


def test_what_cannot_be_done_is_told_to_the_model(guessing):
    odd = [
        "seven", [ToolCall("act", {"number": "seven"})], [ToolCall("jump", {})],
        [ToolCall("act", {"number": 1, "speed": 3})], guess(0),
    ]  # fmt: skip
    record = run(from_openenv(guessing), ScriptedPolicy(odd), seed=1)
    told = [m.text for m in record.messages[1:] if m.role in ("tool", "user")]
    assert record.status == "completed" and record.reward == 1.0
    assert "call a tool (act)" in told[0] and "number" in told[1]
    assert "no tool 'jump'" in told[2] and "speed" in told[3]


def test_an_environment_that_raises_is_an_env_failure_with_its_words(guessing):
    record = run(from_openenv(guessing), ScriptedPolicy([guess(13)]), seed=1)
    assert record.status == "env_failure" and "thirteen is not said here" in record.detail


def test_seeds_are_tasks_and_reset_takes_arguments(guessing):
    env = from_openenv(guessing, tasks=5, reset_args={"largest": 100})
    record = run(env, ScriptedPolicy([guess(24)]), task="train-3", seed=77)
    assert record.reward == 1.0 and "0 to 99" in record.messages[0].text
    assert record.task_id == "train-3"


def test_a_text_is_an_action_where_an_action_is_a_text():
    with served(Echo, Say, Told) as url:
        record = run(from_openenv(url), ScriptedPolicy(["hello"]))
        assert record.reward == 5.0 and "HELLO" in record.messages[-1].text


def test_mcp_tools_are_the_model_s_tools():
    with served(Sums, CallToolAction, CallToolObservation) as url:
        env = from_openenv(url, max_turns=2)
        assert env.tools.names == ("add",)
        calls = [ToolCall("add", {"a": 2, "b": 3}), ToolCall("add", {"a": "x", "b": 3})]
        record = run(env, ScriptedPolicy([calls, "5"]))
        told = [m.text for m in record.messages if m.role == "tool"]
        assert told[0] == "5" and "Error" in told[1]
        assert record.status == "truncated_turns"


def test_many_sessions_at_once_do_not_disturb_each_other(guessing):
    def halve(messages, tools):
        low, high = 0, 9
        for message in messages:
            for call in getattr(message, "tool_calls", ()):
                said = call.arguments["number"]
            if message.role == "tool":
                low, high = (said + 1, high) if "higher" in message.text else (low, said - 1)
        return guess((low + high) // 2)

    async def go():
        kwargs = {"url": guessing, "tasks": 30}
        async with make_vec("relax/OpenEnv-v0", 8, **kwargs) as envs:
            jobs = [f"train-{n}" for n in range(24)]
            return [p async for p in envs.run(lambda: ScriptedPolicy(halve), jobs)]

    records = asyncio.run(go())
    assert len(records) == 24 and all(record.terminated for record in records)
    assert len({record.task_id for record in records}) == 24


def test_a_server_that_is_not_there_or_goes_away_is_an_error():
    with pytest.raises(EnvError, match="is it running"):
        from_openenv("http://127.0.0.1:9")
    with served(Guessing, Guess, Told) as url:
        env = from_openenv(url, timeout_s=5)
        asyncio.run(env.reset(seed=1))
    with pytest.raises(EnvError, match=r"lost|says"):
        asyncio.run(env.step(assistant(tool_calls=[guess(1)])))
    asyncio.run(env.close())


def test_what_the_page_of_neighbours_shows_runs():
    """The page's server listens where the snippet looks for it."""
    with served(Guessing, Guess, Told, port=8000):
        run_snippets("OpenEnv")

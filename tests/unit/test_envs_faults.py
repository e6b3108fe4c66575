"""One fault, one status: the same whoever drives the environment, whatever kind the fault is."""

import asyncio
import itertools
import math

import pytest
from rollout_support import FakeEngine, FakeRenderer, options, run

from relax_agent.envs import (
    Env,
    Job,
    ScriptedPolicy,
    SyncEnv,
    Task,
    TaskSet,
    ToolEnv,
    make_async,
    make_vec,
    register,
)
from relax_agent.envs.playing import PlayLimits, play
from relax_agent.episode import Episode
from relax_agent.messages import ToolCall, user
from relax_agent.rollout import run_episode
from relax_agent.tools import tool


class Panic(BaseException):
    """As libraries written in Rust raise it: no Exception."""


def raising(error):
    def fault():
        raise error

    return fault


def ending(**info):
    return lambda: ([], 1.0, False, True, info)


def measured(value):
    return lambda: ([], 1.0, True, False, {"metrics": {"length": value}})


FAULTS = {
    "panic": (raising(Panic("index out of bounds")), "env_failure"),
    "panic in a group": (raising(BaseExceptionGroup("", [Panic("x")])), "env_failure"),
    "exit": (raising(SystemExit(0)), "env_failure"),
    "cancelled inside": (raising(asyncio.CancelledError()), "env_failure"),
    "cut by time": (ending(status="truncated_time"), "truncated_time"),
    "cut by tokens": (ending(status="truncated_tokens"), "truncated_tokens"),
    "cut by a failure": (ending(status="env_failure", detail="it froze"), "env_failure"),
    "cut by a tool": (ending(status="tool_failure", detail="it froze"), "tool_failure"),
    "metric nan": (measured(math.nan), "env_failure"),
    "metric inf": (measured(-math.inf), "env_failure"),
    "metric huge": (measured(10**400), "env_failure"),
    "metric text": (measured("long"), "env_failure"),
    "cut by nothing known": (ending(status="completed"), "truncated_turns"),
}

RAISED = ("panic", "panic in a group", "exit", "cancelled inside")


@register("faults/Async-v0")
class Faulty(Env):
    def __init__(self, kind, place="step"):
        self.kind, self.place = kind, place

    async def reset(self, *, seed=None, options=None):
        if self.place == "reset":
            FAULTS[self.kind][0]()
        return [user("go")], {}

    async def step(self, action):
        return FAULTS[self.kind][0]()


@register("faults/Plain-v0")
class PlainFaulty(SyncEnv):
    def __init__(self, kind, place="step"):
        self.kind, self.place = kind, place

    def reset(self, *, seed=None, options=None):
        if self.place == "reset":
            FAULTS[self.kind][0]()
        return [user("go")], {}

    def step(self, action):
        return FAULTS[self.kind][0]()


async def in_play(env_id, **kwargs):
    env = await make_async(env_id, **kwargs)
    record = await play(env, ScriptedPolicy(["hi"]), limits=PlayLimits(max_turns=2))
    return record.status


async def in_rollout(env_id, **kwargs):
    env, log = await make_async(env_id, **kwargs), Episode("toy", "t", "g", 7)
    await run_episode(env, FakeEngine("good"), FakeRenderer(), log, options(max_turns=2))
    return log.status


async def in_vector(env_id, **kwargs):
    async with make_vec(env_id, 2, **kwargs) as vec, asyncio.timeout(20):
        records = [r async for r in vec.run(lambda: ScriptedPolicy(["hi"]), [Job(), Job(), Job()])]
    assert len(records) == 3
    (status,) = {record.status for record in records}
    return status


@pytest.mark.parametrize("driver", [in_play, in_rollout, in_vector])
@pytest.mark.parametrize("env_id", ["faults/Async-v0", "faults/Plain-v0"])
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_has_one_status_whoever_drives(kind, env_id, driver):
    """T154, T158: also for what is no Exception, which once made a vector wait for ever."""
    status = FAULTS[kind][1]
    assert asyncio.run(driver(env_id, kind=kind)) == status
    if status == "env_failure" and kind in RAISED:
        assert asyncio.run(driver(env_id, kind=kind, place="reset")) == status


class Interrupted:
    """A policy that ends like a thread whose Ctrl-C nobody caught."""

    def act(self, messages, tools):
        raise GeneratorExit


@pytest.mark.parametrize("jobs", ["plain", "cancelled"])
def test_a_run_whose_worker_dies_says_so_instead_of_waiting(jobs):
    """T158: the worker ends without a word that anybody could read."""

    async def cancelled():
        yield Job()
        raise asyncio.CancelledError

    async def main():
        chosen = [Job()] if jobs == "plain" else cancelled()
        policy = Interrupted() if jobs == "plain" else ScriptedPolicy(["hi"] * 9)
        async with make_vec("faults/Async-v0", 1, kind="cut by time") as vec, asyncio.timeout(20):
            async for _ in vec.run(policy, chosen):
                pass

    with pytest.raises((GeneratorExit, asyncio.CancelledError)):
        asyncio.run(main())


class Converting(Env):
    """Turns its cancellation into an error of its own, as some clients do."""

    async def reset(self, *, seed=None, options=None):
        return [user("go")], {}

    async def step(self, action):
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            raise ConnectionError("closed while it waited") from None


def test_what_a_cancelled_step_raises_is_not_why_the_episode_ended():
    """T152: the time was over, in a play as in a rollout."""

    async def main():
        limits, log = PlayLimits(timeout_s=100.0), Episode("toy", "t", "g", 7)
        record = await play(Converting(), ScriptedPolicy(["hi"]), limits=limits)
        await run_episode(
            Converting(), FakeEngine("good"), FakeRenderer(), log, options(timeout_s=100.0)
        )
        return record.status, log.status

    assert run(main()) == ("truncated_time", "truncated_time")


@tool
def plain_tool(kind: str) -> str:
    """Fail.

    Args:
        kind: How.
    """
    FAULTS[kind][0]()


@tool(inline=True)
def inline_tool(kind: str) -> str:
    """Fail.

    Args:
        kind: How.
    """
    FAULTS[kind][0]()


@tool
async def async_tool(kind: str) -> str:
    """Fail.

    Args:
        kind: How.
    """
    FAULTS[kind][0]()


class Tools(ToolEnv):
    tools = (plain_tool, inline_tool, async_tool)
    tasks = TaskSet([Task("a", "?")])

    def score(self, task, transcript):
        return 1.0


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *itertools.product(RAISED, ["plain_tool", "async_tool"]),
        *itertools.product(RAISED[:3], ["inline_tool"]),  # it runs in the caller's own task
    ],
)
def test_whatever_a_tool_raises_is_a_message_to_the_model(kind, name):
    """T160: a call that is cancelled from inside has an answer as well."""
    script = ScriptedPolicy([ToolCall(name, {"kind": kind}), "done"])
    record = asyncio.run(play(Tools(), script))
    assert record.status == "completed"
    assert record.messages[2].text.startswith(f"Error: {name}: ")


@pytest.mark.parametrize("name", [None, 5, "", "plain", "__class__"])
def test_a_name_that_is_no_tool_is_a_message_to_the_model(name):
    record = asyncio.run(play(Tools(), ScriptedPolicy([ToolCall(name, {}), "done"])))
    assert record.status == "completed"
    assert "there is no tool" in record.messages[2].text

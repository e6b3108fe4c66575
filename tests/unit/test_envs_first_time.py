"""What people hand over in their first program: a class, a pair, a plain text."""

import asyncio
import threading

import pytest

from relax_agent.envs import (
    EnvSpec,
    ScriptedPolicy,
    SyncEnv,
    Task,
    TaskSet,
    ToolEnv,
    make,
    play,
    register,
)
from relax_agent.envs.policies import as_message
from relax_agent.envs.wrappers import TimeLimit
from relax_agent.errors import ConfigError, EnvError, PolicyError, at_line
from relax_agent.messages import ToolCall, assistant
from relax_agent.status import EpisodeStatus
from relax_agent.tools import tool


class Sum(ToolEnv):
    """Add."""

    tasks = TaskSet([Task("q", "What is 1 + 7?", "8")])

    def __init__(self, worth=1.0):
        super().__init__()
        self.worth = worth

    @tool
    def add(self, a: int, b: int) -> int:
        """Add.

        Args:
            a: One number.
            b: The other.
        """
        return a + b

    def score(self, task, transcript):
        return self.worth * (transcript.answer == task.answer)


class Plain(SyncEnv):
    """Plain."""

    def reset(self, *, seed=None, options=None):
        self.thread = threading.current_thread()
        return [], {}

    def step(self, action):
        return [], 0.0, True, False, {}


def test_make_takes_a_class_with_arguments_and_its_spec_rebuilds_it():
    env = make(Sum, worth=3.0)
    assert asyncio.run(play(env, ScriptedPolicy(["8"]))).reward == 3.0
    again = make(EnvSpec.from_json(env.spec.to_json()))
    assert again.unwrapped.worth == 3.0
    with pytest.raises(ConfigError, match="arguments: worth"):
        make(Sum, value=1)

    async def main():
        async with make(Plain) as plain:
            await plain.reset()
            return plain.unwrapped.thread

    assert asyncio.run(main()) is not threading.main_thread()


@pytest.mark.parametrize(
    ("given", "words"),
    [(Sum(), "an environment already"), (None, "no environment"), (int, "it takes an id, a spec")],
)
def test_make_says_what_it_takes(given, words):
    with pytest.raises(ConfigError, match=words):
        make(given)


@pytest.mark.parametrize(
    "wrapper", [(TimeLimit, {"max_turns": 1}), ("relax_agent.envs:TimeLimit", {"max_turns": 1})]
)
def test_wrappers_may_be_pairs(wrapper):
    register("first/Pairs-v0", Sum, wrappers=[wrapper])
    env = make("first/Pairs-v0")
    assert make(EnvSpec.from_json(env.spec.to_json())).env.max_turns == 1


@pytest.mark.parametrize("wrapper", [3, (TimeLimit, 3), (TimeLimit, {"max_turns": 3}, 1)])
def test_what_is_no_wrapper_is_refused_where_it_is_registered(wrapper):
    with pytest.raises(ConfigError, match="is no wrapper → wrappers="):
        register("first/NoWrapper-v0", Sum, wrappers=[wrapper])


class Says:
    def __init__(self, *replies, later=False):
        self.replies, self.later = list(replies), later

    def act(self, messages, tools):
        reply = self.replies.pop(0)
        return self._after(reply) if self.later else reply

    async def _after(self, reply):
        return reply


@pytest.mark.parametrize("later", [False, True], ids=["plain", "async"])
def test_a_policy_may_say_what_a_script_may_say(later):
    call = ToolCall("add", {"a": 1, "b": 7})
    record = asyncio.run(play(Sum(), Says(call, [call, call], "8", later=later)))
    assert (record.status, record.reward) == (EpisodeStatus.COMPLETED, 1.0)
    ids = [message.tool_call_id for message in record.messages if message.role == "tool"]
    assert ids == ["call_1_0", "call_2_0", "call_2_1"]


def test_a_policy_that_says_something_else_is_told_what_it_may_say():
    record = asyncio.run(play(Sum(), Says(8)))
    assert record.status is EpisodeStatus.ENGINE_FAILURE
    assert "a reply is a str, a ToolCall" in record.detail
    with pytest.raises(PolicyError):
        as_message(None, 1)
    said = assistant("hello")
    assert as_message(said, 1) is said


class Misspelt(Sum):
    """Add."""

    def score(self, task, transcript):
        return {"answer": 1.0}["anwser"]


class BreaksWhenBuilt(Sum):
    """Add."""

    def __init__(self):
        super().__init__(tools=[][3])


def line_of(function):
    return f"(test_envs_first_time.py:{function.__code__.co_firstlineno + 1})"


@pytest.mark.parametrize("build", [make, lambda kind: kind()], ids=["guarded", "bare"])
def test_a_failure_of_an_environment_names_the_authors_line(build):
    record = asyncio.run(play(build(Misspelt), ScriptedPolicy(["8"])))
    assert record.status is EpisodeStatus.ENV_FAILURE
    assert "KeyError: 'anwser'" in record.detail
    assert record.detail.count(".py:") == 1
    assert record.detail.endswith(line_of(Misspelt.score))


def test_a_failure_of_a_plain_environment_names_the_authors_line():
    class Breaks(Plain):
        """Plain."""

        def step(self, action):
            return action.tool_calls[0]

    record = asyncio.run(play(make(Breaks), ScriptedPolicy(["8"])))
    assert record.detail.endswith(line_of(Breaks.step))


def test_a_failure_of_a_policy_names_the_authors_line():
    record = asyncio.run(play(Sum(), Says()))
    assert "policy: IndexError" in record.detail
    assert record.detail.endswith(line_of(Says.act))


def test_a_failure_of_a_constructor_names_the_authors_line():
    with pytest.raises(EnvError, match=r"IndexError.*\(test_envs_first_time.py:\d+\)$"):
        make(BreaksWhenBuilt)


def test_an_error_of_this_projects_own_code_names_no_line():
    try:
        as_message(None, 1)
    except PolicyError as error:
        assert at_line(error) == ""
    assert at_line(ValueError("never raised")) == ""

"""Policies that are not models, and what `play` makes of whatever can happen in an episode."""

import asyncio
import gc
import json
import random
import threading
import time
import warnings

import jsonschema
import numpy as np
import pytest

from relax_agent import limits as waiting
from relax_agent.envs import (
    Env,
    EnvSpec,
    Play,
    PlayLimits,
    Policy,
    RandomPolicy,
    ScriptedPolicy,
    SyncEnv,
    make,
    play,
)
from relax_agent.envs.arguments import random_arguments
from relax_agent.errors import (
    ConfigError,
    EnvError,
    EpisodeError,
    PolicyError,
    PromptTooLong,
    ToolError,
)
from relax_agent.messages import (
    AssistantMessage,
    Image,
    Rewrite,
    ToolCall,
    Usage,
    assistant,
    tool_message,
    user,
)
from relax_agent.status import EpisodeStatus
from relax_agent.tools import Toolset, tool


class Talk(Env):
    """Answers ``length`` messages, then ends; ``on_step`` may do something else."""

    def __init__(self, length=3, on_step=None, on_reset=None, on_close=None):
        self.length, self.said, self.closed = length, 0, 0
        self.on_step, self.on_reset, self.on_close = on_step, on_reset, on_close

    async def reset(self, *, seed=None, options=None):
        self.said = 0
        if self.on_reset:
            return await self.on_reset()
        task = (options or {}).get("task", "free")
        return [user(f"start {seed}")], {"task": task}

    async def step(self, action):
        self.said += 1
        if self.on_step:
            return await self.on_step(self.said)
        over = self.said >= self.length
        return [user(f"echo {action.text}")], 0.5, over, False, {"metrics": {"said": self.said}}

    async def close(self):
        self.closed += 1
        if self.on_close:
            await self.on_close()


async def forever(*_):
    await asyncio.Event().wait()


async def stubborn(*_):
    """Swallow every cancellation, for a while."""
    for _ in range(4):
        try:
            await asyncio.sleep(0.2)
        except asyncio.CancelledError:
            continue


class Always:
    """Says the same again and again."""

    def act(self, messages, tools):
        return assistant("hm")


@pytest.fixture
def hurry(monkeypatch):
    """What was told to stop gets little time for it."""
    from relax_agent.envs import playing

    for module in (waiting, playing):
        monkeypatch.setattr(module, "GRACE_S", 0.05)


def played(env, policy=None, **kwargs):
    return asyncio.run(play(env, policy or Always(), **kwargs))


# -- the record ------------------------------------------------------------------------------


def test_an_episode_from_start_to_end():
    record = played(Talk(2), ScriptedPolicy(["a", "b"]), task="t", seed=7)
    assert record.status is EpisodeStatus.COMPLETED
    assert [m.text for m in record.messages] == ["start 7", "a", "echo a", "b", "echo b"]
    assert (record.reward, record.rewards, record.turns) == (1.0, [0.5, 0.5], 2)
    assert (record.terminated, record.truncated) == (True, False)
    assert (record.task_id, record.seed, record.env_id) == ("t", 7, "Talk")
    assert record.metrics == {"said": 2.0}
    assert record.duration_s >= 0


def test_the_task_that_the_environment_chose_is_on_record():
    assert played(Talk(1)).task_id == "free"
    assert played(make(EnvSpec("test/Talk-v0", Talk, {"length": 1}))).env_id == "test/Talk-v0"


def test_a_play_goes_to_json_and_back():
    call = ToolCall("look", {"x": 1}, "c0", error="odd")

    async def step(number):
        if number == 2:
            return Rewrite((user("short"),), "too long"), 0.25, False, False, {}
        picture = tool_message([Image(b"png"), "seen"], call)
        return [picture], -1.0, number == 3, False, {"metrics": {"x": 2}}

    said = AssistantMessage(
        reasoning="why", tool_calls=(call,), usage=Usage(5, 7, 9), finish_reason="stop"
    )
    record = played(Talk(on_step=step), ScriptedPolicy([said, "b", said]), seed=3)
    text = json.dumps(record.to_record(), allow_nan=False)
    again = Play.from_record(json.loads(text))
    assert again == record
    assert (again.usage, again.rewrites) == (Usage(10, 14, 9), [(4, "too long")])
    assert json.loads(text)["reward"] == -1.75


def test_an_episode_ends_exactly_once():
    record = Play()
    with pytest.raises(EpisodeError, match="cannot end as running"):
        record.finish(EpisodeStatus.RUNNING)
    record.finish(EpisodeStatus.COMPLETED)
    with pytest.raises(EpisodeError, match="already ended as completed"):
        record.finish(EpisodeStatus.CANCELLED)
    env = Talk(on_reset=boom)
    with pytest.raises(EpisodeError, match="already ended as completed"):
        played(env, record=record)
    assert record.status is EpisodeStatus.COMPLETED


def test_a_rewrite_changes_what_the_policy_sees_and_loses_nothing():
    seen = []

    async def step(number):
        if number == 1:
            return Rewrite((user("summary"),), "compaction"), 0.0, False, False, {}
        return [user("more")], 0.0, number == 3, False, {}

    def policy(messages, tools):
        seen.append([m.text for m in messages])
        return "x"

    record = played(Talk(on_step=step), ScriptedPolicy(policy))
    assert seen == [["start None"], ["summary"], ["summary", "x", "more"]]
    texts = [m.text for m in record.messages]
    assert texts == ["start None", "x", "summary", "x", "more", "x", "more"]
    assert record.rewrites == [(2, "compaction")]


def test_tools_that_appear_in_mid_episode_are_seen():
    @tool
    def late() -> str:
        """Come late."""
        return ""

    env = Talk(2)

    async def step(number):
        env.tools = Toolset([late])
        return [], 0.0, number == 2, False, {}

    env.on_step = step
    names = []

    def policy(messages, tools):
        names.append([item["function"]["name"] for item in tools])
        return "x"

    played(env, ScriptedPolicy(policy))
    assert names == [[], ["late"]]


def test_what_a_policy_does_to_its_messages_stays_with_it():
    def policy(messages, tools):
        messages.clear()
        return "x"

    record = played(Talk(2), ScriptedPolicy(policy))
    assert [m.text for m in record.messages] == ["start None", "x", "echo x", "x", "echo x"]


# -- whose turn it is ------------------------------------------------------------------------


class Debate(Env):
    """Two roles by turns."""

    async def reset(self, *, seed=None, options=None):
        self.turn = 0
        return [user("begin")], {"role": "pro"}

    async def step(self, action):
        self.turn += 1
        return [], 0.0, self.turn == 4, False, {"role": ("pro", "con")[self.turn % 2]}


def test_a_role_has_its_own_policy():
    record = played(
        Debate(), {"pro": ScriptedPolicy(["p1", "p2"]), "con": ScriptedPolicy(["c1", "c2"])}
    )
    assert [m.text for m in record.messages] == ["begin", "p1", "c1", "p2", "c2"]
    assert record.status is EpisodeStatus.COMPLETED


def test_one_policy_plays_all_roles():
    assert played(Debate(), ScriptedPolicy(["a", "b", "c", "d"])).turns == 4


def test_a_role_that_nobody_plays_is_named():
    record = played(Debate(), {"pro": Always()})
    assert record.status is EpisodeStatus.ENGINE_FAILURE
    assert "no policy plays the role 'con' → there is: pro" in record.detail
    assert record.turns == 1


# -- ends from outside -----------------------------------------------------------------------


def test_the_limit_of_turns_truncates():
    record = played(Talk(99), limits=PlayLimits(max_turns=2))
    assert record.status is EpisodeStatus.TRUNCATED_TURNS
    assert (record.turns, record.truncated, record.detail) == (2, True, "2 turns are used")


@pytest.mark.parametrize(
    ("info", "status"),
    [
        ({}, EpisodeStatus.TRUNCATED_TURNS),
        ({"status": "truncated_tokens"}, EpisodeStatus.TRUNCATED_TOKENS),
        ({"status": EpisodeStatus.TRUNCATED_TIME, "detail": "slow"}, EpisodeStatus.TRUNCATED_TIME),
        ({"status": "parse_failure"}, EpisodeStatus.PARSE_FAILURE),
        ({"status": "shipped"}, EpisodeStatus.TRUNCATED_TURNS),
        ({"status": "completed"}, EpisodeStatus.TRUNCATED_TURNS),
        ({"status": ["odd"]}, EpisodeStatus.TRUNCATED_TURNS),
    ],
)
def test_an_environment_that_truncates_may_say_why(info, status):
    async def step(number):
        return [], 0.0, False, True, info

    record = played(Talk(on_step=step))
    assert record.status is status
    assert record.detail == info.get("detail", "the environment truncated the episode")


def test_a_message_that_was_cut_ends_as_truncated_tokens():
    cut = AssistantMessage(finish_reason="length")
    record = played(Talk(1), ScriptedPolicy([cut]))
    assert record.status is EpisodeStatus.TRUNCATED_TOKENS
    assert record.terminated


def test_a_status_is_not_the_environments_where_the_task_ended_by_itself():
    async def step(number):
        return [], 0.0, True, False, {"status": "env_failure"}

    assert played(Talk(on_step=step)).status is EpisodeStatus.COMPLETED


@pytest.mark.parametrize("name", ["max_turns", "timeout_s", "step_timeout_s", "policy_timeout_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_limit_that_makes_no_sense_is_named(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be > 0"):
        PlayLimits(**{name: value})


# -- failures --------------------------------------------------------------------------------


async def boom(*_):
    raise ValueError("boom\nboom")


async def tool_boom(*_):
    raise ToolError("no such tool server")


async def boom_in_a_group(*_):
    async with asyncio.TaskGroup() as group:
        group.create_task(boom())


class Untold(Exception):
    """Cannot be told."""

    def __str__(self):
        raise ValueError("no words")


async def untold(*_):
    raise Untold


async def exits(*_):
    raise SystemExit(0)


async def cancels_itself(*_):
    raise asyncio.CancelledError


async def wrong_tuple(*_):
    return [], 0.0


async def nan_reward(*_):
    return [], float("nan"), False, False, {}


async def odd_metrics(*_):
    return [], 1.0, False, False, {"metrics": {"x": "many"}}


FAILURES = [
    (boom, EpisodeStatus.ENV_FAILURE, "ValueError: boom boom"),
    (boom_in_a_group, EpisodeStatus.ENV_FAILURE, "ValueError: boom boom"),
    (untold, EpisodeStatus.ENV_FAILURE, "Untold: (no message)"),
    (tool_boom, EpisodeStatus.TOOL_FAILURE, "no such tool server"),
    (exits, EpisodeStatus.ENV_FAILURE, "SystemExit: 0"),
    (cancels_itself, EpisodeStatus.ENV_FAILURE, "cancelled from inside"),
    (wrong_tuple, EpisodeStatus.ENV_FAILURE, "must return"),
]
STEP_FAILURES = [
    (nan_reward, EpisodeStatus.ENV_FAILURE, "the reward is nan"),
    (odd_metrics, EpisodeStatus.ENV_FAILURE, "info['metrics'] must be"),
]


@pytest.mark.parametrize(("fail", "status", "words"), FAILURES)
def test_a_failing_reset_is_a_status(fail, status, words):
    record = played(Talk(on_reset=(lambda: fail()) if fail is not wrong_tuple else boom_tuple))
    assert record.status is status
    assert record.detail.startswith("reset: ")
    assert (words in record.detail) and "\n" not in record.detail
    assert record.turns == 0


async def boom_tuple():
    return ([],)


@pytest.mark.parametrize(("fail", "status", "words"), FAILURES + STEP_FAILURES)
def test_a_failing_step_is_a_status_and_the_conversation_stays(fail, status, words):
    async def step(number):
        return await fail() if number == 2 else ([user("ok")], 1.0, False, False, {})

    env = Talk(on_step=step)
    record = played(env)
    assert record.status is status
    assert record.detail.startswith("step: ")
    assert (words in record.detail) and "\n" not in record.detail
    assert [m.text for m in record.messages][:4] == ["start None", "hm", "ok", "hm"]
    assert record.rewards[0] == 1.0
    assert env.closed == 0


def test_tools_that_cannot_be_told_are_the_environments_failure():
    class Odd(Talk):
        @property
        def tools(self):
            raise LookupError("which tools")

    record = played(Odd())
    assert record.status is EpisodeStatus.ENV_FAILURE
    assert record.detail == "its tools cannot be told: LookupError: which tools"


def test_an_environment_is_usable_again_after_it_failed():
    async def step(number):
        raise ValueError

    env = make(EnvSpec("test/Talk-v0", Talk, {"length": 1}))
    env.unwrapped.on_step = step
    assert played(env).status is EpisodeStatus.ENV_FAILURE
    env.unwrapped.on_step = None
    assert played(env).status is EpisodeStatus.COMPLETED


def raise_at_once(error):
    raise error


async def late_answer():
    return assistant("late")


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda m, t: 1 / 0, "policy: ZeroDivisionError"),
        (lambda m, t: 8, "says 8, a int → a reply is a str"),
        (lambda m, t: None, "says None, a NoneType"),
        (lambda m, t: user("x"), "a Message → a reply is a str"),
        (lambda m, t: boom(), "policy: ValueError: boom boom"),
        (lambda m, t: exits(), "SystemExit: 0"),
        (lambda m, t: cancels_itself(), "cancelled from inside"),
        (lambda m: late_answer(), "TypeError"),
        (lambda m, t: raise_at_once(asyncio.CancelledError()), "CancelledError"),
        (lambda m, t: raise_at_once(SystemExit(2)), "SystemExit: 2"),
    ],
)
def test_a_failing_policy_is_a_status(act, words):
    policy = type("Odd", (), {"act": staticmethod(act)})()
    env = Talk()
    record = played(env, policy)
    assert record.status is EpisodeStatus.ENGINE_FAILURE
    assert words in record.detail
    assert (record.turns, env.closed) == (0, 0)


@pytest.mark.parametrize(
    ("env", "policy", "words"),
    [
        ("relax/Calculator-v0", RandomPolicy(), "not 'relax/Calculator-v0' → make"),
        (Talk, RandomPolicy(), r"not the class Talk → Talk\(…\)"),
        (None, RandomPolicy(), "needs an environment, not None"),
        (Talk(), RandomPolicy, r"RandomPolicy is a class → RandomPolicy\(…\)"),
        (Talk(), lambda messages, tools: "x", "is no policy: .* → ScriptedPolicy"),
        (Talk(), {"pro": Always(), "con": None}, "None is no policy"),
    ],
)
def test_what_cannot_play_is_named_at_once(env, policy, words):
    with pytest.raises(ConfigError, match=words):
        played(env, policy)


def test_a_seed_of_numpy_is_a_seed():
    record = played(Talk(1), seed=np.int64(7))
    assert (record.seed, type(record.seed)) == (7, int)
    with pytest.raises(EnvError, match="a seed is a whole number, not 'x'"):
        played(Talk(1), seed="x")


def test_an_environment_without_a_step_says_what_to_write():
    record = played(type("Bare", (Env,), {})())
    assert "Bare does not define step() → async def step(self, action)" in record.detail


def test_a_conversation_that_no_longer_fits_is_truncated():
    def act(messages, tools):
        raise PromptTooLong("9 of 8 tokens")

    record = played(Talk(), ScriptedPolicy(act))
    assert (record.status, record.detail) == (EpisodeStatus.TRUNCATED_TOKENS, "9 of 8 tokens")


# -- what never returns ----------------------------------------------------------------------


@pytest.mark.parametrize("call", ["reset", "step"])
def test_an_environment_that_hangs_fails_at_the_limit_and_is_closed(call):
    env = Talk(**{f"on_{call}": forever})
    record = played(env, limits=PlayLimits(step_timeout_s=0.02))
    assert record.status is EpisodeStatus.ENV_FAILURE
    assert record.detail == f"{call}: no answer within 0.02 s"
    assert env.closed == 1
    assert [m.text for m in record.messages] == (["start None", "hm"] if call == "step" else [])


@pytest.mark.parametrize("call", ["reset", "step", "policy"])
def test_the_time_of_the_whole_episode_ends_any_wait(call):
    env = Talk(**{f"on_{call}": forever} if call != "policy" else {})
    policy = Always() if call != "policy" else ScriptedPolicy(forever)
    record = played(env, policy, limits=PlayLimits(timeout_s=0.02))
    assert record.status is EpisodeStatus.TRUNCATED_TIME
    assert record.detail == f"0.02 s are over (during {call})"
    assert (record.terminated, record.truncated) == (False, True)
    assert env.closed == (call != "policy")


def test_the_time_is_over_also_for_an_episode_that_never_waits():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as a coroutine that was never awaited
        record = played(Talk(10**9), limits=PlayLimits(max_turns=10**9, timeout_s=0.05))
        gc.collect()
    assert record.status is EpisodeStatus.TRUNCATED_TIME
    assert record.turns > 10


def test_an_episode_that_never_waits_lets_others_run():
    async def main():
        long = asyncio.create_task(play(Talk(10**9), Always(), limits=PlayLimits(10**9)))
        short = await play(Talk(2), Always())
        long.cancel()
        return short.status, long.done()

    assert asyncio.run(main()) == (EpisodeStatus.COMPLETED, False)


def test_a_policy_that_hangs_fails_at_its_limit():
    record = played(Talk(), ScriptedPolicy(forever), limits=PlayLimits(policy_timeout_s=0.02))
    assert record.status is EpisodeStatus.ENGINE_FAILURE
    assert record.detail == "policy: no answer within 0.02 s"


def test_a_call_in_time_is_not_disturbed_by_the_limits_of_earlier_ones():
    """One timer serves all waits: an old one that expires must not end a new wait."""

    async def step(number):
        await asyncio.sleep(0.03)
        return [], 0.0, number == 20, False, {}

    async def answer(messages, tools):
        await asyncio.sleep(0.01)
        return "x"

    limits_ = PlayLimits(step_timeout_s=0.5, policy_timeout_s=0.4)
    record = played(Talk(on_step=step), ScriptedPolicy(answer), limits=limits_)
    assert (record.status, record.turns) == (EpisodeStatus.COMPLETED, 20)


def test_an_environment_that_swallows_its_cancellation_is_left_behind(hurry):
    env = Talk(on_step=stubborn, on_close=forever)
    began = time.monotonic()
    record = played(env, limits=PlayLimits(step_timeout_s=0.02))
    assert record.status is EpisodeStatus.ENV_FAILURE
    assert "no answer within 0.02 s; it did not react to its cancellation" in record.detail
    assert "it did not close within 0.05 s" in record.detail
    assert [m.text for m in record.messages] == ["start None", "hm"]
    assert time.monotonic() - began < 20


def test_what_a_hung_environment_says_too_late_changes_no_record(hurry):
    async def late(number):
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            await asyncio.sleep(0.15)
        return [user("too late")], 9.0, True, False, {}

    async def main():
        record = await play(Talk(on_step=late), Always(), limits=PlayLimits(step_timeout_s=0.02))
        before = record.to_record()
        await asyncio.sleep(0.3)
        return before, record.to_record()

    before, after = asyncio.run(main())
    assert before == after
    assert before["rewards"] == []


def test_an_answer_that_comes_after_the_limit_does_not_count():
    async def late(number):
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            return [user("after all")], 9.0, True, False, {}

    record = played(Talk(on_step=late), limits=PlayLimits(step_timeout_s=0.02))
    assert (record.status, record.rewards) == (EpisodeStatus.ENV_FAILURE, [])


def test_a_close_that_fails_is_told_with_the_hang():
    record = played(Talk(on_step=forever, on_close=boom), limits=PlayLimits(step_timeout_s=0.02))
    assert "its close() failed: EnvError" in record.detail


def test_a_plain_environment_that_blocks_is_a_status_and_counted():
    """T154: its thread cannot be killed; it is left behind, and the loop goes on."""
    from relax_agent.envs.threaded import abandoned

    release = threading.Event()

    class Blocks(SyncEnv):
        def step(self, action):
            release.wait(30)

    before = abandoned()
    record = played(Blocks(), limits=PlayLimits(step_timeout_s=0.02))
    assert record.status is EpisodeStatus.ENV_FAILURE
    assert abandoned() == before + 1
    release.set()


def test_a_plain_environment_is_played_as_it_is():
    class Plain(SyncEnv):
        def step(self, action):
            return [], 1.0, True, False, {}

    assert played(Plain()).reward == 1.0


# -- cancellation ----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["reset", "step", "policy"])
def test_a_cancelled_play_ends_its_record_and_everything_under_it(where):
    ended = []

    async def hang(*_):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(where)

    async def main():
        env = Talk(**{f"on_{where}": hang} if where != "policy" else {})
        policy = Always() if where != "policy" else ScriptedPolicy(hang)
        record = Play()
        task = asyncio.create_task(play(env, policy, record=record, task="t"))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1
        return record

    record = asyncio.run(main())
    assert record.status is EpisodeStatus.CANCELLED
    assert ended == [where]
    assert (record.task_id, len(record.messages)) == (
        ("t", 0) if where == "reset" else ("t", 1 if where == "policy" else 2)
    )


def test_a_play_leaves_no_task_and_no_timer_behind():
    async def main():
        loop = asyncio.get_running_loop()
        for _ in range(3):
            await play(Talk(3), Always())
            await play(Talk(on_step=forever), Always(), limits=PlayLimits(step_timeout_s=0.01))
        await asyncio.sleep(0)
        waiting_timers = [h for h in loop._scheduled if not h.cancelled()]
        return len(asyncio.all_tasks()), waiting_timers

    assert asyncio.run(main()) == (1, [])


def test_a_play_frees_what_it_used():
    class Big(Talk):
        pass

    async def main():
        await play(Big(2), Always())
        gc.collect()
        return sum(isinstance(thing, Big) for thing in gc.get_objects())

    assert asyncio.run(main()) == 0


# -- policies --------------------------------------------------------------------------------


def test_a_script_takes_replies_in_all_forms():
    look, go = ToolCall("look", {}), ToolCall("go", {"to": "x"}, "mine")
    policy = ScriptedPolicy(["hi", look, [look, go], assistant("bye", tool_calls=[look])])
    first, second, third, fourth = (policy.act([], []) for _ in range(4))
    assert first == assistant("hi")
    assert [c.id for c in second.tool_calls] == ["call_2_0"]
    assert [c.id for c in third.tool_calls] == ["call_3_0", "mine"]
    assert (fourth.text, fourth.tool_calls[0].id) == ("bye", "call_4_0")
    assert policy.remaining == 0


def test_a_script_that_is_over_says_so_and_can_begin_again():
    policy = ScriptedPolicy(["a"])
    assert policy.act([], []).text == "a"
    for _ in range(2):
        with pytest.raises(PolicyError, match="the script has 1 replies and was asked for another"):
            policy.act([], [])
    policy.rewind()
    assert policy.act([], []).text == "a"
    record = played(Talk(3), ScriptedPolicy(["a"]))
    assert (record.status, record.turns) == (EpisodeStatus.ENGINE_FAILURE, 1)
    assert "the script has 1 replies" in record.detail


@pytest.mark.parametrize("script", ["text", ToolCall("look", {}), assistant("x")])
def test_a_script_is_a_list(script):
    with pytest.raises(ConfigError, match="a script is a list of replies"):
        ScriptedPolicy(script)


@pytest.mark.parametrize("reply", [3, None, user("x"), [ToolCall("a", {}), "b"], {"role": "x"}])
def test_a_reply_that_is_none_is_named(reply):
    with pytest.raises(PolicyError, match="a reply is a str, a ToolCall"):
        ScriptedPolicy([reply]).act([], [])


def test_a_script_may_be_a_function_plain_or_async():
    async def later(messages, tools):
        await asyncio.sleep(0)
        return ToolCall(messages[0].text, {})

    async def main():
        plain = ScriptedPolicy(lambda messages, tools: messages[0].text)
        assert plain.act([user("a")], []).text == "a"
        assert plain.remaining is None
        return await ScriptedPolicy(later).act([user("b")], [])

    assert asyncio.run(main()).tool_calls[0].name == "b"


def test_what_acts_is_a_policy():
    assert isinstance(ScriptedPolicy([]), Policy)
    assert isinstance(RandomPolicy(), Policy)
    assert not isinstance("text", Policy)


SCHEMAS = [
    {"properties": {"n": {"type": "integer", "minimum": 5, "maximum": 7}}, "required": ["n"]},
    {"properties": {"n": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 2}}},
    {"properties": {"n": {"type": "integer", "minimum": 100}}},
    {"properties": {"n": {"type": "integer", "maximum": -100}}},
    {"properties": {"n": {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 20}}},
    {"properties": {"x": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.001}}},
    {"properties": {"x": {"type": "number", "multipleOf": 0.5}}},
    {"properties": {"s": {"type": "string", "minLength": 30, "maxLength": 31}}},
    {"properties": {"s": {"type": "string", "maxLength": 1}}},
    {"properties": {"s": {"const": "only"}, "e": {"enum": [1, None, "x"]}}},
    {"properties": {"u": {"type": ["string", "null"]}, "v": {"anyOf": [{"type": "null"}, {}]}}},
    {"properties": {"a": {"type": "array", "items": {"type": "boolean"}, "minItems": 4}}},
    {"properties": {"a": {"type": "array", "items": {"type": "integer"}, "maxItems": 1}}},
    {
        "properties": {
            "a": {
                "type": "array",
                "items": {"enum": [1, 2, 3]},
                "uniqueItems": True,
                "minItems": 3,
                "maxItems": 3,
            }
        }
    },
    {
        "properties": {
            "pair": {
                "type": "array",
                "prefixItems": [{"type": "string"}, {"type": "integer"}],
                "items": False,
                "minItems": 2,
            }
        }
    },
    {
        "properties": {"tree": {"$ref": "#/$defs/Tree"}},
        "required": ["tree"],
        "$defs": {
            "Tree": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "left": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}]},
                    "kids": {"type": "array", "items": {"$ref": "#/$defs/Tree"}},
                },
                "required": ["value", "left"],
                "additionalProperties": False,
            }
        },
    },
    {
        "properties": {"node": {"$ref": "#/$defs/Node"}},
        "required": ["node"],
        "$defs": {
            "Node": {
                "type": "object",
                "properties": {"left": {"$ref": "#/$defs/Side"}, "right": {"$ref": "#/$defs/Side"}},
                "required": ["left", "right"],
            },
            "Side": {"anyOf": [*[{"$ref": "#/$defs/Node"}] * 3, {"type": "null"}]},
        },
    },
    {
        "properties": {
            "all": {
                "allOf": [
                    {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                    {"properties": {"b": {"type": "string"}}, "required": ["b"]},
                ],
                "type": "object",
            }
        },
        "required": ["all"],
    },
    {"properties": {"map": {"type": "object", "additionalProperties": {"type": "integer"}}}},
    {"additionalProperties": {"type": "boolean"}, "minProperties": 2},
    {"properties": {}},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_random_arguments_fit_their_schema(schema):
    schema = {"type": "object", "additionalProperties": False, **schema}
    rng, shapes = random.Random(1), set()
    for _ in range(60):
        arguments = random_arguments(schema, rng)
        jsonschema.validate(arguments, schema, cls=jsonschema.Draft202012Validator)
        shapes.add(json.dumps(arguments, sort_keys=True))
    optional = set(schema.get("properties", {})) - set(schema.get("required", ()))
    if optional or "additionalProperties" not in schema:
        assert len(shapes) > 1


def test_random_play_follows_from_the_seed_and_leaves_the_global_generator_alone():
    """T161."""

    @tool
    def move(x: int, y: float, words: list[str], how: str | None = None) -> str:
        """Move."""
        return ""

    schemas, state = Toolset([move]).schemas(), random.getstate()

    def choices(seed):
        policy = RandomPolicy(seed)
        return [policy.act([], schemas) for _ in range(20)]

    assert choices(1) == choices(1) != choices(2)
    assert random.getstate() == state
    said = choices(1)
    assert any(m.tool_calls for m in said) and any(m.text for m in said)
    assert all(RandomPolicy(n, call_share=0).act([], schemas).text for n in range(9))
    assert all(not m.tool_calls for m in [RandomPolicy(0).act([], [])])

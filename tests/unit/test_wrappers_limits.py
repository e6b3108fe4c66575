"""Limits end episodes from outside, say by what, and never take an earned reward away."""

import asyncio
from dataclasses import replace

import pytest

from relax_agent.envs import Env, EnvSpec, PlayLimits, ScriptedPolicy, SyncEnv, make, play
from relax_agent.envs.wrappers import TimeLimit, TokenLimit, WallClock
from relax_agent.envs.wrappers.tokens import estimated_tokens
from relax_agent.errors import ConfigError, EnvError
from relax_agent.messages import (
    Audio,
    Image,
    Rewrite,
    ToolCall,
    Usage,
    Video,
    assistant,
    tool_message,
    user,
)
from relax_agent.status import EpisodeStatus


class Endless(Env):
    """Goes on for ever, or ends by itself at ``last``; each step earns 1."""

    def __init__(self, last=None, on_step=None, on_reset=None):
        self.last, self.on_step, self.on_reset = last, on_step, on_reset
        self.seen = []

    async def reset(self, *, seed=None, options=None):
        self.seen = []
        if self.on_reset is not None:
            await self.on_reset()
        return [user("begin")], {"at": "reset"}

    async def step(self, action):
        self.seen.append(action)
        if self.on_step is not None:
            await self.on_step()
        return [user("more")], 1.0, len(self.seen) == self.last, False, {"at": "step"}


def said(prompt=0, completion=0, text="x", left=None):
    return replace(assistant(text), usage=Usage(prompt, completion, left))


def steps(env, *actions):
    """Reset, step through the actions until the end, and return what each step gave."""

    async def main():
        await env.reset(seed=1)
        out = []
        for action in actions:
            out.append(await env.step(action))
            if out[-1][2] or out[-1][3]:
                break
        return out

    return asyncio.run(main())


def test_a_limit_on_turns_ends_with_the_last_turns_reward():
    out = steps(TimeLimit(Endless(), 3), *[said()] * 5)
    assert [(r, t, c) for _, r, t, c, _ in out] == [(1, False, False)] * 2 + [(1, False, True)]
    assert out[-1][4]["status"] == "truncated_turns"
    assert "status" not in out[0][4]


@pytest.mark.parametrize("wrap", [lambda e: TimeLimit(e, 2), lambda e: TokenLimit(e, 20)])
def test_the_tasks_own_end_at_the_limit_is_no_truncation(wrap):
    _, _, terminated, truncated, info = steps(wrap(Endless(last=2)), said(1, 10), said(1, 10))[-1]
    assert (terminated, truncated) == (True, False)
    assert "status" not in info


def test_a_limit_counts_each_episode_from_zero():
    env = TimeLimit(Endless(), 2)
    assert len(steps(env, *[said()] * 5)) == len(steps(env, *[said()] * 5)) == 2


def test_tokens_are_those_that_the_policy_spent():
    env = TokenLimit(Endless(), 100)
    out = steps(env, said(50, 40), said(95, 59), said(160, 1), said(170, 9))
    assert [info["tokens_left"] for *_, info in out] == [60, 1, 0]
    assert out[-1][4]["status"] == "truncated_tokens"
    assert "tokens_estimated" not in out[0][4]


def test_a_limit_on_the_context_counts_everything_in_it_once():
    out = steps(TokenLimit(Endless(), max_context=200), said(50, 40), said(100, 40), said(150, 49))
    lefts = [info["tokens_left"] for *_, info in out]
    more = estimated_tokens(user("more"))
    assert lefts == [200 - 90 - more, 200 - 140 - more, 0]


def test_the_inner_environment_is_told_what_is_left():
    inner = Endless()
    steps(TokenLimit(inner, 100), said(0, 40, left=999), said(0, 40, left=7))
    assert [action.usage.tokens_left for action in inner.seen] == [60, 7]


def test_messages_without_usage_are_estimated_so_that_the_limit_holds():
    out = steps(TokenLimit(Endless(), 100), *[said(text="y" * 200)] * 9)
    assert len(out) == 2
    assert out[0][4]["tokens_estimated"] is True


@pytest.mark.parametrize(
    "message",
    [
        user(["hello", Image(b"x"), Audio(b"y"), Video(b"z")]),
        tool_message(Image(b"x"), ToolCall("look", {}, "c")),
        assistant("", tool_calls=[ToolCall("f", {"x": object()}, "c")], reasoning="because"),
        assistant(""),
        user("ünïcode\ud800"),
    ],
)
def test_counting_is_total_over_every_kind_of_part(message):
    """U26: a counter that raises on audio ends a run."""
    assert estimated_tokens(message) > 0


def test_a_rewritten_history_is_counted_anew():
    class Forks(Endless):
        async def step(self, action):
            await super().step(action)
            return Rewrite((user("short"),), "why"), 0.0, False, False, {}

    out = steps(TokenLimit(Forks(), max_context=1000), said(500, 400))
    assert out[0][4]["tokens_left"] == 1000 - estimated_tokens(user("short"))


def ticking(*times):
    left = list(times)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def test_the_clock_starts_at_reset_and_ends_the_episode_after_the_running_step():
    clock = ticking(100.0, 101.0, 101.5, 109.0, 111.0)  # reset, then before and after each step
    out = steps(WallClock(Endless(), 10, clock=clock), said(), said(), said())
    assert [truncated for *_, truncated, _ in out] == [False, True]
    observation, reward, *_, info = out[-1]
    assert (reward, info["status"], info["at"]) == (1.0, "truncated_time", "step")
    assert observation == [user("more")]


def test_a_hard_clock_cancels_a_step_that_runs():
    cancelled = []

    async def hang():
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    out = steps(WallClock(Endless(on_step=hang), 0.05, hard=True), said())
    assert out[0][:4] == ([], 0.0, False, True)
    assert out[0][4]["status"] == "truncated_time"
    assert cancelled == [True]


def test_a_hard_clock_begins_no_step_after_the_time():
    inner = Endless()
    out = steps(WallClock(inner, 10, hard=True, clock=ticking(0.0, 99.0)), said())
    assert (inner.seen, out[0][3]) == ([], True)


def test_a_hard_clock_bounds_the_reset_too():
    async def hang():
        await asyncio.sleep(3600)

    env = WallClock(Endless(on_reset=hang), 0.05, hard=True)
    with pytest.raises(EnvError, match="reset"):
        asyncio.run(env.reset())


@pytest.mark.parametrize("hard", [False, True])
def test_what_an_environment_raises_passes_through_a_clock(hard):
    async def fail():
        raise KeyError("mine")

    with pytest.raises(KeyError):
        steps(WallClock(Endless(on_step=fail), 10, hard=hard), said())


@pytest.mark.parametrize(
    ("wrap", "status"),
    [
        (lambda e: TimeLimit(e, 2), EpisodeStatus.TRUNCATED_TURNS),
        (lambda e: TokenLimit(e, 30), EpisodeStatus.TRUNCATED_TOKENS),
        (lambda e: WallClock(e, 5, clock=ticking(0, 1, 2, 3, 9)), EpisodeStatus.TRUNCATED_TIME),
    ],
)
def test_a_played_episode_has_the_status_of_its_limit(wrap, status):
    async def main():
        policy = ScriptedPolicy([said(0, 10)] * 9)
        return await play(wrap(Endless()), policy, limits=PlayLimits(max_turns=8))

    assert asyncio.run(main()).status is status


@pytest.mark.parametrize(
    "bad",
    [
        lambda e: TimeLimit(e, 0),
        lambda e: TokenLimit(e),
        lambda e: TokenLimit(e, 0),
        lambda e: TokenLimit(e, 5, max_context=-1),
        lambda e: WallClock(e, 0),
        lambda e: WallClock(e, float("nan")),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(bad):
    with pytest.raises(ConfigError):
        bad(Endless())


def test_limits_round_trip_through_a_spec_in_their_order():
    env = make("relax/Calculator-v0", train_tasks=9, eval_tasks=3)
    env = WallClock(TokenLimit(TimeLimit(env, 3), max_context=99), 5.5, hard=True)
    again = EnvSpec.from_json(env.spec.to_json()).make()
    assert again.spec.to_json() == env.spec.to_json()
    clock = again.env  # behind the guard
    assert (clock.seconds, clock.hard) == (5.5, True)
    assert (clock.env.max_tokens, clock.env.max_context) == (None, 99)
    assert clock.env.env.max_turns == 3


def test_limits_hold_for_a_plain_environment_too():
    class Plain(SyncEnv):
        def reset(self, *, seed=None, options=None):
            return [user("begin")], {}

        def step(self, action):
            return [user("more")], 0.5, False, False, {}

    async def main():
        async with TimeLimit(Plain(), 1) as env:
            await env.reset()
            return await env.step(said())

    assert asyncio.run(main())[1:4] == (0.5, False, True)

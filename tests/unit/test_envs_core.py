"""The environment API behind ``make``: order of calls, contract checks, sync authors, seeds."""

import asyncio
import random
import threading

import pytest

from relax_agent.envs import Env, SyncEnv, TimeLimit, Wrapper, make
from relax_agent.envs.guard import Guard
from relax_agent.envs.registration import EnvSpec, WrapperSpec
from relax_agent.envs.threaded import ThreadedEnv
from relax_agent.errors import ConfigError, EnvError, InvalidAction, ResetNeeded
from relax_agent.messages import assistant, user


class Dice(Env):
    """Shows a roll of its own dice; ends after ``length`` steps."""

    def __init__(self, length: int = 3) -> None:
        self.left = self.length = length
        self.closed = 0

    def roll(self):
        return [user(str(self.rng.randint(1, 10**9)))]

    async def reset(self, *, seed=None, options=None):
        await super().reset(seed=seed)
        self.left = self.length
        return self.roll(), {}

    async def step(self, action):
        self.left -= 1
        await asyncio.sleep(0)
        return self.roll(), 1.0, self.left == 0, False, {}

    async def close(self):
        self.closed += 1


class SyncDice(SyncEnv):
    """The same, written with plain functions; notes the threads it runs in."""

    def __init__(self) -> None:
        self.idents = [threading.get_ident()]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.idents.append(threading.get_ident())
        return [user(str(self.rng.randint(1, 10**9)))], {}

    def step(self, action):
        self.idents.append(threading.get_ident())
        return [user(str(self.rng.randint(1, 10**9)))], 0.0, False, False, {}

    def close(self):
        self.idents.append(threading.get_ident())


async def rolls(env, seed, steps=2):
    observation, _ = await env.reset(seed=seed)
    seen = [observation[0].text]
    for _ in range(steps):
        observation, *_ = await env.step(assistant("go"))
        seen.append(observation[0].text)
    return seen


def of(kind, **kwargs):
    return make(EnvSpec("test/Any-v0", kind, kwargs))


def test_step_needs_an_episode():
    async def main():
        env = of(Dice, length=1)
        with pytest.raises(ResetNeeded, match="test/Any-v0: step\\(\\) outside an episode"):
            await env.step(assistant("go"))
        await env.reset(seed=1)
        assert (await env.step(assistant("go")))[2] is True
        with pytest.raises(ResetNeeded):
            await env.step(assistant("go"))
        await env.close()
        with pytest.raises(ResetNeeded, match="closed"):
            await env.reset()

    asyncio.run(main())


def test_close_reaches_the_environment_once():
    async def main():
        env = of(Dice)
        async with env:
            await env.close()
        return env.unwrapped.closed

    assert asyncio.run(main()) == 1


@pytest.mark.parametrize("action", ["text", user("hello"), None])
def test_an_action_that_is_no_assistant_message_is_named(action):
    async def main():
        env = of(Dice)
        await env.reset()
        with pytest.raises(InvalidAction, match=type(action).__name__):
            await env.step(action)
        await env.step(assistant("still running"))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (([], 0.0, False, {}), "must return"),
        (("text", 0.0, False, False, {}), "list of Message"),
        (([user("x"), "y"], 0.0, False, False, {}), "list of Message"),
        (([], "1", False, False, {}), "is not a number"),
        (([], True, False, False, {}), "is not a number"),
        (([], float("nan"), False, False, {}), "reward is nan"),
        (([], 0.0, 1, False, {}), "must be bool"),
        (([], 0.0, False, False, None), "must be a dict"),
    ],
)
def test_a_broken_step_result_is_named(result, words):
    class Broken(Dice):
        async def step(self, action):
            return result

    async def main():
        env = of(Broken)
        await env.reset()
        with pytest.raises(EnvError, match=words):
            await env.step(assistant("go"))

    asyncio.run(main())


def test_what_an_environment_raises_names_environment_and_call():
    class Crash(Dice):
        async def step(self, action):
            raise ZeroDivisionError("oh")

    async def main():
        env = of(Crash)
        await env.reset()
        with pytest.raises(EnvError, match="test/Any-v0: step\\(\\) raised ZeroDivisionError: oh"):
            await env.step(assistant("go"))
        with pytest.raises(ResetNeeded):
            await env.step(assistant("go"))

    asyncio.run(main())


@pytest.mark.parametrize("kind", [Dice, SyncDice])
def test_equal_seeds_give_equal_episodes_however_interleaved(kind):
    """T161: concurrent environments do not disturb each other or the global generator."""

    async def main():
        state = random.getstate()
        alone = await rolls(of(kind), 5)
        pair = await asyncio.gather(rolls(of(kind), 5), rolls(of(kind), 5), rolls(of(kind), 6))
        assert random.getstate() == state
        return alone, pair

    alone, pair = asyncio.run(main())
    assert pair[0] == pair[1] == alone
    assert pair[2] != alone


def test_a_sync_environment_lives_in_one_thread_of_its_own():
    """T151: steps from inside a running loop do not deadlock; the thread never changes."""

    async def main():
        env = of(SyncDice)
        await rolls(env, 1)
        await env.close()
        return env.unwrapped.idents

    idents = asyncio.run(main())
    assert len(idents) == 5
    assert len(set(idents)) == 1
    assert idents[0] != threading.get_ident()


def test_a_blocking_step_does_not_delay_another_environment():
    release = threading.Event()

    class Slow(SyncDice):
        def step(self, action):
            release.wait(30)
            return super().step(action)

    async def main():
        slow, quick = of(Slow), of(Dice)
        await slow.reset()
        waiting = asyncio.ensure_future(slow.step(assistant("go")))
        await rolls(quick, 1)
        assert not waiting.done()
        release.set()
        await waiting

    asyncio.run(main())


def test_a_sync_environment_past_its_time_limit_is_dead():
    """T154: a call that hangs ends at the limit; its thread is abandoned."""
    release = threading.Event()

    class Hung(SyncDice):
        closed = threading.Event()

        def step(self, action):
            release.wait(30)

        def close(self):
            self.closed.set()

    async def main():
        env = Guard(ThreadedEnv(Hung, timeout_s=0.05))
        await env.reset()
        with pytest.raises(EnvError, match="took over"):
            await env.step(assistant("go"))
        with pytest.raises(EnvError, match="the environment is dead"):
            await env.reset()
        await env.close()
        assert not Hung.closed.is_set()
        release.set()
        assert Hung.closed.wait(30)  # its own close() runs when the thread is free again

    asyncio.run(main())


def test_a_cancelled_step_of_a_sync_environment_kills_the_environment():
    release, entered = threading.Event(), threading.Event()

    class Slow(SyncDice):
        def step(self, action):
            entered.set()
            release.wait(30)

    async def main():
        env = of(Slow)
        await env.reset()
        task = asyncio.ensure_future(env.step(assistant("go")))
        assert await asyncio.to_thread(entered.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        release.set()
        with pytest.raises(EnvError, match="was cancelled while it ran"):
            await env.reset()

    asyncio.run(main())


def test_a_constructor_that_fails_says_so_from_make():
    class Bad(SyncDice):
        def __init__(self) -> None:
            raise ValueError("no display")

    with pytest.raises(EnvError, match="its constructor raised ValueError: no display"):
        of(Bad)


def test_plain_functions_on_env_itself_work_and_a_mixture_is_refused():
    class Plain(Env):
        def reset(self, *, seed=None, options=None):
            return [user(str(self.rng.random()))], {}

        def step(self, action):
            return [], 0.0, True, False, {}

    class Mixed(Env):
        async def reset(self, *, seed=None, options=None):
            return [], {}

        def step(self, action):
            return [], 0.0, True, False, {}

    async def main():
        env = of(Plain)
        first, _ = await env.reset(seed=3)
        second, _ = await env.reset(seed=3)
        assert first == second
        await env.close()

    asyncio.run(main())
    with pytest.raises(ConfigError, match="mixes async and plain"):
        of(Mixed)


def test_the_turn_limit_truncates_but_not_an_episode_that_ended_by_itself():
    async def ends(length, limit):
        wrapper = WrapperSpec(TimeLimit, {"max_turns": limit})
        env = make(EnvSpec("test/Any-v0", Dice, {"length": length}, (wrapper,)))
        out = []
        for _ in range(2):
            await env.reset(seed=1)
            flags = []
            while not flags or not any(flags[-1]):
                _, _, *step, _ = await env.step(assistant("go"))
                flags.append(tuple(step))
            out.append(flags)
        with pytest.raises(ResetNeeded):
            await env.step(assistant("go"))
        assert out[0] == out[1]
        return out[0]

    go, end, cut = (False, False), (True, False), (False, True)
    assert asyncio.run(ends(3, 2)) == [go, cut]
    assert asyncio.run(ends(2, 2)) == [go, end]
    assert asyncio.run(ends(1, 2)) == [end]


def test_a_wrapper_by_itself_changes_nothing():
    async def main():
        return await rolls(Wrapper(Dice()), 4), await rolls(Dice(), 4)

    wrapped, bare = asyncio.run(main())
    assert wrapped == bare

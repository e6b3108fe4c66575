"""The environment API behind ``make``: order of calls, contract checks, sync authors, seeds."""

import asyncio
import gc
import random
import threading
import time
import warnings

import numpy as np
import pytest

from relax_agent import tool
from relax_agent.envs import (
    Env,
    EnvSpec,
    SyncEnv,
    Task,
    TaskSet,
    TimeLimit,
    Transcript,
    Wrapper,
    WrapperSpec,
    make,
    make_async,
)
from relax_agent.envs.guard import Guard
from relax_agent.envs.threaded import abandoned
from relax_agent.errors import EnvError, ResetNeeded
from relax_agent.messages import assistant, user
from relax_agent.tools import Toolset


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


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


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


async def rolls(env, seed, steps=2):
    observation, _ = await env.reset(seed=seed)
    seen = [observation[0].text]
    for _ in range(steps):
        observation, *_ = await env.step(assistant("go"))
        seen.append(observation[0].text)
    return seen


def of(kind, **kwargs):
    return make(EnvSpec("test/Any-v0", kind), **kwargs)


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


@pytest.mark.parametrize("kind", [Dice, SyncDice])
def test_a_seed_is_a_whole_number_of_any_library(kind):
    async def main():
        assert await rolls(of(kind), np.int64(5)) == await rolls(of(kind), 5)
        for wrong in ("5", 5.0):
            with pytest.raises(EnvError, match="a seed is a whole number"):
                await of(kind).reset(seed=wrong)

    asyncio.run(main())


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


def test_a_sync_environment_that_hangs_is_dead_for_its_driver_and_counted():
    """T154: whoever drives it has the limit; the thread is left behind until it ends by itself."""
    release = threading.Event()

    class Hung(SyncDice):
        closed = threading.Event()

        def step(self, action):
            release.wait(30)

        def close(self):
            self.closed.set()

    async def main():
        env, before = of(Hung), abandoned()
        await env.reset()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(env.step(assistant("go")), 0.05)
        assert abandoned() == before + 1
        with pytest.raises(EnvError, match=r"the environment is dead: step\(\) was cancelled"):
            await env.reset()
        await env.close()
        assert not Hung.closed.is_set()
        release.set()
        assert await asyncio.to_thread(Hung.closed.wait, 30)  # as soon as the thread is free again
        return before

    before = asyncio.run(main())
    wait_until(lambda: abandoned() == before)


def test_a_constructor_that_hangs_ends_at_the_limit_of_the_start():
    """T152: the limit covers what the constructor boots; what comes too late is closed."""
    release, closed = threading.Event(), threading.Event()

    class Boots(SyncDice):
        def __init__(self) -> None:
            super().__init__()
            release.wait(30)

        def close(self):
            closed.set()

    spec = EnvSpec("test/Any-v0", Boots)
    with pytest.raises(EnvError, match=r"constructor took over 0\.05 s → make.*start_timeout_s"):
        make(spec, start_timeout_s=0.05)

    async def meanwhile():
        return await asyncio.gather(
            make_async(spec, start_timeout_s=0.05), asyncio.sleep(0, "loop"), return_exceptions=True
        )

    failed, other = asyncio.run(meanwhile())
    assert isinstance(failed, EnvError) and other == "loop"
    release.set()
    assert closed.wait(30)


def test_an_environment_that_is_built_after_its_caller_has_gone_is_closed():
    release, entered, closed = threading.Event(), threading.Event(), threading.Event()

    class Boots(SyncDice):
        def __init__(self) -> None:
            super().__init__()
            entered.set()
            release.wait(30)

        def close(self):
            closed.set()

    async def main():
        task = asyncio.ensure_future(make_async(EnvSpec("test/Any-v0", Boots)))
        assert await asyncio.to_thread(entered.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        release.set()
        assert await asyncio.to_thread(closed.wait, 30)

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


def test_plain_functions_on_env_itself_work():
    class Plain(Env):
        def reset(self, *, seed=None, options=None):
            observation, info = super().reset(seed=seed)
            return [*observation, user(str(self.rng.random()))], info

        def step(self, action):
            return [], 0.0, True, False, {}

        def close(self):
            super().close()

    async def main():
        env = of(Plain)
        first, _ = await env.reset(seed=3)
        second, _ = await env.reset(seed=3)
        other, _ = await env.reset(seed=4)
        assert first == second != other
        await env.close()

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as a coroutine that was never awaited
        asyncio.run(main())


def test_super_reset_may_be_awaited_or_not():
    env = Env()

    async def main():
        return await env.reset(seed=1), await asyncio.create_task(env.reset(seed=1))

    assert asyncio.run(main()) == (([], {}), ([], {}))
    observation, info = env.reset(seed=1)
    assert (observation, info) == ([], {})


MIXTURES = [
    {"reset": True, "step": False, "close": False},
    {"reset": False, "step": True, "close": True},
    {"reset": False, "step": False, "close": True},
    {"reset": False, "step": True, "close": False},
]


@pytest.mark.parametrize("base", [Env, SyncEnv])
@pytest.mark.parametrize("plain", MIXTURES)
def test_plain_and_async_functions_mix(base, plain):
    """T151: plain ones run in the environment's one thread, async ones in the loop."""
    seen = {}

    def note(name, value):
        seen.setdefault(name, []).append(threading.get_ident())
        return value

    results = {"reset": ([user("x")], {}), "step": ([], 0.0, False, False, {}), "close": None}
    members = {"__init__": lambda self: note("init", None)}
    for name, result in results.items():

        def plain_call(self, *args, name=name, result=result, **kwargs):
            return note(name, result)

        async def async_call(self, *args, name=name, result=result, **kwargs):
            await asyncio.sleep(0)
            return note(name, result)

        members[name] = plain_call if plain[name] else async_call

    async def main():
        async with of(type("Mixed", (base,), members)) as env:
            for _ in range(2):
                await env.reset(seed=1)
                for _ in range(3):
                    await env.step(assistant("go"))
        return threading.get_ident()

    here = asyncio.run(main())
    threads = {name: set(idents) for name, idents in seen.items()}
    assert {name: threads[name] != {here} for name in plain} == plain
    in_thread = [threads[name] for name in plain if plain[name]]
    if plain["reset"] or plain["step"]:
        in_thread.append(threads["init"])
    assert len(set.union(*in_thread)) == 1
    assert [len(seen[name]) for name in ("init", "reset", "step", "close")] == [1, 2, 6, 1]


def test_a_plain_function_that_returns_a_coroutine_is_awaited():
    """Decorators often hide an async function behind a plain one."""

    def logged(function):
        def inner(*args, **kwargs):
            return function(*args, **kwargs)

        return inner

    class Decorated(Dice):
        step = logged(Dice.step)

    async def main():
        env = of(Decorated)
        await env.reset(seed=1)
        return (await env.step(assistant("go")))[1]

    assert asyncio.run(main()) == 1.0


def test_a_plain_environment_may_be_wrapped_by_hand():
    async def main():
        env = TimeLimit(SyncDice(), max_turns=1)
        await env.reset(seed=1)
        return (await env.step(assistant("go")))[3]

    assert asyncio.run(main()) is True


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


def test_closing_a_wrapper_closes_what_is_in_it():
    env = Dice()
    asyncio.run(TimeLimit(Wrapper(env), max_turns=1).close())
    assert env.closed == 1


def test_an_argument_of_the_constructor_may_be_called_env():
    class Named(Dice):
        def __init__(self, env) -> None:
            super().__init__()
            self.name = env

    assert of(Named, env="x").unwrapped.name == "x"


def test_a_wrapper_by_itself_changes_nothing():
    async def main():
        return await rolls(Wrapper(Dice()), 4), await rolls(Dice(), 4)

    wrapped, bare = asyncio.run(main())
    assert wrapped == bare


def test_a_wrapper_shows_the_inner_environment_as_it_is_now():
    class Grows(Dice):
        async def reset(self, *, seed=None, options=None):
            self.tools = Toolset([add])
            self.tasks = TaskSet([Task("t", "go")])
            return await super().reset(seed=seed)

    async def main():
        inner = Grows()
        env = Guard(TimeLimit(Wrapper(inner), max_turns=3))
        assert (env.tools.names, env.tasks) == ((), None)
        await env.reset(seed=1)
        assert env.tools is inner.tools
        assert env.tasks is inner.tasks
        assert env.rng is inner.rng
        assert env.unwrapped is inner

    asyncio.run(main())


def test_a_wrapper_may_have_tools_of_its_own():
    class More(Wrapper):
        def __init__(self, env):
            super().__init__(env)
            self.tools = Toolset([*env.tools, add])

    class Computed(Wrapper):
        @property
        def tools(self):
            return Toolset([add])

    class Fewer(Wrapper):
        def __init__(self, env):
            super().__init__(env)
            self.tools, self.tasks = Toolset(), TaskSet([])

    env = Dice()
    assert Guard(Fewer(More(env))).tools.names == ()
    assert Fewer(env).tasks.ids("train") == TaskSet([]).ids("train")
    assert Guard(More(env)).tools.names == ("add",)
    assert Guard(Computed(env)).tools.names == ("add",)
    assert env.tools.names == ()


def test_a_plain_environment_is_seen_as_it_is_now():
    class Grows(SyncDice):
        def reset(self, *, seed=None, options=None):
            self.tools = Toolset([add])
            return super().reset(seed=seed)

    async def main():
        env = of(Grows)
        await env.reset()
        return env.tools.names

    assert asyncio.run(main()) == ("add",)


class Pairs(Dice):
    async def score_group(self, task_id, members):
        return [float(len(member)) for member in members]


class SyncPairs(SyncDice):
    def score_group(self, task_id, members):
        self.idents.append(threading.get_ident())
        return [len(member) for member in members]


@pytest.mark.parametrize("kind", [Dice, SyncDice])
def test_a_group_has_no_extra_reward_by_default(kind):
    members = [Transcript(), Transcript()]
    assert asyncio.run(Wrapper(of(kind)).score_group("t", members)) == [0.0, 0.0]


@pytest.mark.parametrize("kind", [Pairs, SyncPairs])
def test_wrappers_and_threads_hand_the_groups_score_through(kind):
    members = [Transcript([user("a")]), Transcript()]
    env = TimeLimit(of(kind), max_turns=1)
    assert asyncio.run(env.score_group("t", members)) == [1.0, 0.0]
    if kind is SyncPairs:
        assert len(set(env.unwrapped.idents)) == 1


def test_a_global_generator_is_never_touched_by_reset_and_step():
    """T161: also by an author who forgot super().reset() in a plain environment."""

    class Forgot(SyncDice):
        def reset(self, *, seed=None, options=None):
            return [user(str(self.rng.random()))], {}

    async def main():
        state = random.getstate()
        alone = await rolls(of(Forgot), 5)
        first, second = of(Forgot), of(Forgot)
        (a, _), (b, _) = await first.reset(seed=5), await second.reset(seed=5)
        pair = [[a[0].text], [b[0].text]]
        for _ in range(2):
            for env, texts in ((first, pair[0]), (second, pair[1])):
                texts.append((await env.step(assistant("go")))[0][0].text)
        assert random.getstate() == state
        assert pair == [alone, alone]

    asyncio.run(main())


def test_an_environment_in_its_own_thread_is_freed_with_its_thread():
    before = threading.active_count()

    async def main():
        for _ in range(5):
            env = of(SyncDice)
            await env.reset()
            del env
        gc.collect()

    asyncio.run(main())
    wait_until(lambda: threading.active_count() <= before)

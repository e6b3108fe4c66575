"""Many episodes at once: slots have their own limits, and one that fails never stops the others."""

import asyncio
import contextlib
import random
import time
from typing import ClassVar

import pytest

from relax_agent import limits as waiting
from relax_agent.envs import (
    Env,
    EnvSpec,
    Job,
    PlayLimits,
    RandomPolicy,
    ScriptedPolicy,
    SyncEnv,
    make_vec,
)
from relax_agent.errors import ConfigError, EnvBusy, EnvError, InvalidAction, ResetNeeded, ToolError
from relax_agent.messages import assistant, user
from relax_agent.status import EpisodeStatus

GO = assistant("go")


class Walk(Env):
    """Ends after as many steps as its task says; tasks of words do something wrong."""

    made: ClassVar[list["Walk"]] = []

    def __init__(self, length=2, fail_first=0):
        self.made.append(self)
        self.length, self.closed, self.task = length, 0, ""
        if len(self.made) <= fail_first:
            raise OSError("no display")

    async def reset(self, *, seed=None, options=None):
        await super().reset(seed=seed)
        self.task = (options or {}).get("task", str(self.length))
        if self.task == "bad reset":
            raise ValueError("oh")
        if self.task == "slow reset":
            await asyncio.Event().wait()
        self.left = int(self.task) if self.task.isdigit() else 9
        return [user(f"{self.task} {self.rng.random()}")], {"task": self.task}

    async def step(self, action):
        await asyncio.sleep(0)
        if self.task == "crash":
            raise ValueError("oh")
        if self.task == "tool":
            raise ToolError("no server")
        if self.task == "hang":
            await asyncio.Event().wait()
        self.left -= 1
        return [user(f"left {self.left}")], 1.0, self.left == 0, False, {"metrics": {"x": 1}}

    async def close(self):
        self.closed += 1


@pytest.fixture(autouse=True)
def count_afresh():
    Walk.made.clear()


SPEC = EnvSpec("test/Walk-v0", Walk)


def vec(n=3, *, kind=SPEC, **kwargs):
    return make_vec(kind, n, **kwargs)


def tasks(*names):
    return [{"task": name} for name in names]


# -- lockstep --------------------------------------------------------------------------------


def test_slots_step_together_and_an_ended_one_is_skipped_until_it_is_reset():
    async def main():
        async with vec() as v:
            observations, infos = await v.reset(options=tasks("1", "2", "3"))
            assert [info["task"] for info in infos] == ["1", "2", "3"]
            assert [o[0].text[0] for o in observations] == ["1", "2", "3"]
            o, r, terminated, truncated, infos = await v.step([GO] * 3)
            assert (r, terminated, truncated) == ([1.0] * 3, [True, False, False], [False] * 3)
            assert v.running == [False, True, True]
            o, r, terminated, truncated, infos = await v.step([None, GO, GO])
            assert (o[0], r, terminated) == ([], [0.0, 1.0, 1.0], [True, True, False])
            assert infos[0] == {}
            o, infos = await v.reset(slots=[0], options={"task": "5"})
            assert (o[1:], infos[1:]) == ([[], []], [{}, {}])
            assert v.running == [True, False, True]
            assert (await v.step([GO, None, GO]))[2] == [False, True, True]
        return [env.closed for env in Walk.made]

    assert asyncio.run(main()) == [1, 1, 1]


def test_seeds_are_derived_as_in_gymnasium():
    """T161: and no global generator is touched."""

    async def texts(seed):
        async with vec() as v:
            return [o[0].text for o in (await v.reset(seed=seed))[0]]

    async def main():
        state = random.getstate()
        a, b, c = await texts(5), await texts([5, 6, 7]), await texts([7, 6, 5])
        assert random.getstate() == state
        async with vec(1) as v:
            alone = (await v.reset(seed=6))[0][0][0].text
        return a, b, c, alone

    a, b, c, alone = asyncio.run(main())
    assert a == b == c[::-1]
    assert len(set(a)) == 3
    assert a[1] == alone


@pytest.mark.parametrize(
    ("task", "status", "words"),
    [
        ("crash", "env_failure", "step: EnvError: test/Walk-v0: step() raised ValueError: oh"),
        ("hang", "env_failure", "step: no answer within 0.05 s"),
        ("tool", "tool_failure", "step: ToolError: no server"),
    ],
)
def test_a_slot_that_fails_truncates_and_gets_another_environment(task, status, words):
    async def main():
        async with vec(step_timeout_s=0.05) as v:
            await v.reset(options=tasks("3", task, "3"))
            _, r, _, truncated, infos = await v.step([GO] * 3)
            assert (r, truncated) == ([1.0, 0.0, 1.0], [False, True, False])
            assert infos[1]["status"] == status
            assert infos[1]["detail"].startswith(words)
            assert v.envs[1] is None and v.replaced == 1
            assert (await v.step([GO, None, GO]))[1] == [1.0, 0.0, 1.0]
            await v.reset(slots=[1], options={"task": "1"})
            assert (await v.step([GO] * 3))[2] == [True, True, True]
        assert len(Walk.made) == 4
        return [env.closed for env in Walk.made]

    assert asyncio.run(main()) == [1, 1, 1, 1]


@pytest.mark.parametrize("task", ["bad reset", "slow reset"])
def test_a_slot_whose_reset_fails_has_ended(task):
    async def main():
        async with vec(step_timeout_s=0.05) as v:
            observations, infos = await v.reset(options=tasks("2", task, "2"))
            assert observations[1] == []
            assert infos[1]["status"] == "env_failure"
            assert infos[1]["detail"].startswith("reset: ")
            assert v.running == [True, False, True]
            assert (await v.step([GO, None, GO]))[3] == [False, True, False]
            with pytest.raises(EnvError, match="no slot could be reset: reset: "):
                await v.reset(options={"task": task})
            await v.reset()
            assert v.running == [True] * 3

    asyncio.run(main())


def test_a_slot_that_cannot_be_built_is_tried_again_at_its_next_reset():
    async def main():
        async with vec(kind=EnvSpec("test/Walk-v0", Walk, {"fail_first": 2})) as v:
            _, infos = await v.reset()
            assert [info.get("status") for info in infos] == ["env_failure", "env_failure", None]
            assert "its constructor raised OSError: no display" in infos[0]["detail"]
            await v.reset(slots=[0, 1])
            assert v.running == [True] * 3

    asyncio.run(main())


def test_what_no_slot_could_do_better_is_an_error_at_once():
    with pytest.raises(ConfigError, match="unexpected keyword argument 'lenght'"):
        vec(lenght=3)
    with pytest.raises(ConfigError, match="n must be"):
        vec(0)
    with pytest.raises(ConfigError, match="must be > 0"):
        vec(step_timeout_s=0)

    class Wrong(Walk):
        def __init__(self):
            raise ConfigError("there is no such file")

    async def main():
        async with vec(kind=EnvSpec("test/Wrong-v0", Wrong)) as v:
            with pytest.raises(ConfigError, match="no such file"):
                await v.reset()
            with pytest.raises(ConfigError, match="no such file"):
                async for _ in v.run(lambda: ScriptedPolicy([]), ["1"]):
                    pass

    asyncio.run(main())


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda v: v.step([GO]), InvalidAction, "1 actions for 3 slots"),
        (lambda v: v.step(GO), InvalidAction, "no list of actions for 3 slots"),
        (lambda v: v.step([GO, "go", GO]), InvalidAction, "slot 1 needs an AssistantMessage"),
        (lambda v: v.step([GO, None, GO]), InvalidAction, "slot 1 needs .*, not NoneType"),
        (lambda v: v.reset(seed=[1]), ConfigError, "1 seeds for 3 slots"),
        (lambda v: v.reset(options=[{}]), ConfigError, "1 options for 3 slots"),
        (lambda v: v.reset(slots=[3]), ConfigError, "there is no slot 3 → 0 to 2"),
        (lambda v: v.reset(slots=[-1]), ConfigError, "there is no slot -1"),
    ],
)
def test_a_mistake_is_named_before_any_slot_moves(call, kind, words):
    async def main():
        async with vec() as v:
            await v.reset()
            with pytest.raises(kind, match=words):
                await call(v)
            return [env.unwrapped.left for env in v.envs]

    assert asyncio.run(main()) == [2, 2, 2]


def test_a_slot_without_an_episode_takes_no_action():
    async def main():
        async with vec() as v:
            with pytest.raises(ResetNeeded, match=r"slot 0 .* → .* reset\(slots=\[0\]\)"):
                await v.step([GO] * 3)
            assert (await v.step([None] * 3))[1] == [0.0] * 3

    asyncio.run(main())


def test_two_calls_at_once_are_refused():
    async def main():
        async with vec() as v:
            await v.reset()
            running = asyncio.ensure_future(v.step([GO] * 3))
            await asyncio.sleep(0)
            with pytest.raises(EnvBusy, match=r"reset\(\) while its step\(\) still runs"):
                await v.reset()
            await running
        with pytest.raises(ResetNeeded, match="is closed"):
            await v.reset()

    asyncio.run(main())


def test_autoreset_begins_the_next_episode_in_the_same_step():
    async def main():
        async with vec(2, autoreset=True) as v:
            await v.reset(options=tasks("1", "3"))
            o, r, terminated, _, infos = await v.step([GO, GO])
            assert (r, terminated, v.running) == ([1.0, 1.0], [True, False], [True, True])
            assert o[0][0].text.startswith("2 ")
            assert infos[0]["task"] == "2"
            assert infos[0]["final_observation"] == [user("left 0")]
            assert infos[0]["final_info"] == {"metrics": {"x": 1}}
            assert "final_info" not in infos[1]
            assert (await v.step([GO, GO]))[2] == [False, False]

    asyncio.run(main())


def test_autoreset_tries_a_slot_again_that_could_not_be_reset():
    class Shy(Walk):
        async def reset(self, *, seed=None, options=None):
            if len(self.made) == 2:
                raise OSError("busy")
            return await super().reset(seed=seed, options=options)

    async def main():
        async with vec(1, kind=EnvSpec("test/Shy-v0", Shy), autoreset=True) as v:
            await v.reset(options=tasks("crash"))
            *_, truncated, infos = await v.step([GO])
            assert (truncated, v.running) == ([True], [False])
            assert infos[0]["status"] == "env_failure"
            assert "busy" in infos[0]["reset_detail"]
            o, *_ = await v.step([None])
            assert v.running == [True] and o[0][0].text.startswith("2 ")

    asyncio.run(main())


def test_plain_environments_step_at_the_same_time():
    import threading

    barrier = threading.Barrier(3, timeout=20)

    class Meets(SyncEnv):
        def step(self, action):
            barrier.wait()
            return [], 1.0, True, False, {}

    async def main():
        async with vec(kind=EnvSpec("test/Meets-v0", Meets)) as v:
            await v.reset()
            return (await v.step([GO] * 3))[1]

    assert asyncio.run(main()) == [1.0] * 3


@pytest.fixture
def hurry(monkeypatch):
    """What was told to stop gets little time for it."""
    from relax_agent.envs import jobs, playing, slots

    for module in (waiting, jobs, playing, slots):
        monkeypatch.setattr(module, "GRACE_S", 0.05)


def test_closing_takes_no_longer_than_its_slowest_allowed(hurry, caplog):
    class Clings(Walk):
        async def close(self):
            await asyncio.Event().wait()

    class Breaks(Walk):
        async def close(self):
            raise OSError("stuck")

    async def main(kind):
        v = vec(50, kind=EnvSpec("test/Odd-v0", kind))
        await v.reset()
        began = time.monotonic()
        await v.close()
        await v.close()
        return time.monotonic() - began

    assert asyncio.run(main(Clings)) < 20 * 0.05  # together, not one after the other: 2.5 s
    assert "did not close within 0.05 s" in caplog.text
    asyncio.run(main(Breaks))
    assert "stuck" in caplog.text


def test_closing_waits_for_environments_that_were_given_up():
    class Slow(Walk):
        async def close(self):
            await asyncio.sleep(0.05)
            await super().close()

    async def main():
        v = vec(2, kind=EnvSpec("test/Slow-v0", Slow))
        await v.reset(options=tasks("crash", "2"))
        await v.step([GO, GO])
        await v.close()
        return [env.closed for env in Walk.made], len(asyncio.all_tasks())

    assert asyncio.run(main()) == ([1, 1], 1)


def test_cancelling_a_step_reaches_every_slot():
    async def main():
        async with vec() as v:
            await v.reset(options={"task": "hang"})
            task = asyncio.ensure_future(v.step([GO] * 3))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(asyncio.all_tasks()) == 1
            await v.reset()

    asyncio.run(main())


# -- each slot by itself ---------------------------------------------------------------------


def always():
    return ScriptedPolicy(lambda messages, tools: "go")


async def all_plays(v, jobs, policy=always, **kwargs):
    return [each async for each in v.run(policy, jobs, **kwargs)]


def test_every_job_is_played_once_and_failures_are_plays_too():
    names = ["1", "crash", "2", "hang", "bad reset", "3", "tool", "4", "1", "slow reset"]

    async def main():
        async with vec(2, step_timeout_s=0.05) as v:
            found = await all_plays(v, names)
            left = len(asyncio.all_tasks())
        return found, left, v.replaced

    plays, left, replaced = asyncio.run(main())
    assert sorted(play.task_id for play in plays) == sorted(names)
    status = {play.task_id: play.status.value for play in plays}
    assert {status[name] for name in "1234"} == {"completed"}
    assert {status[n] for n in ("crash", "hang", "bad reset", "slow reset")} == {"env_failure"}
    assert status["tool"] == "tool_failure"
    assert {play.turns for play in plays if play.task_id == "4"} == {4}
    assert [env.closed for env in Walk.made] == [1] * len(Walk.made)
    assert len(Walk.made) <= 2 + 5  # another one for each that failed, where jobs are left
    assert replaced == 5
    assert left == 1


def test_plays_come_as_they_end_and_a_hanging_one_stops_nobody():
    async def main():
        async with vec(2) as v:
            limits = PlayLimits(step_timeout_s=0.5)
            return [p.task_id async for p in v.run(always, ["hang", *"12345"], limits=limits)]

    assert asyncio.run(main()) == [*"12345", "hang"]


def test_an_environment_that_was_closed_for_hanging_is_replaced():
    async def main():
        async with vec(1) as v:
            plays = await all_plays(v, ["hang", "1"], limits=PlayLimits(timeout_s=0.1))
            return [play.status for play in plays], v.replaced

    ends = [EpisodeStatus.TRUNCATED_TIME, EpisodeStatus.COMPLETED]
    assert asyncio.run(main()) == (ends, 1)


def test_no_more_than_n_run_at_once_and_jobs_are_asked_for_as_slots_are_free():
    running, most, asked = 0, 0, []

    class Counts(Walk):
        async def reset(self, *, seed=None, options=None):
            nonlocal running, most
            running += 1
            most = max(most, running)
            return await super().reset(seed=seed, options=options)

        async def step(self, action):
            nonlocal running
            await asyncio.sleep(0.001)
            result = await super().step(action)
            running -= result[2]
            return result

    def jobs():
        for number in range(100):
            asked.append(number)
            yield Job("2", seed=number)

    async def main():
        async with vec(3, kind=EnvSpec("test/Counts-v0", Counts)) as v:
            plays = v.run(always, jobs())
            first = await anext(plays)
            early = len(asked)
            rest = [each async for each in plays]
        return [first, *rest], early

    plays, early = asyncio.run(main())
    assert sorted(play.seed for play in plays) == list(range(100))
    assert most == 3
    assert early <= 3 + 3 + 3
    assert len(Walk.made) == 3


def test_jobs_may_come_from_an_async_generator():
    async def jobs():
        for number in range(7):
            await asyncio.sleep(0.001)
            yield Job("1", seed=number)

    async def main():
        async with vec(3) as v:
            return await all_plays(v, jobs())

    assert sorted(play.seed for play in asyncio.run(main())) == list(range(7))


@pytest.mark.parametrize("jobs", ["task", Job("task"), [3], [None]])
def test_what_is_no_job_is_named(jobs):
    async def main():
        async with vec() as v:
            with pytest.raises(ConfigError, match=r"jobs must be a list|a job is a task's id"):
                await all_plays(v, jobs)
            return await all_plays(v, ["1"])

    assert len(asyncio.run(main())) == 1


def test_jobs_that_cannot_be_made_end_the_run_with_their_error():
    def jobs():
        yield "1"
        raise LookupError("no more data")

    async def main():
        async with vec() as v:
            with pytest.raises(LookupError, match="no more data"):
                await all_plays(v, jobs())
            return len(asyncio.all_tasks())

    assert asyncio.run(main()) == 1


def test_policies_are_made_for_each_episode_or_shared():
    made = []

    def factory():
        made.append(always())
        return made[-1]

    def broken():
        raise OSError("no key")

    async def main():
        async with vec(2) as v:
            await all_plays(v, ["1"] * 5, factory)
            assert len(made) == 5
            shared = ScriptedPolicy(["a"] * 5)
            assert all(p.status == "completed" for p in await all_plays(v, ["1"] * 5, shared))
            assert shared.remaining == 0
            assert len(await all_plays(v, ["1"] * 2, RandomPolicy)) == 2
            (play,) = await all_plays(v, ["1"], broken)
            assert (play.status, play.detail) == ("engine_failure", "policy: OSError: no key")
            with pytest.raises(ConfigError, match="is no policy"):
                await all_plays(v, ["1"], "text")

    asyncio.run(main())


def test_leaving_early_ends_the_rest_and_the_slots_can_be_used_again():
    async def main():
        async with vec(3) as v:
            async for first in v.run(always, ["1", "hang", "hang", "1"]):
                task = first.task_id
                break
            again = await all_plays(v, ["1", "2"])
            async with contextlib.aclosing(v.run(always, ["1", "hang", "hang"])) as plays:
                async for _ in plays:
                    break
            assert len(asyncio.all_tasks()) == 1
            return task, len(again), [env.closed for env in Walk.made], v.replaced

    task, again, closed, replaced = asyncio.run(main())
    assert (task, again) == ("1", 2)
    assert replaced == 4
    assert sum(closed) == 4


def test_cancelling_the_reader_ends_everything():
    async def read(v):
        async for _ in v.run(always, ["hang"] * 9):
            pass

    async def main():
        async with vec(3) as v:
            task = asyncio.create_task(read(v))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(asyncio.all_tasks()) == 1
            assert v.replaced == 3
            return len(await all_plays(v, ["1"]))

    assert asyncio.run(main()) == 1


def test_closing_ends_a_run_for_its_reader():
    async def main():
        v = vec(2)
        reader = asyncio.create_task(all_plays(v, ["1", "hang", "hang"]))
        await asyncio.sleep(0.02)
        await v.close()
        plays = await asyncio.wait_for(reader, 20)
        return [play.task_id for play in plays], [env.closed for env in Walk.made]

    found, closed = asyncio.run(main())
    assert found == ["1"]
    assert set(closed) == {1}


def test_a_run_and_a_step_at_once_are_refused():
    async def main():
        async with vec(2) as v:
            running = asyncio.ensure_future(all_plays(v, ["hang"]))
            await asyncio.sleep(0.01)
            for call in (v.reset(), all_plays(v, ["1"])):
                with pytest.raises(EnvBusy, match=r"while its run\(\) still runs"):
                    await call
            running.cancel()
            await asyncio.wait({running})

    asyncio.run(main())


def test_a_slow_reader_slows_the_playing_down():
    asked = []

    def jobs():
        for number in range(1000):
            asked.append(number)
            yield "1"

    async def main():
        async with vec(2) as v, contextlib.aclosing(v.run(always, jobs())) as plays:
            await anext(plays)
            for _ in range(200):
                await asyncio.sleep(0)
            return len(asked)

    assert asyncio.run(main()) < 12


def test_a_play_of_a_run_is_like_any_other():
    async def main():
        async with vec(1) as v:
            return await all_plays(v, [Job("2", seed=4), Job(seed=4)])

    first, second = asyncio.run(main())
    assert (first.env_id, first.task_id, first.seed) == ("test/Walk-v0", "2", 4)
    assert first.status is second.status is EpisodeStatus.COMPLETED
    assert (second.task_id, first.metrics) == ("2", {"x": 1.0})
    assert [m.text for m in first.messages] == [m.text for m in second.messages]

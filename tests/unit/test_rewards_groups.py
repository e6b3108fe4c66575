"""Group rewards in a rollout: asked once, added where the trainer looks, never the group's end."""

import asyncio
import logging

import pytest
from rollout_support import FakeEngine, FakeEnv, now, run, runner

from relax_agent import Rubric, Task, ToolEnv
from relax_agent.envs import SyncEnv, Wrapper, make, register, registry
from relax_agent.envs.rewards import exact_match
from relax_agent.rollout import GroupRunner
from relax_agent.rollout.group_rewards import scores_groups

HOUR = 3600.0


class Ranked(FakeEnv):
    """Members that said "good" share a bonus; counts how often it is asked."""

    asked = 0

    async def score_group(self, task_id, members):
        Ranked.asked += 1
        self.seen_members = members
        good = [member.answer == "good" for member in members]
        return [each / max(1, sum(good)) for each in good]


def answers(*texts):
    """An engine that gives the members of a group different answers."""
    left = list(texts)
    return FakeEngine(lambda request: left.pop(0))


def run_group(engine, env=Ranked, *, size=4, keep=True, **changes):
    episodes = runner(engine, env, **changes)
    return run(GroupRunner(episodes, size=size, keep_equal_rewards=keep).run("g", "t"))


def test_the_group_is_asked_once_and_the_reward_stands_where_the_trainer_looks():
    Ranked.asked = 0
    outcome = run_group(answers("good", "bad", "good", "bad"))
    assert Ranked.asked == 1
    rewards = [episode.reward for episode in outcome.group.episodes]
    assert sorted(rewards) == [0.0, 0.0, 1.5, 1.5]
    for episode in outcome.group.episodes:
        assert episode.turns[-1].reward == episode.reward
        assert episode.metrics["group_reward"] == (0.5 if episode.reward else 0.0)
        assert episode.metrics["group_reward_failures"] == 0.0
        assert episode.to_json()["reward"] == episode.reward


def test_members_bring_their_conversation_reward_and_metrics():
    seen = []

    class Looks(FakeEnv):
        async def score_group(self, task_id, members):
            seen.append((task_id, [(m.answer, m.reward, m.metrics["success"]) for m in members]))
            return [0.0] * len(members)

    run_group(answers("good", "bad"), Looks, size=2)
    ((task_id, members),) = seen
    assert task_id == "t"
    assert sorted(members) == [("bad", 0.0, 0.0), ("good", 1.0, 1.0)]


def test_a_group_that_only_its_group_reward_tells_apart_is_not_filtered():
    class Order(FakeEnv):
        async def score_group(self, task_id, members):
            return list(range(len(members)))

    assert run_group(FakeEngine("good"), Order, keep=False).reason is None
    assert run_group(FakeEngine("good"), FakeEnv, keep=False).reason == "filtered"


async def raises(members):
    raise ValueError("no opinion")


async def hangs(members):
    await asyncio.sleep(HOUR)


async def gives_nan(members):
    return [float("nan")] * len(members)


async def gives_too_few(members):
    return [1.0]


async def gives_none(members):
    return None


@pytest.mark.parametrize(
    ("judge", "words"),
    [
        (raises, "ValueError: no opinion"),
        (hangs, "no answer within 10 s"),
        (gives_nan, "it returned [nan"),
        (gives_too_few, "1 rewards for 3 members"),
        (gives_none, "TypeError"),
    ],
)
def test_a_judge_of_groups_that_fails_costs_only_its_reward(judge, words, caplog):
    class Failing(FakeEnv):
        async def score_group(self, task_id, members):
            members[0].metrics["half_done"] = 1.0
            return await judge(members)

    with caplog.at_level(logging.WARNING):
        outcome = run_group(FakeEngine("good"), Failing, size=3, env_timeout_s=10)
    assert outcome.reason is None
    assert [episode.reward for episode in outcome.group.episodes] == [1.0] * 3
    for episode in outcome.group.episodes:
        assert episode.metrics["group_reward_failures"] == 1.0
        assert episode.metrics["group_reward"] == 0.0
        assert "half_done" not in episode.metrics
    assert words in caplog.text


def test_an_environment_that_hung_in_it_is_not_used_again():
    made = []

    class Hung(FakeEnv):
        def __init__(self):
            super().__init__()
            made.append(self)

        async def score_group(self, task_id, members):
            await asyncio.sleep(HOUR)

    async def main():
        episodes = runner(FakeEngine("good"), Hung, pool=1)
        start = now()
        await GroupRunner(episodes, size=2).run("g", "t")
        assert now() - start < HOUR
        await GroupRunner(episodes, size=2).run("h", "t")
        return episodes._envs.discarded

    assert run(main()) == 2
    assert [env.closed for env in made] == [1, 1]


def test_a_group_that_is_dropped_is_not_asked():
    Ranked.asked = 0

    class Half(Ranked):
        async def reset(self, *, seed=None, options=None):
            raise ValueError("no display")

    assert run_group(FakeEngine("good"), Half).reason == "failed"
    assert Ranked.asked == 0


def test_a_cancelled_group_stops_its_judge():
    stopped = []

    class Slow(FakeEnv):
        async def score_group(self, task_id, members):
            try:
                await asyncio.sleep(50)
            finally:
                stopped.append(True)

    async def main():
        group = GroupRunner(runner(FakeEngine("good"), Slow), size=2)
        running = asyncio.create_task(group.run("g", "t"))
        await asyncio.sleep(20)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return len(asyncio.all_tasks())

    assert run(main()) == 1
    assert stopped == [True]


# -- who is asked at all -----------------------------------------------------------------------


class Plain(ToolEnv):
    """No group functions."""

    tasks = (Task("t", "?", "4"),)
    rubric = Rubric(exact_match)


def shortest(task, members):
    best = min(len(member.answer) for member in members)
    return [float(len(member.answer) == best) for member in members]


class Compared(Plain):
    """One group function."""

    rubric = Rubric(exact_match, group=[(shortest, 0.5)])


class ByHand(SyncEnv):
    """A plain function."""

    def score_group(self, task_id, members):
        return [1.0] * len(members)


class Judging(Wrapper):
    """A wrapper with an opinion of its own."""

    async def score_group(self, task_id, members):
        return [1.0] * len(members)


@pytest.mark.parametrize(
    ("kind", "asked"), [(Plain, False), (Compared, True), (ByHand, True), (SyncEnv, False)]
)
def test_only_environments_with_something_to_say_are_asked(kind, asked):
    register("test/Kind-v0", kind)
    try:
        env = make("test/Kind-v0")
        assert scores_groups(env) is asked
        assert scores_groups(Wrapper(env)) is asked
        assert scores_groups(Judging(env)) is True
    finally:
        del registry["test/Kind-v0"]


def test_a_rubrics_group_functions_reach_the_members_metrics():
    group = GroupRunner(runner(answers("good", "no"), Compared), size=2)
    outcome = asyncio.run(group.run("g", "t"))  # a real clock: plain functions run in threads
    by_answer = {episode.messages[-1].text: episode for episode in outcome.group.episodes}
    assert by_answer["no"].reward == 0.5
    assert by_answer["good"].reward == 0.0
    assert by_answer["no"].metrics["shortest"] == 1.0
    assert by_answer["no"].metrics["group_reward"] == 0.5

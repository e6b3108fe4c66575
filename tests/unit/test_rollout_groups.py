"""Groups, the producer and evaluation: every started group ends exactly once."""

import asyncio
import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_support import (
    FakeEngine,
    FakeEnv,
    dead,
    ids_of,
    now,
    result,
    run,
    runner,
)

from relax_agent.episode import EpisodeStatus
from relax_agent.errors import ConfigError, ProducerFailed, RunFailed
from relax_agent.queue import LocalQueue, QueueSettings, load_group
from relax_agent.rollout import (
    EnvPool,
    Fleet,
    GroupRunner,
    Producer,
    RolloutSettings,
    episode_options,
    evaluate,
)
from relax_agent.rollout.groups import equal
from relax_agent.rollout.seeds import stable_seed

HOUR = 3600.0


def group(engine, make_env=FakeEnv, *, size=4, keep_equal_rewards=True, **changes):
    episodes = runner(engine, make_env, **changes)
    return GroupRunner(episodes, size=size, keep_equal_rewards=keep_equal_rewards)


# -- one group -----------------------------------------------------------------------------------


def test_members_share_task_and_env_seed_and_differ_in_their_sampling():
    engine = FakeEngine("good")
    envs = []

    def make():
        envs.append(FakeEnv())
        return envs[-1]

    outcome = run(group(engine, make).run("g1", "t1"))
    assert outcome.reason is None
    assert [episode.group_id for episode in outcome.group.episodes] == ["g1"] * 4
    seen = {seen for env in envs for seen in env.tasks_seen}
    assert seen == {(outcome.group.episodes[0].seed, "t1")}
    assert len({request.sampling.seed for request in engine.requests}) == 4


def test_two_groups_of_one_task_have_different_seeds():
    first = run(group(FakeEngine("good")).run("g1", "t1"))
    second = run(group(FakeEngine("good")).run("g2", "t1"))
    assert first.group.episodes[0].seed != second.group.episodes[0].seed


def failing(times):
    """Fails the first ``times`` episodes at their second request, then works."""
    failed = set()

    def script(request):
        episode, turn, _ = request.rid.split(".")
        if int(turn) == 1 and (episode in failed or len(failed) < times):
            failed.add(episode)
            return dead(request)
        return "good" if int(turn) else "old tokens"

    return script


def test_a_failed_member_is_run_once_more_from_a_clean_copy():
    """T116: nothing of the first try is in the second. T112: one of eight fails: replaced."""
    outcome = run(group(FakeEngine(failing(1)), lambda: FakeEnv(turns=2), size=8).run("g", "t"))
    assert outcome.reason is None
    assert len(outcome.group.episodes) == 8
    (failed,) = outcome.failed
    assert failed.status is EpisodeStatus.ENGINE_FAILURE
    assert len(failed.turns) == 1, "its trace is kept"
    lengths = {len(episode) for episode in outcome.group.episodes}
    assert len(lengths) == 1, "no member carries old tokens"
    assert failed.id not in {episode.id for episode in outcome.group.episodes}


def test_an_aborted_member_is_dropped_and_its_task_is_run_again():
    """T115: without partial rollouts an aborted sample is no sample."""
    aborted = []

    def script(request):
        if not aborted:
            aborted.append(request)
            return result([65], finish="abort", request=request)
        return "good"

    outcome = run(group(FakeEngine(script), on_abort="retry").run("g", "t"))
    assert [episode.status for episode in outcome.failed] == [EpisodeStatus.CANCELLED]
    assert len(outcome.group.episodes) == 4
    assert all(turn.finish_reason == "stop" for e in outcome.group.episodes for turn in e.turns)


@pytest.mark.parametrize(
    ("broken", "reason"), [(0, None), (1, None), (2, None), (3, "dropped"), (4, "failed")]
)
def test_a_group_goes_on_with_the_rest_while_two_remain(broken, reason):
    episodes = runner(FakeEngine("good"))
    play = episodes.run

    async def boom(env):
        raise ValueError("no display")

    async def run_member(*args, member, **kwargs):
        on_reset = boom if member < broken else None
        episodes._envs = EnvPool(lambda: FakeEnv(on_reset=on_reset), 1)
        return await play(*args, member=member, **kwargs)

    episodes.run = run_member
    outcome = run(GroupRunner(episodes, size=4).run("g", "t"))
    assert outcome.reason == reason
    assert len(outcome.group.episodes) == 4 - broken
    assert len(outcome.failed) == 2 * broken, "each was tried twice"
    if reason is not None:
        assert "no display" in outcome.detail


@pytest.mark.parametrize(("keep", "reason"), [(True, None), (False, "filtered")])
def test_a_group_with_equal_rewards_is_filtered_only_if_the_recipe_says_so(keep, reason):
    outcome = run(group(FakeEngine("good"), keep_equal_rewards=keep).run("g", "t"))
    assert outcome.reason == reason


def test_rewards_that_differ_by_rounding_are_equal():
    """U1: seven rewards of 0.3."""
    assert equal([0.1 + 0.2] * 3 + [0.3] * 4)
    assert equal([5.0])
    assert not equal([0.0, 1e-3])


def test_a_single_member_is_a_group_of_its_own():
    assert run(group(FakeEngine("good"), size=1).run("g", "t")).reason is None
    assert run(group(FakeEngine(dead), size=1).run("g", "t")).reason == "failed"


def test_every_try_is_handed_out_with_its_status():
    """T59: the trace keeps every attempt; the trainer gets the valid ones."""
    seen = []
    outcome = run(
        group(FakeEngine(failing(1)), lambda: FakeEnv(2), on_episode=seen.append).run("g", "t")
    )
    assert Counter(episode.status for episode in seen) == {
        EpisodeStatus.COMPLETED: 4,
        EpisodeStatus.ENGINE_FAILURE: 1,
    }
    assert {id(e) for e in seen} == {id(e) for e in [*outcome.group.episodes, *outcome.failed]}


def test_a_cancelled_group_leaves_no_task_and_hands_out_the_traces():
    seen = []

    async def forever(request):
        if request.rid.split(".")[1] == "0001":
            await asyncio.sleep(HOUR)
        return result(ids_of("a"), request=request)

    async def main():
        running = asyncio.create_task(
            group(FakeEngine(forever), lambda: FakeEnv(2), on_episode=seen.append).run("g", "t")
        )
        await asyncio.sleep(10)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert len(asyncio.all_tasks()) == 1

    run(main())
    assert [episode.status for episode in seen] == [EpisodeStatus.CANCELLED] * 4
    assert all(len(episode.turns) == 1 for episode in seen)


# -- environments --------------------------------------------------------------------------------


def test_environments_are_used_again_and_broken_ones_never():
    made = []

    def make():
        async def maybe(env):
            if len(made) == 1 and len(env.tasks_seen) == 2:
                raise ValueError("worn out")

        made.append(FakeEnv(on_reset=maybe))
        return made[-1]

    async def main():
        episodes = runner(FakeEngine("good"), make, pool=1)
        statuses = [(await episodes.run("t", "g", 1)).status for _ in range(4)]
        assert statuses[1] is EpisodeStatus.ENV_FAILURE
        assert statuses.count(EpisodeStatus.COMPLETED) == 3
        assert [env.closed for env in made] == [1, 0]
        await episodes._envs.close()
        assert [env.closed for env in made] == [1, 1]
        assert episodes._envs.discarded == 1

    run(main())


def test_no_more_episodes_run_at_a_time_than_the_pool_holds():
    engine = FakeEngine()
    most = 0

    async def script(request):
        nonlocal most
        most = max(most, engine.running)
        await asyncio.sleep(1)
        return result(ids_of("good"), request=request)

    engine.script = script
    outcome = run(group(engine, size=20, pool=3).run("g", "t"))
    assert len(outcome.group.episodes) == 20
    assert most == 3


def test_an_environment_that_cannot_be_built_fails_its_episode_but_a_wrong_recipe_is_raised():
    def no_display():
        raise OSError("no display")

    def wrong():
        raise ConfigError("max_operand must be positive")

    outcome = run(group(FakeEngine("good"), no_display).run("g", "t"))
    assert outcome.reason == "failed"
    assert "no display" in outcome.detail
    with pytest.raises(ExceptionGroup) as caught:
        run(group(FakeEngine("good"), wrong).run("g", "t"))
    assert caught.group_contains(ConfigError)


def test_an_environment_that_does_not_close_holds_nobody_up():
    class Clinging(FakeEnv):
        async def close(self):
            await asyncio.sleep(HOUR)

    async def main():
        pool = EnvPool(Clinging, 1)
        start = now()
        async with pool.borrow():
            pass
        async with pool.borrow():
            pass
        assert now() - start < 60

    run(main())


# -- the producer --------------------------------------------------------------------------------


class Rig:
    """A producer, a queue and a trainer that only counts."""

    def __init__(self, folder, engine, make_env=FakeEnv, *, per_step=2, size=2, **changes):
        queue = {k: changes.pop(k) for k in list(changes) if k in QueueSettings.model_fields}
        producer = {k: changes.pop(k) for k in list(changes) if k in ("max_episodes", "on_group")}
        failures = changes.pop("max_failures_in_a_row", 16)
        keep = changes.pop("keep_equal_rewards", True)
        self.per_step = per_step
        self.queue = LocalQueue(folder, QueueSettings(**queue), groups_per_step=per_step)
        self.tasks = changes.pop("tasks", (f"t{n}" for n in itertools.count()))
        self.groups = GroupRunner(
            runner(engine, make_env, pool=64, **changes), size=size, keep_equal_rewards=keep
        )
        self.producer = Producer(
            self.queue,
            self.groups,
            self.tasks,
            max_episodes=producer.pop("max_episodes", 64),
            max_failures_in_a_row=failures,
            **producer,
        )
        self.trained: list[str] = []

    async def train(self, first, last, *, commit=None, seconds=1.0):
        for step in range(first, last + 1):
            lease = await self.queue.lease(self.per_step, step=step, timeout=100 * HOUR)
            await asyncio.sleep(seconds)
            self.trained += [group.id for group in lease.groups]
            await self.queue.ack(lease, step)
            if commit and step % commit == 0:
                await self.queue.commit(step)

    async def steps(self, first, last, **how):
        """Train some steps with the producer beside it, then stop it."""
        await self.queue.restore(first - 1)
        producing = asyncio.create_task(self.producer.run())
        try:
            await self.train(first, last, **how)
        finally:
            producing.cancel()
            await asyncio.gather(producing, return_exceptions=True)
        return await self.queue.stats()


def test_tasks_come_in_order_and_counters_add_up(tmp_path):
    async def main():
        rig = Rig(tmp_path, FakeEngine("good"))
        stats = await rig.steps(1, 5)
        assert rig.trained == [f"g{n:08d}" for n in range(10)]
        tasks = await rig.queue.groups()
        assert [tasks[group_id] for group_id in rig.trained] == [f"t{n}" for n in range(10)]
        assert stats.trained == 10
        assert stats.reserved == 0, "every started group has ended"
        assert stats.started == stats.trained + stats.ready + stats.cancelled
        assert rig.producer.running_episodes == 0
        await rig.queue.close()

    run(main())


def test_a_group_reaches_the_queue_as_soon_as_it_is_finished(tmp_path):
    """T133: no barrier: 3 of 4 groups are visible while the fourth runs for an hour."""

    async def main():
        async def script(request):
            slow = "t0" in "".join(map(chr, request.input_ids))
            await asyncio.sleep(HOUR if slow else 1)
            return result(ids_of("good"), request=request)

        rig = Rig(tmp_path, FakeEngine(script), on_straggler="overtake", timeout_s=2 * HOUR)
        producing = asyncio.create_task(rig.producer.run())
        await asyncio.sleep(5)
        stats = await rig.queue.stats()
        assert (stats.ready, stats.reserved) == (3, 1)
        producing.cancel()
        await asyncio.gather(producing, return_exceptions=True)
        await rig.queue.close()

    run(main())


def test_a_new_group_starts_as_soon_as_there_is_room_not_when_all_are_done(tmp_path):
    """T124: no drain: a long tail does not keep free capacity idle."""

    async def main():
        async def script(request):
            slow = "t0" in "".join(map(chr, request.input_ids))
            await asyncio.sleep(1000 if slow else 1)
            return result(ids_of("good"), request=request)

        rig = Rig(tmp_path, FakeEngine(script), max_episodes=4, max_staleness=5, timeout_s=2 * HOUR)
        producing = asyncio.create_task(rig.producer.run())
        await asyncio.sleep(20)
        assert (await rig.queue.stats()).ready >= 10
        producing.cancel()
        await asyncio.gather(producing, return_exceptions=True)
        await rig.queue.close()

    run(main())


def test_the_number_of_episodes_is_bounded_by_max_episodes_to_one_group(tmp_path):
    async def main():
        most = 0
        rig = Rig(tmp_path, FakeEngine(), max_episodes=3, size=2, max_staleness=5)

        async def script(request):
            nonlocal most
            most = max(most, rig.producer.running_episodes)
            await asyncio.sleep(1)
            return result(ids_of("good"), request=request)

        rig.groups._episodes._source.script = script
        await rig.steps(1, 4)
        assert most == 4
        await rig.queue.close()

    run(main())


def test_filtered_and_failed_groups_are_replaced(tmp_path):
    async def main():
        seen = []

        def script(request):
            text = "".join(map(chr, request.input_ids))
            number = int(text[text.index(" t") + 2 : text.index("\0")])
            if number % 3 == 1:
                return dead(request)
            if number % 3 == 2:
                return "good"
            return "good" if request.sampling.seed % 2 else "bad"

        rig = Rig(
            tmp_path, FakeEngine(script), size=8, keep_equal_rewards=False, on_group=seen.append
        )
        stats = await rig.steps(1, 3)
        assert stats.trained == 6
        assert stats.failed >= 4
        assert stats.filtered >= 4
        assert stats.reserved == 0
        ended = stats.trained + stats.filtered + stats.dropped + stats.failed + stats.cancelled
        assert stats.started == ended + stats.open
        assert Counter(outcome.reason for outcome in seen)["failed"] == stats.failed
        await rig.queue.close()

    run(main())


def test_groups_that_only_ever_fail_end_the_run_with_the_cause(tmp_path):
    async def main():
        rig = Rig(tmp_path, FakeEngine(dead), max_failures_in_a_row=5)
        leasing = asyncio.create_task(rig.queue.lease(2, step=1, timeout=HOUR))
        start = now()
        with pytest.raises(RunFailed, match=r"5 groups failed.*the engine is gone"):
            await rig.producer.run()
        with pytest.raises(ProducerFailed, match="the engine is gone"):
            await leasing
        assert now() - start < 1
        assert (await rig.queue.stats()).reserved == 0
        await rig.queue.close()

    run(main())


def test_a_defect_in_one_worker_reaches_the_consumer_while_its_siblings_still_stop(tmp_path):
    """T109: worker 3 raises; the main loop knows within a second, whatever the others do."""

    async def main():
        async def script(request):
            if "t3" in "".join(map(chr, request.input_ids)):
                await asyncio.sleep(10)
                raise TypeError("a bug in worker 3")
            try:
                await asyncio.sleep(HOUR)
            except asyncio.CancelledError:
                await asyncio.sleep(3)  # takes its time to stop
                raise

        rig = Rig(tmp_path, FakeEngine(script), timeout_s=2 * HOUR)
        producing = asyncio.create_task(rig.producer.run())
        start = now()
        with pytest.raises(ProducerFailed, match="TypeError: a bug in worker 3"):
            await rig.queue.lease(2, step=1, timeout=HOUR)
        assert now() - start < 11
        with pytest.raises(TypeError):
            await producing
        stats = await rig.queue.stats()
        assert (stats.reserved, stats.failed, stats.cancelled) == (0, 1, 3)
        assert len(asyncio.all_tasks()) == 1
        await rig.queue.close()

    run(main())


def test_an_error_in_the_callback_is_not_swallowed(tmp_path):
    def broken(outcome):
        raise ZeroDivisionError("metrics")

    async def main():
        rig = Rig(tmp_path, FakeEngine("good"), on_group=broken)
        with pytest.raises(ZeroDivisionError):
            await rig.producer.run()
        assert (await rig.queue.stats()).reserved == 0
        await rig.queue.close()

    run(main())


def test_a_finite_list_of_tasks_ends_the_producer(tmp_path):
    async def main():
        rig = Rig(tmp_path, FakeEngine("good"), tasks=["a", "b", "c"])
        await rig.producer.run()
        assert (await rig.queue.stats()).ready == 3
        assert rig.producer.ended == {"put": 3}
        await rig.queue.close()

    run(main())


def test_after_a_resume_nothing_is_trained_twice_and_no_task_is_skipped(tmp_path):
    """U10, U13: stopped in the middle, gone on from the checkpoint of step 4."""

    async def main():
        rig = Rig(tmp_path, FakeEngine("good"))
        await rig.steps(1, 6, commit=4)
        lineage = rig.trained[:8]
        await rig.queue.close()
        again = Rig(tmp_path, FakeEngine("good"))
        await again.steps(5, 10, commit=2)
        assert again.trained[:4] == rig.trained[8:], "trained in the order of the first time"
        lineage += again.trained
        assert sorted(lineage) == [f"g{n:08d}" for n in range(20)]
        await again.queue.close()

    run(main())


def test_payloads_hold_what_was_played(tmp_path):
    async def main():
        rig = Rig(tmp_path, FakeEngine("good"))
        producing = asyncio.create_task(rig.producer.run())
        lease = await rig.queue.lease(2, step=1, timeout=HOUR)
        group = load_group(lease.paths[0])
        assert (group.id, group.task_id, len(group.episodes)) == ("g00000000", "t0", 2)
        for episode in group.episodes:
            episode.validate()
            assert episode.status is EpisodeStatus.COMPLETED
        producing.cancel()
        await asyncio.gather(producing, return_exceptions=True)
        await rig.queue.close()

    run(main())


fates = st.lists(
    st.sampled_from(["good", "bad", "mixed", "dead", "boom", "slow", "abort"]),
    min_size=1,
    max_size=6,
).filter(lambda fates: set(fates) & {"good", "mixed", "slow"})


@settings(max_examples=60, deadline=None)
@given(
    fates=fates,
    per_step=st.integers(1, 3),
    size=st.integers(1, 3),
    staleness=st.integers(0, 2),
    max_episodes=st.integers(1, 9),
    stops=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    keep=st.booleans(),
)
def test_whatever_fails_every_started_group_ends_exactly_once(
    tmp_path_factory, fates, per_step, size, staleness, max_episodes, stops, keep
):
    keep = keep or size == 1 or not set(fates) & {"mixed", "slow"}

    def fate_of(task):
        return fates[int(task[1:]) % len(fates)]

    async def script(request):
        text = "".join(map(chr, request.input_ids))
        task = text[text.index(" t") + 1 : text.index("\0")]
        fate = fate_of(task)
        await asyncio.sleep(100 if fate == "slow" else request.sampling.seed % 3)
        if fate == "dead":
            raise dead(request)
        if fate == "abort":
            return result([65], finish="abort", request=request)
        if fate in ("mixed", "slow"):
            return result(ids_of("good" if request.sampling.seed % 2 else "bad"))
        return result(ids_of("bad" if fate == "bad" else "good"))

    async def on_reset(env):
        if fate_of(env.tasks_seen[-1][1]) == "boom":
            raise ValueError("boom")

    async def main(folder):
        lineage: list[str] = []
        step = 0
        for life in stops:
            rig = Rig(
                folder,
                Fleet([FakeEngine(script, name=f"e{i}") for i in range(2)]),
                lambda: FakeEnv(on_reset=on_reset),
                per_step=per_step,
                size=size,
                max_staleness=staleness,
                max_episodes=max_episodes,
                max_failures_in_a_row=10_000,
                keep_equal_rewards=keep,
                on_abort="retry",
            )
            stats = await rig.steps(step + 1, step + life, commit=life)
            step += life
            lineage += rig.trained
            ended = stats.trained + stats.filtered + stats.dropped + stats.failed
            assert stats.reserved == stats.leased == 0
            assert stats.started == stats.ready + ended + stats.cancelled
            assert stats.open <= stats.capacity
            loads = rig.groups._episodes._source.loads()
            assert all(load.requests == load.episodes == 0 for load in loads)
            assert rig.producer.running_episodes == 0
            assert len(asyncio.all_tasks()) == 1
            await rig.queue.close()
        assert len(set(lineage)) == len(lineage) == step * per_step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda handle: None)
        run(main(tmp_path_factory.mktemp("queue")))


# -- evaluation ----------------------------------------------------------------------------------


def test_success_counts_a_failed_episode_as_not_solved():
    def script(request):
        text = "".join(map(chr, request.input_ids))
        if " t2" in text:
            return dead(request)
        return "good" if " t0" in text or " t1" in text else "bad"

    report = run(evaluate(["t0", "t1", "t2", "t3"], runner(FakeEngine(script)), name="eval-0"))
    assert (report.tasks, report.success, report.reward, report.failures) == (4, 0.5, 0.5, 1)
    assert [episode.task_id for episode in report.episodes] == ["t0", "t1", "t2", "t3"]
    assert report.statuses == {"completed": 3, "engine_failure": 1}
    assert report.metrics["success"] == pytest.approx(2 / 3)


def test_a_greedy_evaluation_asks_for_temperature_0_and_shows_the_same_tasks_every_time():
    settings = RolloutSettings(temperature=0.8)
    greedy = episode_options(settings, run_seed=1, temperature=0.0)
    assert greedy.sampling.temperature == 0.0
    assert episode_options(settings, run_seed=1).sampling.temperature == 0.8
    reports = [
        run(evaluate(["t0", "t1"], runner(FakeEngine("good")), name=name))
        for name in ("eval-0", "eval-60")
    ]
    assert [e.seed for e in reports[0].episodes] == [e.seed for e in reports[1].episodes]


def test_an_evaluation_of_nothing_is_empty():
    report = run(evaluate([], runner(FakeEngine("good")), name="eval"))
    assert (report.tasks, report.success) == (0, 0.0)


# -- seeds ---------------------------------------------------------------------------------------


def test_seeds_are_the_same_in_every_process_and_parts_do_not_run_together():
    assert stable_seed(0, "g00000000") == 2117039301
    assert stable_seed("ab", "c") != stable_seed("a", "bc")
    assert stable_seed(1) != stable_seed("1")
    assert len({stable_seed(0, n) for n in range(10_000)}) > 9_990
    assert all(0 <= stable_seed(n) < 2**31 for n in range(100))

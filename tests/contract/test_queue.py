"""One suite for every TrajectoryQueue: what rollout, trainer and resume may rely on."""

import asyncio

import pytest
from rollout_support import make_group, now, run

from relax_agent.errors import LeaseLost, NoData, ProducerFailed, QueueError
from relax_agent.queue import LocalQueue, QueueSettings, load_group

HOUR = 3600.0


@pytest.fixture(params=["local"])
def open_queue(request, tmp_path):
    """Return a function that opens the same queue again, as another process would after a crash."""
    opened = []

    def make(*, groups_per_step=2, **settings):
        for queue in opened:
            queue._index.close()  # what a killed process leaves: its statements, and no lock
        queue = LocalQueue(
            tmp_path / "queue", QueueSettings(**settings), groups_per_step=groups_per_step
        )
        opened.append(queue)
        return queue

    yield make
    for queue in opened:
        queue._index.close()


async def fill(queue, *ids, version=0):
    for group_id in ids:
        await queue.reserve(group_id, f"task-{group_id}", timeout=1)
        await queue.put(make_group(group_id, f"task-{group_id}", version=version))


async def train(queue, step, count=2):
    lease = await queue.lease(count, step=step, timeout=1)
    await queue.ack(lease, step)
    return [group.id for group in lease.groups]


def test_a_group_goes_from_reserve_to_ack_and_its_payload_is_what_was_put(open_queue):
    async def main():
        queue = open_queue()
        await fill(queue, "a", "b")
        lease = await queue.lease(2, step=1, timeout=1)
        assert [group.id for group in lease.groups] == ["a", "b"]
        loaded = load_group(lease.groups[0].path)
        assert loaded.episodes[1].to_json() | {"id": 0} == make_group("a", "task-a").episodes[
            1
        ].to_json() | {"id": 0}
        await queue.ack(lease, 1)
        stats = await queue.stats()
        assert (stats.started, stats.trained, stats.open) == (2, 2, 0)

    run(main())


def test_slots_are_charged_at_start_and_freed_when_trained_or_dropped(open_queue):
    async def main():
        queue = open_queue(max_staleness=1)
        for i in range(4):
            await queue.reserve(f"g{i}", "t", timeout=1)
        with pytest.raises(NoData, match="4 of 4 slots"):
            await queue.reserve("more", "t", timeout=HOUR)
        assert await queue.put(make_group("g0"))
        with pytest.raises(NoData):  # a finished group frees nothing
            await queue.reserve("more", "t", timeout=HOUR)
        await queue.drop("g1", "failed", "env")
        await queue.reserve("g4", "t", timeout=1)
        await queue.drop("g2", "filtered")
        await queue.drop("g3", "dropped")
        stats = await queue.stats()
        assert (stats.reserved, stats.ready) == (1, 1)
        assert (stats.failed, stats.filtered, stats.dropped) == (1, 1, 1)
        assert stats.started == stats.open + 3

    run(main())


def test_an_acknowledged_step_frees_its_slots_for_whoever_waits(open_queue):
    async def main():
        queue = open_queue(max_staleness=0)
        await fill(queue, "a", "b")
        waiting = asyncio.create_task(queue.reserve("c", "t", timeout=HOUR))
        await asyncio.sleep(1)
        assert not waiting.done()
        await train(queue, 1)
        await waiting

    run(main())


def test_ten_producers_on_one_slot_take_it_one_after_the_other_without_spinning(open_queue):
    """T122: several waiters are woken by one free slot; only one gets it, none loops."""

    async def main():
        queue = open_queue(max_staleness=0, groups_per_step=1)
        order = []
        looks = 0
        has_room = queue._has_room

        def counted():
            nonlocal looks
            looks += 1
            return has_room()

        queue._has_room = counted

        async def produce(i):
            await queue.reserve(f"g{i}", "t", timeout=HOUR)
            order.append(i)
            await queue.put(make_group(f"g{i}"))

        async with asyncio.TaskGroup() as tasks:
            for i in range(10):
                tasks.create_task(produce(i))
            for step in range(1, 11):
                lease = await queue.lease(1, step=step, timeout=HOUR)
                await queue.ack(lease, step)
        assert order == list(range(10))
        assert looks < 100

    run(main())


def test_surplus_groups_stay_for_the_next_lease(open_queue):
    """T113: four are asked for, seven are ready, three remain."""

    async def main():
        queue = open_queue(groups_per_step=4)
        await fill(queue, *"abcdefg")
        assert await train(queue, 1, 4) == list("abcd")
        assert (await queue.stats()).ready == 3
        await fill(queue, "h")
        assert await train(queue, 2, 4) == list("efgh")

    run(main())


def test_many_finishers_do_not_block_the_event_loop(open_queue):
    """T113: ten finishers while the queue is full; a ticker still ticks."""

    async def main():
        queue = open_queue(max_staleness=0, groups_per_step=1)
        ticks = 0

        async def ticker():
            nonlocal ticks
            while True:
                await asyncio.sleep(1)
                ticks += 1

        async def finisher(i):
            await queue.reserve(f"g{i}", "t", timeout=HOUR)
            await queue.put(make_group(f"g{i}"))

        ticking = asyncio.create_task(ticker())
        finishers = [asyncio.create_task(finisher(i)) for i in range(10)]
        await asyncio.sleep(100)
        assert ticks >= 99
        for task in [ticking, *finishers]:
            task.cancel()
        await asyncio.gather(ticking, *finishers, return_exceptions=True)
        assert (await queue.stats()).reserved == 0

    run(main())


def test_a_late_or_repeated_put_is_ignored_and_counted(open_queue):
    """T127: the answer of a first attempt arrives after the group has ended."""

    async def main():
        queue = open_queue()
        await fill(queue, "a", "b")
        assert not await queue.put(make_group("a"))
        await train(queue, 1)
        assert not await queue.put(make_group("a"))
        await queue.reserve("c", "t", timeout=1)
        await queue.drop("c", "failed", "time is over")
        assert not await queue.put(make_group("c"))
        assert not await queue.put(make_group("never reserved"))
        stats = await queue.stats()
        assert stats.duplicates == 4
        assert (stats.trained, stats.failed, stats.open) == (2, 1, 0)

    run(main())


def test_a_group_ends_only_once(open_queue):
    async def main():
        queue = open_queue()
        await queue.reserve("a", "t", timeout=1)
        assert await queue.drop("a", "failed")
        assert not await queue.drop("a", "dropped")
        with pytest.raises(QueueError, match="failed"):
            await queue.reserve("a", "t", timeout=1)
        await fill(queue, "b", "c")
        lease = await queue.lease(2, step=1, timeout=1)
        assert not await queue.drop("b", "dropped"), "the trainer has it"
        await queue.ack(lease, 1)
        assert not await queue.drop("b", "dropped")

    run(main())


def test_failed_workers_leave_no_reservation(open_queue):
    """T121: three workers fail; no reservation leaks. T112: the freed ids hold nobody up."""

    async def main():
        queue = open_queue()
        for i in range(4):
            await queue.reserve(f"g{i}", "t", timeout=1)
        for i in range(3):
            await queue.drop(f"g{i}", "failed", "worker died")
        assert (await queue.stats()).reserved == 1
        await queue.put(make_group("g3"))
        await fill(queue, "g4")
        assert await train(queue, 1) == ["g3", "g4"]

    run(main())


def test_a_cancelled_reserve_charges_nothing(open_queue):
    async def main():
        queue = open_queue(max_staleness=0, groups_per_step=1)
        await fill(queue, "a")
        first = asyncio.create_task(queue.reserve("b", "t", timeout=HOUR))
        second = asyncio.create_task(queue.reserve("c", "t", timeout=HOUR))
        await asyncio.sleep(1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await train(queue, 1, 1)
        await second
        assert list(await queue.groups()) == ["a", "c"]

    run(main())


def test_no_data_within_the_limit_is_a_typed_error_that_says_what_is_missing(open_queue):
    """T128: never None, never a bare queue.Empty."""

    async def main():
        queue = open_queue()
        await fill(queue, "a")
        await queue.reserve("b", "t", timeout=1)
        start = now()
        with pytest.raises(NoData, match=r"1 of 2 groups .*1 reserved, 1 ready"):
            await queue.lease(2, step=1, timeout=HOUR / 12)
        assert now() - start == pytest.approx(HOUR / 12)

    run(main())


def test_no_progress_ends_a_wait_with_the_reason(open_queue):
    """T110: all collectors are gone, and the trainer would poll an empty buffer for hours."""

    async def main():
        queue = open_queue(no_progress_s=600)
        await queue.reserve("a", "t", timeout=1)

        async def one_late_group():
            await asyncio.sleep(400)
            await queue.put(make_group("a"))

        late = asyncio.create_task(one_late_group())
        start = now()
        with pytest.raises(NoData, match="nothing new came"):
            await queue.lease(2, step=1, timeout=100 * HOUR)
        assert now() - start == pytest.approx(1000), "counted from the last group that came"
        await late

    run(main())


def test_a_producers_failure_reaches_the_consumer_at_once_with_its_cause(open_queue):
    """T109: an exception in a worker ends the main loop within a second."""

    async def main():
        queue = open_queue()
        leasing = asyncio.create_task(queue.lease(2, step=1, timeout=HOUR))
        reserving = [
            asyncio.create_task(queue.reserve(f"g{i}", "t", timeout=HOUR)) for i in range(5)
        ]
        await asyncio.sleep(10)
        start = now()
        queue.fail(ExceptionGroup("workers", [ExceptionGroup("w3", [OSError("engine 3 died")])]))
        with pytest.raises(ProducerFailed, match="OSError: engine 3 died") as caught:
            await leasing
        assert now() - start < 1
        assert isinstance(caught.value.__cause__, OSError)
        with pytest.raises(ProducerFailed):
            await reserving[4]
        with pytest.raises(ProducerFailed):
            await queue.lease(2, step=1, timeout=HOUR)
        await asyncio.gather(*reserving, return_exceptions=True)

    run(main())


def test_closing_wakes_every_waiter(open_queue):
    async def main():
        queue = open_queue()
        leasing = asyncio.create_task(queue.lease(2, step=1, timeout=HOUR))
        await asyncio.sleep(1)
        await queue.close()
        with pytest.raises(QueueError, match="closed"):
            await leasing
        await queue.close()

    run(main())


def test_a_released_lease_is_offered_again_and_cannot_be_acknowledged(open_queue):
    async def main():
        queue = open_queue()
        await fill(queue, "a", "b", "c", "d")
        lease = await queue.lease(2, step=1, timeout=1)
        await queue.release(lease)
        await queue.release(lease)
        with pytest.raises(LeaseLost):
            await queue.ack(lease, 1)
        assert await train(queue, 1) == ["a", "b"]
        assert (await queue.stats()).redelivered == 2

    run(main())


def test_an_expired_lease_is_offered_again_and_trained_once(open_queue):
    async def main():
        queue = open_queue(lease_timeout_s=100)
        await fill(queue, "a", "b")
        lost = await queue.lease(2, step=1, timeout=1)
        start = now()
        again = await queue.lease(2, step=1, timeout=HOUR)
        assert now() - start == pytest.approx(100)
        await queue.ack(again, 1)
        with pytest.raises(LeaseLost):
            await queue.ack(lost, 1)
        assert (await queue.stats()).trained == 2

    run(main())


def test_an_expired_lease_keeps_its_slots_and_no_waiter_spins(open_queue):
    async def main():
        queue = open_queue(lease_timeout_s=100, max_staleness=0)
        await fill(queue, "a", "b")
        await queue.lease(2, step=1, timeout=1)
        with pytest.raises(NoData):
            await queue.reserve("c", "t", timeout=HOUR)

    run(main())


def test_a_step_is_leased_only_after_the_one_before_and_never_twice(open_queue):
    """T130: no off-by-one between what is trained and what is handed out, to the last step."""

    async def main():
        queue = open_queue(max_staleness=0, groups_per_step=1)
        for step in range(1, 6):
            await fill(queue, f"g{step}", version=step - 1)
            assert await train(queue, step, 1) == [f"g{step}"]
            with pytest.raises(QueueError, match=f"step {step} is trained"):
                await queue.lease(1, step=step, timeout=1)
        stats = await queue.stats()
        assert (stats.trained, stats.open) == (5, 0)

    run(main())


def test_a_lease_that_could_never_be_filled_is_refused(open_queue):
    async def main():
        with pytest.raises(QueueError, match="at most 4"):
            await open_queue().lease(5, step=1, timeout=HOUR)

    run(main())


# -- age -----------------------------------------------------------------------------------------


def test_no_step_is_leased_that_would_push_an_unfinished_group_past_the_bound(open_queue):
    async def main():
        queue = open_queue(max_staleness=1, groups_per_step=1)
        await queue.reserve("slow", "t", timeout=1)
        await fill(queue, "fast-1")
        assert await train(queue, 1, 1) == ["fast-1"]
        await fill(queue, "fast-2")
        leasing = asyncio.create_task(queue.lease(1, step=2, timeout=HOUR))
        await asyncio.sleep(100)
        assert not leasing.done(), "step 3 would train the slow group at age 2"
        await queue.put(make_group("slow"))
        lease = await leasing
        assert [(group.id, group.age) for group in lease.groups] == [("slow", 1)]
        await queue.ack(lease, 2)

    run(main())


def test_waiting_for_a_straggler_that_never_comes_says_its_name(open_queue):
    async def main():
        queue = open_queue(max_staleness=0, groups_per_step=2)
        await queue.reserve("slow", "t", timeout=1)
        await fill(queue, "fast")
        with pytest.raises(NoData, match="1 of 2"):
            await queue.lease(2, step=1, timeout=10)
        with pytest.raises(NoData, match="slow"):
            await queue.lease(1, step=1, timeout=10)
        await queue.drop("slow", "failed")
        await queue.lease(1, step=1, timeout=10)

    run(main())


@pytest.mark.parametrize("beyond", ["train", "mask", "drop"])
def test_with_overtake_what_is_beyond_the_bound_follows_the_policy(open_queue, beyond):
    async def main():
        queue = open_queue(
            max_staleness=1, groups_per_step=1, on_straggler="overtake", beyond=beyond
        )
        await queue.reserve("slow", "t", timeout=1)
        for step in (1, 2, 3):
            await fill(queue, f"fast-{step}")
            await train(queue, step, 1)
        assert (await queue.stats()).oldest_age == 3
        await queue.put(make_group("slow"))
        if beyond == "drop":
            with pytest.raises(NoData):
                await queue.lease(1, step=4, timeout=1)
            assert (await queue.stats()).dropped == 1
            return
        lease = await queue.lease(1, step=4, timeout=1)
        assert [(group.id, group.age) for group in lease.groups] == [("slow", 3)]
        assert lease.max_token_age == (1 if beyond == "mask" else None)

    run(main())


def test_on_policy_no_group_starts_before_the_engines_have_the_new_weights(open_queue):
    """T130: an ack frees slots, but the engines still serve the old weights."""

    async def main():
        queue = open_queue(max_staleness=0, groups_per_step=1)
        queue.published(0)
        await fill(queue, "a")
        await train(queue, 1, 1)
        starting = asyncio.create_task(queue.reserve("b", "t", timeout=HOUR))
        await asyncio.sleep(10)
        assert not starting.done()
        queue.published(1)
        await starting
        await queue.put(make_group("b"))
        lease = await queue.lease(1, step=2, timeout=1)
        assert lease.groups[0].age == 0

    run(main())


# -- resume --------------------------------------------------------------------------------------


def test_restore_offers_again_what_was_acknowledged_after_the_checkpoint_in_that_order(
    open_queue,
):
    async def main():
        queue = open_queue()
        await fill(queue, "b", "a")
        assert await train(queue, 1) == ["b", "a"]
        await queue.commit(1)
        await fill(queue, "d", "c")
        second = await train(queue, 2)
        await fill(queue, "f", "e")
        third = await train(queue, 3)
        await fill(queue, "g")
        await queue.reserve("running", "t", timeout=1)
        queue = open_queue()
        restored = await queue.restore(1)
        assert restored.offered == (*second, *third, "g")
        assert restored.cleared == ("running",)
        assert await train(queue, 2) == second
        assert await train(queue, 3) == third
        assert list(await queue.groups()) == ["b", "a", "d", "c", "f", "e", "g"]
        stats = await queue.stats()
        assert (stats.trained, stats.ready, stats.reserved) == (6, 1, 0)

    run(main())


def test_slots_after_recovery_are_those_of_the_formula(open_queue):
    """T119: groups that are offered again use up slots; capacity stays (staleness + 1) * groups."""

    async def main():
        queue = open_queue(max_staleness=2, groups_per_step=2)
        for step in range(1, 11):
            await fill(queue, f"a{step}", f"b{step}")
            await train(queue, step)
            if step == 4:
                await queue.commit(4)
        queue = open_queue(max_staleness=2, groups_per_step=2)
        await queue.restore(4)
        stats = await queue.stats()
        assert (stats.open, stats.capacity) == (12, 6)
        with pytest.raises(NoData):
            await queue.reserve("new", "t", timeout=10)
        for step in range(5, 9):
            await train(queue, step)
        assert (await queue.stats()).open == 4
        await queue.reserve("new-1", "t", timeout=10)
        await queue.reserve("new-2", "t", timeout=10)
        with pytest.raises(NoData):
            await queue.reserve("new-3", "t", timeout=10)

    run(main())


def test_a_committed_group_is_never_offered_again_and_its_payload_is_gone(open_queue):
    async def main():
        queue = open_queue()
        await fill(queue, "a", "b")
        lease = await queue.lease(2, step=1, timeout=1)
        await queue.ack(lease, 1)
        assert all(path.exists() for path in lease.paths), "an ack is provisional"
        await queue.commit(1)
        assert not any(path.exists() for path in lease.paths)
        queue = open_queue()
        assert await queue.restore(1) == await queue.restore(1)
        assert (await queue.stats()).trained == 2
        assert (await queue.stats()).ready == 0

    run(main())


def test_a_crash_between_checkpoint_and_commit_trains_nothing_twice(open_queue):
    async def main():
        queue = open_queue()
        await fill(queue, "a", "b")
        await train(queue, 1)
        queue = open_queue()  # the checkpoint of step 1 was saved, its commit never came
        restored = await queue.restore(1)
        assert restored.offered == ()
        assert (await queue.stats()).trained == 2

    run(main())


def test_a_checkpoint_older_than_the_last_commit_gets_its_groups_run_again(open_queue):
    async def main():
        queue = open_queue()
        await fill(queue, "a", "b")
        await train(queue, 1)
        await fill(queue, "c", "d")
        await train(queue, 2)
        await queue.commit(2)
        queue = open_queue()
        restored = await queue.restore(1)
        assert (restored.offered, restored.cleared) == ((), ("c", "d"))
        await fill(queue, "c", "d")
        assert await train(queue, 2) == ["c", "d"]

    run(main())


def test_a_future_that_is_partly_lost_is_run_again_as_a_whole(open_queue):
    """Its later groups were sampled by weights that the new future will not have at that step."""

    async def main():
        queue = open_queue()
        for step, ids in ((1, "ab"), (2, "cd"), (3, "ef")):
            await fill(queue, *ids)
            await train(queue, step)
            if step == 2:
                await queue.commit(2)
        await fill(queue, "g")
        queue = open_queue()  # the checkpoint of step 2 was damaged and is deleted
        restored = await queue.restore(1)
        assert (restored.offered, restored.cleared) == ((), tuple("cdefg"))
        assert list(await queue.groups()) == ["a", "b"]

    run(main())


def test_a_step_that_was_leased_and_not_acknowledged_is_leased_the_same_again(open_queue):
    """Its weights may be published already: a group that they sampled must not come before."""

    async def main():
        queue = open_queue()
        await queue.reserve("slow", "t", timeout=1)
        await fill(queue, "b", "a")
        lease = await queue.lease(2, step=1, timeout=1)
        assert [group.id for group in lease.groups] == ["b", "a"]
        await queue.put(make_group("slow"))  # after the new weights went out
        queue = open_queue()
        assert (await queue.restore(0)).offered == ("b", "a", "slow")
        assert await train(queue, 1) == ["b", "a"]

    run(main())


def test_a_dropped_group_does_not_pin_the_resume_point(open_queue):
    """U13: group 2 of 150 is dropped; a resume goes on at 150, nothing twice, nothing skipped."""

    async def main():
        queue = open_queue(groups_per_step=10)
        trained = []
        for step in range(1, 16):
            ids = [f"g{i}" for i in range(10 * step - 10, 10 * step)]
            for group_id in ids:
                await queue.reserve(group_id, "t", timeout=1)
                if group_id == "g2":
                    await queue.drop(group_id, "dropped", "stale")
                else:
                    await queue.put(make_group(group_id))
            trained += await train(queue, step, 9 if step == 1 else 10)
            await queue.commit(step)
        queue = open_queue(groups_per_step=10)
        assert await queue.restore(15) == await queue.restore(15)
        known = await queue.groups()
        assert list(known) == [f"g{i}" for i in range(150)]
        assert sorted(trained, key=lambda g: int(g[1:])) == [g for g in known if g != "g2"]

    run(main())


def test_a_cancelled_group_is_forgotten_at_restore_so_that_its_task_runs_again(open_queue):
    async def main():
        queue = open_queue()
        await queue.reserve("a", "t", timeout=1)
        await queue.drop("a", "cancelled", "the run ended")
        await queue.reserve("b", "t", timeout=1)
        await queue.drop("b", "failed", "env")
        assert (await queue.stats()).cancelled == 1
        queue = open_queue()
        assert (await queue.restore(0)).cleared == ("a",)
        assert list(await queue.groups()) == ["b"]

    run(main())


def test_groups_of_an_earlier_run_must_be_restored_before_anything_else(open_queue):
    async def main():
        await fill(open_queue(), "a")
        queue = open_queue()
        with pytest.raises(QueueError, match="restore"):
            await queue.reserve("b", "t", timeout=1)
        with pytest.raises(QueueError, match="restore"):
            await queue.lease(1, step=1, timeout=1)

    run(main())


def test_two_restores_in_a_row_keep_the_order_of_what_is_offered(open_queue):
    async def main():
        queue = open_queue(max_staleness=2)
        for step, ids in ((1, "zy"), (2, "xw"), (3, "vu")):
            await fill(queue, *ids)
            await train(queue, step)
        queue = open_queue(max_staleness=2)
        first = await queue.restore(0)
        assert await train(queue, 1) == ["z", "y"]
        queue = open_queue(max_staleness=2)
        assert (await queue.restore(0)).offered == first.offered == tuple("zyxwvu")

    run(main())

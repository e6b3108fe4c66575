"""The admission formula and the straggler rule, tested to exhaustion on small numbers."""

import itertools

import pytest

from relax_agent.queue.admission import (
    age,
    capacity,
    first_crowded,
    last_step,
    may_start,
    must_wait,
)

SMALL = [(s, g) for s in range(4) for g in range(1, 5)]


@pytest.mark.parametrize(("staleness", "per_step"), SMALL)
def test_a_group_may_start_exactly_while_fewer_than_capacity_are_open(staleness, per_step):
    allowed = [
        n for n in range(40) if may_start(n, max_staleness=staleness, groups_per_step=per_step)
    ]
    assert allowed == list(range((staleness + 1) * per_step))


def test_capacity_after_recovery_depends_on_no_version():
    """T119: two steps of staleness and 16 groups give 48 slots, also at version 10 (not 208)."""
    assert capacity(2, 16) == 48
    assert not may_start(48, max_staleness=2, groups_per_step=16)


@pytest.mark.parametrize("staleness", range(4))
def test_the_last_step_is_the_oldest_age_within_the_bound(staleness):
    for began in range(5):
        assert age(began, last_step(began, staleness)) == staleness
        assert age(began, began + 1) == 0


def can_all_be_trained(began, *, next_step, staleness, per_step):
    """Whether some order of training meets every bound: try them all, without any theory."""
    groups = sorted(began)
    if not groups:
        return True
    for chosen in set(itertools.combinations(range(len(groups)), min(per_step, len(groups)))):
        if any(age(groups[i], next_step) > staleness for i in chosen):
            continue
        rest = [g for i, g in enumerate(groups) if i not in chosen]
        if can_all_be_trained(
            rest, next_step=next_step + 1, staleness=staleness, per_step=per_step
        ):
            return True
    return False


@pytest.mark.parametrize("staleness", range(3))
@pytest.mark.parametrize("per_step", [1, 2])
def test_crowded_means_that_no_order_of_training_meets_every_bound(staleness, per_step):
    for count in range(6):
        for began in itertools.combinations_with_replacement(range(4), count):
            crowded = first_crowded(
                began, next_step=4, max_staleness=staleness, groups_per_step=per_step
            )
            possible = can_all_be_trained(
                began, next_step=4, staleness=staleness, per_step=per_step
            )
            assert (crowded is None) == possible, began


def test_a_step_waits_for_an_unfinished_group_that_it_would_push_past_the_bound():
    bound = {"max_staleness": 1, "groups_per_step": 2}
    assert not must_wait([2], [], step=3, **bound), "step 4 can still train it"
    assert must_wait([2], [], step=4, **bound), "step 5 would be too late"
    assert must_wait([2, 2], [2], step=3, **bound), "step 4 has room for two of three"
    assert not must_wait([2], [2], step=3, **bound)


def test_finished_groups_alone_are_never_waited_for():
    for step in range(1, 8):
        assert not must_wait([], [0, 0, 0], step=step, max_staleness=0, groups_per_step=1)


def test_a_late_finished_crowd_does_not_hold_up_a_young_unfinished_group():
    assert not must_wait([9], [0, 0], step=10, max_staleness=3, groups_per_step=1)


@pytest.mark.parametrize(("staleness", "per_step"), [(0, 1), (0, 3), (1, 1), (1, 2), (2, 2)])
def test_oldest_first_under_admission_always_leaves_a_schedule(staleness, per_step):
    """Every order in which groups can finish: what admission lets in can be trained in time."""
    seen = set()

    def explore(open_groups, step):
        state = (tuple(began - step for began in open_groups),)
        if state in seen:
            return
        seen.add(state)
        groups = list(open_groups)
        while may_start(len(groups), max_staleness=staleness, groups_per_step=per_step):
            groups.append(step - 1)
        bound = {"max_staleness": staleness, "groups_per_step": per_step}
        assert first_crowded(groups, next_step=step, **bound) is None
        for size in range(per_step, len(groups) + 1):
            for finished in set(itertools.combinations(range(len(groups)), size)):
                chosen = sorted(finished, key=lambda i: groups[i])[:per_step]
                left = [groups[i] for i in finished if i not in chosen]
                running = [g for i, g in enumerate(groups) if i not in finished]
                if must_wait(running, left, step=step, **bound):
                    continue
                assert all(age(groups[i], step) <= staleness for i in chosen)
                explore(tuple(sorted([*left, *running])), step + 1)
        chosen = sorted(range(len(groups)), key=lambda i: groups[i])[:per_step]
        rest = [g for i, g in enumerate(groups) if i not in chosen]
        assert not must_wait([], rest, step=step, **bound), "all finished: never a deadlock"

    explore((), 1)
    assert len(seen) > 1 or staleness == 0

"""A timeline's parts sum to the wall clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_agent.timeline import OTHER, Timeline


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_parts_and_other_sum_to_the_wall_time(clock):
    timeline = Timeline(clock)
    clock.advance(1)
    with timeline.part("forward"):
        clock.advance(2)
    with timeline.part("backward"):
        clock.advance(4)
    clock.advance(8)
    assert timeline.lap() == {"forward": 2, "backward": 4, OTHER: 9}


def test_two_pauses_in_one_interval_add_up(clock):
    """T134: the second pause must not overwrite the first."""
    timeline = Timeline(clock)
    for seconds in (3, 5):
        clock.advance(1)
        with timeline.part("paused"):
            clock.advance(seconds)
    assert timeline.lap() == {"paused": 8, OTHER: 2}


def test_a_pause_that_is_still_open_at_the_lap_is_split_between_the_laps(clock):
    """T134: an interval that ends while paused must not show zero."""
    timeline = Timeline(clock)
    with timeline.part("paused"):
        clock.advance(3)
        assert timeline.lap() == {"paused": 3, OTHER: 0}
        clock.advance(4)
    clock.advance(1)
    assert timeline.lap() == {"paused": 4, OTHER: 1}


def test_a_nested_part_is_taken_out_of_the_outer_one(clock):
    timeline = Timeline(clock)
    with timeline.part("step"):
        clock.advance(1)
        with timeline.part("sync"):
            clock.advance(10)
        clock.advance(2)
    assert timeline.lap() == {"step": 3, "sync": 10, OTHER: 0}


def test_a_part_nested_in_itself_counts_once(clock):
    timeline = Timeline(clock)
    with timeline.part("wait"), timeline.part("wait"):
        clock.advance(2)
    assert timeline.lap() == {"wait": 2, OTHER: 0}


def test_an_exception_closes_its_part(clock):
    timeline = Timeline(clock)
    with pytest.raises(KeyError), timeline.part("forward"):
        clock.advance(1)
        raise KeyError
    clock.advance(2)
    assert timeline.lap() == {"forward": 1, OTHER: 2}


def test_a_snapshot_does_not_end_the_lap(clock):
    timeline = Timeline(clock)
    clock.advance(1)
    assert timeline.snapshot() == {OTHER: 1}
    clock.advance(1)
    assert timeline.lap() == {OTHER: 2}
    assert timeline.lap() == {OTHER: 0}


def test_the_name_of_the_remainder_is_refused(clock):
    with pytest.raises(ValueError, match="another name"), Timeline(clock).part(OTHER):
        pass


@given(
    st.lists(
        st.tuples(st.sampled_from(["open", "close", "lap", "wait"]), st.integers(0, 9)), max_size=40
    )
)
def test_the_sums_hold_whatever_the_order_of_opening_and_closing(actions):
    clock = FakeClock()
    timeline = Timeline(clock)
    opened = []
    total = 0.0
    for action, number in actions:
        if action == "open":
            part = timeline.part("abc"[number % 3])
            part.__enter__()
            opened.append(part)
        elif action == "close" and opened:
            opened.pop(number % len(opened)).__exit__(None, None, None)
        elif action == "lap":
            total += sum(timeline.lap().values())
        elif action == "wait":
            clock.advance(number)
    assert total + sum(timeline.snapshot().values()) == clock.now - 1000.0

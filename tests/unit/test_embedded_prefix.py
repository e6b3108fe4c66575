"""The radix tree against the plainest possible model of itself."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from relax_agent.engines.embedded.prefix import PrefixTree

runs = st.lists(st.integers(0, 2), max_size=14)


class Filled:
    """A tree together with what its caller wrote at each index."""

    def __init__(self, capacity):
        self.tree = PrefixTree(capacity)
        self.pool = [None] * capacity

    def insert(self, tokens):
        start, indices = self.tree.insert(tokens)
        for offset, index in enumerate(indices):
            self.pool[index] = tuple(tokens[: start + offset + 1])
        return start, indices

    def match(self, tokens):
        return [self.pool[index] for index in self.tree.match(tokens)]


def longest(known, tokens):
    return max(
        (n for n in range(len(tokens) + 1) if any(k[:n] == tokens[:n] for k in known)), default=0
    )


@given(st.lists(runs, max_size=12), runs)
def test_a_match_is_the_longest_known_prefix_and_leads_to_its_own_entries(known, tokens):
    filled = Filled(1000)
    for run in known:
        filled.insert(run)
    found = filled.match(tokens)
    assert len(found) == longest(known, tokens)
    assert found == [tuple(tokens[: n + 1]) for n in range(len(found))]


@given(st.lists(runs, max_size=12))
def test_every_distinct_prefix_is_held_once(known):
    filled = Filled(1000)
    for run in known:
        start, indices = filled.insert(run)
        assert start + len(indices) == len(run)
    assert len(filled.tree) == len({tuple(r[: n + 1]) for r in known for n in range(len(r))})


@given(st.lists(runs, max_size=30), st.integers(1, 20), runs)
def test_with_too_little_room_matches_stay_true(known, capacity, tokens):
    filled = Filled(capacity)
    for run in known:
        filled.insert(run)
        assert len(filled.tree) <= capacity
    found = filled.match(tokens)
    assert found == [tuple(tokens[: n + 1]) for n in range(len(found))]


@given(st.lists(runs, min_size=1, max_size=30), st.integers(14, 20))
def test_the_newest_entry_always_finds_room(known, capacity):
    filled = Filled(capacity)
    for run in known:
        filled.insert(run)
        assert len(filled.match(run)) == len(run)


def test_the_least_recently_used_leaf_goes_first():
    tree = PrefixTree(10)
    tree.insert([1, 1, 1, 1])
    tree.insert([2, 2, 2, 2])
    tree.match([1, 1, 1, 1])
    tree.insert([3, 3, 3, 3])
    assert [len(tree.match([n] * 4)) for n in (1, 2, 3)] == [4, 0, 4]


def test_clearing_forgets_everything_and_gives_all_room_back():
    tree = PrefixTree(8)
    tree.insert([1, 2, 3])
    tree.clear()
    assert len(tree) == 0
    assert len(tree.match([1, 2, 3])) == 0
    start, indices = tree.insert(list(range(8)))
    assert start == 0
    assert sorted(indices) == list(range(8))


def test_without_capacity_nothing_is_kept():
    tree = PrefixTree(0)
    start, indices = tree.insert([1, 2])
    assert (start, len(indices)) == (0, 0)
    assert tree.match([1, 2]).dtype == np.int64

"""The token log: columns of equal length, forks, routes, rows; compared with a naive model."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_agent.episode import NOT_SAMPLED, Episode, EpisodeStatus, Group, MediaSpan, Segment
from relax_agent.errors import EpisodeError
from relax_agent.messages import Audio, Image, ToolCall, assistant, tool_message, user


def new() -> Episode:
    return Episode("toy", "t", "g", 7)


def route_of(token: int) -> list[list[int]]:
    """A route that a test can tell from every other token's."""
    return [[token % 251, 1], [2, token % 7]]


def routes_of(tokens, dtype=np.uint8):
    return np.array([route_of(token) for token in tokens], dtype).reshape(len(tokens), 2, 2)


# -- columns -------------------------------------------------------------------------------------


def test_the_mask_is_one_exactly_on_sampled_tokens():
    episode = new()
    episode.add_prompt([1, 2])
    episode.add_sampled([3, 4], [-0.1, -0.2], [5, 6], "stop")
    episode.add_prompt([10])
    (row,) = episode.rows()
    assert row.token_ids.tolist() == [1, 2, 3, 4, 10]
    assert row.loss_mask.tolist() == [0, 0, 1, 1, 0]
    assert row.weight_versions.tolist() == [NOT_SAMPLED, NOT_SAMPLED, 5, 6, NOT_SAMPLED]
    assert row.turn_index.tolist() == [-1, -1, 0, 0, -1]
    np.testing.assert_allclose(row.logprobs, [0, 0, -0.1, -0.2, 0])
    episode.validate()


@pytest.mark.parametrize(
    ("ids", "logprobs", "versions", "error"),
    [
        ([1, 2], [-0.1], [0, 0], EpisodeError),
        ([1, 2], [-0.1, -0.1], [0], EpisodeError),
        ([1], [None], [0], TypeError),
        ([1], [-0.1], ["new"], TypeError),
        ([2**40], [-0.1], [0], OverflowError),
    ],
)
def test_a_refused_append_changes_nothing(ids, logprobs, versions, error):
    episode = new()
    episode.add_prompt([1])
    with pytest.raises(error):
        episode.add_sampled(ids, logprobs, versions, "stop")
    assert len(episode) == 1
    assert episode.turns == []
    episode.validate()


def test_an_episode_ends_exactly_once_and_takes_nothing_afterwards():
    episode = new()
    with pytest.raises(EpisodeError, match="running"):
        episode.finish(EpisodeStatus.RUNNING)
    episode.finish(EpisodeStatus.COMPLETED)
    for again in (
        lambda: episode.finish(EpisodeStatus.CANCELLED),
        lambda: episode.add_prompt([1]),
        lambda: episode.add_sampled([1], [0.0], [0], "stop"),
        lambda: episode.fork(0, "x"),
    ):
        with pytest.raises(EpisodeError, match="already ended as completed"):
            again()


@pytest.mark.parametrize("status", EpisodeStatus)
def test_only_a_policys_own_outcome_is_trainable(status):
    own = {"completed", "truncated_turns", "truncated_tokens", "truncated_time", "parse_failure"}
    assert status.trainable == (status.value in own)


def test_appending_costs_time_in_the_turn_not_in_the_episode():
    """Counted, not timed: a turn touches its own tokens only."""
    episode = new()
    grown = []
    original = Segment.extend

    def counted(self, ids, mask, logprobs, versions):
        grown.append(len(ids))
        original(self, ids, mask, logprobs, versions)

    Segment.extend = counted
    try:
        for _ in range(1000):
            episode.add_prompt([1] * 5)
            episode.add_sampled([2] * 5, [0.0] * 5, [0] * 5, "stop")
            start = episode.routed_until()
            episode.add_routes(start, routes_of(range(len(episode) - 1 - start)))
    finally:
        Segment.extend = original
    assert sum(grown) == len(episode) == 10_000
    assert episode.segments[0].route_spans == [(0, 9_999)]


# -- routes --------------------------------------------------------------------------------------


def test_a_token_keeps_the_route_that_was_used_when_it_was_sampled():
    episode = new()
    episode.add_prompt([1, 2, 3, 4])
    episode.add_routes(0, routes_of([1, 2]))
    episode.add_routes(1, routes_of([90, 91, 92]))  # the engine sends one more than was asked for
    (row,) = episode.rows()
    assert row.routes[:, 0, 0].tolist() == [1, 2 % 251, 91, 92]
    assert row.has_route.tolist() == [True] * 4


def test_tokens_without_a_route_are_told_apart_from_expert_0():
    episode = new()
    episode.add_prompt([1, 2, 3])
    episode.add_routes(1, np.zeros((1, 2, 2), np.uint8))
    (row,) = episode.rows()
    assert row.has_route.tolist() == [False, True, False]
    assert episode.routed_until() == 2


def test_routes_beyond_the_tokens_are_refused():
    """T97: 18,057 routes for 17,804 tokens."""
    episode = new()
    episode.add_prompt([1, 2])
    with pytest.raises(EpisodeError, match="token 3 of 2"):
        episode.add_routes(0, routes_of([1, 2, 3]))
    episode.add_routes(2, routes_of([]))
    assert episode.routed_until() == 0


def test_more_than_256_experts_stay_what_they_are():
    episode = new()
    episode.add_prompt([1])
    episode.add_routes(0, np.full((1, 2, 2), 300, np.uint16))
    (row,) = episode.rows()
    assert row.routes.dtype == np.uint16
    assert (row.routes == 300).all()


# -- forks ---------------------------------------------------------------------------------------


def test_tokens_that_leaves_share_are_trained_once():
    episode = new()
    episode.add_prompt([1, 2])
    episode.add_sampled([3, 4], [-0.1] * 2, [0] * 2, "stop")
    episode.fork(3, "compaction")
    episode.add_sampled([5], [-0.1], [1], "stop")
    first, second = episode.rows()
    assert first.token_ids.tolist() == [1, 2, 3, 4]
    assert first.loss_mask.tolist() == [0, 0, 1, 1]
    assert second.token_ids.tolist() == [1, 2, 3, 5]
    assert second.loss_mask.tolist() == [0, 0, 0, 1]


def test_a_parent_whose_samples_are_all_shared_makes_no_row_of_its_own():
    episode = new()
    episode.add_prompt([1])
    episode.add_sampled([2], [-0.1], [0], "stop")
    episode.add_prompt([9, 9])
    episode.fork(2, "rewritten observation")
    episode.add_sampled([3], [-0.1], [0], "stop")
    (row,) = episode.rows()
    assert row.token_ids.tolist() == [1, 2, 3]
    assert row.loss_mask.tolist() == [0, 1, 1]


@pytest.mark.parametrize("shared", [-1, 3])
def test_a_fork_cannot_share_what_is_not_there(shared):
    """T10: a cut at a wrong offset is refused, not taken."""
    episode = new()
    episode.add_prompt([1, 2])
    with pytest.raises(EpisodeError, match="of 2 tokens"):
        episode.fork(shared, "x")


# -- against a naive model -----------------------------------------------------------------------


class Naive:
    """The same log as plain lists: every branch is a whole copy of its sequence."""

    def __init__(self):
        self.branches: list[list[dict]] = [[]]
        self.turns = 0
        self.serial = 0

    @property
    def leaf(self):
        return self.branches[-1]

    def add(self, count, *, sampled, version=NOT_SAMPLED):
        for _ in range(count):
            self.serial += 1
            self.leaf.append(
                {
                    "serial": self.serial,
                    "id": self.serial % 1000,
                    "sampled": sampled,
                    "version": version,
                    "turn": self.turns if sampled else -1,
                    "route": None,
                }
            )
        self.turns += sampled
        return [token["id"] for token in self.leaf[len(self.leaf) - count :]]

    def fork(self, shared):
        self.branches.append([dict(token) for token in self.leaf[:shared]])

    def route(self, start, end, own_from):
        for position in range(max(start, own_from), end):
            if self.leaf[position]["route"] is None:
                self.leaf[position]["route"] = route_of(self.leaf[position]["id"])


operations = st.lists(
    st.one_of(
        st.tuples(st.just("prompt"), st.integers(0, 4)),
        st.tuples(st.just("sampled"), st.integers(0, 4), st.integers(0, 3)),
        st.tuples(st.just("fork"), st.floats(0, 1)),
        st.tuples(st.just("routes"), st.floats(0, 1), st.floats(0, 1)),
    ),
    max_size=14,
)


def apply(operation, episode: Episode, naive: Naive) -> None:
    kind = operation[0]
    length = len(naive.leaf)
    if kind == "prompt":
        episode.add_prompt(naive.add(operation[1], sampled=False))
    elif kind == "sampled":
        ids = naive.add(operation[1], sampled=True, version=operation[2])
        versions = [operation[2]] * len(ids)
        episode.add_sampled(ids, [-float(i) for i in ids], versions, "stop")
    elif kind == "fork":
        shared = round(operation[1] * length)
        episode.fork(shared, "x")
        naive.fork(shared)
    else:
        own = episode.segments[-1].shared
        start = round(operation[1] * min(length, episode.routed_until()))
        end = start + round(operation[2] * (length - start))
        episode.add_routes(start, routes_of([token["id"] for token in naive.leaf[start:end]]))
        naive.route(start, end, own)


@settings(max_examples=300, deadline=None)
@given(operations)
def test_any_sequence_of_operations_gives_what_plain_copies_give(steps):
    """T5: random appends, samples, forks and routes at random cut points."""
    episode, naive = new(), Naive()
    for step in steps:
        apply(step, episode, naive)
        assert len(episode) == len(naive.leaf)
        assert episode.token_ids() == [token["id"] for token in naive.leaf]
        assert len(episode.segments) == len(naive.branches)
    episode.validate()
    compare_rows(episode, naive)
    again = Episode.load(json.loads(json.dumps(episode.to_json())), episode.to_arrays())
    again.validate()
    assert again.to_json() == episode.to_json()
    compare_rows(again, naive)


def compare_rows(episode: Episode, naive: Naive) -> None:
    rows = episode.rows()
    trained = [
        (row.token_ids[i], row.weight_versions[i], row.turn_index[i])
        for row in rows
        for i in np.flatnonzero(row.loss_mask)
    ]
    every = {
        token["serial"]: (token["id"], token["version"], token["turn"])
        for branch in naive.branches
        for token in branch
        if token["sampled"]
    }
    assert sorted(trained) == sorted(every.values()), "each sampled token is trained once"
    branches = [[token["id"] for token in branch] for branch in naive.branches]
    for row in rows:
        index = branches.index(row.token_ids.tolist())
        branch = naive.branches[index]
        assert row.turn_index.tolist() == [token["turn"] for token in branch]
        assert row.weight_versions.tolist() == [token["version"] for token in branch]
        np.testing.assert_array_equal(
            row.logprobs, [-float(t["id"]) if t["sampled"] else 0.0 for t in branch]
        )
        twins = [b for b in naive.branches if [t["id"] for t in b] == row.token_ids.tolist()]
        assert any(
            row.has_route.tolist() == [token["route"] is not None for token in twin]
            for twin in twins
        )
        for position in np.flatnonzero(row.has_route):
            assert row.routes[position].tolist() == route_of(branch[position]["id"])


# -- storing -------------------------------------------------------------------------------------


def test_json_and_arrays_hold_the_whole_episode():
    episode = new()
    episode.messages = [user("2+3"), assistant(tool_calls=[ToolCall("add", {"a": 2}, "c0")])]
    episode.messages.append(tool_message("5", episode.messages[1].tool_calls[0]))
    episode.add_prompt([1])
    turn = episode.add_sampled([2], [-0.5], [3], "stop", episode.messages[1])
    turn.reward = 0.5
    episode.metrics["success"] = 1.0
    episode.finish(EpisodeStatus.TRUNCATED_TIME, "late")
    again = Episode.load(json.loads(json.dumps(episode.to_json())), episode.to_arrays())
    assert again.messages == episode.messages
    assert again.turns[0].message == episode.messages[1]
    assert (again.status, again.detail, again.reward) == (episode.status, "late", 0.5)
    assert again.metrics == {"success": 1.0}
    assert again.id == episode.id


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda s: s.logprobs.append(0.0), "different lengths"),
        (lambda s: s.loss_mask.__setitem__(0, 1), "mask"),
        (lambda s: s.weight_versions.__setitem__(0, 3), "token 0 has version 3"),
        (lambda s: s.logprobs.__setitem__(1, float("nan")), "not finite"),
        (lambda s: s.route_spans.append((0, 1)), "route spans"),
    ],
)
def test_validate_names_the_first_broken_invariant(damage, words):
    episode = new()
    episode.add_prompt([1])
    episode.add_sampled([2], [-0.5], [3], "stop")
    episode.validate()
    damage(episode.segments[0])
    with pytest.raises(EpisodeError, match=words):
        episode.validate()


def test_a_group_knows_its_tokens_and_its_oldest_version():
    group = Group("g", "toy", "t")
    assert group.oldest_version() is None
    for versions in ([4, 5], [3, 3, 6]):
        episode = new()
        episode.add_prompt([1])
        episode.add_sampled([2] * len(versions), [0.0] * len(versions), versions, "stop")
        group.episodes.append(episode)
    assert group.sampled_tokens == 5
    assert group.oldest_version() == 3


# -- media ---------------------------------------------------------------------------------------

SKY, SEA, RAIN = Image(b"sky"), Image(b"sea"), Audio(b"rain")


def with_media() -> Episode:
    """Told 3 tokens of which two are a picture, sampled one, told a sound and the picture again."""
    episode = new()
    episode.add_prompt([1, 50, 50], [(1, 2, SKY)])
    episode.add_sampled([2], [-0.5], [0], "stop")
    episode.add_prompt([3, 60, 50, 50, 4], [(1, 1, RAIN), (2, 2, SKY)])
    episode.add_sampled([5], [-0.5], [0], "stop")
    return episode


def test_each_medium_is_kept_once_and_each_showing_has_its_span():
    episode = with_media()
    episode.validate()
    assert sorted(each.data for each in episode.media.values()) == [b"rain", b"sky"]
    spans = [(each.start, each.count, each.kind) for each in episode.media_spans()]
    assert spans == [(1, 2, "image"), (5, 1, "audio"), (6, 2, "image")]
    (row,) = episode.rows()
    assert row.media == episode.media_spans()


def test_a_fork_takes_the_media_it_shares_and_cuts_none_in_two():
    """T97 for media: what is left out of a sequence takes its media along."""
    episode = with_media()
    with pytest.raises(EpisodeError, match="would cut a medium in two"):
        episode.fork(7, "too far")
    episode.fork(5, "compacted")
    episode.add_prompt([70, 70], [(0, 2, SEA)])
    episode.add_sampled([9], [-0.1], [0], "stop")
    episode.validate()
    assert [(each.start, each.count) for each in episode.media_spans()] == [(1, 2), (5, 2)]
    first, second = episode.rows()
    assert [each.start for each in first.media] == [1, 5, 6]
    assert [each.start for each in second.media] == [1, 5]


@pytest.mark.parametrize(
    "media",
    [
        [(1, 3, SKY)],
        [(-1, 1, SKY)],
        [(0, 0, SKY)],
        [(0, 2, SKY), (1, 1, SEA)],
        [(2, 1, SKY), (0, 1, SEA)],
    ],
)
def test_media_that_do_not_fit_their_prompt_are_refused_and_change_nothing(media):
    episode = new()
    with pytest.raises(EpisodeError):
        episode.add_prompt([1, 2, 3], media)
    assert (len(episode), episode.media, episode.media_spans()) == (0, {}, [])


def test_media_survive_a_file():
    episode = with_media()
    again = Episode.load(json.loads(json.dumps(episode.to_json())), episode.to_arrays())
    again.validate()
    assert (again.media, again.media_spans()) == (episode.media, episode.media_spans())


def test_a_broken_log_of_media_is_told():
    episode = with_media()
    episode.media.pop(next(iter(episode.media)))
    with pytest.raises(EpisodeError, match="is not there"):
        episode.validate()
    episode = with_media()
    span = episode.segments[0].media[0]
    episode.segments[0].media[0] = MediaSpan(span.start + 2, 1, span.kind, span.digest)
    with pytest.raises(EpisodeError, match="a sampled token stands for a medium"):
        episode.validate()

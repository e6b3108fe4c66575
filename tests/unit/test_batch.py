"""From groups to micro-batches: what is refused, what is left out, what packing cannot change."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_support import SHAPE, VOCAB, episode, group, layout, random_routes

from relax_agent.episode import Episode, EpisodeStatus, Group
from relax_agent.errors import BatchError, RouteError
from relax_agent.trainers.algorithms.settings import GrpoSettings
from relax_agent.trainers.building import build_batch, build_sft_batch
from relax_agent.trainers.losses import sft_micro_loss
from relax_agent.trainers.packing import first_fit, spread

GRPO = GrpoSettings()


def build(groups, where=None, algorithm=GRPO, version=0, **kwargs):
    return build_batch(groups, algorithm, where or layout(), version=version, **kwargs)


def trained_tokens(batch):
    """Every trained token as (target, advantage, behaviour, weight), in an order of its own."""
    rows = []
    for micro in batch.micro_batches:
        columns = (micro.targets, micro.advantages, micro.behaviour_logprobs, micro.weights)
        if not micro.filler:
            rows += list(zip(*(column.tolist() for column in columns), strict=True))
    return sorted(rows)


def test_columns_line_up_with_the_token_log():
    """T28, T44: every sampled token of every turn is trained, with its episode's advantage."""
    data = group([1.0, 0.0])
    batch = build([data])
    (micro,) = batch.micro_batches
    starts = micro.cu_seqlens.tolist()
    order = sorted(range(2), key=lambda i: -len(data.episodes[i]))
    for number, index in enumerate(order):
        (row,) = data.episodes[index].rows()
        trained = np.flatnonzero(row.loss_mask)
        inside = (micro.predictors >= starts[number]) & (micro.predictors < starts[number + 1])
        assert (micro.predictors[inside] - starts[number] + 1).tolist() == trained.tolist()
        assert micro.targets[inside].tolist() == row.token_ids[trained].tolist()
        np.testing.assert_allclose(micro.behaviour_logprobs[inside], row.logprobs[trained])
        assert set(micro.advantages[inside].tolist()) == {1.0 if index == 0 else -1.0}
        kept = micro.token_ids[starts[number] : starts[number + 1]]
        assert kept.tolist() == row.token_ids[: trained[-1]].tolist()
    assert micro.positions.tolist() == [i for n in micro.lengths for i in range(n)]
    assert micro.loss_mask.sum() == len(micro.targets) == batch.tokens
    assert (micro.labels[micro.loss_mask] == micro.targets).all()


def test_a_row_ends_at_the_last_token_that_predicts_something():
    tail = episode(turns=((4, 3),), seed=1)
    longer = Episode("env", "task", "g", 0, id="longer")
    ids = tail.token_ids()
    longer.add_prompt(ids[:4])
    longer.add_sampled(ids[4:], [-1.0] * 3, [0] * 3, "stop")
    longer.add_prompt([1, 2, 3, 4, 5])
    longer.finish(EpisodeStatus.TRUNCATED_TURNS)
    batch = build([Group("g", "env", "task", [longer, episode(1.0, seed=2)])])
    assert 6 in batch.micro_batches[0].lengths


def test_token_mean_divides_by_all_tokens_of_the_step():
    """T35: one token with loss 4 and three with loss 0 give 1.0, wherever they are packed."""
    batch = build([group([1.0, 0.0, 1.0, 0.0])], layout(budget=20))
    assert len(batch.micro_batches) > 1
    weights = torch.cat([micro.weights for micro in batch.micro_batches])
    assert torch.allclose(weights, torch.full_like(weights, 1 / batch.tokens))
    assert math.isclose(float(weights.sum()), 1.0, rel_tol=1e-6)


def test_losses_of_unequal_shards_join_to_the_mean_over_tokens():
    """T35: a shard with one token of loss 4 and a shard with three of loss 0 make 1.0, not 2.0."""
    data = Group("g", "env", "task", [episode(turns=((8, 1),)), episode(turns=((6, 3),), seed=1)])
    shards = build_sft_batch([data], layout(budget=8)).micro_batches
    assert sorted(len(micro.targets) for micro in shards) == [1, 3]
    total = 0.0
    for micro in shards:
        count = len(micro.targets)
        logprobs = torch.full((count,), -4.0 if count == 1 else 0.0)
        total += float(sft_micro_loss(micro, logprobs)[0])
    assert total == pytest.approx(1.0)


def test_sequence_mean_gives_every_episode_the_same_share():
    data = group([1.0, 0.0, 3.0], turns=[((4, 1),), ((4, 7),), ((4, 3), (2, 9))])
    batch = build([data], algorithm=GrpoSettings(aggregation="sequence_mean"))
    shares = {}
    for micro in batch.micro_batches:
        for advantage, weight in zip(micro.advantages, micro.weights, strict=True):
            shares[float(advantage)] = shares.get(float(advantage), 0) + float(weight)
    assert list(shares.values()) == pytest.approx([1 / 3] * 3)


def test_forks_of_one_episode_share_its_weight_and_train_nothing_twice():
    forked = Episode("env", "task", "g", 0, id="forked")
    forked.add_prompt([1, 2, 3])
    forked.add_sampled([4, 5], [-1.0] * 2, [0] * 2, "stop")
    forked.fork(5, "compaction")
    forked.add_prompt([6])
    forked.add_sampled([7], [-1.0], [0], "stop")
    forked.fork(3, "rewrite")
    forked.add_prompt([8])
    forked.add_sampled([9], [-1.0], [0], "stop")
    forked.turns[-1].reward = 1.0
    forked.finish(EpisodeStatus.COMPLETED)
    data = Group("g", "env", "task", [forked, episode(0.0, turns=((3, 4),))])
    batch = build([data], algorithm=GrpoSettings(aggregation="sequence_mean"))
    own = [(t, w) for t, a, _, w in trained_tokens(batch) if a > 0]
    assert sorted(t for t, _ in own) == [4, 5, 7, 9]
    assert [w for _, w in own] == pytest.approx([1 / 2 / 4] * 4)
    assert batch.sequences == 2


def test_rows_without_advantage_stay_in_the_denominators_only():
    """T37 and the other way round: what is not computed still counts, what is padding never."""
    signal, silent = group([1.0, 0.0], id="a"), group([1.0, 1.0], id="b")
    batch = build([signal, silent])
    alone = build([signal])
    assert batch.tokens == alone.tokens + silent.sampled_tokens
    assert batch.sequences == 4
    assert batch.forward_tokens == alone.forward_tokens
    assert batch.excluded["groups_without_signal"] == 1
    assert batch.excluded["rows_without_advantage"] == 2
    assert batch.skip_reason is None


def test_one_nan_reward_is_isolated_and_counted():
    """U2: [1, NaN, 0, 1] trains like [1, 0, 1]."""
    whole = group([1.0, float("nan"), 0.0, 1.0])
    rest = Group("g", "env", "task", [e for i, e in enumerate(whole.episodes) if i != 1])
    batch = build([whole])
    assert batch.excluded["episodes_with_nan_reward"] == 1
    assert trained_tokens(batch) == trained_tokens(build([rest]))
    assert batch.reward == pytest.approx(2 / 3)


def test_failed_episodes_say_nothing_about_the_policy():
    """T118: an aborted episode is never trained as a complete one."""
    data = group([1.0, 0.0, 1.0])
    data.episodes[2].status = EpisodeStatus.ENGINE_FAILURE
    batch = build([data])
    assert batch.sequences == 2
    assert batch.excluded["episodes_engine_failure"] == 1


@pytest.mark.parametrize("groups", [[], [Group("g", "env", "task", [])]])
def test_an_empty_batch_is_a_skip_with_a_reason(groups):
    """U5"""
    batch = build(groups)
    assert batch.skip_reason == "no episode has a token to train on"
    assert (batch.micro_batches, batch.tokens, batch.reward) == ([], 0, 0.0)
    assert build_sft_batch(groups, layout()).skip_reason


def test_a_batch_of_equal_rewards_is_a_skip_with_a_reason():
    """U2, U5"""
    batch = build([group([1.0, 1.0]), group([0.3] * 7, id="h")])
    assert "every advantage is zero" in batch.skip_reason
    assert batch.micro_batches == []
    assert batch.tokens > 0


def test_a_log_prob_that_is_not_finite_is_refused():
    for bad in (float("nan"), float("-inf")):
        with pytest.raises(BatchError, match=r"episode g-\d+ row 0: a log-prob is not finite"):
            build([group([1.0, 0.0], logprob=bad)])


def test_a_token_outside_the_vocabulary_is_refused():
    data = group([1.0, 0.0])
    data.episodes[0].segments[0].token_ids[2] = VOCAB
    with pytest.raises(BatchError, match="vocabulary of 64"):
        build([data])


def test_a_sequence_longer_than_the_budget_is_refused():
    data = group([1.0, 0.0], turns=[((40, 5),)] * 2)
    assert build([data], layout(budget=44)).micro_batches[0].lengths == [44]
    with pytest.raises(BatchError, match="44 tokens do not fit into micro_batch_tokens = 43"):
        build([data], layout(budget=43))


def test_a_first_token_without_a_predictor_is_refused():
    lone = Episode("env", "task", "g", 0)
    lone.add_sampled([1, 2], [-1.0] * 2, [0] * 2, "stop")
    lone.finish(EpisodeStatus.COMPLETED)
    with pytest.raises(BatchError, match="nothing predicts it"):
        build([Group("g", "env", "task", [lone, episode()])])


def test_a_token_from_the_future_is_refused():
    with pytest.raises(BatchError, match="sampled by version 3, but the trainer is at 2"):
        build([group([1.0, 0.0], version=3)], version=2)


def test_staleness_is_measured_over_tokens():
    """T131: every step reports the lag of what it trains, and a batch is one optimizer step."""
    old, new = group([1.0, 0.0], version=1, id="a"), group([1.0, 0.0], version=3, id="b")
    batch = build([old, new], version=4)
    count = old.sampled_tokens, new.sampled_tokens
    assert batch.staleness_mean == pytest.approx((3 * count[0] + 1 * count[1]) / sum(count))
    assert batch.staleness_max == 3


def test_tokens_beyond_the_bound_leave_the_loss():
    """T29: the mask removes exactly the stale tokens, in the middle of an episode too."""
    mixed = Episode("env", "task", "g", 0, id="mixed")
    mixed.add_prompt([1, 2])
    mixed.add_sampled([11, 12, 13], [-1.0] * 3, [0, 0, 2], "stop")
    mixed.turns[-1].reward = 1.0
    mixed.finish(EpisodeStatus.COMPLETED)
    data = Group("g", "env", "task", [mixed, episode(0.0, version=2)])
    batch = build([data], version=2, mask_older_than=1)
    assert [t for t, a, _, _ in trained_tokens(batch) if a > 0] == [13]
    assert batch.excluded["tokens_too_stale"] == 2
    assert batch.staleness_max == 0


def test_routes_keep_their_dtype_and_their_tokens():
    """T97, T98, T101: routes follow the ids; the last sampled token has none."""
    data = group([1.0, 0.0], routes=True)
    batch = build([data], layout(routes=SHAPE))
    (micro,) = batch.micro_batches
    assert micro.routes.dtype == torch.uint8
    start = 0
    for index in sorted(range(2), key=lambda i: -len(data.episodes[i])):
        (row,) = data.episodes[index].rows()
        used = int(np.flatnonzero(row.loss_mask)[-1])
        assert (micro.routes[start : start + used].numpy() == row.routes[:used]).all()
        start += used
    assert micro.has_route.all()
    assert not data.episodes[0].rows()[0].has_route[-1]


def test_tokens_without_a_route_are_marked():
    data = group([1.0, 0.0])
    for member in data.episodes:
        member.segments[0].add_routes(0, random_routes(np.random.default_rng(0), 4))
    (micro,) = build([data], layout(routes=SHAPE)).micro_batches
    starts = micro.cu_seqlens.tolist()
    for start, end in itertools.pairwise(starts):
        assert micro.has_route[start:end].tolist() == [True] * 4 + [False] * (end - start - 4)


def broken_routes(change):
    data = group([1.0, 0.0])
    for member in data.episodes:
        good = random_routes(np.random.default_rng(0), len(member) - 1)
        member.segments[0].add_routes(0, change(good))
    return [data]


def named(routes, value):
    routes = routes.copy()
    routes[1, 2] = value
    return routes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r[:, :2], "routes have shape"),
        (lambda r: r[..., :1], "routes have shape"),
        (lambda r: named(r, [1, 4]), "expert 4 of 4"),
        (lambda r: named(r, [3, 3]), "one expert twice"),
        (lambda r: r.astype(np.int64), "not uint8 or uint16"),
    ],
)
def test_routes_that_do_not_fit_the_model_are_refused(change, message):
    with pytest.raises(RouteError, match=message):
        build(broken_routes(change), layout(routes=SHAPE))


def test_dense_layers_may_hold_anything():
    """T100: layers [dense, moe, moe] are indexed globally; the dense layer's are not read."""

    def dense_is_garbage(routes):
        routes = routes.copy()
        routes[:, 0] = 255
        return routes

    assert build(broken_routes(dense_is_garbage), layout(routes=SHAPE)).micro_batches


def test_missing_routes_are_refused_where_replay_is_on():
    with pytest.raises(RouteError, match="no routed experts"):
        build([group([1.0, 0.0])], layout(routes=SHAPE))
    assert build([group([1.0, 0.0], routes=True)]).micro_batches[0].routes is None


def test_sft_trains_every_sampled_token_equally_and_without_routes():
    data = [group([1.0, 1.0], routes=True), group([0.0], id="b")]
    batch = build_sft_batch(data, layout(routes=SHAPE))
    assert batch.tokens == sum(g.sampled_tokens for g in data)
    assert [w for *_, w in trained_tokens(batch)] == pytest.approx(
        [1 / batch.tokens] * batch.tokens
    )
    assert all(micro.routes is None for micro in batch.micro_batches)


def test_sft_leaves_failed_episodes_out():
    data = group([1.0, 0.0])
    data.episodes[0].status = EpisodeStatus.ENV_FAILURE
    batch = build_sft_batch([data], layout())
    assert (batch.sequences, batch.excluded["episodes_env_failure"]) == (1, 1)


def test_shuffled_rewards_keep_the_mean_and_change_the_advantages():
    data = [group([1.0, 1.0, 0.0, 0.0], id=name) for name in "abcd"]
    plain = build(data)
    mixed = build(data, algorithm=GrpoSettings(shuffle_rewards=True), seed=5)
    again = build(data, algorithm=GrpoSettings(shuffle_rewards=True), seed=5)
    assert mixed.reward == plain.reward
    assert trained_tokens(mixed) == trained_tokens(again) != trained_tokens(plain)


SHAPES = st.lists(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=3),
    min_size=2,
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.integers(45, 200), st.integers(1, 3))
def test_splitting_into_micro_batches_changes_nothing(turns, budget, multiple):
    rewards = [float(i % 2) for i in range(len(turns))]
    data = [group(rewards, turns=turns)]
    split, whole = build(data, layout(budget, multiple=multiple)), build(data, layout(1000))
    assert trained_tokens(split) == trained_tokens(whole)
    assert len(split.micro_batches) % multiple == 0
    assert all(micro.tokens <= budget for micro in split.micro_batches)
    assert all(not micro.weights.any() for micro in split.micro_batches if micro.filler)


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.data())
def test_inserting_observation_tokens_changes_nothing_in_the_loss(turns, data):
    """T31, T32: what the policy did not say moves neither advantages nor weights."""
    rewards = [float(i % 2) for i in range(len(turns))]
    plain = group(rewards, turns=turns)
    longer = [e.rows()[0] for e in plain.episodes]
    padded = Group("g", "env", "task", [])
    for member, row, reward in zip(plain.episodes, longer, rewards, strict=True):
        copy = Episode("env", "task", "g", 0, id=member.id)
        for turn in member.turns:
            previous = max((t.end for t in member.turns if t.end <= turn.start), default=0)
            copy.add_prompt(row.token_ids[previous : turn.start].tolist())
            copy.add_prompt([7] * data.draw(st.integers(0, 5)))
            span = slice(turn.start, turn.end)
            ids, logprobs = row.token_ids[span].tolist(), row.logprobs[span].tolist()
            copy.add_sampled(ids, logprobs, [0] * len(ids), "stop")
        copy.turns[-1].reward = reward
        copy.finish(EpisodeStatus.COMPLETED)
        padded.episodes.append(copy)
    for algorithm in (GRPO, GrpoSettings(aggregation="sequence_mean")):
        before = build([plain], layout(1000), algorithm)
        after = build([padded], layout(1000), algorithm)
        assert trained_tokens(before) == trained_tokens(after)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 5))
def test_bins_hold_every_row_once_within_the_budget(sizes, multiple):
    """U7: data-parallel ranks make the same number of forward passes."""
    bins = spread(first_fit(sizes, 50), sizes, multiple)
    assert sorted(i for members in bins for i in members) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in members) <= 50 for members in bins)
    assert len(bins) % multiple == 0
    assert all(bins) or len(sizes) < len(bins)


def test_ranks_take_disjoint_shares_of_equal_count():
    batch = build([group([1.0, 0.0])], layout(multiple=4))
    shares = [batch.shard(rank, 4) for rank in range(4)]
    assert [len(share) for share in shares] == [1] * 4
    assert sum(micro.filler for share in shares for micro in share) == 2
    with pytest.raises(BatchError, match="cannot be shared by 3 ranks"):
        batch.shard(0, 3)


@pytest.mark.parametrize("end", [[2], [2, 2], [2, 2, 2]])
def test_an_end_token_that_is_also_the_padding_token_is_trained_like_any_other(end):
    """T43: the mask says what was sampled; no token id does, neither 0 nor the end of a turn."""
    first, second = Episode("env", "t", "g", 0), Episode("env", "t", "g", 0)
    for log, reward in ((first, 1.0), (second, 0.0)):
        log.add_prompt([2, 0])
        ids = [5, 6, *end, 0]
        log.add_sampled(ids, [-1.0] * len(ids), [0] * len(ids), "stop").reward = reward
        log.finish(EpisodeStatus.COMPLETED)
    batch = build([Group("g", "env", "t", [first, second])])
    (micro,) = batch.micro_batches
    assert micro.padded(64).labels.tolist()[:-1].count(-100) == 63 - 2 * (3 + len(end))
    assert micro.targets.tolist() == 2 * [5, 6, *end, 0]


def test_padding_adds_a_row_that_trains_nothing():
    (micro,) = build([group([1.0, 0.0], routes=True)], layout(routes=SHAPE)).micro_batches
    padded = micro.padded(64)
    assert padded.tokens == len(padded.positions) == len(padded.routes) == 64
    assert padded.lengths == [*micro.lengths, 64 - micro.tokens]
    assert padded.loss_mask.sum() == micro.loss_mask.sum()
    assert not padded.has_route[micro.tokens :].any()
    assert micro.padded(micro.tokens) is micro
    with pytest.raises(BatchError):
        micro.padded(3)

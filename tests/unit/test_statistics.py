"""Statistics of an evaluation."""

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_agent.envs.statistics import clustered_mean, clustered_share, pass_all_k, pass_at_k


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(samples, data):
    successes = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    outcomes = [1] * successes + [0] * (samples - successes)
    subsets = list(itertools.combinations(outcomes, k))
    assert pass_at_k(samples, successes, k) == pytest.approx(statistics.fmean(map(max, subsets)))
    assert pass_all_k(samples, successes, k) == pytest.approx(statistics.fmean(map(min, subsets)))


def test_pass_at_k_stays_exact_for_many_samples():
    assert pass_at_k(10_000, 1, 1) == pytest.approx(1e-4)
    assert pass_at_k(10_000, 9_999, 100) == 1.0


@pytest.mark.parametrize("k", [0, 4])
def test_pass_at_k_refuses_a_k_that_the_samples_cannot_give(k):
    with pytest.raises(ValueError, match="samples"):
        pass_at_k(3, 1, k)


@pytest.mark.parametrize("mean_of", [clustered_mean, clustered_share])
@pytest.mark.parametrize("samples", [1, 8])
def test_the_interval_covers_the_true_mean_about_as_often_as_it_says(mean_of, samples):
    rng = random.Random(0)
    covered = 0
    for _ in range(600):
        found = {}
        for task in range(20):
            p = rng.random()  # tasks differ, samples of one task agree: the mean of all is 0.5
            found[str(task)] = [float(rng.random() < p) for _ in range(samples)]
        mean = mean_of(found)
        covered += mean.low <= 0.5 <= mean.high
    assert 0.91 <= covered / 600 <= 0.98


def test_every_task_has_the_same_weight_and_few_tasks_have_no_interval():
    assert clustered_mean({"a": [1.0, 1.0, 1.0], "b": [0.0]}).value == 0.5
    alone = clustered_mean({"a": [0.0, 1.0]})
    assert alone.low is None and str(alone) == "0.500"
    for mean_of in (clustered_mean, clustered_share):
        assert mean_of({}) is None and mean_of({"a": []}) is None


def test_more_tasks_make_the_interval_narrower():
    few = clustered_mean({str(i): [float(i % 2)] for i in range(10)})
    many = clustered_mean({str(i): [float(i % 2)] for i in range(1000)})
    assert few.high - few.low > 5 * (many.high - many.low)
    half = 1.96 * 0.5 / math.sqrt(1000)
    assert math.isclose(many.high - many.value, half, rel_tol=0.01)


@pytest.mark.parametrize(("right", "of"), [(0, 3), (3, 3), (0, 40), (39, 40)])
def test_a_share_stays_between_0_and_1_and_is_never_certain(right, of):
    mean = clustered_share({str(i): [float(i < right)] for i in range(of)})
    assert 0.0 <= mean.low <= mean.value <= mean.high <= 1.0
    assert mean.high - mean.low > 0.05


def test_the_interval_of_a_share_is_wilson_s():
    """20 of 50 gives 0.276 to 0.538."""
    mean = clustered_share({str(i): [float(i < 20)] for i in range(50)})
    assert (mean.low, mean.high) == pytest.approx((0.2761, 0.5382), abs=2e-3)


@given(st.dictionaries(st.text(max_size=2), st.lists(st.sampled_from([0.0, 1.0]), min_size=1)))
def test_any_shares_give_an_interval_around_their_mean(samples):
    mean = clustered_share(samples)
    if samples:
        assert 0 <= mean.low <= mean.value + 1e-9 and mean.value - 1e-9 <= mean.high <= 1

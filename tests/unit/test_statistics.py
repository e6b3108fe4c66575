"""Statistics of an evaluation."""

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_agent.envs.statistics import clustered_mean, pass_all_k, pass_at_k


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


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says():
    rng = random.Random(0)
    covered = 0
    for _ in range(400):
        samples = {}
        for task in range(12):
            p = rng.random()  # tasks differ, samples of one task agree: the mean of all is 0.5
            samples[str(task)] = [float(rng.random() < p) for _ in range(8)]
        mean = clustered_mean(samples)
        covered += abs(mean.value - 0.5) <= mean.half_width
    assert 0.91 <= covered / 400 <= 0.98


def test_every_task_has_the_same_weight_and_one_task_has_no_interval():
    assert clustered_mean({"a": [1.0, 1.0, 1.0], "b": [0.0]}).value == 0.5
    alone = clustered_mean({"a": [0.0, 1.0]})
    assert alone.half_width is None and str(alone) == "0.500"
    assert clustered_mean({}) is None and clustered_mean({"a": []}) is None


def test_more_tasks_make_the_interval_narrower():
    few = clustered_mean({str(i): [float(i % 2)] for i in range(10)})
    many = clustered_mean({str(i): [float(i % 2)] for i in range(1000)})
    assert few.half_width > 5 * many.half_width
    assert math.isclose(many.half_width, 1.96 * 0.5 / math.sqrt(1000), rel_tol=0.01)

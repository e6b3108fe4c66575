"""Sampling: the right distribution, the right log-probs, and nobody's neighbour matters."""

import numpy as np
import pytest
import torch

from relax_agent.engines.embedded.sampling import Sampler, Sampling, uniform


def sampling(**changes):
    base = {"max_new_tokens": 8, "temperature": 1.0, "seed": 1, "stop_token_ids": frozenset()}
    return Sampling(**(base | changes))


def draw(rows, logits, counters=None):
    return Sampler(rows).sample(logits.clone(), counters or [0] * len(rows))


def test_numbers_are_uniform_and_differ_by_seed_and_counter():
    seeds, counters = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200, dtype=np.uint64))
    numbers = uniform(seeds.ravel(), counters.ravel()).numpy()
    assert numbers.min() >= 0 and numbers.max() < 1
    assert len(np.unique(numbers)) == numbers.size
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    expected = numbers.size / 20
    assert ((counts - expected) ** 2 / expected).sum() < 50  # chi-square, 19 degrees, p < 1e-4


def test_tokens_come_as_often_as_the_distribution_says():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    rows = [sampling(seed=seed, temperature=0.7) for seed in range(20_000)]
    tokens, _ = draw(rows, logits.expand(len(rows), -1))
    share = np.bincount(tokens, minlength=4) / len(tokens)
    assert share == pytest.approx((logits[0] / 0.7).softmax(-1).numpy(), abs=0.015)


def test_logprobs_are_those_after_bias_and_temperature():
    torch.manual_seed(0)
    logits = torch.randn(3, 16)
    rows = [
        sampling(temperature=0.5, logit_bias={3: 2.0, 5: -1.0}),
        sampling(temperature=1.7),
        sampling(temperature=0.0, logit_bias={1: 9.0}),
    ]
    tokens, logprobs = draw(rows, logits)
    biased = logits.clone()
    biased[0, 3] += 2.0
    biased[0, 5] -= 1.0
    biased[2, 1] += 9.0
    for row, temperature in enumerate((0.5, 1.7, 1.0)):
        expected = (biased[row] / temperature).log_softmax(-1)[tokens[row]]
        assert logprobs[row] == pytest.approx(float(expected), abs=1e-6)
    assert tokens[2] == 1


def test_a_token_of_chance_zero_is_never_taken():
    logits = torch.full((2000, 5), -torch.inf)
    logits[:, 2] = 1.0
    tokens, logprobs = draw([sampling(seed=s) for s in range(2000)], logits)
    assert set(tokens) == {2}
    assert set(logprobs) == {0.0}


def test_a_row_samples_the_same_in_any_company():
    torch.manual_seed(0)
    logits = torch.randn(64, 32)
    rows = [sampling(seed=s, temperature=1.0 if s % 3 else 0.0) for s in range(64)]
    together, _ = draw(rows, logits, list(range(64)))
    alone = [draw([rows[at]], logits[at : at + 1], [at])[0][0] for at in range(64)]
    assert together == alone


def test_stop_tokens_are_not_sampled_before_the_minimum():
    logits = torch.zeros(1, 4)
    logits[0, 1] = 50.0
    row = sampling(stop_token_ids=frozenset({1}), min_new_tokens=3)
    assert draw([row], logits, [2])[0] != [1]
    assert draw([row], logits, [3])[0] == [1]


def test_nan_logits_are_reported_as_nan_and_stay_inside_the_vocabulary():
    tokens, logprobs = draw([sampling()], torch.full((1, 7), torch.nan))
    assert 0 <= tokens[0] < 7
    assert np.isnan(logprobs[0])


def test_seeds_may_be_any_64_bit_integer():
    logits = torch.randn(3, 9)
    draw([sampling(seed=s) for s in (-(2**63), -1, 2**63 - 1)], logits)

"""The mathematics of GRPO against float64 oracles written in NumPy, token by token."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pydantic import ValidationError

from relax_agent.trainers.algorithms.advantages import group_advantages, shuffled, zero_variance
from relax_agent.trainers.algorithms.grpo import k3, policy_loss
from relax_agent.trainers.algorithms.settings import GrpoSettings

REWARDS = hnp.arrays(np.float64, st.integers(2, 12), elements=st.integers(-4, 4).map(float))


def loss_oracle(logprob, behaviour, advantage, s):
    ratio = math.exp(min(20.0, max(-20.0, logprob - behaviour)))
    held = min(max(ratio, 1 - s.clip_low), 1 + s.clip_high)
    loss = max(-ratio * advantage, -held * advantage)
    if s.dual_clip is not None and advantage < 0:
        loss = min(loss, -s.dual_clip * advantage)
    return loss


def tensors(*columns):
    return [torch.tensor(column, dtype=torch.float64) for column in columns]


@given(REWARDS)
def test_advantages_are_the_z_score(rewards):
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    expected = [0.0 if std < 1e-9 else (r - mean) / std for r in rewards]
    np.testing.assert_allclose(group_advantages(rewards), expected, atol=1e-12)


@given(REWARDS, st.integers(-50, 50), st.integers(1, 9))
def test_advantages_ignore_the_scale_and_offset_of_rewards(rewards, offset, scale):
    np.testing.assert_allclose(
        group_advantages(rewards * scale + offset), group_advantages(rewards), atol=1e-9
    )


def test_equal_rewards_are_zero_variance_whatever_rounding_says():
    """U1: seven float32 rewards of 0.3 have a standard deviation above 0."""
    rewards = np.full(7, 0.3, np.float32)
    assert rewards.std() > 0
    assert zero_variance(rewards)
    assert not group_advantages(rewards).any()
    noisy = np.array([0.3, 0.1 + 0.2, 0.3 + 1e-9])
    assert len(set(noisy)) == 3
    assert not group_advantages(noisy).any()


def test_a_lone_episode_has_no_advantage():
    assert group_advantages([5.0]).tolist() == [0.0]
    assert group_advantages([]).tolist() == []


def test_without_std_the_advantage_is_the_centred_reward():
    assert group_advantages([0, 1, 1, 2], normalize_std=False).tolist() == [-1, 0, 0, 1]


def test_shuffling_permutes_and_depends_on_the_seed_alone():
    rewards = np.arange(20.0)
    first, again, other = (shuffled(rewards, seed) for seed in ((1, 2), (1, 2), (1, 3)))
    assert sorted(first) == rewards.tolist()
    assert first.tolist() == again.tolist() != other.tolist()


TOKEN = st.tuples(
    st.floats(-30, 0, width=32), st.floats(-30, 0, width=32), st.floats(-3, 3, width=32)
)


@given(st.lists(TOKEN, min_size=1, max_size=8), st.sampled_from([None, 1.5, 3.0]))
def test_policy_loss_equals_the_oracle(tokens, dual_clip):
    constants = GrpoSettings(dual_clip=dual_clip)
    got = policy_loss(*tensors(*zip(*tokens, strict=True)), constants)
    expected = [loss_oracle(*token, constants) for token in tokens]
    np.testing.assert_allclose(got.loss.numpy(), expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=60)
@given(st.lists(TOKEN, min_size=1, max_size=6))
def test_policy_gradient_equals_finite_differences(tokens):
    constants = GrpoSettings()
    logprobs, behaviour, advantages = tensors(*zip(*tokens, strict=True))
    logprobs.requires_grad_()
    policy_loss(logprobs, behaviour, advantages, constants).loss.sum().backward()
    step = 1e-6
    for i, (logprob, old, advantage) in enumerate(tokens):
        log_ratio = logprob - old
        kinks = [math.log(0.8), math.log(1.28), math.log(3.0), 20.0, -20.0]
        if min(abs(log_ratio - kink) for kink in kinks) < 1e-4:
            continue  # two different slopes meet here
        above = loss_oracle(logprob + step, old, advantage, constants)
        below = loss_oracle(logprob - step, old, advantage, constants)
        slope = (above - below) / (2 * step)
        assert logprobs.grad[i].item() == pytest.approx(slope, rel=1e-4, abs=1e-5)


def test_clipped_tokens_are_exactly_those_without_gradient():
    log_ratios = [math.log(x) for x in (0.5, 0.9, 1.0, 1.2, 1.5, 5.0)] * 2
    advantages = [1.0] * 6 + [-1.0] * 6
    logprobs, behaviour, advantage = tensors(log_ratios, [0.0] * 12, advantages)
    logprobs.requires_grad_()
    result = policy_loss(logprobs, behaviour, advantage, GrpoSettings())
    result.loss.sum().backward()
    assert result.clipped.tolist() == (logprobs.grad == 0).tolist()
    assert result.clipped.tolist() == [False] * 4 + [True] * 2 + [True] + [False] * 4 + [True]


def test_on_policy_gradient_is_minus_the_advantage():
    logprobs, behaviour, advantages = tensors([-1.0, -2.0], [-1.0, -2.0], [1.5, -0.5])
    logprobs.requires_grad_()
    policy_loss(logprobs, behaviour, advantages, GrpoSettings()).loss.sum().backward()
    assert logprobs.grad.tolist() == [-1.5, 0.5]


@pytest.mark.parametrize("log_ratio", [-200.0, -50.0, 0.0, 50.0, 200.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kl_and_loss_stay_finite_far_off_policy(log_ratio, dtype):
    """U4: a log-ratio of ±200 overflows ``exp`` in float32."""
    logprobs = torch.tensor([log_ratio], dtype=dtype, requires_grad=True)
    zero = torch.zeros(1, dtype=dtype)
    for advantage in (-1.0, 1.0):
        loss = policy_loss(logprobs, zero, torch.tensor([advantage], dtype=dtype), GrpoSettings())
        total = loss.loss.sum() + k3(logprobs, zero).sum()
        (gradient,) = torch.autograd.grad(total, logprobs)
        assert torch.isfinite(total)
        assert torch.isfinite(gradient).all()


@given(st.floats(-15, 15), st.floats(-15, 0))
def test_k3_equals_its_definition_and_is_never_negative(difference, old):
    got = k3(*tensors([old + difference], [old])).item()
    exact = (old + difference) - old
    assert got >= 0
    assert got == pytest.approx(math.expm1(exact) - exact, rel=1e-9, abs=1e-15)


def test_k3_estimates_the_divergence_it_names():
    """Mean over samples of q equals KL(q ‖ p), by the exact sum over a small vocabulary."""
    rng = np.random.default_rng(0)
    q, p = (np.exp(x) / np.exp(x).sum() for x in rng.normal(size=(2, 9)))
    expectation = (q * k3(*tensors(np.log(p), np.log(q))).numpy()).sum()
    assert expectation == pytest.approx((q * np.log(q / p)).sum(), rel=1e-12)


def test_bounds_that_contradict_each_other_are_refused():
    with pytest.raises(ValidationError, match="dual_clip"):
        GrpoSettings(dual_clip=1.1, clip_high=0.28)
    with pytest.raises(ValidationError):
        GrpoSettings.model_validate({"kl_coef": 0.1})

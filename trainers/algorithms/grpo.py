"""The clipped policy loss and the KL estimate, per token and without reduction.

Everything takes log-probs ``[trained]`` of tokens that were sampled and gives ``[trained]``; how
tokens are weighed against each other is in the batch (``MicroBatch.weights``), so the packing
cannot change it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from relax_agent.trainers.algorithms.settings import GrpoSettings

LOG_RATIO_BOUND = 20.0
"""Log-ratios are held within ±20 before ``exp``: far beyond any clip, and finite in float32."""


class TokenLoss(NamedTuple):
    """The loss of each token, ``[trained]``, and what clipping did to it."""

    loss: Tensor
    ratio: Tensor
    """``exp(logprobs − behaviour)``, detached."""
    clipped: Tensor
    """Bool: the bound holds, so the token sends no gradient."""


def policy_loss(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, settings: GrpoSettings
) -> TokenLoss:
    """Return the dual-clip policy loss of every token.

    With ``ρ = exp(logprobs − behaviour)`` and advantage ``A``::

        L = max(−ρ·A, −clip(ρ, 1 − clip_low, 1 + clip_high)·A)
        L = min(L, −dual_clip·A)   where A < 0

    PPO (arXiv 1707.06347, eq. 7) with the separate upper bound of DAPO (arXiv 2503.14476) and the
    dual clip of Ye et al. (arXiv 1912.09729, eq. 5). ``ρ`` compares with the engine's own
    log-probs, so it corrects staleness and the engine's numerics at once.

    Args:
        logprobs: ``[trained]``, with gradient.
        behaviour: ``[trained]``, log-probs at sampling time.
        advantages: ``[trained]``.
        settings: The bounds.
    """
    log_ratio = (logprobs - behaviour).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    free = -ratio * advantages
    held = -ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantages
    loss, clipped = torch.maximum(free, held), held > free
    if settings.dual_clip is not None:
        bound = -settings.dual_clip * advantages
        over = (advantages < 0) & (loss > bound)
        loss, clipped = torch.where(over, bound, loss), clipped | over
    return TokenLoss(loss, ratio.detach(), clipped)


def k3(logprobs: Tensor, sampled_from: Tensor) -> Tensor:
    """Return Schulman's k3 estimate of ``KL(sampled_from ‖ policy)`` per token, never negative.

    ``k3 = e^d − 1 − d`` with ``d = logprobs − sampled_from`` (joschu.net/blog/kl-approx.html).
    ``d`` is bounded above before ``exp``, so a log-ratio of ±200 stays finite; below, the estimate
    is linear in ``d`` by itself.

    Args:
        logprobs: ``[tokens]``, of the policy.
        sampled_from: ``[tokens]``, of the distribution that the tokens were drawn from.
    """
    difference = logprobs - sampled_from
    # expm1 keeps the square that is left for small d, which exp(d) − 1 would round away.
    return torch.expm1(difference.clamp(max=LOG_RATIO_BOUND)) - difference.clamp(
        max=LOG_RATIO_BOUND
    )

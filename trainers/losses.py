"""From the log-probs of one micro-batch to its share of the loss and of the metrics.

Both trainers call these; metrics are *sums* in one float64 vector, so that micro-batches and ranks
are joined by plain addition (one all-reduce), and means are taken once, at the end.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from relax_agent.trainers.algorithms.grpo import k3, policy_loss
from relax_agent.trainers.algorithms.settings import AlgorithmSettings
from relax_agent.trainers.batch import Batch, MicroBatch
from relax_agent.trainers.protocol import StepReport

SUMS: Final = (
    "loss",
    "tokens",
    "mismatch",
    "kl",
    "ratio",
    "clipped",
    "replayed_tokens",
    "replayed_choices",
    "differing_choices",
)
"""The entries of a vector of sums; the last three come from the routers."""


def new_sums() -> Tensor:
    """Return a vector of zeros ``[len(SUMS)]``, float64 on the CPU."""
    return torch.zeros(len(SUMS), dtype=torch.float64)


def policy_micro_loss(
    micro: MicroBatch, logprobs: Tensor, algorithm: AlgorithmSettings
) -> tuple[Tensor, Tensor]:
    """Return this micro-batch's share of the step's policy loss, and its sums.

    Add the losses of all micro-batches of all ranks; divide by nothing.

    Args:
        micro: The packed rows.
        logprobs: ``[trained]``, of ``micro.targets`` at ``micro.predictors``, with gradient.
        algorithm: The loss and its bounds.
    """
    behaviour = micro.behaviour_logprobs
    token = policy_loss(logprobs, behaviour, micro.advantages, algorithm)
    loss = (token.loss * micro.weights).sum()
    current = logprobs.detach().double()
    return loss, _sums(
        micro,
        loss,
        mismatch=(current - behaviour).abs().sum(),
        kl=k3(current, behaviour.double()).sum(),
        ratio=token.ratio.double().sum(),
        clipped=token.clipped.sum(),
    )


def sft_micro_loss(micro: MicroBatch, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Return this micro-batch's share of ``−Σ weight · logprob``, and its sums.

    Args:
        micro: The packed rows.
        logprobs: ``[trained]``, with gradient.
    """
    loss = -(logprobs * micro.weights).sum()
    return loss, _sums(micro, loss)


def _sums(micro: MicroBatch, loss: Tensor, **values: Tensor) -> Tensor:
    sums = new_sums()
    if not micro.filler:
        for name, value in {"loss": loss.detach(), **values}.items():
            sums[SUMS.index(name)] = value
        sums[SUMS.index("tokens")] = micro.targets.numel()
    return sums


def report_of(batch: Batch, sums: Tensor | None = None) -> StepReport:
    """Return a report with everything that the batch and the joined sums say.

    Args:
        batch: The step's batch.
        sums: ``[len(SUMS)]``, added over micro-batches and data-parallel ranks; None if skipped.
    """
    report = StepReport(
        skipped=batch.skip_reason,
        reward=batch.reward,
        tokens=batch.tokens,
        sequences=batch.sequences,
        forward_tokens=batch.forward_tokens,
        micro_batches=len(batch.micro_batches),
        staleness_mean=batch.staleness_mean,
        staleness_max=batch.staleness_max,
        excluded=dict(batch.excluded),
    )
    if sums is None:
        return report
    value = dict(zip(SUMS, sums.tolist(), strict=True))
    tokens = max(1.0, value["tokens"])
    report.loss = value["loss"]
    report.logprob_mismatch = value["mismatch"] / tokens
    report.mismatch_kl = value["kl"] / tokens
    report.ratio_mean = value["ratio"] / tokens
    report.clip_share = value["clipped"] / tokens
    report.routes_replayed = value["replayed_tokens"] / max(1, batch.forward_tokens)
    report.routes_differ = value["differing_choices"] / max(1.0, value["replayed_choices"])
    return report

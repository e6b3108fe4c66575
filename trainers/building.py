"""From groups of episodes to one step's batch.

An episode's leaves become rows, and rows become packed micro-batches
(:mod:`relax_agent.trainers.packing`). Three things keep the numbers independent of the packing:

* every trained token carries its own ``weight`` in the loss, divided by the denominator of the
  whole step;
* advantages are computed over whole groups before anything is packed;
* a row ends at the last token that predicts something: what follows could not reach the loss.

Rows whose advantage is 0 send exactly no gradient; they stay out of the forward pass and in the
denominators. Everything that can be wrong with the data is found here, before a weight changes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from relax_agent.episode import Episode, Group, Row
from relax_agent.errors import BatchError
from relax_agent.trainers.algorithms.advantages import group_advantages, shuffled, zero_variance
from relax_agent.trainers.algorithms.settings import AlgorithmSettings
from relax_agent.trainers.batch import Batch
from relax_agent.trainers.checks import check_row
from relax_agent.trainers.packing import Sample, pack
from relax_agent.trainers.protocol import BatchLayout


def build_batch(
    groups: Sequence[Group],
    algorithm: AlgorithmSettings,
    layout: BatchLayout,
    *,
    version: int,
    seed: int = 0,
    mask_older_than: int | None = None,
) -> Batch:
    """Return the batch of one reinforcement-learning step.

    Args:
        groups: Whole groups; their episodes' rewards are compared.
        algorithm: Decides advantages and each token's weight.
        layout: From the trainer.
        version: The trainer's weight version, from which staleness is counted.
        seed: Seeds the diagnostic permutation of rewards, together with ``version``.
        mask_older_than: Tokens staler than this leave the loss; None keeps all.

    Raises:
        BatchError: Malformed data.
        RouteError: Routes that do not fit the model or the tokens.
    """
    batch = Batch()
    kept = [(group, _countable(group, batch.excluded)) for group in groups]
    rewards = _rewards([episodes for _, episodes in kept], algorithm, (seed, version))
    samples: list[Sample] = []
    for (_, episodes), values in zip(kept, rewards, strict=True):
        advantages = group_advantages(values, normalize_std=algorithm.normalize_std)
        if episodes and zero_variance(values):
            batch.excluded["groups_without_signal"] += 1
        for episode, advantage in zip(episodes, advantages, strict=True):
            rows = _rows(episode, layout, version, mask_older_than, batch.excluded)
            samples += [Sample(name, row, episode.media, float(advantage)) for name, row in rows]
            batch.sequences += bool(rows)
    counted = [float(value) for values in rewards for value in values]
    batch.reward = float(np.mean(counted)) if counted else 0.0
    _weigh(samples, batch, algorithm.aggregation)
    _measure_staleness(samples, batch, version)
    live = [sample for sample in samples if sample.advantage != 0.0]
    batch.excluded["rows_without_advantage"] += len(samples) - len(live)
    return _finish(batch, samples, live, layout)


def build_sft_batch(groups: Sequence[Group], layout: BatchLayout) -> Batch:
    """Return the batch of one supervised step: every sampled token, equal weights, no routes.

    What an expert "sampled" was routed by no engine, so the live router decides.
    """
    batch, samples = Batch(), []
    for episode in (each for group in groups for each in _countable(group, batch.excluded)):
        rows = _rows(episode, replace(layout, routes=None), 0, None, batch.excluded)
        samples += [Sample(name, row, episode.media) for name, row in rows]
        batch.sequences += bool(rows)
    _weigh(samples, batch, "token_mean")
    return _finish(batch, samples, samples, replace(layout, routes=None))


def _countable(group: Group, excluded: Counter[str]) -> list[Episode]:
    """Return the episodes whose reward says something; one bad one never poisons its group."""
    kept = []
    for episode in group.episodes:
        if not episode.status.trainable:
            excluded[f"episodes_{episode.status.value}"] += 1
        elif not math.isfinite(episode.reward):
            excluded["episodes_with_nan_reward"] += 1
        else:
            kept.append(episode)
    return kept


def _rewards(
    kept: Sequence[Sequence[Episode]], algorithm: AlgorithmSettings, seed: tuple[int, int]
) -> list[npt.NDArray[np.float64]]:
    flat = np.array([episode.reward for episodes in kept for episode in episodes], np.float64)
    if algorithm.shuffle_rewards:
        flat = shuffled(flat, seed)
    return np.split(flat, np.cumsum([len(episodes) for episodes in kept])[:-1]) if kept else []


def _rows(
    episode: Episode,
    layout: BatchLayout,
    version: int,
    mask_older_than: int | None,
    excluded: Counter[str],
) -> list[tuple[str, Row]]:
    """Return the checked rows of one episode that train at least one token."""
    rows = []
    for index, row in enumerate(episode.rows()):
        name = f"episode {episode.id} row {index}"
        check_row(name, row, layout)
        if mask_older_than is not None:
            stale = (row.loss_mask != 0) & (version - row.weight_versions > mask_older_than)
            row.loss_mask = np.where(stale, 0, row.loss_mask).astype(np.int8)
            excluded["tokens_too_stale"] += int(stale.sum())
        if row.loss_mask.any():
            rows.append((name, row))
    if not rows:
        excluded["episodes_without_trained_tokens"] += 1
    return rows


def _weigh(samples: Sequence[Sample], batch: Batch, aggregation: str) -> None:
    """Set each row's weight per token, with the denominators of the whole step."""
    counts: Counter[str] = Counter()
    for sample in samples:
        counts[_episode_of(sample)] += len(sample.trained)
    batch.tokens = sum(counts.values())
    for sample in samples:
        if aggregation == "token_mean":
            sample.weight = 1.0 / batch.tokens
        else:
            sample.weight = 1.0 / (batch.sequences * counts[_episode_of(sample)])


def _episode_of(sample: Sample) -> str:
    return sample.name.rpartition(" row ")[0]


def _measure_staleness(samples: Sequence[Sample], batch: Batch, version: int) -> None:
    if samples:
        ages = np.concatenate([version - s.row.weight_versions[s.trained] for s in samples])
        batch.staleness_mean, batch.staleness_max = float(ages.mean()), int(ages.max())
        if int(ages.min()) < 0:
            raise BatchError(
                f"a token was sampled by version {version - int(ages.min())}, but the trainer is "
                f"at {version}",
                hint="the payload belongs to another run or to a later checkpoint",
            )


def _finish(
    batch: Batch, samples: Sequence[Sample], live: Sequence[Sample], layout: BatchLayout
) -> Batch:
    batch.excluded = Counter({reason: n for reason, n in batch.excluded.items() if n})
    if not samples:
        batch.skip_reason = "no episode has a token to train on"
    elif not live:
        batch.skip_reason = "every advantage is zero: the rewards within each group are equal"
    else:
        batch.micro_batches = pack(live, layout)
    return batch

"""From groups of episodes to packed micro-batches.

An episode's leaves become rows; rows that share a micro-batch lie one behind another in a single
packed sequence ``[tokens]`` with ``cu_seqlens`` between them, so that no token is padding. Row
lengths vary ten-fold in tool use, which is why the budget is counted in tokens, not in rows.

Three things keep the numbers independent of the packing:

* every trained token carries its own ``weight`` in the loss, divided by the denominator of the
  whole step (all ranks, all micro-batches), so a micro-batch's loss is a plain weighted sum;
* advantages are computed over whole groups before anything is packed;
* a row ends at the last token that predicts something: what follows could not reach the loss.

Rows whose advantage is 0 send exactly no gradient; they stay out of the forward pass and in the
denominators. Everything that can be wrong with the data is found here, before a weight changes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relax_agent.episode import Episode, Group, Row
from relax_agent.errors import BatchError
from relax_agent.trainers.algorithms.advantages import group_advantages, shuffled, zero_variance
from relax_agent.trainers.algorithms.settings import AlgorithmSettings
from relax_agent.trainers.checks import check_row
from relax_agent.trainers.protocol import BatchLayout


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packed rows. ``tokens`` counts input tokens, ``trained`` the tokens in the loss."""

    token_ids: Tensor
    """``[tokens]`` int64."""
    positions: Tensor
    """``[tokens]`` int64, from 0 in every row."""
    cu_seqlens: Tensor
    """``[rows + 1]`` int32: row ``i`` is ``token_ids[cu_seqlens[i]:cu_seqlens[i + 1]]``."""
    predictors: Tensor
    """``[trained]`` int64: the index whose logits predict the trained token, one before it."""
    targets: Tensor
    """``[trained]`` int64: the token that was sampled."""
    advantages: Tensor
    """``[trained]`` float32."""
    behaviour_logprobs: Tensor
    """``[trained]`` float32: the engine's log-prob of the target."""
    weights: Tensor
    """``[trained]`` float32: the token's share of the step's loss; already divided."""
    routes: Tensor | None
    """``[tokens, layers, top_k]`` uint8 or uint16; None if the model has no routes to replay."""
    has_route: Tensor
    """``[tokens]`` bool: whether ``routes`` means anything there."""
    filler: bool = False
    """A stand-in whose weights are 0, so that all ranks make the same number of forwards."""

    @property
    def tokens(self) -> int:
        """Input tokens."""
        return self.token_ids.numel()

    @property
    def lengths(self) -> list[int]:
        """Length of every row."""
        return torch.diff(self.cu_seqlens).tolist()

    @property
    def loss_mask(self) -> Tensor:
        """``[tokens]`` bool, true where the *next* token is trained."""
        mask = torch.zeros(self.tokens, dtype=torch.bool, device=self.token_ids.device)
        mask[self.predictors] = True
        return mask

    @property
    def labels(self) -> Tensor:
        """``[tokens]`` int64: the trained token that each index predicts, -100 elsewhere."""
        labels = torch.full_like(self.token_ids, -100)
        labels[self.predictors] = self.targets
        return labels

    def to(self, device: str | torch.device) -> MicroBatch:
        """Return the same micro-batch with every tensor on ``device``."""
        moved: dict[str, Any] = {
            name: value.to(device)
            for name in self.__dataclass_fields__
            if isinstance(value := getattr(self, name), Tensor)
        }
        return replace(self, **moved)

    def padded(self, tokens: int) -> MicroBatch:
        """Return it with a last row of untrained tokens that fills it up to ``tokens``."""
        missing = tokens - self.tokens
        if missing < 0:
            raise BatchError(f"{self.tokens} tokens do not fit into {tokens}")
        if missing == 0:
            return self
        pad = self.token_ids.new_zeros(missing)
        routes = self.routes
        return replace(
            self,
            token_ids=torch.cat([self.token_ids, pad]),
            positions=torch.cat([self.positions, torch.arange(missing, device=pad.device)]),
            cu_seqlens=torch.cat([self.cu_seqlens, self.cu_seqlens.new_tensor([tokens])]),
            has_route=torch.cat([self.has_route, pad.bool()]),
            routes=None
            if routes is None
            else torch.cat([routes, routes.new_zeros(missing, *routes.shape[1:])]),
        )


@dataclass(slots=True)
class Batch:
    """One step's data, the same on every rank."""

    micro_batches: list[MicroBatch] = field(default_factory=list)
    tokens: int = 0
    """Trained tokens in the denominator, those of rows left out of the forward included."""
    sequences: int = 0
    """Episodes in the denominator."""
    reward: float = 0.0
    """Mean reward of those episodes."""
    staleness_mean: float = 0.0
    staleness_max: int = 0
    excluded: Counter[str] = field(default_factory=Counter)
    """What was left out, by reason."""
    skip_reason: str | None = None
    """Why there is nothing to train on; None if there is."""

    @property
    def forward_tokens(self) -> int:
        """Input tokens of all micro-batches, stand-ins not counted."""
        return sum(micro.tokens for micro in self.micro_batches if not micro.filler)

    def shard(self, rank: int, ranks: int) -> list[MicroBatch]:
        """Return the micro-batches of data-parallel ``rank``; every rank gets as many."""
        if len(self.micro_batches) % ranks:
            raise BatchError(
                f"{len(self.micro_batches)} micro-batches cannot be shared by {ranks} ranks",
                hint="build the batch with layout.multiple = the number of data-parallel ranks",
            )
        return self.micro_batches[rank::ranks]


@dataclass(slots=True)
class _Sample:
    """One training row with what its episode says about it."""

    name: str
    row: Row
    advantage: float = 1.0
    weight: float = 0.0
    """Per trained token."""

    @property
    def trained(self) -> npt.NDArray[np.int64]:
        return np.flatnonzero(self.row.loss_mask)

    @property
    def input_tokens(self) -> int:
        """Up to the last token that predicts something trained."""
        return int(self.trained[-1])


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
    samples: list[_Sample] = []
    for (_, episodes), values in zip(kept, rewards, strict=True):
        advantages = group_advantages(values, normalize_std=algorithm.normalize_std)
        if episodes and zero_variance(values):
            batch.excluded["groups_without_signal"] += 1
        for episode, advantage in zip(episodes, advantages, strict=True):
            rows = _rows(episode, layout, version, mask_older_than, batch.excluded)
            samples += [_Sample(name, row, float(advantage)) for name, row in rows]
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
        samples += [_Sample(name, row) for name, row in rows]
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


def _weigh(samples: Sequence[_Sample], batch: Batch, aggregation: str) -> None:
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


def _episode_of(sample: _Sample) -> str:
    return sample.name.rpartition(" row ")[0]


def _measure_staleness(samples: Sequence[_Sample], batch: Batch, version: int) -> None:
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
    batch: Batch, samples: Sequence[_Sample], live: Sequence[_Sample], layout: BatchLayout
) -> Batch:
    batch.excluded = Counter({reason: n for reason, n in batch.excluded.items() if n})
    if not samples:
        batch.skip_reason = "no episode has a token to train on"
    elif not live:
        batch.skip_reason = "every advantage is zero: the rewards within each group are equal"
    else:
        batch.micro_batches = pack(live, layout)
    return batch


def pack(samples: Sequence[_Sample], layout: BatchLayout) -> list[MicroBatch]:
    """Pack rows into as few micro-batches as first-fit decreasing finds, ``multiple`` respected."""
    sizes = [sample.input_tokens for sample in samples]
    bins = spread(first_fit(sizes, layout.micro_batch_tokens), sizes, layout.multiple)
    packed = [_pack_one([samples[i] for i in members], layout) for members in bins if members]
    shortest = samples[int(np.argmin(sizes))]
    filler = replace(shortest, advantage=0.0, weight=0.0)
    missing = len(bins) - len(packed)
    return packed + [replace(_pack_one([filler], layout), filler=True) for _ in range(missing)]


def first_fit(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Return bins of indices, no bin's sizes above ``budget``; the longest are placed first."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        for number, left in enumerate(room):
            if sizes[index] <= left:
                bins[number].append(index)
                room[number] -= sizes[index]
                break
        else:
            bins.append([index])
            room.append(budget - sizes[index])
    return bins


def spread(bins: list[list[int]], sizes: Sequence[int], multiple: int) -> list[list[int]]:
    """Return the bins, their number grown to a multiple by splitting the fullest ones.

    A bin stays empty only where there are fewer rows than bins.
    """
    bins = [list(members) for members in bins]
    for _ in range(-len(bins) % multiple):
        new: list[int] = []
        fullest = max(bins, key=lambda members: (len(members) > 1, sum(sizes[i] for i in members)))
        while len(fullest) > 1 and sum(sizes[i] for i in new) < sum(sizes[i] for i in fullest) / 2:
            new.append(fullest.pop())
        bins.append(new)
    return bins


def _pack_one(samples: Sequence[_Sample], layout: BatchLayout) -> MicroBatch:
    lengths = np.array([sample.input_tokens for sample in samples])
    starts = np.concatenate([[0], np.cumsum(lengths)])

    def joined(column: str, dtype: npt.DTypeLike) -> Tensor:
        values = [getattr(s.row, column)[: s.input_tokens] for s in samples]
        return torch.from_numpy(np.concatenate(values).astype(dtype))

    def trained(column: str, dtype: npt.DTypeLike) -> Tensor:
        values = [getattr(s.row, column)[s.trained] for s in samples]
        return torch.from_numpy(np.concatenate(values).astype(dtype))

    def per_row(values: Iterator[float]) -> Tensor:
        counts = torch.tensor([len(s.trained) for s in samples])
        return torch.tensor(list(values), dtype=torch.float32).repeat_interleave(counts)

    predictors = [start + s.trained - 1 for start, s in zip(starts, samples, strict=False)]
    return MicroBatch(
        token_ids=joined("token_ids", np.int64),
        positions=torch.cat([torch.arange(int(n)) for n in lengths]),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        predictors=torch.from_numpy(np.concatenate(predictors).astype(np.int64)),
        targets=trained("token_ids", np.int64),
        advantages=per_row(s.advantage for s in samples),
        behaviour_logprobs=trained("logprobs", np.float32),
        weights=per_row(s.weight for s in samples),
        routes=None if layout.routes is None else _joined_routes(samples),
        has_route=torch.zeros(int(starts[-1]), dtype=torch.bool)
        if layout.routes is None
        else joined("has_route", np.bool_),
    )


def _joined_routes(samples: Sequence[_Sample]) -> Tensor:
    parts = [s.row.routes[: s.input_tokens] for s in samples if s.row.routes is not None]
    return torch.from_numpy(np.concatenate(parts))

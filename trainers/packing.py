"""Rows of many lengths, put into as few micro-batches as a token budget allows.

Row lengths vary ten-fold in tool use, which is why the budget is counted in tokens, not in rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relax_agent.episode import Row
from relax_agent.media import Media
from relax_agent.rendering.media.layout import PlacedMedium
from relax_agent.trainers.batch import MicroBatch
from relax_agent.trainers.protocol import BatchLayout


@dataclass(slots=True)
class Sample:
    """One training row with what its episode says about it."""

    name: str
    row: Row
    media: Mapping[str, Media]
    """The episode's media by digest."""
    advantage: float = 1.0
    weight: float = 0.0
    """Per trained token."""

    @property
    def trained(self) -> npt.NDArray[np.int64]:
        """Positions of the trained tokens, ``[trained]``."""
        return np.flatnonzero(self.row.loss_mask)

    @property
    def input_tokens(self) -> int:
        """Up to the last token that predicts something trained."""
        return int(self.trained[-1])


def pack(samples: Sequence[Sample], layout: BatchLayout) -> list[MicroBatch]:
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


def _pack_one(samples: Sequence[Sample], layout: BatchLayout) -> MicroBatch:
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
        media=tuple(
            PlacedMedium(int(start) + span.start, span.count, s.media[span.digest])
            for start, s in zip(starts, samples, strict=False)
            for span in s.row.media
            if span.start < s.input_tokens
        ),
    )


def _joined_routes(samples: Sequence[Sample]) -> Tensor:
    parts = [s.row.routes[: s.input_tokens] for s in samples if s.row.routes is not None]
    return torch.from_numpy(np.concatenate(parts))

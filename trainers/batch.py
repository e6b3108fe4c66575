"""What a trainer is given for one step: packed micro-batches, the same on every rank.

Rows that share a micro-batch lie one behind another in a single packed sequence ``[tokens]`` with
``cu_seqlens`` between them, so that no token is padding. Every trained token carries its own
``weight`` in the loss, divided by the denominator of the whole step (all ranks, all micro-batches):
a micro-batch's loss is a plain weighted sum. How a batch comes about from groups of episodes says
:mod:`relax_agent.trainers.building`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from relax_agent.errors import BatchError
from relax_agent.rendering.media.layout import PlacedMedium


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
    media: tuple[PlacedMedium, ...] = ()
    """Media of all rows, with starts within ``token_ids``, ascending."""
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

"""Attention over packed rows for transformers' models: each row attends only to itself.

The model runs on one sequence ``[1, tokens]`` that holds many rows. A block-diagonal mask would
compute (and then hide) all pairs between rows. Here rows of similar length are gathered into small
rectangles ``[rows, heads, length, head_dim]`` and attended causally; padding stands at the end of a
row, where causality already keeps it from every real token, so no mask is needed at all.

``install(model)`` switches a model over; ``Packing.of(lengths)`` plans the rectangles once per
micro-batch, for all layers, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from relax_agent.errors import ConfigError, TrainerError

NAME = "relax_packed"
"""The name under which transformers knows this attention."""

FILL = 0.75
"""A rectangle takes rows down to this share of its longest."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Rows of similar length, padded to the longest."""

    gather: Tensor
    """``[rows, length]`` int64: each cell's token; padding repeats the row's last."""
    cells: Tensor
    """``[own tokens]`` int64: flat cells that are not padding, in the order of ``tokens``."""
    tokens: Tensor
    """``[own tokens]`` int64: which tokens those are."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How the rows of one micro-batch are cut into rectangles."""

    rectangles: tuple[Rectangle, ...]
    order: Tensor
    """``[tokens]`` int64: where each token stands in the rectangles' outputs laid end to end."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: str | torch.device = "cpu") -> Packing:
        """Plan rectangles for rows of these lengths."""
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        shapes = []
        for members in _similar(lengths):
            longest = lengths[members[0]]
            steps = torch.arange(longest)
            own = torch.tensor([lengths[i] for i in members])[:, None]
            first = torch.tensor([starts[i] for i in members])[:, None]
            gather = first + torch.minimum(steps, own - 1)
            real = (steps < own).flatten()
            shapes.append((gather, real.nonzero()[:, 0], gather.flatten()[real]))
        order = torch.empty(starts[-1], dtype=torch.int64)
        order[torch.cat([tokens for _, _, tokens in shapes])] = torch.arange(starts[-1])
        moved = (Rectangle(*(part.to(device) for part in shape)) for shape in shapes)
        return cls(tuple(moved), order.to(device))


def _similar(lengths: Sequence[int]) -> list[list[int]]:
    """Group row indices, the longest first, so that no rectangle is mostly padding."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and lengths[index] >= FILL * lengths[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packing: Packing | None = None,
    sliding_window: int | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """Attend within rows. The signature is transformers' attention interface.

    Args:
        module: The attention layer; not read.
        query: ``[1, heads, tokens, head_dim]``.
        key: ``[1, kv_heads, tokens, head_dim]``.
        value: ``[1, kv_heads, tokens, head_dim]``.
        attention_mask: Always None: rows are causal.
        scaling: Factor on the scores.
        dropout: Dropout on the scores.
        packing: The micro-batch's plan.
        sliding_window: How many tokens back a token sees, itself included.
        extras: Model-specific arguments; those that would change the result are refused.

    Returns:
        ``[1, tokens, heads, head_dim]`` and None for the scores.
    """
    if packing is None:
        raise TrainerError("the model does not hand the packing to its attention layers")
    for name in ("softcap", "s_aux", "position_bias"):
        if extras.get(name) is not None:
            raise ConfigError(f"packed attention does not know {name}, which this model needs")
    shared_heads = key.shape[1] != query.shape[1]
    parts = []
    for shape in packing.rectangles:
        q, k, v = (tensor[0][:, shape.gather].transpose(0, 1) for tensor in (query, key, value))
        window = _window(shape.gather.shape[1], sliding_window, query.device)
        out = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=window,
            is_causal=window is None,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=shared_heads,
        )
        parts.append(out.transpose(1, 2).flatten(0, 1)[shape.cells])
    return torch.cat(parts)[packing.order][None], None


def _window(length: int, sliding_window: int | None, device: torch.device) -> Tensor | None:
    """Return the causal band ``[length, length]``, or None where plain causality says the same."""
    if sliding_window is None or length <= sliding_window:
        return None
    steps = torch.arange(length, device=device)
    back = steps[:, None] - steps
    return (back >= 0) & (back < sliding_window)


def install(model: Any) -> None:
    """Make a transformers model attend within rows; it then needs ``packing=`` in its forward."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)
    model.set_attn_implementation(NAME)

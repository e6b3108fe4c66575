"""Attention for one forward over rows of different length.

The model sees one flat sequence ``[1, tokens]``: the new tokens of all rows, one after the
other, so its linear layers and experts work on real tokens only. Only attention knows about
rows. It is registered with transformers as the attention implementation ``relax_slots``; each
layer's call writes the new keys and values into the slots and attends **block** by block. A
block is a range of rows and the same number of query positions for each: all rows that decode
form one block, prompts of like length share another (shorter ones padded), and a long prompt
is cut into several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax_agent.engines.embedded.kv import Slots
from relax_agent.errors import ConfigError

ATTENTION = "relax_slots"
_MAX_QUERIES = 256
_PADDING_WORTH = 32
"""Padded positions that cost less than one more block."""


@dataclass(slots=True)
class Block:
    """Queries of some rows: ``count`` rows from ``first`` on, ``width`` positions each."""

    first: int
    count: int
    width: int
    start: int
    """First of its tokens in the flat sequence."""
    stop: int
    positions: Tensor
    """``[count, width]``; padding repeats a real position."""
    kv_length: int
    gather: Tensor | None = None
    """``[count * width]`` flat tokens, counted from ``start``; None without padding."""
    scatter: Tensor | None = None
    """``[stop - start]`` where each real token lies among the padded; None without padding."""
    masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor:
        """Return what to add to the scores: ``[count, 1, width or width * group, kv_length]``."""
        key = (window, group)
        if key not in self.masks:
            self.masks[key] = self._make_mask(window, group, dtype)
        return self.masks[key]

    def _make_mask(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor:
        at = torch.arange(self.kv_length)
        query = self.positions[:, :, None]
        hidden = at > query
        if window is not None:
            hidden |= at <= query - window
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
        if self.width > 1 and group > 1:
            mask = mask.repeat_interleave(group, dim=1)
        return mask[:, None]


@dataclass(slots=True)
class Step:
    """The new tokens of every row, as one flat sequence."""

    slots: Slots
    input_ids: Tensor
    """``[1, tokens]``"""
    position_ids: Tensor
    """``[1, tokens]``"""
    rows: Tensor
    """``[tokens]`` the row of each token."""
    last: Tensor
    """``[rows]`` where each row's last token lies."""
    blocks: list[Block]
    write: Tensor
    """``[tokens * heads]`` where each key lies among the slots' ``rows * heads * capacity``."""
    layer_calls: set[int] = field(default_factory=set)


def make_step(slots: Slots, tokens: Sequence[Sequence[int]], lengths: Sequence[int]) -> Step:
    """Lay out a forward.

    Args:
        slots: Where the rows live.
        tokens: New tokens of row 0, 1, …; at least one each, rows with one token first.
        lengths: How many tokens of each row are in the slots already.
    """
    counts = np.fromiter((len(new) for new in tokens), dtype=np.int64, count=len(tokens))
    ends = np.cumsum(counts)
    starts, known = ends - counts, np.asarray(lengths, dtype=np.int64)
    rows = np.repeat(np.arange(len(tokens)), counts)
    positions = np.arange(ends[-1]) - np.repeat(starts - known, counts)
    flat = [token for new in tokens for token in new]
    heads = np.arange(slots.shape.heads)
    write = ((rows[:, None] * len(heads) + heads) * slots.capacity + positions[:, None]).ravel()
    return Step(
        slots=slots,
        input_ids=torch.tensor([flat]),
        position_ids=torch.from_numpy(positions)[None],
        rows=torch.from_numpy(rows),
        last=torch.from_numpy(ends - 1),
        blocks=_make_blocks(counts, starts, positions),
        write=torch.from_numpy(write),
    )


def _make_blocks(counts: np.ndarray, starts: np.ndarray, positions: np.ndarray) -> list[Block]:
    blocks = []
    first = 0
    while first < len(counts):
        stop = _block_end(counts, first)
        if counts[first] > _MAX_QUERIES:
            blocks += _split_row(first, int(starts[first]), int(counts[first]), positions)
        else:
            blocks.append(_rows_block(first, stop, counts, starts, positions))
        first = stop
    return blocks


def _block_end(counts: np.ndarray, first: int) -> int:
    """Return the row after the last that is worth padding to a common width."""
    stop, narrow, wide = first + 1, int(counts[first]), int(counts[first])
    if wide > _MAX_QUERIES:
        return stop
    real = wide
    while stop < len(counts):
        new = int(counts[stop])
        narrow, wide = min(narrow, new), max(wide, new)
        padding = wide * (stop + 1 - first) - real - new
        if wide > _MAX_QUERIES or (narrow == 1) != (wide == 1):
            break
        if padding > max(_PADDING_WORTH, (real + new) // 2):
            break
        real += new
        stop += 1
    return stop


def _split_row(row: int, start: int, count: int, positions: np.ndarray) -> list[Block]:
    blocks = []
    for begin in range(start, start + count, _MAX_QUERIES):
        end = min(begin + _MAX_QUERIES, start + count)
        at = torch.from_numpy(positions[begin:end])[None]
        blocks.append(Block(row, 1, end - begin, begin, end, at, int(positions[end - 1]) + 1))
    return blocks


def _rows_block(
    first: int, stop: int, counts: np.ndarray, starts: np.ndarray, positions: np.ndarray
) -> Block:
    some, begin = counts[first:stop], int(starts[first])
    end, count, width = begin + int(some.sum()), stop - first, int(some.max())
    kv_length = int(positions[begin:end].max()) + 1
    if (some == width).all():
        at = torch.from_numpy(positions[begin:end].reshape(count, width))
        return Block(first, count, width, begin, end, at, kv_length)
    offsets = np.minimum(np.arange(width), some[:, None] - 1)  # padding repeats the last token
    gather = (starts[first:stop] - begin)[:, None] + offsets
    scatter = np.flatnonzero(np.arange(width) < some[:, None])
    at = torch.from_numpy(positions[begin:end][gather])
    parts = torch.from_numpy(gather.ravel()), torch.from_numpy(scatter)
    return Block(first, count, width, begin, end, at, kv_length, *parts)


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend over the slots, in the form of a transformers attention function.

    Args:
        module: The attention layer; ``module.relax_step`` holds the current :class:`Step`.
        query: ``[1, heads, tokens, key_dim]``
        key: ``[1, kv_heads, tokens, key_dim]``
        value: ``[1, kv_heads, tokens, value_dim]``
        attention_mask: Unused: transformers makes none for an attention it does not know.
        scaling: Factor of the scores.
        dropout: Zero outside training.
        sliding_window: How far back a query sees; None for all the way.
        kwargs: What else the model passes; only what has no effect is accepted.

    Returns:
        ``[1, tokens, heads, value_dim]``, and no attention weights.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ConfigError(f"the embedded engine cannot do attention with {name}")
    step: Step = module.relax_step.current  # type: ignore[union-attr,assignment]
    layer = module.layer_idx
    keys, values = _write(step, layer, key[0], value[0])  # type: ignore[arg-type]
    outputs = [
        _attend(block, query[0], keys, values, scaling, sliding_window) for block in step.blocks
    ]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output[None], None


def _write(step: Step, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Put new keys and values ``[kv_heads, tokens, dim]`` into the slots of ``layer``."""
    step.layer_calls.add(layer)
    keys, values = step.slots.keys[layer], step.slots.values[layer]
    for buffer, new in ((keys, key), (values, value)):
        dim = new.shape[-1]
        buffer.view(-1, dim).index_copy_(0, step.write, new.transpose(0, 1).reshape(-1, dim))
    return keys, values


def _attend(
    block: Block,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Return ``[tokens of the block, heads, value_dim]``."""
    heads, kv_heads, count, width = query.shape[0], keys.shape[1], block.count, block.width
    group = heads // kv_heads
    own = query[:, block.start : block.stop].transpose(0, 1)
    if block.gather is not None:
        own = own[block.gather]
    rows, seen = slice(block.first, block.first + count), slice(0, block.kv_length)
    # Heads that share a key-value head become further query positions of it.
    own = own.reshape(count, width, kv_heads, group, -1).transpose(1, 2)
    output = torch.nn.functional.scaled_dot_product_attention(
        own.reshape(count, kv_heads, width * group, -1),
        keys[rows, :, seen],
        values[rows, :, seen],
        attn_mask=block.mask(window, group, query.dtype),
        scale=scaling,
    )
    output = output.view(count, kv_heads, width, group, -1).transpose(1, 2)
    output = output.reshape(count * width, heads, -1)
    return output if block.scatter is None else output[block.scatter]

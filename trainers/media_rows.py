"""The media of packed rows: their features, and positions along time, height and width.

A row brings its media spans, counted when the prompt was rendered, and the encoded media. They are
decoded here again, with the processor of the model that is trained: should it count otherwise, the
step is refused, because then the engine has not seen what would be trained on. A row without media
needs none of this and may stand beside one that has some.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from relax_agent.errors import BatchError, MediaError
from relax_agent.models.media_model import MediaModel, Piece, TowerInputs, tower_inputs
from relax_agent.rendering.media import Layout, PlacedMedium, positions_of
from relax_agent.trainers.batch import MicroBatch


def media_inputs(model: MediaModel, micro: MicroBatch) -> tuple[Tensor, TowerInputs | None]:
    """Return positions ``[3, tokens]`` of packed rows, and what the towers read.

    Raises:
        BatchError: A medium is damaged, or does not take the tokens that it was counted with.
    """
    placed = [(each.start, _layout(model, each, micro.token_ids)) for each in micro.media]
    pieces = [
        Piece(layout, model.processor.features_of(each.medium), 0, layout.count, start)
        for each, (start, layout) in zip(micro.media, placed, strict=True)
    ]
    inputs = tower_inputs(pieces, model.processor.placeholder_ids)
    return torch.from_numpy(_positions(micro.lengths, placed)), inputs


def _layout(model: MediaModel, each: PlacedMedium, token_ids: Tensor) -> Layout:
    try:
        layout = model.processor.layout(each.medium)
    except MediaError as error:
        raise BatchError(f"a medium cannot be trained on: {error}") from error
    found = token_ids[each.start : each.start + each.count].cpu().numpy()
    if not np.array_equal(found, layout.body):
        raise BatchError(
            f"a medium of kind {layout.kind} was rendered to {each.count} tokens, but takes"
            f" {layout.count} here",
            hint="renderer, engine and trainer must read the same processor files",
        )
    return layout


def _positions(
    lengths: list[int], placed: list[tuple[int, Layout]]
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Return positions ``[3, tokens]`` that begin at 0 in every row."""
    parts, start = [], 0
    for length in lengths:
        own = [(at - start, layout) for at, layout in placed if start <= at < start + length]
        parts.append(positions_of(length, own))
        start += length
    return np.concatenate(parts, axis=1)

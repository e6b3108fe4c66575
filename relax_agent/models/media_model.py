"""A transformers model that sees or hears, driven part by part.

The model's own forward looks for placeholder ids to know where features go. A policy that sampled
such an id would break it, and a prompt that is read in pieces would not fit it. Here the places
come from the media spans: towers run over whole media, their features are written over the
embeddings at given tokens (and, as Qwen's *deepstack*, added to the first layers there), and the
language model runs on that, at positions that the caller gives. Engine and trainer share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax_agent.errors import ConfigError
from relax_agent.media import Kind
from relax_agent.rendering.media import Layout, MediaProcessor

_OF_KIND: dict[Kind, tuple[str, str]] = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
    "audio": ("input_features", "feature_lens"),
}


@dataclass(frozen=True, slots=True)
class TowerInputs:
    """What the towers read, and where in a flat sequence their features go."""

    features: dict[str, Tensor]
    """As :meth:`~relax_agent.rendering.media.MediaProcessor.features` names them."""
    at: dict[Kind, Tensor]
    """``[tokens of the kind]`` int64: the token that a feature replaces."""
    rows: dict[Kind, Tensor]
    """``[tokens of the kind]`` int64: which of the tower's features that is."""

    def to(self, device: str | torch.device) -> TowerInputs:
        """Return the same on a device."""
        moved = {
            each.name: {name: t.to(device) for name, t in getattr(self, each.name).items()}
            for each in fields(self)
        }
        return replace(self, **moved)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a medium's body that is read now."""

    layout: Layout
    features: Mapping[str, Any]
    """NumPy arrays of the whole medium."""
    first: int
    """First token of the body that is read; 0 for all of it."""
    stop: int
    at: int
    """Where in the flat sequence that token lies."""


def tower_inputs(pieces: Sequence[Piece], pads: Mapping[Kind, int]) -> TowerInputs | None:
    """Join media for one forward; None if there are none."""
    if not pieces:
        return None
    at: dict[Kind, list[Any]] = {kind: [] for kind in _OF_KIND}
    rows: dict[Kind, list[Any]] = {kind: [] for kind in _OF_KIND}
    made: dict[Kind, int] = dict.fromkeys(_OF_KIND, 0)
    for piece in pieces:
        for kind, pad in pads.items():
            places = np.flatnonzero(piece.layout.body == pad)
            read = (places >= piece.first) & (places < piece.stop)
            at[kind].append(places[read] - piece.first + piece.at)
            rows[kind].append(np.flatnonzero(read) + made[kind])
            made[kind] += len(places)
    kinds = [kind for kind in _OF_KIND if made[kind]]
    return TowerInputs(
        features=_joined([piece.features for piece in pieces]),
        at={kind: torch.from_numpy(np.concatenate(at[kind])) for kind in kinds},
        rows={kind: torch.from_numpy(np.concatenate(rows[kind])) for kind in kinds},
    )


def _joined(features: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    names = dict.fromkeys(name for part in features for name in part)
    return {
        name: torch.cat(
            [torch.from_numpy(part[name]) for part in features if name in part],
            dim=1 if name == "input_features" else 0,
        )
        for name in names
    }


class MediaModel:
    """A model with towers."""

    def __init__(self, model: Any, processor: MediaProcessor) -> None:
        self.model, self.processor = model, processor
        inner = model.model
        if not hasattr(inner, "language_model") or not hasattr(inner, "visual"):
            raise ConfigError(f"{type(model).__name__} has no towers that are known here")
        self._inner = inner
        self.suppressed = torch.tensor(processor.suppressed_ids)
        """``[ids]``: tokens that are never sampled."""

    @property
    def language_model(self) -> Any:
        """The part that reads tokens, without its head."""
        return self._inner.language_model

    def logits(
        self,
        input_ids: Tensor,
        positions: Tensor,
        inputs: TowerInputs | None,
        keep: Tensor,
        **options: Any,
    ) -> Tensor:
        """Return logits ``[kept, vocabulary]`` of one flat sequence.

        Args:
            input_ids: ``[1, tokens]``; what it says at a medium's tokens does not matter.
            positions: ``[3, tokens]`` along time, height and width.
            inputs: The media, if there are any.
            keep: ``[kept]``: the tokens whose logits are wanted.
            options: For the attention layers.
        """
        embedded = self.language_model.get_input_embeddings()(input_ids)
        deep: dict[str, Any] = {}
        if inputs is not None:
            embedded, deep = self._with_media(embedded, inputs)
        hidden = self.language_model(
            inputs_embeds=embedded,
            position_ids=positions[:, None],
            use_cache=False,
            **deep,
            **options,
        ).last_hidden_state
        return self.model.lm_head(hidden[0, keep])  # type: ignore[no-any-return]

    def _with_media(self, embedded: Tensor, inputs: TowerInputs) -> tuple[Tensor, dict[str, Any]]:
        """Write features over embeddings ``[1, tokens, hidden]``; also return what goes deeper."""
        flat, seen_at = embedded[0], []
        deep: list[list[Tensor]] = []
        for kind, at in inputs.at.items():
            found, deeper = self._encode(kind, inputs.features)
            rows = inputs.rows[kind]
            flat = flat.index_copy(0, at, found[rows].to(flat.dtype))
            if kind != "audio":
                seen_at.append(at)
                deep.append([each[rows] for each in deeper])
        if not seen_at:
            return flat[None], {}
        places = torch.cat(seen_at)
        order = places.argsort()
        mask = torch.zeros(len(flat), dtype=torch.bool, device=flat.device)
        mask[places] = True
        layers = [torch.cat(parts)[order] for parts in zip(*deep, strict=True)]
        return flat[None], {"visual_pos_masks": mask[None], "deepstack_visual_embeds": layers}

    def _encode(self, kind: Kind, features: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Run a tower; return features ``[tokens, hidden]`` and those for the first layers."""
        values, sizes = (features[name] for name in _OF_KIND[kind])
        if kind == "audio":
            heard = self._inner.audio_tower(values, feature_lens=sizes, return_dict=True)
            return heard.last_hidden_state, []
        seen = self._inner.get_image_features(values, sizes, return_dict=True)
        return torch.cat(seen.pooler_output), [
            torch.cat(layer) for layer in seen.deepstack_features
        ]


def media_model(model: Any, folder: Any) -> MediaModel | None:
    """Wrap a loaded model if its folder says that it takes media."""
    processor = MediaProcessor.load(folder)
    return None if processor is None else MediaModel(model, processor)

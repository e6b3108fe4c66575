"""The media of a prompt, ready for forwards that may read the prompt in pieces.

A request brings token ids with the placeholders already expanded, and the encoded media of each
kind in the order of the prompt. :func:`prepare_prompt` (in a thread: it decodes) counts the
placeholders itself and refuses what does not fit. It also makes the **keys** that the prefix cache
looks a prompt up by: token ids, but at a medium's tokens a number that stands for its content. Two
prompts with equal ids and different pictures share no more than what stands before the picture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from relax_agent.errors import EngineRejected, RelaxError
from relax_agent.media import Kind, Media
from relax_agent.models.media_model import Piece
from relax_agent.rendering.media import Layout, MediaProcessor, find_media, positions_of
from relax_agent.rendering.media.processor import Features

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PromptMedia:
    """The media of one prompt."""

    placed: list[tuple[int, Layout, Features]]
    """Where each body begins, in order."""
    keys: list[int]
    """The prompt as the prefix cache knows it."""
    positions: Floats
    """``[3, prompt]``"""

    def positions_from(self, start: int, stop: int) -> Floats:
        """Return positions ``[3, stop - start]``; behind the prompt each is one further."""
        known = self.positions[:, start:stop]
        count = self.positions.shape[1]
        first = max(start, count)
        if stop <= first:
            return known
        behind = float(self.positions[:, -1].max()) + 1 if count else 0.0
        more = np.arange(first - count, stop - count, dtype=np.float32) + np.float32(behind)
        return np.concatenate([known, np.broadcast_to(more, (3, len(more)))], axis=1)

    def pieces(self, start: int, stop: int, at: int) -> list[Piece]:
        """Return what of the media lies in ``[start, stop)``, which is token ``at`` onwards."""
        found = []
        for first, layout, features in self.placed:
            begin, end = max(start, first), min(stop, first + layout.count)
            if begin < end:
                where = at + begin - start
                found.append(Piece(layout, features, begin - first, end - first, where))
        return found


def prepare_prompt(
    processor: MediaProcessor, ids: Sequence[int], media: Mapping[Kind, Sequence[Media]]
) -> PromptMedia | None:
    """Find a prompt's media and decode them; None for a prompt of text alone.

    Raises:
        EngineRejected: Placeholders and media do not fit together, or a medium is damaged.
    """
    try:
        layouts = {kind: [processor.layout(each) for each in some] for kind, some in media.items()}
        places = find_media(ids, layouts, processor.placeholder_ids)
        if not places:
            return None
        left = {kind: iter(some) for kind, some in media.items()}
        placed = [(at, lay, processor.features_of(next(left[lay.kind]))) for at, lay in places]
    except EngineRejected:
        raise
    except RelaxError as error:
        raise EngineRejected(f"the media of the prompt: {error}") from error
    keys = list(ids)
    for start, layout in places:
        keys[start : start + layout.count] = [_key(layout)] * layout.count
    return PromptMedia(placed, keys, positions_of(len(keys), places))


def _key(layout: Layout) -> int:
    """Return a number that is no token id and differs between media."""
    content = hashlib.sha256(f"{layout.kind}:{layout.digest}".encode()).digest()
    return -1 - int.from_bytes(content[:7], "little")

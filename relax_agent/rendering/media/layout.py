"""A medium's place in the prompt: its token ids and their rotary positions.

In the prompt a medium is a **head** of markers, a **body** from its first placeholder to its last,
and a **tail**. The body is what a media span of the token log covers. Mostly it is one placeholder
repeated; a film for Qwen3-VL has the time of each frame written between its placeholders, and one
with sound for Qwen3-Omni has two kinds of placeholders, woven together by time.

Positions have three rows (time, height, width) that differ inside a body only: text goes on one
behind the largest. They are computed from the *spans*, never by searching ids for a marker: what a
policy sampled, placeholders included, is ordinary text here and cannot move anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from relax_agent.errors import MediaError
from relax_agent.media import Kind, Media
from relax_agent.rendering.media.vision import Grid

if TYPE_CHECKING:
    from relax_agent.rendering.media.config import MediaConfig

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Layout:
    """The tokens of one medium."""

    kind: Kind
    digest: str
    """SHA-256 of the encoded bytes, in hex."""
    head: tuple[int, ...]
    body: Ids
    """``[count]``, from the first placeholder to the last."""
    tail: tuple[int, ...]
    positions: Floats
    """``[3, count]``, counted from the body's start."""
    advance: float
    """Position of the token behind the body, counted from the body's start."""

    @property
    def count(self) -> int:
        """Tokens of the body."""
        return len(self.body)

    @property
    def ids(self) -> list[int]:
        """All of it as it stands in the prompt."""
        return [*self.head, *self.body.tolist(), *self.tail]

    @property
    def size(self) -> int:
        """Bytes that it takes in memory."""
        return self.body.nbytes + self.positions.nbytes + 512


@dataclass(frozen=True, slots=True)
class PlacedMedium:
    """A medium and where its body begins."""

    start: int
    count: int
    medium: Media


def picture_layout(grid: Grid, digest: str, config: MediaConfig) -> Layout:
    """Lay out a picture."""
    positions = _grid_positions(grid, config.image.merge)
    body = np.full(positions.shape[1], config.pads["image"], dtype=np.int64)
    return _enclosed("image", digest, body, positions, config, "vision")


def sound_layout(tokens: int, digest: str, config: MediaConfig) -> Layout:
    """Lay out a clip of sound."""
    body = np.full(tokens, config.pads["audio"], dtype=np.int64)
    return _enclosed("audio", digest, body, _line(tokens), config, "audio")


def timed_frames_layout(
    grid: Grid, stamps: Sequence[Sequence[int]], digest: str, config: MediaConfig
) -> Layout:
    """Lay out a film as pictures with their times in front, as Qwen3-VL reads it.

    Args:
        grid: Patches along time, height and width.
        stamps: The token ids of each picture's time.
        digest: Of the film.
        config: Of the model.
    """
    start, end = config.markers["vision_start"], config.markers["vision_end"]
    frame = _grid_positions((1, *grid[1:]), config.video.patches.merge)
    pads = np.full(frame.shape[1], config.pads["video"], dtype=np.int64)
    behind = float(frame.max()) + 1
    ids: list[npt.NDArray[np.int64]] = []
    positions: list[Floats] = []
    at = 0.0
    for number, stamp in enumerate(stamps):
        if number:
            between = np.array([end, *stamp, start], dtype=np.int64)
            ids.append(between)
            positions.append(_line(len(between)) + np.float32(at))
            at += len(between)
        ids.append(pads)
        positions.append(frame + np.float32(at))
        at += behind
    return Layout(
        kind="video",
        digest=digest,
        head=(*stamps[0], start),
        body=np.concatenate(ids),
        tail=(end,),
        positions=np.concatenate(positions, axis=1),
        advance=at,
    )


def film_layout(
    grid: Grid, seconds_per_step: float, sound_tokens: int, digest: str, config: MediaConfig
) -> Layout:
    """Lay out a film as Qwen3-Omni reads it, its sound woven in by time.

    Args:
        grid: Patches along time, height and width.
        seconds_per_step: Seconds from one step of the grid's time to the next.
        sound_tokens: Tokens of its sound; 0 if it is silent.
        digest: Of the film.
        config: Of the model.
    """
    step = seconds_per_step * config.positions_per_second
    seen = _grid_positions(grid, config.video.patches.merge, step)
    if not sound_tokens:
        body = np.full(seen.shape[1], config.pads["video"], dtype=np.int64)
        return _enclosed("video", digest, body, seen, config, "vision")
    heard = _line(sound_tokens)
    count = seen.shape[1] + sound_tokens
    where_seen = np.arange(seen.shape[1]) + np.searchsorted(heard[0], seen[0], side="left")
    body = np.full(count, config.pads["audio"], dtype=np.int64)
    body[where_seen] = config.pads["video"]
    positions = np.empty((3, count), dtype=np.float32)
    is_seen = np.zeros(count, dtype=bool)
    is_seen[where_seen] = True
    positions[:, is_seen], positions[:, ~is_seen] = seen, heard
    return _enclosed("video", digest, body, positions, config, "vision", "audio")


def _enclosed(
    kind: Kind, digest: str, body: Ids, positions: Floats, config: MediaConfig, *around: str
) -> Layout:
    return Layout(
        kind=kind,
        digest=digest,
        head=tuple(config.markers[f"{name}_start"] for name in around),
        body=body,
        tail=tuple(config.markers[f"{name}_end"] for name in reversed(around)),
        positions=positions,
        advance=float(positions.max()) + 1,
    )


def _grid_positions(grid: Grid, merge: int, step: float = 0.0) -> Floats:
    """Return positions ``[3, tokens]`` of a grid; time goes on by ``step``."""
    time, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
    times = np.arange(time, dtype=np.float32) * np.float32(step)
    axes = np.meshgrid(times, np.arange(rows), np.arange(columns), indexing="ij")
    return np.stack([axis.ravel() for axis in axes]).astype(np.float32)


def _line(count: int) -> Floats:
    return np.broadcast_to(np.arange(count, dtype=np.float32), (3, count))


def positions_of(length: int, placed: Sequence[tuple[int, Layout]]) -> Floats:
    """Return the rotary positions of a whole sequence, ``[3, length]``.

    Args:
        length: Tokens from the sequence's beginning.
        placed: The start of each body, in order, and its layout; a body may reach past the end.
    """
    found = np.empty((3, length), dtype=np.float32)
    at, base = 0, 0.0
    for start, layout in placed:
        if start >= length:
            break
        found[:, at:start] = base + np.arange(start - at, dtype=np.float32)
        base += start - at
        at = min(length, start + layout.count)
        found[:, start:at] = base + layout.positions[:, : at - start]
        base += layout.advance
    found[:, at:] = base + np.arange(length - at, dtype=np.float32)
    return found


def find_media(
    ids: Sequence[int], layouts: Mapping[Kind, Sequence[Layout]], pads: Mapping[Kind, int]
) -> list[tuple[int, Layout]]:
    """Return where in a prompt each medium's body begins, in order.

    Args:
        ids: The prompt.
        layouts: The media of each kind in the order of the prompt.
        pads: The placeholder of each kind.

    Raises:
        MediaError: Placeholders and media do not fit together; the message says which.
    """
    kinds = {token: kind for kind, token in pads.items()}
    left = {kind: list(reversed(of_kind)) for kind, of_kind in layouts.items()}
    flat = np.asarray(ids, dtype=np.int64)
    places = np.flatnonzero(np.isin(flat, list(kinds)))
    found: list[tuple[int, Layout]] = []
    done = 0
    for start in places.tolist():
        if start < done:
            continue
        kind = kinds[int(flat[start])]
        if not left.get(kind):
            raise MediaError(
                f"token {start} of the prompt is a placeholder of kind {kind}, but no such medium"
                f" is left: {len(layouts.get(kind, ()))} came with the prompt"
            )
        layout = left[kind].pop()
        done = start + layout.count
        _check_body(flat[start:done], layout, start)
        found.append((start, layout))
    missing = {kind: len(rest) for kind, rest in left.items() if rest}
    if missing:
        words = ", ".join(f"{count} of kind {kind}" for kind, count in missing.items())
        raise MediaError(f"media without placeholders in the prompt: {words}")
    return found


def _check_body(found: Ids, layout: Layout, start: int) -> None:
    if np.array_equal(found, layout.body):
        return
    same = len(found) == layout.count and found == layout.body
    run = int(np.argmin(same)) if isinstance(same, np.ndarray) else len(found)
    raise MediaError(
        f"the {layout.kind} at token {start} of the prompt takes {layout.count} tokens, but the"
        f" prompt differs from them after {run}",
        hint="render the prompt with the processor files of the model that is served",
    )

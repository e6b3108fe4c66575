"""Pictures and frames to patches, in NumPy.

A picture is resized so that both sides are multiples of what becomes one token and its area lies
within the model's bounds, then cut into patches. The order of patches is that of the vision
tower: squares of ``merge × merge`` patches lie together, because they become one token.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from relax_agent.errors import MediaError
from relax_agent.rendering.media.config import PatchConfig

if TYPE_CHECKING:
    import PIL.Image

Floats: TypeAlias = npt.NDArray[np.float32]
Grid: TypeAlias = tuple[int, int, int]
"""Patches along time, height and width."""

_LONGEST_RATIO = 200


def image_size(height: int, width: int, config: PatchConfig) -> tuple[int, int]:
    """Return the (height, width) that a picture is resized to.

    Raises:
        MediaError: It is too narrow a strip.
    """
    return _fit(height, width, 1, 1, config)


def frame_size(frames: int, height: int, width: int, config: PatchConfig) -> tuple[int, int]:
    """Return the (height, width) that the frames of a video are resized to.

    The bounds on pixels hold for all frames together.

    Raises:
        MediaError: They are too narrow a strip.
    """
    if min(height, width) < config.factor:
        scale = max(config.factor / height, config.factor / width)
        height, width = int(height * scale), int(width * scale)
    whole = round(frames / config.temporal) * config.temporal
    return _fit(height, width, frames, whole, config)


def _fit(height: int, width: int, frames: int, whole: int, config: PatchConfig) -> tuple[int, int]:
    if max(height, width) > _LONGEST_RATIO * min(height, width):
        raise MediaError(
            f"a picture of {width}×{height} pixels: one side is more than {_LONGEST_RATIO} times"
            " the other"
        )
    factor = config.factor
    tall, wide = (round(side / factor) * factor for side in (height, width))
    if whole * tall * wide > config.max_pixels:
        shrink = math.sqrt(frames * height * width / config.max_pixels)
        tall, wide = (
            max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)
        )
    elif whole * tall * wide < config.min_pixels:
        grow = math.sqrt(config.min_pixels / (frames * height * width))
        tall, wide = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return tall, wide


def image_grid(height: int, width: int, config: PatchConfig) -> Grid:
    """Return the grid of patches of a picture of this size."""
    tall, wide = image_size(height, width, config)
    return 1, tall // config.patch, wide // config.patch


def video_grid(frames: int, height: int, width: int, config: PatchConfig) -> Grid:
    """Return the grid of patches of so many frames of this size."""
    tall, wide = frame_size(frames, height, width, config)
    return -(-frames // config.temporal), tall // config.patch, wide // config.patch


def tokens_of(grid: Grid, config: PatchConfig) -> int:
    """Return how many tokens a grid of patches becomes."""
    return math.prod(grid) // config.merge**2


def image_patches(picture: PIL.Image.Image, config: PatchConfig) -> tuple[Floats, Grid]:
    """Return the patches of an RGB picture, ``[patches, channels * temporal * patch²]``."""
    tall, wide = image_size(picture.height, picture.width, config)
    pixels = _resized(picture, tall, wide)
    return _patchify(np.broadcast_to(pixels, (config.temporal, *pixels.shape)), config)


def video_patches(frames: npt.NDArray[np.uint8], config: PatchConfig) -> tuple[Floats, Grid]:
    """Return the patches of frames ``[frames, height, width, 3]``; the last one fills up."""
    import PIL.Image

    count, height, width = frames.shape[:3]
    tall, wide = frame_size(count, height, width, config)
    resized = np.stack([_resized(PIL.Image.fromarray(frame), tall, wide) for frame in frames])
    missing = -len(resized) % config.temporal
    if missing:
        resized = np.concatenate([resized, np.repeat(resized[-1:], missing, axis=0)])
    return _patchify(resized, config)


def _resized(picture: PIL.Image.Image, tall: int, wide: int) -> npt.NDArray[np.uint8]:
    import PIL.Image

    if picture.size != (wide, tall):
        picture = picture.resize((wide, tall), PIL.Image.Resampling.BICUBIC)
    return np.asarray(picture, dtype=np.uint8)


def _patchify(pixels: npt.NDArray[Any], config: PatchConfig) -> tuple[Floats, Grid]:
    """Cut ``[frames, height, width, channels]``; frames and sides are multiples already."""
    scaled: Floats = np.divide(pixels, np.float32(255), dtype=np.float32)
    scaled = np.divide(scaled - np.array(config.mean, np.float32), np.array(config.std, np.float32))
    frames, tall, wide, channels = scaled.shape
    patch, temporal, merge = config.patch, config.temporal, config.merge
    grid = (frames // temporal, tall // patch, wide // patch)
    cut = scaled.reshape(
        grid[0], temporal, grid[1] // merge, merge, patch, grid[2] // merge, merge, patch, channels
    )
    # to [time, rows, columns, row in the square, column in it, channel, frame, y, x]
    cut = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    flat = cut.reshape(math.prod(grid), channels * temporal * patch * patch)
    return np.ascontiguousarray(flat, dtype=np.float32), grid

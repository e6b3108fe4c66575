"""Decoding videos with decord, for those who ask for it and trust their files.

The times of frames, and so the choice of frames, are those of
:mod:`relax_agent.media.video`; what the two give for a whole file is the same. What protects from
damaged files is missing: decord reads on over broken packets, and some files end the process. Where
decord itself notices that it gives nothing usable, that is a MediaError; nothing is decoded with
another library in its place.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from relax_agent.errors import MediaError, MissingExtraError
from relax_agent.media.clock import Deadline
from relax_agent.media.kinds import require_mime
from relax_agent.media.video import Timeline
from relax_agent.messages import Video

if TYPE_CHECKING:
    from relax_agent.media.video import Pixels

_MICRO = 10**6
_HALF_TICK_S = 0.0005
"""What files that count milliseconds may be off."""
_FLOAT_ERROR = 2.0**-23
_BLOCK = 16
"""Frames that are decoded between two looks at the clock."""
_HINT = 'backend="pyav" may read it'


class _FloatTimeline(Timeline):
    """Times that came as 32-bit floats: their error grows with the length of the video."""

    @property
    def grace_s(self) -> float:
        """Seconds before its time at which a frame already counts as shown."""
        rounded = min(_HALF_TICK_S, self.duration_s / len(self.pts) / 100)
        return rounded + self.duration_s * _FLOAT_ERROR


class DecordReader:
    """A video opened by decord."""

    def __init__(self, part: Video, deadline: Deadline) -> None:
        try:
            import decord
        except ImportError:
            raise MissingExtraError("decord", "media") from None
        self._mime = require_mime(part.data, "video")
        self._deadline = deadline
        self._failures: tuple[type[Exception], ...] = (
            decord.DECORDError, RuntimeError, ValueError, IndexError, MemoryError
        )  # fmt: skip
        with self._told():
            self._reader = decord.VideoReader(io.BytesIO(part.data), num_threads=1)
            count = len(self._reader)
            spans = self._reader.get_frame_timestamp(range(count)).tolist() if count else []
        deadline.check()
        self._spans = self._checked(spans)
        with self._told():
            self._size = self._reader[0].shape[:2]

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Say in one line what decord could not do."""
        try:
            yield
        except self._failures as error:
            # Its messages are long and full of addresses and paths of its own source.
            raise MediaError(
                f"decord cannot read this video ({self._mime}): {type(error).__name__}",
                hint=_HINT,
            ) from error

    def _checked(self, spans: list[list[float]]) -> list[list[float]]:
        if not spans:
            raise MediaError("a video without frames")
        starts = [start for start, _ in spans]
        in_order = all(one < next_one for one, next_one in pairwise(starts))
        if not in_order or not all(map(math.isfinite, starts)) or spans[-1][1] <= spans[-1][0]:
            raise MediaError(
                f"decord finds no time for the frames of this video ({self._mime})", hint=_HINT
            )
        return spans

    @cached_property
    def line(self) -> Timeline:
        """When the frames are shown, and their size."""
        height, width = self._size
        start = self._spans[0][0]
        pts = tuple(round((each - start) * _MICRO) for each, _ in self._spans)
        last = max(1, round((self._spans[-1][1] - self._spans[-1][0]) * _MICRO))
        return _FloatTimeline(pts, Fraction(1, _MICRO), (), last, height, width)

    def read(self, numbers: list[int]) -> Pixels:
        """Decode the frames of these numbers."""
        import numpy as np

        found: list[Any] = []
        for start in range(0, len(numbers), _BLOCK):
            self._deadline.check()
            with self._told():
                found.append(self._reader.get_batch(numbers[start : start + _BLOCK]).asnumpy())
        pixels: Pixels = np.concatenate(found)
        if len(pixels) != len(numbers) or pixels.dtype != np.uint8 or pixels.shape[-1] != 3:
            raise MediaError(f"decord gives no pictures of this video ({self._mime})", hint=_HINT)
        return pixels

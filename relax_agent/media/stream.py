"""Frames of a video one after the other, made smaller on the way: for what would not fit at once.

:func:`~relax_agent.media.decode_video` holds all of the frames that it gives; this holds one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from relax_agent.errors import MediaError
from relax_agent.media.clock import Deadline
from relax_agent.media.video import Timeline, _frames, _Opened, _upright
from relax_agent.messages import Video

if TYPE_CHECKING:
    import numpy as np


def stream_frames(
    part: Video,
    line: Timeline,
    numbers: Sequence[int],
    deadline: Deadline,
    *,
    max_side: int | None = None,
) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """Yield the number and the pixels, uint8 ``[height, width, 3]``, of each frame asked for.

    Args:
        part: The encoded video.
        line: Its timeline (:func:`~relax_agent.media.video.read_timeline`).
        numbers: Which frames, in ascending order.
        deadline: Looked at between frames.
        max_side: Larger frames are made smaller, with the same shape and even sides.

    Raises:
        MediaError: It is damaged, or too slow to decode.
    """
    if max_side is not None:
        line = scaled(line, max_side)
    wanted = sorted(set(numbers))
    left = set(wanted)
    with _Opened(part) as (container, stream):
        for number, frame in _frames(container, stream, line, wanted):
            deadline.check()
            if number is None or number not in left:
                continue
            if frame.is_corrupt:
                raise MediaError(f"a damaged video: frame {number} is broken")
            left.remove(number)
            yield number, _upright(frame, line)
            if not left:
                return
    if left:
        raise MediaError(f"a damaged video: {len(left)} of {len(wanted)} frames cannot be decoded")


def scaled(line: Timeline, max_side: int) -> Timeline:
    """Return the timeline of the same video with frames of at most ``max_side`` pixels a side."""
    factor = max_side / max(line.width, line.height)
    if factor >= 1:
        return line
    width, height = (max(2, 2 * round(side * factor / 2)) for side in (line.width, line.height))
    return replace(line, width=width, height=height)

"""Which frames of a video a model sees, and the sound that comes with them.

Frames are taken at a steady rate, so many as the bounds on their number allow, and by the time at
which they are shown; so a file whose rate varies gives the right ones. Everything comes from the
model's folder and the file itself: no environment variable, nothing that two processes could
understand differently.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from relax_agent.errors import MediaError, MissingExtraError
from relax_agent.media import decode_video
from relax_agent.media.video import Timeline, read_timeline
from relax_agent.messages import Audio, Video
from relax_agent.rendering.media.config import FilmConfig


@dataclass(frozen=True, slots=True)
class Shots:
    """The frames that are taken from a video."""

    times: tuple[float, ...]
    """When each is shown, in seconds."""
    step_s: float
    """Seconds from one to the next, on average."""
    height: int
    width: int


def choose_shots(video: Video, config: FilmConfig) -> Shots:
    """Return which frames are taken, without decoding them.

    Raises:
        MediaError: It is damaged, cut off or without a picture.
    """
    line = read_timeline(video)
    total = len(line.pts)
    count = int(line.duration_s * config.fps)
    count = max(1, min(max(count, config.min_frames), config.max_frames, total))
    numbers = np.linspace(0, total - 1, count).round().astype(int)
    times = tuple(line.times[number] for number in numbers)
    return Shots(times, line.duration_s / count, *_shown_size(video, line))


def _shown_size(video: Video, line: Timeline) -> tuple[int, int]:
    """Return (height, width) as the decoder gives it: a file may say that it lies on its side."""
    height, width = decode_video(video, times=[0.0]).frames.shape[1:3]
    return int(height), int(width)


def read_shots(video: Video, shots: Shots) -> npt.NDArray[np.uint8]:
    """Decode the chosen frames, ``[frames, height, width, 3]``."""
    return decode_video(video, times=shots.times).frames


def sound_track(video: Video) -> Audio | None:
    """Return the video's sound as a clip of its own, or None if it is silent."""
    try:
        import av
    except ImportError:
        raise MissingExtraError("av", "media") from None
    try:
        with av.open(io.BytesIO(video.data)) as container:
            if not container.streams.audio:
                return None
    except (av.FFmpegError, ValueError, IndexError) as error:
        raise MediaError(f"a damaged video: {error}") from error
    return Audio(video.data, video.mime)

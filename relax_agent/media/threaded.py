"""The decoders for code in an event loop: each runs in a thread, and is given up at its limit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from relax_agent.media.audio import MAX_SECONDS, decode_audio
from relax_agent.media.clock import in_thread
from relax_agent.media.image import MAX_PIXELS, decode_image
from relax_agent.media.video import MAX_DECODED_BYTES, Backend, VideoFrames, decode_video
from relax_agent.messages import Audio, Image, Video

if TYPE_CHECKING:
    import PIL.Image

    from relax_agent.media.audio import Samples

_GRACE_S = 1.0
"""A decoder's own limit speaks first, where it can: it says what it was doing and ends."""


async def decode_image_async(
    part: Image, *, max_pixels: int = MAX_PIXELS, timeout_s: float = 30.0
) -> PIL.Image.Image:
    """Do what :func:`~relax_agent.media.decode_image` does without blocking the event loop."""
    return await in_thread(partial(decode_image, part, max_pixels=max_pixels), timeout_s=timeout_s)


async def decode_audio_async(
    part: Audio,
    sample_rate: int | None = None,
    *,
    max_seconds: float = MAX_SECONDS,
    timeout_s: float = 60.0,
) -> tuple[Samples, int]:
    """Do what :func:`~relax_agent.media.decode_audio` does without blocking the event loop."""
    call = partial(decode_audio, part, sample_rate, max_seconds=max_seconds, timeout_s=timeout_s)
    return await in_thread(call, timeout_s=timeout_s + _GRACE_S)


async def decode_video_async(
    part: Video,
    *,
    frames: int | None = None,
    times: Sequence[float] | None = None,
    max_bytes: int = MAX_DECODED_BYTES,
    timeout_s: float = 120.0,
    backend: Backend = "pyav",
) -> VideoFrames:
    """Do what :func:`~relax_agent.media.decode_video` does without blocking the event loop."""
    call = partial(
        decode_video,
        part,
        frames=frames,
        times=times,
        max_bytes=max_bytes,
        timeout_s=timeout_s,
        backend=backend,
    )
    return await in_thread(call, timeout_s=timeout_s + _GRACE_S)

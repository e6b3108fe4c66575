"""Media: finding, checking and decoding images, sounds and videos, and making them.

A content part holds an *encoded* file; it is decoded where somebody needs pixels or samples.
:func:`load_media` makes parts from whatever a data set has, ``encode_…`` from arrays, ``decode_…``
turns them into arrays. Whatever is wrong with a file becomes a
:class:`~relax_agent.errors.MediaError`. In an event loop use ``decode_…_async``: the same in a
thread and within a time limit, while the loop goes on.

The libraries (Pillow, soundfile, soxr, PyAV: the ``media`` extra) are imported when used.
"""

from __future__ import annotations

from relax_agent.media.audio import decode_audio
from relax_agent.media.clock import in_thread
from relax_agent.media.encode import encode_mp4, encode_png, encode_wav
from relax_agent.media.image import decode_image
from relax_agent.media.kinds import KINDS, Kind, Media, count_kinds, digest_of, kind_of, mime_of
from relax_agent.media.load import MAX_BYTES, check_media, load_media
from relax_agent.media.threaded import (
    decode_audio_async,
    decode_image_async,
    decode_video_async,
)
from relax_agent.media.video import VideoFrames, decode_video

__all__ = [
    "KINDS",
    "MAX_BYTES",
    "Kind",
    "Media",
    "VideoFrames",
    "check_media",
    "count_kinds",
    "decode_audio",
    "decode_audio_async",
    "decode_image",
    "decode_image_async",
    "decode_video",
    "decode_video_async",
    "digest_of",
    "encode_mp4",
    "encode_png",
    "encode_wav",
    "in_thread",
    "kind_of",
    "load_media",
    "mime_of",
]

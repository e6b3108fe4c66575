"""Making media: a picture, a sound or a video out of arrays, as environments and tests do.

Each function returns a content part, ready for a message: ``user([encode_png(frame), "What is
it?"])``. PNG and WAV lose nothing (WAV rounds to 16 bits); MP4 is H.264. Equal input gives equal
bytes under one version of the libraries.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from relax_agent.errors import MediaError, MissingExtraError
from relax_agent.messages import Audio, Image, Video

if TYPE_CHECKING:
    import numpy as np

MAX_SAMPLE_RATE = 384_000
_PNG_MODES = {"1", "L", "LA", "P", "RGB", "RGBA", "I;16"}


def encode_png(picture: Any) -> Image:
    """Return a PIL image or an array as PNG.

    Args:
        picture: A PIL image, or uint8 ``[height, width]`` or ``[height, width, 1 | 3 | 4]``.

    Raises:
        MediaError: It is neither, or empty.
    """
    try:
        import PIL.Image
    except ImportError:
        raise MissingExtraError("Pillow", "media") from None
    if not isinstance(picture, PIL.Image.Image):
        picture = PIL.Image.fromarray(_pixels(picture))
    if 0 in picture.size:
        raise MediaError(f"a picture of {picture.width}×{picture.height} pixels cannot be encoded")
    if picture.mode not in _PNG_MODES:
        picture = picture.convert("RGB")
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=6)
    return Image(file.getvalue(), "image/png")


def _pixels(picture: Any) -> np.ndarray[Any, Any]:
    import numpy as np

    pixels = np.asarray(picture)
    if pixels.dtype != np.uint8:
        raise MediaError(
            f"a picture is an array of uint8, not of {pixels.dtype}",
            hint="(255 * x).astype('uint8') if it goes from 0 to 1",
        )
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.ndim != 2 and not (pixels.ndim == 3 and pixels.shape[2] in (3, 4)):
        raise MediaError(
            f"a picture is [height, width] or [height, width, 3 | 4], not {list(pixels.shape)}"
        )
    return np.ascontiguousarray(pixels)


def encode_wav(samples: Any, sample_rate: int) -> Audio:
    """Return samples as 16-bit WAV.

    Args:
        samples: Floats from -1 to 1 (what is beyond is clipped) or int16, ``[frames]`` or
            ``[channels, frames]``.
        sample_rate: Frames per second.

    Raises:
        MediaError: The shape, the type or the rate does not fit, or a sample is not finite.
    """
    rate = require_rate(sample_rate)
    planes = _planes(samples)
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(planes.shape[0])
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(planes.T.tobytes())
    return Audio(file.getvalue(), "audio/wav")


def require_rate(rate: Any) -> int:
    """Return a sample rate as an int, or raise MediaError if it cannot be one."""
    try:
        number = int(rate)
    except (TypeError, ValueError, OverflowError):
        number = 0
    if not 1 <= number <= MAX_SAMPLE_RATE or number != rate:
        raise MediaError(f"a sample rate is a whole number of Hz, not {rate!r}", hint="e.g. 16000")
    return number


def _planes(samples: Any) -> np.ndarray[Any, Any]:
    """Samples as little-endian int16 ``[channels, frames]``."""
    import numpy as np

    try:
        array = np.atleast_2d(np.asarray(samples))
    except ValueError as error:
        raise MediaError(f"samples do not form an array: {error}") from error
    if array.ndim != 2 or array.size == 0:
        raise MediaError(f"samples are [frames] or [channels, frames], not {list(array.shape)}")
    if array.shape[0] > 32:
        hint = "is it [frames, channels]? Transpose it" if array.shape[1] <= 32 else None
        raise MediaError(f"a sound with {array.shape[0]} channels", hint=hint)
    if array.dtype == np.int16:
        return array.astype("<i2")
    if not np.issubdtype(array.dtype, np.floating):
        raise MediaError(
            f"samples are floats from -1 to 1, or int16, not {array.dtype}",
            hint="divide by the largest value of that type",
        )
    if not np.isfinite(array).all():
        raise MediaError("a sample is not finite")
    return np.round(np.clip(array, -1.0, 1.0) * 32767.0).astype("<i2")


def encode_mp4(frames: Any, fps: float | Fraction) -> Video:
    """Return frames as an H.264 video without sound.

    Args:
        frames: uint8 ``[frames, height, width, 3]``, or an iterable of ``[height, width, 3]``.
        fps: Frames per second; 23.976 is taken for 24000/1001.

    Raises:
        MediaError: There is no frame, they differ in size, or the rate is not positive.
    """
    try:
        import av
    except ImportError:
        raise MissingExtraError("av", "media") from None
    rate = _frame_rate(fps)
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = None
        size: tuple[int, ...] = ()
        for number, frame in enumerate(frames):
            pixels = _rgb(frame, size, number)
            if stream is None:
                size = pixels.shape
                stream = _h264(container, rate, size)
            _mux(container, stream, av.VideoFrame.from_ndarray(pixels, format="rgb24"), number)
        if stream is None:
            raise MediaError("a video needs a frame")
        container.mux(stream.encode())
    return Video(file.getvalue(), "video/mp4")


def _mux(container: Any, stream: Any, frame: Any, number: int) -> None:
    frame.pts, frame.time_base = number, stream.codec_context.time_base
    container.mux(stream.encode(frame))


def _frame_rate(fps: float | Fraction) -> Fraction:
    try:
        rate = Fraction(fps)
    except (TypeError, ValueError, OverflowError):
        rate = Fraction(0)
    if not 0 < rate <= 100_000:
        raise MediaError(f"a frame rate is a number above 0, not {fps!r}")
    # 23.976 and 29.97 are how people write 24000/1001 and 30000/1001.
    film = Fraction(round(rate * Fraction(1001, 1000)) * 1000, 1001)
    if rate.denominator > 1 and film and abs(film - rate) < Fraction(1, 1000):
        return film
    return rate.limit_denominator(1001)


def _rgb(frame: Any, size: Sequence[int], number: int) -> np.ndarray[Any, Any]:
    import numpy as np

    pixels = _pixels(frame)
    if pixels.ndim == 2:
        pixels = np.repeat(pixels[:, :, None], 3, axis=2)
    pixels = np.ascontiguousarray(pixels[:, :, :3])
    if 0 in pixels.shape:
        raise MediaError("a frame without pixels")
    if size and tuple(size) != pixels.shape:
        raise MediaError(f"frame {number} is {pixels.shape[:2]}, the first one {tuple(size[:2])}")
    return pixels


def _h264(container: Any, rate: Fraction, size: Iterable[int]) -> Any:
    height, width, _ = size
    stream = container.add_stream("libx264", rate=rate)
    stream.width, stream.height = width, height
    # What every player shows needs even sides.
    stream.pix_fmt = "yuv420p" if width % 2 == height % 2 == 0 else "yuv444p"
    stream.options = {"preset": "veryfast", "crf": "18", "threads": "1"}
    stream.codec_context.time_base = 1 / rate
    return stream

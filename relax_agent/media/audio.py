"""Decoding sound: soundfile for what it reads, PyAV for the rest (MP4, WebM, AAC).

A sound is read block by block, so a small file that unfolds to hours of silence ends at the limit
and not at the end of memory.

librosa reads nothing more: its ``load`` uses soundfile, and a program ``ffmpeg`` beside it for the
rest. It is for features of what was decoded here, ``librosa.feature.melspectrogram(y=samples[0],
sr=rate)``; the first such call of a process compiles for seconds.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from relax_agent.errors import MediaError, MissingExtraError
from relax_agent.media.clock import Deadline
from relax_agent.media.encode import require_rate
from relax_agent.media.kinds import reason, require_mime
from relax_agent.messages import Audio

if TYPE_CHECKING:
    import numpy as np

    Samples: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.float32]]

MAX_SECONDS = 3600.0
"""Longest sound that is decoded by default."""
MAX_VALUES = 2**29
"""Most samples of all channels together, whatever the length: 2 GiB as float32."""
_SOUNDFILE = {"audio/wav", "audio/flac", "audio/ogg", "audio/mpeg", "audio/aiff"}
_BLOCK = 65536
_MAX_CHANNELS = 32


def decode_audio(
    part: Audio,
    sample_rate: int | None = None,
    *,
    max_seconds: float = MAX_SECONDS,
    timeout_s: float = 60.0,
) -> tuple[Samples, int]:
    """Return (samples, sample rate).

    Args:
        part: The encoded sound.
        sample_rate: Frames per second wanted; None keeps the file's own.
        max_seconds: Refuses what unfolds to more.
        timeout_s: Seconds that decoding may take; looked at between blocks.

    Returns:
        float32 ``[channels, frames]`` from -1 to 1, and the rate. A file that was cut off gives
        what there is.

    Raises:
        MediaError: It is damaged, empty, too long, or of a format that is not read.
    """
    wanted = None if sample_rate is None else require_rate(sample_rate)
    mime = require_mime(part.data, "audio")
    deadline = Deadline(timeout_s, "decoding a sound")
    read = _read_soundfile if mime in _SOUNDFILE else _read_av
    samples, rate = read(part.data, mime, max_seconds, deadline)
    _check(samples)
    return _resample(samples, rate, wanted)


def _check(samples: Samples) -> None:
    import numpy as np

    if samples.shape[1] == 0:
        raise MediaError("a sound without samples")
    if not np.isfinite(samples).all():
        raise MediaError("a sound with samples that are not finite")


def _join(blocks: Iterator[Samples], rate: int, max_seconds: float, deadline: Deadline) -> Samples:
    import numpy as np

    found: list[Samples] = []
    total = 0
    for block in blocks:
        deadline.check()
        total += block.shape[1]
        if total > max_seconds * rate:
            raise MediaError(
                f"a sound of more than {max_seconds:g} s", hint="max_seconds= allows more"
            )
        if total * block.shape[0] > MAX_VALUES:
            raise MediaError(f"a sound of more than {MAX_VALUES:,} samples in all channels")
        found.append(block)
    if not found:
        raise MediaError("a sound without samples")
    return np.ascontiguousarray(np.concatenate(found, axis=1))


def _read_soundfile(
    data: bytes, mime: str, max_seconds: float, deadline: Deadline
) -> tuple[Samples, int]:
    try:
        import soundfile
    except ImportError:
        raise MissingExtraError("soundfile", "media") from None

    def blocks(file: Any) -> Iterator[Samples]:
        while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
            yield block.T

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check_channels(file.channels)
            rate = require_rate(file.samplerate)
            return _join(blocks(file), rate, max_seconds, deadline), rate
    except (soundfile.SoundFileError, RuntimeError, ValueError, TypeError) as error:
        raise MediaError(f"a damaged sound ({mime}): {reason(error)}") from error


def _check_channels(channels: int) -> None:
    if not 1 <= channels <= _MAX_CHANNELS:
        raise MediaError(f"a sound with {channels} channels")


def _read_av(data: bytes, mime: str, max_seconds: float, deadline: Deadline) -> tuple[Samples, int]:
    try:
        import av
    except ImportError:
        raise MissingExtraError("av", "media") from None
    try:
        with av.open(io.BytesIO(data)) as container:
            if not container.streams.audio:
                raise MediaError(f"a file without sound ({mime})")
            stream = container.streams.audio[0]
            if stream.codec_context is None:
                raise MediaError(f"a sound ({mime}) in a format that is not known")
            _check_channels(stream.channels)
            rate = require_rate(stream.rate)
            blocks = _av_blocks(container, stream, rate)
            return _join(blocks, rate, max_seconds, deadline), rate
    except (av.FFmpegError, ValueError, IndexError) as error:
        raise MediaError(f"a damaged sound ({mime}): {reason(error)}") from error


def _av_blocks(container: Any, stream: Any, rate: int) -> Iterator[Samples]:
    import av

    to_float = av.AudioResampler(format="fltp", layout=stream.layout, rate=rate)
    for frame in itertools.chain(container.decode(stream), [None]):
        for block in to_float.resample(frame):
            samples: Any = block.to_ndarray()
            yield samples


def _resample(samples: Samples, rate: int, wanted: int | None) -> tuple[Samples, int]:
    if wanted is None or wanted == rate:
        return samples, rate
    try:
        import soxr
    except ImportError:
        raise MissingExtraError("soxr", "media") from None
    import numpy as np

    out = soxr.resample(samples.T, rate, wanted)
    return np.ascontiguousarray(np.atleast_2d(out.T), dtype=np.float32), wanted

"""Decoding videos: which frames are shown when, then those frames.

PyAV reads a file's packets first, without decoding them. That gives the time of each frame (rates
may vary within a file, so frames are chosen by time and not by number) and shows whether the file
is whole. Only one that is goes to decord, the faster decoder for single frames of a long video:
given damaged files it ends the whole process. Everything else, and whatever decord refuses, is
decoded by PyAV. A file that was cut off is an error, not a video whose last frame repeats.
"""

from __future__ import annotations

import bisect
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from relax_agent.errors import ConfigError, MediaError, MissingExtraError
from relax_agent.media.clock import Deadline
from relax_agent.media.kinds import reason, require_mime
from relax_agent.messages import Video

if TYPE_CHECKING:
    import numpy as np

    Pixels: TypeAlias = np.ndarray[tuple[int, int, int, int], np.dtype[np.uint8]]

MAX_DECODED_BYTES = 2 * 2**30
"""What all decoded frames together may take."""
_CHECK_EVERY = 512
_DECORD_READS = {"video/mp4", "video/quicktime", "video/webm", "video/x-matroska"}


class VideoFrames(NamedTuple):
    """Decoded frames and when they are shown."""

    frames: Pixels
    """uint8 ``[frames, height, width, 3]``, RGB."""
    times: list[float]
    """Seconds from the first frame of the video, one for each frame."""


@dataclass(frozen=True)
class Timeline:
    """When the frames of a video are shown, in order."""

    pts: tuple[int, ...]
    """Time of each frame in units of ``unit``."""
    unit: Fraction
    """Seconds."""
    keys: tuple[int, ...]
    """Times of the frames that decoding may start at."""
    last_ticks: int
    """How long the last frame is shown."""
    height: int
    width: int
    whole: bool
    """Nothing is missing or out of the ordinary."""

    @cached_property
    def times(self) -> list[float]:
        """Seconds from the first frame, one for each frame."""
        return [float((each - self.pts[0]) * self.unit) for each in self.pts]

    @property
    def duration_s(self) -> float:
        """Seconds from the first frame to the end of the last one."""
        return float((self.pts[-1] + self.last_ticks - self.pts[0]) * self.unit)

    def spread(self, count: int) -> list[int]:
        """Return numbers of at most ``count`` frames, evenly over the time."""
        step = self.duration_s / count
        found = (self.at((number + 0.5) * step) for number in range(count))
        return list(dict.fromkeys(found))

    def at(self, time_s: float) -> int:
        """Return the number of the frame that is shown at a time."""
        # Half a tick of grace: 1/3 s as a float may lie before the frame that begins there.
        return max(0, bisect.bisect_right(self.times, time_s + float(self.unit) / 2) - 1)


def decode_video(
    part: Video,
    *,
    frames: int | None = None,
    times: Sequence[float] | None = None,
    max_bytes: int = MAX_DECODED_BYTES,
    timeout_s: float = 120.0,
) -> VideoFrames:
    """Return frames of a video; every frame unless told which.

    Args:
        part: The encoded video; an animated GIF too.
        frames: So many, evenly spread over the time. A video with fewer gives each of its own
            once.
        times: Those shown at these moments (seconds from the first frame), one for each.
        max_bytes: What the decoded frames together may take.
        timeout_s: Seconds that decoding may take; looked at between frames.

    Raises:
        MediaError: It is damaged, cut off, without a picture, too large, or too slow to decode.
        ConfigError: Both ``frames`` and ``times`` are given, or make no sense.
    """
    _check_wishes(frames, times)
    mime = require_mime(part.data, "video")
    deadline = Deadline(timeout_s, "decoding a video")
    line = read_timeline(part, deadline)
    wanted = _choose(line, frames, times)
    unique = sorted(set(wanted))
    _check_room(len(unique), line, max_bytes)
    found = None
    if line.whole and mime in _DECORD_READS:
        found = _with_decord(part.data, line, unique, deadline)
    if found is None:
        found = _with_av(part, line, unique, deadline)
    if unique != wanted:
        found = found[[bisect.bisect_left(unique, number) for number in wanted]]
    return VideoFrames(found, [line.times[number] for number in wanted])


def _check_wishes(frames: int | None, times: Sequence[float] | None) -> None:
    if frames is not None and times is not None:
        raise ConfigError("decode_video takes frames or times, not both")
    if frames is not None and frames < 1:
        raise ConfigError(f"frames={frames}: at least 1")
    if times is not None and not (len(times) and all(math.isfinite(t) and t >= 0 for t in times)):
        raise ConfigError(f"times={list(times)}: one or more moments, in seconds from 0 on")


def _choose(line: Timeline, frames: int | None, times: Sequence[float] | None) -> list[int]:
    if frames is not None:
        return line.spread(frames)
    if times is None:
        return list(range(len(line.pts)))
    late = max(times)
    if late > line.duration_s + float(line.unit):
        raise MediaError(f"there is no frame at {late:g} s: the video ends at {line.duration_s:g}")
    return [line.at(each) for each in times]


def _check_room(count: int, line: Timeline, max_bytes: int) -> None:
    need = count * line.height * line.width * 3
    if need > max_bytes:
        raise MediaError(
            f"{count} frames of {line.width}×{line.height} take {need / 2**20:.0f} MiB, more than"
            f" {max_bytes / 2**20:.0f}",
            hint="ask for fewer frames, or raise max_bytes",
        )


def read_timeline(part: Video, deadline: Deadline | None = None) -> Timeline:
    """Return when the frames of a video are shown, without decoding them.

    Raises:
        MediaError: It is damaged, cut off or without a picture.
    """
    deadline = deadline or Deadline(60.0, "reading a video")
    with _Opened(part) as (container, stream):
        unit = Fraction(stream.time_base or Fraction(1, 1000))
        shown, keys, ticks, clean = _read_packets(container, stream, deadline)
        if not shown:
            raise MediaError("a video without frames")
        if stream.frames > len(shown) + clean.discarded:
            raise MediaError(
                f"a video that was cut off: {len(shown)} of {stream.frames} frames are there"
            )
        whole = clean.ok and len(shown) == len(set(shown)) and not _is_turned(stream)
        return Timeline(
            pts=tuple(sorted(set(shown))),
            unit=unit,
            keys=tuple(sorted(keys)),
            last_ticks=_last_ticks(shown, ticks, stream, unit),
            height=stream.height,
            width=stream.width,
            whole=whole,
        )


@dataclass
class _Cleanliness:
    ok: bool = True
    discarded: int = 0


def _read_packets(
    container: Any, stream: Any, deadline: Deadline
) -> tuple[list[int], list[int], int, _Cleanliness]:
    """Return times of frames, times of key frames, the last frame's length and what was odd."""
    shown: list[int] = []
    keys: list[int] = []
    ticks, clean = 0, _Cleanliness()
    for number, packet in enumerate(container.demux(stream)):
        if number % _CHECK_EVERY == 0:
            deadline.check()
        if packet.size == 0:  # the end
            continue
        if packet.is_discard:  # before the first frame that is shown
            clean.discarded, clean.ok = clean.discarded + 1, False
            continue
        if packet.is_corrupt or packet.pts is None:
            raise MediaError("a damaged video: a packet is broken or without its time")
        if not shown or packet.pts > max(shown[-1], shown[0]):
            ticks = packet.duration or 0
        shown.append(packet.pts)
        if packet.is_keyframe:
            keys.append(packet.pts)
    return shown, keys, ticks, clean


def _last_ticks(shown: list[int], ticks: int, stream: Any, unit: Fraction) -> int:
    if ticks > 0:
        return ticks
    if len(shown) > 1:
        return max(1, (max(shown) - min(shown)) // (len(shown) - 1))
    rate = stream.average_rate or 25
    return max(1, round(1 / (rate * unit)))


def _is_turned(stream: Any) -> bool:
    """Whether players show it turned, as phones film: PyAV tells it with each frame only."""
    return bool(getattr(stream, "side_data", None)) or bool(stream.metadata.get("rotate"))


class _Opened:
    """A file opened by PyAV with the stream that is the picture; its failures are MediaErrors."""

    def __init__(self, part: Video) -> None:
        self._data = part.data
        self._mime = require_mime(part.data, "video")
        self._container: Any = None

    def __enter__(self) -> tuple[Any, Any]:
        try:
            import av
        except ImportError:
            raise MissingExtraError("av", "media") from None
        self._errors: tuple[type[Exception], ...] = (
            av.FFmpegError, ValueError, IndexError, TypeError, OverflowError, MemoryError
        )  # fmt: skip
        try:
            self._container = av.open(io.BytesIO(self._data))
            return self._container, self._stream()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def _stream(self) -> Any:
        from av.stream import Disposition

        for stream in self._container.streams.video:
            if stream.disposition & Disposition.attached_pic:
                continue
            if stream.codec_context is None:
                raise MediaError(f"a video ({self._mime}) in a format that is not known")
            if stream.width < 1 or stream.height < 1:
                raise MediaError("a video whose frames have no size")
            stream.thread_type = "AUTO"
            return stream
        raise MediaError(f"a file without a picture track ({self._mime})")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._container is not None:
            self._container.close()
        if isinstance(error, self._errors):
            raise MediaError(f"a damaged video ({self._mime}): {reason(error)}") from error


def _with_decord(
    data: bytes, line: Timeline, numbers: list[int], deadline: Deadline
) -> Pixels | None:
    """Decode with decord; None if it is not installed, refuses, or counts frames differently."""
    import numpy as np

    try:
        import decord
    except ImportError:
        return None
    decord.logging.set_level(decord.logging.QUIET)
    out = np.empty((len(numbers), line.height, line.width, 3), np.uint8)
    try:
        reader = decord.VideoReader(io.BytesIO(data), num_threads=1)
        if len(reader) != len(line.pts):
            return None
        shown = reader.get_frame_timestamp(numbers)[:, 0] - reader.get_frame_timestamp([0])[0, 0]
        if np.abs(shown - [line.times[number] for number in numbers]).max() > 1e-3:
            return None
        for place, number in enumerate(numbers):
            deadline.check()
            out[place] = reader[number].asnumpy()  # ValueError: at some widths it has 4 channels
    except (decord.DECORDError, RuntimeError, ValueError, IndexError):
        return None  # PyAV is asked next, and says what is wrong
    return out


def _with_av(part: Video, line: Timeline, numbers: list[int], deadline: Deadline) -> Pixels:
    import numpy as np

    wanted = {line.pts[number]: place for place, number in enumerate(numbers)}
    out: Any = None
    missing = set(wanted)
    with _Opened(part) as (container, stream):
        for frame in _frames(container, stream, line, sorted(wanted)):
            deadline.check()
            if frame.pts not in missing:
                continue
            if frame.is_corrupt:
                raise MediaError(f"a damaged video: the frame at {frame.time:g} s is broken")
            pixels = _upright(frame, line)
            if out is None:
                out = np.empty((len(numbers), *pixels.shape), np.uint8)
            out[wanted[frame.pts]] = pixels
            missing.discard(frame.pts)
            if not missing:
                return out
    raise MediaError(f"a damaged video: {len(missing)} of {len(numbers)} frames cannot be decoded")


def _upright(frame: Any, line: Timeline) -> np.ndarray[Any, Any]:
    import numpy as np

    pixels = frame.to_ndarray(format="rgb24", width=line.width, height=line.height)
    turns = round(getattr(frame, "rotation", 0) / 90) % 4
    return np.rot90(pixels, turns) if turns else pixels


def _frames(container: Any, stream: Any, line: Timeline, wanted: list[int]) -> Iterator[Any]:
    """Decode the stretches from a key frame to the wanted frames behind it, jumping over others."""
    runs: dict[int, int] = {}
    for pts in wanted:
        at = bisect.bisect_right(line.keys, pts) - 1
        key = line.keys[at] if at >= 0 else line.pts[0]
        runs[key] = pts
    for number, (key, last) in enumerate(runs.items()):
        if number or key != line.pts[0]:
            container.seek(key, stream=stream)
        for frame in container.decode(stream):
            yield frame
            if frame.pts is not None and frame.pts >= last:
                break

"""Decoding videos: which frames are shown when, then those frames.

PyAV reads a file's packets first, without decoding them. That gives the time of each frame (rates
may vary within a file, so frames are chosen by time and not by number), and shows whether the file
was cut off: that is an error, not a video whose last frame repeats. Then the stretches from a key
frame to the wanted frames behind it are decoded, and what lies between them is jumped over.

decord is there for those who ask for it (``backend="decord"``,
:mod:`relax_agent.media.video_decord`), and is never chosen by itself: of 400 damaged files, 7 ended
the whole process with a segmentation fault. For 8 or 32 frames of a video of 1,000 (720p) it took
0.8 and 1.1 CPU-seconds, PyAV 0.85 and 1.2.
"""

from __future__ import annotations

import bisect
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, get_args

from relax_agent.errors import ConfigError, MediaError, MissingExtraError
from relax_agent.media.clock import Deadline
from relax_agent.media.kinds import reason, require_mime
from relax_agent.messages import Video

if TYPE_CHECKING:
    import numpy as np

    Pixels: TypeAlias = np.ndarray[tuple[int, int, int, int], np.dtype[np.uint8]]

Backend: TypeAlias = Literal["pyav", "decord"]
"""What decodes a video."""
MAX_DECODED_BYTES = 2 * 2**30
"""What all decoded frames together may take."""
_CHECK_EVERY = 512
_WITHOUT_TIMES = {"video/x-msvideo"}
"""Containers that keep the order of decoding, not the time of a frame."""


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
    """Times of the frames that decoding may start at; none if the file's times are not to be
    relied on, and frames are counted from its beginning.
    """
    last_ticks: int
    """How long the last frame is shown."""
    height: int
    width: int

    @cached_property
    def times(self) -> list[float]:
        """Seconds from the first frame, one for each frame."""
        return [float((each - self.pts[0]) * self.unit) for each in self.pts]

    @property
    def duration_s(self) -> float:
        """Seconds from the first frame to the end of the last one."""
        return float((self.pts[-1] + self.last_ticks - self.pts[0]) * self.unit)

    @property
    def grace_s(self) -> float:
        """Seconds before its time at which a frame already counts as shown.

        Files round times to ticks, so 2/3 s may lie just before its frame.
        """
        return min(float(self.unit) / 2, self.duration_s / len(self.pts) / 100)

    def spread(self, count: int) -> list[int]:
        """Return numbers of at most ``count`` frames, evenly over the time."""
        step = self.duration_s / count
        found = (self.at((number + 0.5) * step) for number in range(count))
        return list(dict.fromkeys(found))

    def at(self, time_s: float) -> int:
        """Return the number of the frame that is shown at a time."""
        return max(0, bisect.bisect_right(self.times, time_s + self.grace_s) - 1)


def decode_video(
    part: Video,
    *,
    frames: int | None = None,
    times: Sequence[float] | None = None,
    max_bytes: int = MAX_DECODED_BYTES,
    timeout_s: float = 120.0,
    backend: Backend = "pyav",
) -> VideoFrames:
    """Return frames of a video; every frame unless told which.

    Args:
        part: The encoded video; an animated GIF too.
        frames: So many, evenly spread over the time. A video with fewer gives each of its own
            once.
        times: Those shown at these moments (seconds from the first frame), one for each.
        max_bytes: What the decoded frames together may take.
        timeout_s: Seconds that decoding may take; looked at between frames.
        backend: ``pyav``, or ``decord`` for files that one trusts: it takes a little less time
            for few frames, and a damaged file may end the whole process, or give frames that are
            not in it. It cannot read some sizes (widths of 16, 24, 48 or 72) and no GIF.

    Raises:
        MediaError: It is damaged, cut off, without a picture, too large, or too slow to decode.
        ConfigError: Both ``frames`` and ``times`` are given, or make no sense.
        MissingExtraError: The backend is not installed.
    """
    _check_wishes(frames, times)
    deadline = Deadline(timeout_s, "decoding a video")
    reader = _reader(backend)(part, deadline)
    line = reader.line
    wanted = _choose(line, frames, times)
    unique = sorted(set(wanted))
    _check_room(len(unique), line, max_bytes)
    found = reader.read(unique)
    if unique != wanted:
        found = found[[bisect.bisect_left(unique, number) for number in wanted]]
    return VideoFrames(found, [line.times[number] for number in wanted])


class Reader(Protocol):
    """A video that is open for reading."""

    @property
    def line(self) -> Timeline:
        """When its frames are shown."""

    def read(self, numbers: list[int]) -> Pixels:
        """Decode the frames of these numbers, which ascend."""


class _PyAVReader:
    def __init__(self, part: Video, deadline: Deadline) -> None:
        self._part, self._deadline = part, deadline
        self.line = read_timeline(part, deadline)

    def read(self, numbers: list[int]) -> Pixels:
        return _decode(self._part, self.line, numbers, self._deadline)


def _reader(backend: str) -> Callable[[Video, Deadline], Reader]:
    if backend == "pyav":
        return _PyAVReader
    if backend == "decord":
        from relax_agent.media.video_decord import DecordReader

        return DecordReader
    raise ConfigError(f"backend={backend!r} is not known", hint=", ".join(get_args(Backend)))


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
        packets, unseen = _read_packets(container, stream, deadline)
        if not packets:
            raise MediaError("a video without frames")
        if stream.frames > len(packets) + unseen:
            raise MediaError(
                f"a video that was cut off: {len(packets)} of {stream.frames} frames are there"
            )
        if require_mime(part.data, "video") not in _WITHOUT_TIMES:
            pts = sorted(packets)
            keys = tuple(each for each in pts if packets[each][0])
            last = packets[pts[-1]][1] or _usual_ticks(pts, stream, unit)
            return Timeline(tuple(pts), unit, keys, last, stream.height, stream.width)
    with _Opened(part) as (container, stream):
        return _count_frames(container, stream, deadline)


def _read_packets(
    container: Any, stream: Any, deadline: Deadline
) -> tuple[dict[int, tuple[bool, int]], int]:
    """Return {time: (is a key frame, how long it is shown)}, and how many are never shown."""
    found: dict[int, tuple[bool, int]] = {}
    unseen = 0
    for number, packet in enumerate(container.demux(stream)):
        if number % _CHECK_EVERY == 0:
            deadline.check()
        if packet.size == 0:  # the end
            continue
        if packet.is_corrupt or packet.pts is None:
            raise MediaError("a damaged video: a packet is broken or without its time")
        if packet.is_discard or packet.pts in found:
            unseen += 1
            continue
        found[packet.pts] = bool(packet.is_keyframe), packet.duration or 0
    return found, unseen


def _count_frames(container: Any, stream: Any, deadline: Deadline) -> Timeline:
    """Return the timeline of a file with a constant rate by decoding all of it."""
    count = 0
    for _ in container.decode(stream):
        deadline.check()
        count += 1
    if not count:
        raise MediaError("a damaged video: no frame can be decoded")
    unit = 1 / Fraction(stream.average_rate or 25)
    return Timeline(tuple(range(count)), unit, (), 1, stream.height, stream.width)


def _usual_ticks(pts: list[int], stream: Any, unit: Fraction) -> int:
    if len(pts) > 1:
        return max(1, (pts[-1] - pts[0]) // (len(pts) - 1))
    return max(1, round(1 / ((stream.average_rate or 25) * unit)))


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


def _decode(part: Video, line: Timeline, numbers: list[int], deadline: Deadline) -> Pixels:
    import numpy as np

    places = {number: place for place, number in enumerate(numbers)}
    out: Any = None
    with _Opened(part) as (container, stream):
        for number, frame in _frames(container, stream, line, numbers):
            deadline.check()
            if number not in places:
                continue
            if frame.is_corrupt:
                raise MediaError(f"a damaged video: frame {number} is broken")
            pixels = _upright(frame, line)
            if out is None:
                out = np.empty((len(numbers), *pixels.shape), np.uint8)
            out[places.pop(number)] = pixels
            if not places:
                return out
    raise MediaError(f"a damaged video: {len(places)} of {len(numbers)} frames cannot be decoded")


def _upright(frame: Any, line: Timeline) -> np.ndarray[Any, Any]:
    import numpy as np

    pixels = frame.to_ndarray(format="rgb24", width=line.width, height=line.height)
    turns = round(getattr(frame, "rotation", 0) / 90) % 4
    return np.rot90(pixels, turns) if turns else pixels


def _frames(
    container: Any, stream: Any, line: Timeline, wanted: list[int]
) -> Iterator[tuple[int | None, Any]]:
    """Decode what is needed for the wanted frames; yield frames with their numbers."""
    if not line.keys:
        yield from enumerate(container.decode(stream))
        return
    number_of = {pts: number for number, pts in enumerate(line.pts)}
    runs: dict[int, int] = {}
    for number in wanted:  # the last one of each stretch, by the key frame before it
        pts = line.pts[number]
        at = bisect.bisect_right(line.keys, pts) - 1
        runs[line.keys[at] if at >= 0 else line.pts[0]] = pts
    for key, last in runs.items():
        if key != line.pts[0]:
            container.seek(key, stream=stream)
        for frame in container.decode(stream):
            yield number_of.get(frame.pts), frame
            if frame.pts is not None and frame.pts >= last:
                break

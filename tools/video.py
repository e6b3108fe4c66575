"""Ready-made video tools: look at moments, get an overview, cut, listen.

    env = MyEnv(tools=MediaShelf(VIDEO_TOOLS))     # films by name, never shown to the model whole
    relax-agent tools serve relax_agent.tools.video

Times are seconds from the first frame; the frame of a time is the one that is shown then, whatever
the frame rate does. Frames are decoded one after the other and made smaller on the way, so a tool
takes little memory. PyAV does the work (the ``media`` extra).

Scene changes are found by comparing the colours of neighbouring frames: each is made 64 pixels
small, its red, green and blue values are counted in 16 steps each, and the change is the share of
pixels that would have to move to another step (0 to 1). A change is where that is above the
threshold and the largest within half a second; slow fades are not found.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from relax_agent.errors import MediaError
from relax_agent.media import decode_audio, encode_mp4, encode_png, encode_wav, mime_of
from relax_agent.media.clock import Deadline
from relax_agent.media.stream import stream_frames
from relax_agent.media.video import Timeline, read_timeline
from relax_agent.messages import Audio, Video
from relax_agent.tools.declaration import tool
from relax_agent.tools.pictures import Reply, Span, span_in, told, write, wrong

if TYPE_CHECKING:
    import numpy as np
    import PIL.Image

MAX_TIMES = 16
"""Frames of one call."""
MAX_TILES = 36
"""Frames of one contact sheet."""
MAX_SIDE = 1024
"""Longest side of a frame that is given back; larger ones are made smaller."""
MAX_CUT_SECONDS = 60.0
MAX_CUT_SIDE = 640
MAX_SOUND_SECONDS = 600.0
MAX_OUTPUT_BYTES = 64 << 20
_CUT_FPS = 30.0
_TILE = 256
_SHEET_WIDTH = 1536
_SCENE_FPS = 10.0
_SCENE_SIDE = 64
_SCENE_GAP_S = 0.5
_MAX_SCENES = 200
_WORK_S = 80.0
"""Seconds that a call may decode; a little less than it may take altogether."""

Seconds = Annotated[float, Field(ge=0)]


def warm_up() -> None:
    """Load the libraries and run them once, so that no call waits for that."""
    import numpy as np

    film = encode_mp4(np.zeros((3, 16, 16, 3), np.uint8), 10)
    video_contact_sheet(film)
    cut_video(film)


_video_tool = tool(
    timeout=90.0,
    max_concurrency=4,
    max_output_bytes=MAX_OUTPUT_BYTES,
    idempotent=True,
    warm_up=warm_up,
)


@_video_tool
def video_frames(
    video: Video,
    times: Annotated[list[Seconds], Field(min_length=1, max_length=MAX_TIMES)],
) -> Reply:
    """Show what is to be seen at some moments of a video.

    Args:
        video: The video.
        times: The moments, in seconds from its beginning.
    """
    film = _Film(video)
    late = max(times)
    if late > film.line.duration_s:
        raise wrong(f"there is no frame at {late:g} s: the video ends at {film.ends} s")
    numbers = [film.line.at(each) for each in times]
    shown = dict(film.frames(numbers, MAX_SIDE))
    reply: Reply = []
    for time_s, number in zip(times, numbers, strict=True):
        reply += [f"{'' if not reply else chr(10)}At {time_s:g} s:", encode_png(shown[number])]
    return reply


@_video_tool
def video_contact_sheet(
    video: Video,
    frames: Annotated[int, Field(ge=1, le=MAX_TILES)] = 9,
    start: Seconds = 0.0,
    end: Seconds | None = None,
) -> Reply:
    """Show a video as one picture of frames, evenly spread over its time, with their times.

    Args:
        video: The video.
        frames: How many.
        start: Where to begin, in seconds.
        end: Where to end; by default where the video ends.
    """
    film = _Film(video)
    span = film.span(start, end)
    step = (span.end - span.start) / frames
    numbers = [film.line.at(span.start + (place + 0.5) * step) for place in range(frames)]
    numbers = list(dict.fromkeys(numbers))
    tiles = [(film.line.times[n], pixels) for n, pixels in film.frames(numbers, _TILE)]
    words = f"{len(tiles)} frames from {span.start:.2f} to {span.end:.2f} s{span.note}"
    return [f"{words}; the whole video has {film.ends} s", encode_png(_sheet(tiles))]


@_video_tool
def cut_video(video: Video, start: Seconds = 0.0, end: Seconds | None = None) -> list[str | Video]:
    """Cut a piece of at most a minute out of a video. It comes back small and without sound.

    Args:
        video: The video.
        start: Where the piece begins, in seconds.
        end: Where it ends; by default where the video ends.
    """
    film = _Film(video)
    span = film.span(start, end)
    length = span.end - span.start
    if length > MAX_CUT_SECONDS:
        raise wrong(f"{length:.0f} s are too long; at most {MAX_CUT_SECONDS:g}: give start, end")
    line = film.line
    fps = min(_CUT_FPS, max(1.0, len(line.times) / line.duration_s))
    count = max(1, math.ceil(length * fps - 1e-6))
    numbers = [line.at(span.start + place / fps) for place in range(count)]
    with told():
        piece = encode_mp4(_repeated(film.frames(numbers, MAX_CUT_SIDE), numbers), fps)
    words = f"{span.start:.2f} to {span.end:.2f} s{span.note}: {count} frames, {fps:.2f} a second"
    return [f"{words}, no sound", piece]


@_video_tool
def video_scenes(
    video: Video,
    start: Seconds = 0.0,
    end: Seconds | None = None,
    threshold: Annotated[float, Field(ge=0.05, le=1)] = 0.3,
) -> dict[str, Any]:
    """Find where the picture of a video changes at once, and so where its scenes begin and end.

    Args:
        video: The video.
        start: Where to begin, in seconds.
        end: Where to end; by default where the video ends.
        threshold: How much has to change; lower finds more.
    """
    film = _Film(video)
    span = film.span(start, end)
    numbers = _every(film.line, span, 1 / _SCENE_FPS)
    counts = [(film.line.times[n], _colours(p)) for n, p in film.frames(numbers, _SCENE_SIDE)]
    cuts = _changes(counts, threshold)
    edges = [span.start, *cuts[: _MAX_SCENES - 1], span.end]
    facts: dict[str, Any] = {
        "duration_s": round(film.line.duration_s, 3),
        "scenes": [
            {"start_s": round(edges[i], 3), "end_s": round(edges[i + 1], 3)}
            for i in range(len(edges) - 1)
        ],
    }
    if len(cuts) >= _MAX_SCENES:
        facts["note"] = f"{len(cuts) + 1} scenes were found; raise the threshold to see the rest"
    return facts


@_video_tool
def video_sound(
    video: Video, start: Seconds = 0.0, end: Seconds | None = None
) -> list[str | Audio]:
    """Take the sound out of a video.

    Args:
        video: The video.
        start: Where the piece begins, in seconds.
        end: Where it ends; by default where the sound ends.
    """
    mime = mime_of(video.data, "audio")
    with told():
        if mime is None:
            raise MediaError("a video of this kind has no sound that can be taken out")
        sound = Audio(video.data, mime)
        samples, rate = decode_audio(sound, max_seconds=MAX_SOUND_SECONDS, timeout_s=_WORK_S)
    span = span_in(round(samples.shape[1] / rate, 6), start, end, "sound")
    piece = samples[:, int(span.start * rate) : max(1, round(span.end * rate))]
    if piece.nbytes // 2 > MAX_OUTPUT_BYTES - 1024 or not piece.size:
        raise wrong(f"{span.end - span.start:.3f} s cannot be given back; give other start, end")
    return [f"{span.start:.2f} to {span.end:.2f} s{span.note}, {rate} Hz", encode_wav(piece, rate)]


VIDEO_TOOLS = (video_frames, video_contact_sheet, cut_video, video_scenes, video_sound)


class _Film:
    """A video that is open, and the time that one call has for it."""

    def __init__(self, video: Video) -> None:
        self._video = video
        self._deadline = Deadline(_WORK_S, "decoding this video")
        with told():
            self.line = read_timeline(video, self._deadline)

    @property
    def ends(self) -> str:
        return f"{self.line.duration_s:.6g}"

    def span(self, start: float, end: float | None) -> Span:
        return span_in(round(self.line.duration_s, 6), start, end, "video")

    def frames(
        self, numbers: Sequence[int], max_side: int
    ) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        with told():
            yield from stream_frames(
                self._video, self.line, numbers, self._deadline, max_side=max_side
            )


def _repeated(
    frames: Iterator[tuple[int, np.ndarray[Any, Any]]], numbers: Sequence[int]
) -> Iterator[np.ndarray[Any, Any]]:
    """Yield each frame as often as it is asked for; ``numbers`` ascend."""
    left = deque(numbers)
    for number, pixels in frames:
        while left and left[0] == number:
            left.popleft()
            yield pixels


def _sheet(tiles: Sequence[tuple[float, np.ndarray[Any, Any]]]) -> PIL.Image.Image:
    """Lay frames out in rows, each with its time in its corner."""
    import PIL.Image
    import PIL.ImageDraw

    height, width, _ = tiles[0][1].shape
    columns = min(math.ceil(math.sqrt(len(tiles))), max(1, _SHEET_WIDTH // (width + 4)))
    rows = math.ceil(len(tiles) / columns)
    sheet = PIL.Image.new("RGB", (columns * (width + 4), rows * (height + 4)), "white")
    draw = PIL.ImageDraw.Draw(sheet)
    for place, (time_s, pixels) in enumerate(tiles):
        left, top = place % columns * (width + 4) + 2, place // columns * (height + 4) + 2
        sheet.paste(PIL.Image.fromarray(pixels), (left, top))
        write(
            draw, (left + 4, top + 2), f"{time_s:.1f} s", 14,
            fill="white", stroke_width=2, stroke_fill="black",
        )  # fmt: skip
    return sheet


def _every(line: Timeline, span: Span, step_s: float) -> list[int]:
    """Return frames of a span that are at least so far apart."""
    found: list[int] = []
    soonest = -math.inf
    for number, time_s in enumerate(line.times):
        if span.start <= time_s < span.end and time_s >= soonest - 1e-6:
            found.append(number)
            soonest = time_s + step_s
    return found or [line.at(span.start)]


def _colours(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the share of pixels in each of 16 steps of red, green and blue, ``[3, 16]``."""
    import numpy as np

    steps = pixels.reshape(-1, 3) >> 4
    counts = np.stack([np.bincount(steps[:, channel], minlength=16) for channel in range(3)])
    return counts / len(steps)


def _changes(counts: Sequence[tuple[float, Any]], threshold: float) -> list[float]:
    """Return the times of frames whose colours differ from those of the frame before."""
    found: list[tuple[float, float]] = []
    for (_, before), (time_s, after) in pairwise(counts):
        change = float(abs(after - before).sum()) / 6
        if change < threshold:
            continue
        if found and time_s - found[-1][0] < _SCENE_GAP_S:
            if change > found[-1][1]:
                found[-1] = time_s, change
            continue
        found.append((time_s, change))
    return [time_s for time_s, _ in found]

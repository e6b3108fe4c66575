"""What the ready-made media tools share: pictures within limits, spans of time, words for a model.

A picture that a tool gives back is PNG of at most :data:`MAX_OUTPUT_PIXELS`; what is larger is
shown smaller, and the text says so. A :class:`~relax_agent.errors.MediaError` may hint at arguments
that only a program can change, so tools pass on what happened and leave the hint out.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from relax_agent.errors import MediaError, ToolError, ToolErrorKind
from relax_agent.media import decode_image, encode_png
from relax_agent.messages import Image

if TYPE_CHECKING:
    import PIL.Image

MAX_INPUT_PIXELS = 40_000_000
"""Most pixels of a picture that a tool is given."""
MAX_OUTPUT_PIXELS = 4 << 20
"""Most pixels of a picture that a tool gives back."""
MAX_SIDE = 4096
"""Most pixels along one side of a picture that a tool gives back."""
MAX_OUTPUT_BYTES = 3 * MAX_OUTPUT_PIXELS + (1 << 20)
"""What such a picture takes as PNG at the very most."""

Reply: TypeAlias = list[str | Image]
"""Text and pictures, as a tool returns them."""
Unit: TypeAlias = Literal["pixel", "fraction", "thousandth"]
"""What places in a picture are counted in; the latter two are parts of its width and height."""

_FAR = 1e9


class Box(NamedTuple):
    """A rectangle of whole pixels inside a picture."""

    left: int
    top: int
    right: int
    bottom: int


class Span(NamedTuple):
    """A stretch of time inside a sound or a video."""

    start: float
    end: float
    note: str
    """What was changed about it; empty if nothing."""


def wrong(message: str) -> ToolError:
    """Return the error for an argument that a model can put right."""
    return ToolError(message, kind=ToolErrorKind.INVALID_ARGUMENTS)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Turn what is wrong with a medium into an error for the model."""
    try:
        yield
    except MediaError as error:
        raise wrong(error.message) from error


def open_picture(image: Image) -> PIL.Image.Image:
    """Decode a picture to RGB, or raise ToolError."""
    with told():
        return decode_image(image, max_pixels=MAX_INPUT_PIXELS)


def give_picture(picture: PIL.Image.Image, words: str) -> Reply:
    """Return words and a picture, which is made smaller where it has too many pixels."""
    width, height = picture.size
    scale = min(math.sqrt(MAX_OUTPUT_PIXELS / (width * height)), MAX_SIDE / max(width, height))
    note = ""
    if scale < 1:
        from PIL.Image import Resampling

        size = max(1, int(width * scale)), max(1, int(height * scale))
        picture = picture.resize(size, Resampling.LANCZOS)
        note = f", shown smaller at {size[0]}×{size[1]}"
    return [f"{words}: {width}×{height} pixels{note}", encode_png(picture)]


def box_in(
    size: tuple[int, int], corners: tuple[float, float, float, float], unit: Unit
) -> tuple[Box, str]:
    """Return a box in whole pixels, cut off at the picture's edge, and a note if it was.

    Args:
        size: Width and height of the picture.
        corners: Left, top, right and bottom.
        unit: What they are counted in.

    Raises:
        ToolError: It is empty or lies outside.
    """
    left, top, right, bottom = (
        _pixels(value, size[place % 2], unit) for place, value in enumerate(corners)
    )
    if left >= right or top >= bottom:
        raise wrong(
            f"the box is empty: right ({corners[2]:g}) must be beyond left ({corners[0]:g}) and"
            f" bottom ({corners[3]:g}) beyond top ({corners[1]:g}) by a pixel at least"
        )
    box = Box(max(left, 0), max(top, 0), min(right, size[0]), min(bottom, size[1]))
    if box.left >= box.right or box.top >= box.bottom:
        raise wrong(f"the box lies outside the picture, which is {size[0]}×{size[1]} pixels")
    return box, "" if box == (left, top, right, bottom) else " (the box was cut off at the edge)"


def point_in(size: tuple[int, int], x: float, y: float, unit: Unit) -> tuple[int, int]:
    """Return a point in whole pixels, or raise ToolError if it lies outside."""
    place = _pixels(x, size[0], unit), _pixels(y, size[1], unit)
    if not (0 <= place[0] <= size[0] and 0 <= place[1] <= size[1]):
        raise wrong(f"the point lies outside the picture, which is {size[0]}×{size[1]} pixels")
    return place


def _pixels(value: float, side: int, unit: Unit) -> int:
    scale = {"pixel": 1.0, "fraction": float(side), "thousandth": side / 1000}[unit]
    return round(max(-_FAR, min(_FAR, value)) * scale)


def span_in(duration_s: float, start: float, end: float | None, what: str) -> Span:
    """Return the span from ``start`` to ``end``, cut off where the medium ends.

    Args:
        duration_s: How long the medium is.
        start: Seconds.
        end: Seconds; None is the medium's end.
        what: Names it, e.g. ``sound``.

    Raises:
        ToolError: It is empty or lies outside.
    """
    if start < 0:
        raise wrong(f"start must be 0 or more seconds, not {start:g}")
    if start >= duration_s:
        raise wrong(f"start is {start:g} s, but the {what} ends at {duration_s:g} s")
    if end is not None and end <= start:
        raise wrong(f"end ({end:g} s) must be after start ({start:g} s)")
    if end is None or end <= duration_s:
        return Span(start, duration_s if end is None else end, "")
    return Span(start, duration_s, f" (the {what} ends at {duration_s:g} s)")


@lru_cache(maxsize=16)
def font(size: int) -> Any:
    """Return the font that labels are written in."""
    import PIL.ImageFont

    return PIL.ImageFont.load_default(size)


def write(draw: Any, place: tuple[float, float], text: str, size: int, **colors: Any) -> None:
    """Write text on a picture; what the font has no sign for becomes a box."""
    try:
        draw.text(place, text, font=font(size), **colors)
    except UnicodeError:  # a Pillow without FreeType knows Latin letters only
        plain = text.encode("ascii", "replace").decode()
        draw.text(place, plain, font=font(size), **colors)

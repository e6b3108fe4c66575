"""Ready-made picture tools: look closer, turn, mark, and measure.

    env = MyEnv(tools=IMAGE_TOOLS)                 # pictures of the conversation: "image:1"
    env = MyEnv(tools=MediaShelf(IMAGE_TOOLS))     # or by name, from the shelf of the episode
    relax-agent tools serve relax_agent.tools.image

Every tool takes a picture and gives a new one, which the model may use in its next call; the old
one stays as it is. Places are counted in pixels from the top left corner, or in parts of the width
and height (``unit``). Pillow does the work (the ``media`` extra).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from relax_agent.messages import Image
from relax_agent.tools.declaration import tool
from relax_agent.tools.pictures import (
    MAX_OUTPUT_BYTES,
    MAX_OUTPUT_PIXELS,
    MAX_SIDE,
    Reply,
    Unit,
    box_in,
    give_picture,
    open_picture,
    point_in,
    write,
    wrong,
)

if TYPE_CHECKING:
    import PIL.Image

MAX_ZOOM = 50.0
MAX_LABEL_CHARS = 80
_SAMPLE = 256
"""Pixels along a side that dominant colours are found in."""
_BARS = 8

Side = Annotated[int, Field(ge=1, le=MAX_SIDE)]


def warm_up() -> None:
    """Load Pillow and its decoders, which the first call would otherwise wait for."""
    import PIL.Image

    from relax_agent.media import encode_png

    open_picture(encode_png(PIL.Image.new("RGB", (8, 8))))


_picture_tool = tool(
    timeout=30.0,
    max_concurrency=16,
    max_output_bytes=MAX_OUTPUT_BYTES,
    idempotent=True,
    warm_up=warm_up,
)


@_picture_tool
def crop_image(
    image: Image, left: float, top: float, right: float, bottom: float, unit: Unit = "pixel"
) -> Reply:
    """Cut a rectangle out of a picture.

    Args:
        image: The picture.
        left: Where the rectangle begins, from the left edge.
        top: Where it begins, from the top edge.
        right: Where it ends, from the left edge.
        bottom: Where it ends, from the top edge.
        unit: What these are counted in.
    """
    picture = open_picture(image)
    box, note = box_in(picture.size, (left, top, right, bottom), unit)
    return give_picture(picture.crop(box), f"Pixels {box.left},{box.top} to {_end(box)}{note}")


@_picture_tool
def zoom_image(
    image: Image,
    x: float,
    y: float,
    factor: Annotated[float, Field(ge=1, le=MAX_ZOOM)] = 2.0,
    unit: Unit = "pixel",
) -> Reply:
    """Enlarge the surroundings of a point to the size of the whole picture.

    Args:
        image: The picture.
        x: The point, from the left edge.
        y: The point, from the top edge.
        factor: How many times larger.
        unit: What x and y are counted in.
    """
    from PIL.Image import Resampling

    picture = open_picture(image)
    x, y = point_in(picture.size, x, y, unit)
    width, height = (max(1, round(side / factor)) for side in picture.size)
    left = min(max(0, x - width // 2), picture.width - width)
    top = min(max(0, y - height // 2), picture.height - height)
    size = _at_most(picture.size)
    area = (left, top, left + width, top + height)
    larger = picture.resize(size, Resampling.LANCZOS, box=area)
    return give_picture(larger, f"Pixels {left},{top} to {area[2]},{area[3]}, enlarged")


@_picture_tool
def rotate_image(image: Image, degrees: float) -> Reply:
    """Turn a picture clockwise. New corners are white.

    Args:
        image: The picture.
        degrees: How far; negative turns the other way.
    """
    from PIL.Image import Resampling, Transpose

    picture = open_picture(image)
    turn = round(degrees % 360, 6) % 360  # a hair less than nothing is 360.0 otherwise
    quarters = [Transpose.ROTATE_270, Transpose.ROTATE_180, Transpose.ROTATE_90]
    if turn == 0:
        turned = picture
    elif turn % 90 == 0:
        turned = picture.transpose(quarters[int(turn) // 90 - 1])
    else:
        size = _at_most(picture.size)
        small = picture if size == picture.size else picture.resize(size, Resampling.LANCZOS)
        turned = small.rotate(
            -turn, resample=Resampling.BICUBIC, expand=True, fillcolor=(255, 255, 255)
        )
    return give_picture(turned, f"Turned by {degrees:g}° clockwise")


@_picture_tool
def resize_image(image: Image, width: Side | None = None, height: Side | None = None) -> Reply:
    """Make a picture smaller or larger. With one side given, its shape stays.

    Args:
        image: The picture.
        width: New width in pixels.
        height: New height in pixels.
    """
    from PIL.Image import Resampling

    if width is None and height is None:
        raise wrong("give width, height or both")
    picture = open_picture(image)
    wide = width or max(1, round(picture.width * (height or 1) / picture.height))
    high = height or max(1, round(picture.height * wide / picture.width))
    if wide * high > MAX_OUTPUT_PIXELS or max(wide, high) > MAX_SIDE:
        raise wrong(
            f"{wide}×{high} pixels are too many; at most {MAX_OUTPUT_PIXELS:,} in all and"
            f" {MAX_SIDE} along a side"
        )
    return give_picture(picture.resize((wide, high), Resampling.LANCZOS), "Resized")


@_picture_tool
def draw_box(
    image: Image,
    left: float,
    top: float,
    right: float,
    bottom: float,
    label: Annotated[str, Field(max_length=MAX_LABEL_CHARS)] = "",
    color: str = "red",
    unit: Unit = "pixel",
) -> Reply:
    """Mark a rectangle on a picture, for instance to show where something is.

    Args:
        image: The picture.
        left: Where the rectangle begins, from the left edge.
        top: Where it begins, from the top edge.
        right: Where it ends, from the left edge.
        bottom: Where it ends, from the top edge.
        label: A few words to write beside it.
        color: A name such as "red", or "#ff0000".
        unit: What the places are counted in.
    """
    import PIL.ImageDraw

    rgb = _color(color)
    picture = open_picture(image)
    box, note = box_in(picture.size, (left, top, right, bottom), unit)
    draw = PIL.ImageDraw.Draw(picture)
    line = max(1, round(max(picture.size) / 250))
    draw.rectangle((*box[:2], box.right - 1, box.bottom - 1), outline=rgb, width=line)
    if label.strip():
        _write_label(draw, picture.size, box, " ".join(label.split()), rgb)
    words = f"Box from {box.left},{box.top} to {_end(box)}{note}"
    return give_picture(picture, words)


@_picture_tool
def image_statistics(image: Image) -> dict[str, Any]:
    """Measure a picture: size, brightness, and the colours that fill most of it.

    Values of pixels go from 0 (dark) to 255. The histogram tells which share of the pixels is how
    bright, in equal steps from dark to bright.

    Args:
        image: The picture.
    """
    import PIL.ImageStat

    picture = open_picture(image)
    grey = picture.convert("L")
    channels = PIL.ImageStat.Stat(picture)
    bright = PIL.ImageStat.Stat(grey)
    pixels, counts = picture.width * picture.height, grey.histogram()
    step = 256 // _BARS
    return {
        "width": picture.width,
        "height": picture.height,
        "mean_rgb": [round(each, 1) for each in channels.mean],
        "std_rgb": [round(each, 1) for each in channels.stddev],
        "brightness": {"mean": round(bright.mean[0], 1), "std": round(bright.stddev[0], 1)},
        "brightness_histogram": [
            round(sum(counts[start : start + step]) / pixels, 4) for start in range(0, 256, step)
        ],
        "dominant_colors": _dominant(picture),
    }


IMAGE_TOOLS = (crop_image, zoom_image, rotate_image, resize_image, draw_box, image_statistics)


def _end(box: tuple[int, int, int, int]) -> str:
    return f"{box[2]},{box[3]}"


def _at_most(size: tuple[int, int]) -> tuple[int, int]:
    """Return a size of the same shape that may be given back."""
    width, height = size
    scale = (MAX_OUTPUT_PIXELS / (width * height)) ** 0.5
    scale = min(1.0, scale, MAX_SIDE / max(size))
    return max(1, int(width * scale)), max(1, int(height * scale))


def _color(name: str) -> tuple[int, ...]:
    import PIL.ImageColor

    try:
        return PIL.ImageColor.getrgb(name.strip())[:3]
    except ValueError:
        raise wrong(f'{name[:40]!r} is no colour; use a name such as "red", or "#ff0000"') from None


def _write_label(
    draw: Any, size: tuple[int, int], box: tuple[int, ...], label: str, rgb: tuple[int, ...]
) -> None:
    """Write on a strip of the box's colour: above the box, or inside it where there is no room."""
    height = max(10, round(max(size) / 45))
    strip = height + height // 3
    top = box[1] - strip if box[1] >= strip else box[1]
    left = float(box[0])
    ink = "black" if sum(rgb) > 380 else "white"
    right = left + _text_width(draw, label, height) + height // 2
    if right > size[0]:
        left = max(0.0, size[0] - (right - left))
    draw.rectangle((left, top, right, top + strip), fill=rgb)
    write(draw, (left + height // 4, top), label, height, fill=ink)


def _text_width(draw: Any, text: str, size: int) -> float:
    from relax_agent.tools.pictures import font

    try:
        width: float = draw.textlength(text, font=font(size))
    except UnicodeError:
        width = size * len(text) / 2
    return width


def _dominant(picture: PIL.Image.Image) -> list[dict[str, Any]]:
    """Return up to five colours and their shares, by median cut on a small copy."""
    small = picture.copy()
    small.thumbnail((_SAMPLE, _SAMPLE))
    reduced = small.quantize(5)
    palette = reduced.getpalette() or []
    found = sorted(reduced.getcolors() or [], reverse=True)
    total = small.width * small.height
    return [
        {"color": "#" + bytes(palette[3 * i : 3 * i + 3]).hex(), "share": round(count / total, 3)}
        for count, i in found
        if isinstance(i, int)
    ]

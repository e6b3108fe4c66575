"""A spectrogram as a picture with axes: seconds below, Hz at the left."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from relax_agent.media import encode_png
from relax_agent.messages import Image
from relax_agent.tools.pictures import write
from relax_agent.tools.signals import RANGE_DB

if TYPE_CHECKING:
    import numpy as np

WIDTH, HEIGHT = 800, 400
"""Of the spectrum itself, in pixels."""
_LEFT, _TOP, _RIGHT, _BOTTOM = 64, 12, 16, 34
_TEXT = 13
_COLORS = [(0, 0, 0), (50, 10, 100), (150, 30, 110), (230, 80, 60), (252, 170, 40), (255, 255, 200)]
"""From the quietest to the loudest, at equal distances."""


def paint_spectrum(levels_db: np.ndarray[Any, Any], start: float, end: float, top: float) -> Image:
    """Return a picture of levels ``[frequencies, moments]`` from -80 to 0 dB.

    Args:
        levels_db: The lowest frequency first.
        start: Seconds at the left.
        end: Seconds at the right.
        top: Hz at the top.
    """
    import numpy as np
    import PIL.Image
    import PIL.ImageDraw

    scale = np.clip(levels_db / RANGE_DB + 1, 0, 1)[::-1] * (len(_COLORS) - 1)
    steps, colors = np.arange(len(_COLORS)), np.array(_COLORS)
    pixels = np.stack([np.interp(scale, steps, colors[:, i]) for i in range(3)], axis=-1)
    spectrum = PIL.Image.fromarray(pixels.astype(np.uint8)).resize((WIDTH, HEIGHT))
    size = WIDTH + _LEFT + _RIGHT, HEIGHT + _TOP + _BOTTOM
    picture = PIL.Image.new("RGB", size, "white")
    picture.paste(spectrum, (_LEFT, _TOP))
    draw = PIL.ImageDraw.Draw(picture)
    for value in ticks(start, end, 8):
        x = _LEFT + round((value - start) / (end - start) * (WIDTH - 1))
        draw.line((x, _TOP + HEIGHT, x, _TOP + HEIGHT + 5), fill="black")
        write(draw, (x - 8, _TOP + HEIGHT + 8), f"{value:g} s", _TEXT, fill="black")
    for value in ticks(0.0, top, 6):
        y = _TOP + round((1 - value / top) * (HEIGHT - 1))
        draw.line((_LEFT - 5, y, _LEFT, y), fill="black")
        write(draw, (4, y - 8), f"{value:g} Hz", _TEXT, fill="black")
    return encode_png(picture)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return round numbers from ``low`` to ``high``, at most ``most`` and one more."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{number * step:.6g}") for number in range(first, last + 1)]

"""Decoding pictures, within limits on what they unfold to."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

from relax_agent.errors import MediaError, MissingExtraError
from relax_agent.media.kinds import reason, require_mime
from relax_agent.messages import Image

if TYPE_CHECKING:
    import PIL.Image

MAX_PIXELS = 64 * 10**6
"""Most pixels that a picture may unfold to by default."""
_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")


def decode_image(part: Image, *, max_pixels: int = MAX_PIXELS) -> PIL.Image.Image:
    """Return the picture in RGB, the right way up, transparency on white; a GIF's first frame.

    Args:
        part: The encoded picture.
        max_pixels: Refuses what unfolds to more, before it does.

    Raises:
        MediaError: It is damaged, too large, or of a format that is not read.
    """
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError:
        raise MissingExtraError("Pillow", "media") from None
    mime = require_mime(part.data, "image")
    try:
        with warnings.catch_warnings():  # the limit here is the caller's, not Pillow's
            warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)
            picture: PIL.Image.Image = PIL.Image.open(io.BytesIO(part.data), formats=_FORMATS)
        _check_pixels(picture.width, picture.height, max_pixels)
        picture.load()
        return _flatten(PIL.ImageOps.exif_transpose(picture))
    except MediaError:
        raise
    except PIL.Image.DecompressionBombError as error:
        raise MediaError(f"a picture of too many pixels: {error}") from None
    except PIL.UnidentifiedImageError:
        raise MediaError(
            f"a picture ({mime}) that cannot be read", hint=f"read are {', '.join(_FORMATS)}"
        ) from None
    except Exception as error:  # damaged files raise whatever a decoder stumbles over
        raise MediaError(f"a damaged picture ({mime}): {reason(error)}") from error


def _check_pixels(width: int, height: int, limit: int) -> None:
    if width * height > limit:
        raise MediaError(
            f"a picture of {width}×{height} pixels, more than {limit / 1e6:g} million",
            hint="max_pixels= allows more",
        )


def _flatten(picture: PIL.Image.Image) -> PIL.Image.Image:
    import PIL.Image

    if picture.mode == "RGB":
        return picture
    if picture.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
        clear = picture.convert("RGBA")
        white = PIL.Image.new("RGBA", clear.size, (255, 255, 255, 255))
        return PIL.Image.alpha_composite(white, clear).convert("RGB")
    if picture.mode.startswith("I;16") or picture.mode == "I":  # 16 bits a pixel
        picture = picture.convert("I").point(lambda value: value / 257).convert("L")
    return picture.convert("RGB")

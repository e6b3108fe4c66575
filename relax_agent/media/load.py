"""Media from whatever a data set, a tool or a person has: a file, bytes, a data URL, an array.

:func:`load_media` turns it into an :class:`~relax_agent.messages.Image`, ``Audio`` or ``Video``,
which hold the *encoded* file. What is encoded already stays as it is, byte by byte; only decoded
things (a PIL image, a numpy array) are encoded, without loss. The MIME type comes from the first
bytes. :func:`check_media` is the cheap half: it finds what is missing or of the wrong kind without
reading a file.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
import sys
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_agent.errors import MediaError
from relax_agent.media.encode import encode_png, encode_wav
from relax_agent.media.kinds import HEAD_BYTES, MEDIA_CLASSES, Kind, Media, reason, require_mime
from relax_agent.messages import Audio, Image, Video

MAX_BYTES: dict[Kind, int] = {"image": 64 * 2**20, "audio": 256 * 2**20, "video": 1024 * 2**20}
"""What an encoded file may have by default."""
_TAKES = {
    "image": "a path, bytes, a data URL, {'bytes': …}, {'path': …}, a PIL image or an array",
    "audio": "a path, bytes, a data URL, {'bytes': …}, {'path': …} or {'array', 'sampling_rate'}",
    "video": "a path, bytes, a data URL, {'bytes': …} or {'path': …}",
}


def load_media(
    value: Any, kind: Kind, *, base: Path | None = None, max_bytes: int | None = None
) -> Media:
    """Return ``value`` as a content part.

    Args:
        value: A path, encoded bytes, a data URL, a ``datasets`` dict (``{"bytes", "path"}`` or
            ``{"array", "sampling_rate"}``), a PIL image, an array ``[height, width]`` or
            ``[height, width, 1 | 3 | 4]`` of uint8 for an image, or a part, which is returned.
        kind: ``image``, ``audio`` or ``video``.
        base: The folder that relative paths start from; the current one by default.
        max_bytes: Most bytes of the encoded file; :data:`MAX_BYTES` by default.

    Raises:
        MediaError: It is missing, too large, unreadable, or not of this kind.
    """
    limit = MAX_BYTES[kind] if max_bytes is None else max_bytes
    data = _encoded(value, kind, base, limit)
    if isinstance(data, bytes):
        _check_size(len(data), limit)
        return MEDIA_CLASSES[kind](data, require_mime(data, kind))
    _check_size(len(data.data), limit)
    return data


def check_media(value: Any, kind: Kind, *, base: Path | None = None) -> None:
    """Raise MediaError if it can be told without reading a file that ``value`` will not load.

    Encoded bytes may be cut off after their first 64: only their beginning is looked at.
    """
    if isinstance(value, Mapping):
        value = _of_mapping(value, kind)
    if isinstance(value, (bytes, bytearray, memoryview)):
        require_mime(bytes(value[:64]), kind)
    elif isinstance(value, os.PathLike) or (isinstance(value, str) and not _is_data_url(value)):
        _file_size(_path(value, base), MAX_BYTES[kind])
    elif isinstance(value, str):
        require_mime(_of_data_url(_cut_off(value)), kind)
    elif isinstance(value, (Image, Audio, Video)):
        _require_kind(value, kind)


def _encoded(value: Any, kind: Kind, base: Path | None, limit: int) -> bytes | Media:
    if isinstance(value, Mapping):
        value = _of_mapping(value, kind)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, str) and _is_data_url(value):
        return _of_data_url(value)
    if isinstance(value, (str, os.PathLike)):
        return _read(_path(value, base), limit)
    if isinstance(value, (Image, Audio, Video)):
        return _require_kind(value, kind)
    if isinstance(value, _Samples) and kind == "audio":
        return encode_wav(value.array, value.rate)
    if kind == "image" and _is_picture(value):
        return encode_png(value)
    raise MediaError(f"{_article(kind)} cannot be made of {_described(value)}", hint=_TAKES[kind])


def _article(kind: Kind) -> str:
    return f"{'a' if kind == 'video' else 'an'} {kind}"


def _described(value: Any) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    if isinstance(value, Mapping):
        return f"a dict with the keys {', '.join(map(repr, value)) or '(none)'}"
    return f"a value of type {name}"


def _require_kind(part: Media, kind: Kind) -> Media:
    if not isinstance(part, MEDIA_CLASSES[kind]):
        raise MediaError(f"this is of type {type(part).__name__}, not {_article(kind)}")
    return part


class _Samples:
    """Decoded sound on its way to an encoder."""

    def __init__(self, array: Any, rate: Any) -> None:
        self.array, self.rate = array, rate


def _of_mapping(value: Mapping[str, Any], kind: Kind) -> Any:
    """Return what a dict holds: bytes, a path, a data URL or samples."""
    if value.get("array") is not None:
        if "sampling_rate" not in value:
            raise MediaError("samples without their rate", hint="{'array': …, 'sampling_rate': …}")
        return _Samples(value["array"], value["sampling_rate"])
    for key in ("bytes", "path", "url"):
        if value.get(key) is not None:
            return value[key]
    raise MediaError(f"{_article(kind)} cannot be made of {_described(value)}", hint=_TAKES[kind])


def _is_picture(value: Any) -> bool:
    pil = sys.modules.get("PIL.Image")
    if pil is not None and isinstance(value, pil.Image):
        return True
    return hasattr(value, "__array__") and hasattr(value, "dtype")


def _is_data_url(value: str) -> bool:
    return value[:5].lower() == "data:"


def _cut_off(url: str) -> str:
    """Keep as much of a data URL as its type shows in."""
    head, comma, body = url[:1024].partition(",")
    # So many characters stand for whole bytes, whether they are base64 or percent signs.
    return head + comma + "".join(body.split())[: 12 * (HEAD_BYTES // 4)]


def _of_data_url(value: str) -> bytes:
    head, comma, body = value.partition(",")
    if not comma:
        raise MediaError(f"a data URL without data: {_short(value)!r}")
    if not head.lower().endswith(";base64"):
        return urllib.parse.unquote_to_bytes(body)
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"a data URL whose base64 is damaged: {error}") from error


def _path(value: Any, base: Path | None) -> Path:
    text = os.fspath(value)
    if isinstance(text, bytes):
        text = os.fsdecode(text)
    scheme = text.partition("://")[0] if "://" in text[:32] else ""
    if scheme == "file":
        text = urllib.parse.unquote(urllib.parse.urlsplit(text).path)
    elif scheme:
        raise MediaError(
            f"{_short(text)} is on the network", hint="download it and give the file's path"
        )
    if not text or "\0" in text:
        raise MediaError(f"{_short(text)!r} is not a path")
    if len(text) > 1024:
        raise MediaError(
            f"{_short(text)!r} is too long for a path",
            hint="is it base64? Then put 'data:image/png;base64,' before it",
        )
    return (base or Path()) / text


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:60]}…{text[-30:]}"


def _file_size(path: Path, limit: int) -> int:
    try:
        status = path.stat()
    except FileNotFoundError:
        raise MediaError(f"there is no file {_short(str(path))}") from None
    except (OSError, ValueError) as error:
        raise MediaError(f"{_short(str(path))} cannot be read: {reason(error)}") from error
    if stat.S_ISDIR(status.st_mode):
        raise MediaError(f"{_short(str(path))} is a folder, not a file")
    if not stat.S_ISREG(status.st_mode):  # a pipe or a device might never end
        raise MediaError(f"{_short(str(path))} is not a regular file")
    _check_size(status.st_size, limit, path)
    return status.st_size


def _read(path: Path, limit: int) -> bytes:
    size = _file_size(path, limit)
    try:
        with path.open("rb") as file:
            data = file.read(size)
    except OSError as error:
        raise MediaError(f"{_short(str(path))} cannot be read: {reason(error)}") from error
    return data


def _check_size(size: int, limit: int, path: Path | None = None) -> None:
    if size > limit:
        what = "this file" if path is None else _short(str(path))
        raise MediaError(
            f"{what} has {size / 2**20:.1f} MiB, more than {limit / 2**20:.1f}",
            hint="max_bytes= allows more",
        )

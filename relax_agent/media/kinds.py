"""What kind of thing a piece of media is, told by its first bytes and not by its name.

A file name or a declared MIME type may be wrong or missing; the first bytes are what a decoder
goes by. The same container may hold sound or a moving picture (MP4, WebM, Matroska, Ogg), so
:func:`mime_of` is told which of the two is wanted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal, TypeAlias, overload

from relax_agent.errors import MediaError
from relax_agent.messages import Audio, Image, Part, Text, Video

Media: TypeAlias = Image | Audio | Video
Kind: TypeAlias = Literal["image", "audio", "video"]
KINDS: tuple[Kind, Kind, Kind] = ("image", "audio", "video")
HEAD_BYTES = 64
"""As many first bytes as the type of a file shows in."""

MEDIA_CLASSES: dict[Kind, type[Media]] = {
    "image": Image,
    "audio": Audio,
    "video": Video,
}
_PREFIXES = [
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"II*\0", "image/tiff"),
    (b"MM\0*", "image/tiff"),
    (b"fLaC", "audio/flac"),
    (b"ID3", "audio/mpeg"),
    (b"OggS", "container/ogg"),
    (b"\0\0\x01\xba", "video/mpeg"),
    (b"FLV\x01", "video/x-flv"),
    (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "video/x-ms-wmv"),
]
_RIFF = {b"WAVE": "audio/wav", b"WEBP": "image/webp", b"AVI ": "video/x-msvideo"}
_FTYP = {
    b"M4A ": "audio/mp4",
    b"M4B ": "audio/mp4",
    b"avif": "image/avif",
    b"avis": "image/avif",
    b"heic": "image/heic",
    b"heix": "image/heic",
    b"mif1": "image/heic",
    b"qt  ": "container/quicktime",
}
_HOLDS: dict[str, dict[Kind, str]] = {
    "container/mp4": {"video": "video/mp4", "audio": "audio/mp4"},
    "container/quicktime": {"video": "video/quicktime", "audio": "audio/mp4"},
    "container/webm": {"video": "video/webm", "audio": "audio/webm"},
    "container/matroska": {"video": "video/x-matroska", "audio": "audio/x-matroska"},
    "container/ogg": {"video": "video/ogg", "audio": "audio/ogg"},
    "image/gif": {"image": "image/gif", "video": "image/gif"},
}
_BMP_HEADERS = {12, 16, 40, 52, 56, 64, 108, 124}


def _sniff(head: bytes) -> str | None:
    for prefix, mime in _PREFIXES:
        if head.startswith(prefix):
            return mime
    if head[:4] in (b"RIFF", b"RF64"):
        return _RIFF.get(head[8:12])
    if head[:4] == b"FORM" and head[8:12] in (b"AIFF", b"AIFC"):
        return "audio/aiff"
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free"):
        return _FTYP.get(head[8:12], "container/mp4") if head[4:8] == b"ftyp" else "container/mp4"
    if head.startswith(b"\x1a\x45\xdf\xa3"):
        return "container/webm" if b"webm" in head else "container/matroska"
    if head[:2] == b"BM" and int.from_bytes(head[14:18], "little") in _BMP_HEADERS:
        return "image/bmp"
    return _sniff_mpeg_audio(head)


def _sniff_mpeg_audio(head: bytes) -> str | None:
    """A frame header without a tag before it: 11 or 12 bits in step, then no reserved value."""
    if len(head) < 4 or head[0] != 0xFF or head[1] < 0xE0:
        return None
    if head[1] & 0xF6 == 0xF0:
        return "audio/aac"
    version, layer = head[1] >> 3 & 3, head[1] >> 1 & 3
    bitrate, rate = head[2] >> 4, head[2] >> 2 & 3
    fits = version != 1 and layer != 0 and bitrate != 15 and rate != 3
    return "audio/mpeg" if fits else None


def mime_of(head: bytes, kind: Kind) -> str | None:
    """Return the MIME type that the first bytes show, or None if they show no such ``kind``.

    Args:
        head: The beginning, :data:`HEAD_BYTES` or more of it.
        kind: What it is to be used as; an MP4 file can be a video or a sound.
    """
    found = _sniff(bytes(head[:HEAD_BYTES]))
    if found is None:
        return None
    if found in _HOLDS:
        return _HOLDS[found].get(kind)
    return found if found.startswith(kind) else None


def require_mime(head: bytes, kind: Kind) -> str:
    """Return the MIME type, or raise MediaError that says what the bytes look like instead."""
    mime = mime_of(head, kind)
    if mime is not None:
        return mime
    article = "a" if kind == "video" else "an"
    if not head:
        raise MediaError(f"{article} {kind} of 0 bytes")
    raise MediaError(f"this is not {article} {kind} that can be read: it {_looks_like(head)}")


def _looks_like(head: bytes) -> str:
    found = _sniff(bytes(head[:HEAD_BYTES]))
    if found is not None:
        return f"is {found.removeprefix('container/')}"
    start = bytes(head[:HEAD_BYTES]).lstrip().lower()
    if start.startswith(b"version https://git-lfs"):
        return "is a pointer of Git LFS (git lfs pull fetches the file)"
    if start.startswith((b"<!doctype", b"<html", b"<?xml", b"<svg")):
        return "is a text file with markup, perhaps a web page that was saved in its place"
    return f"begins with {bytes(head[:12])!r}"


def reason(error: BaseException) -> str:
    """Return what a library says is wrong, without the numbers of its errors."""
    words = getattr(error, "error_string", None) or getattr(error, "strerror", None) or str(error)
    return " ".join(words.split()) or type(error).__name__


@overload
def kind_of(part: Media) -> Kind: ...
@overload
def kind_of(part: Part) -> Literal["text", "image", "audio", "video"]: ...
def kind_of(part: Part) -> Literal["text", "image", "audio", "video"]:
    """Return the kind of a content part."""
    if isinstance(part, Text):
        return "text"
    for kind, cls in MEDIA_CLASSES.items():
        if isinstance(part, cls):
            return kind
    raise TypeError(f"{type(part).__name__} is no content part")


def digest_of(medium: Media) -> str:
    """Return the SHA-256 of a medium's encoded bytes, in hex."""
    return hashlib.sha256(medium.data).hexdigest()


def count_kinds(content: Iterable[Part]) -> dict[str, int]:
    """Count the parts of each kind; kinds that do not occur count 0."""
    counts = {"text": 0, "image": 0, "audio": 0, "video": 0}
    for part in content:
        counts[kind_of(part)] += 1
    return counts

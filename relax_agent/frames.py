"""Frames: plain data and bytes, one after the other on a stream that both sides trust little.

    4 bytes: length of the header | header: JSON with "id" and "blobs": [sizes] | the blobs

Plain data travels as JSON, bytes as they are, and nothing is ever unpickled. Errors travel too:
one of this project's own arrives as the same class.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from relax_agent import errors
from relax_agent.errors import RelaxError, ToolError, ToolErrorKind, one_line

Header: TypeAlias = dict[str, Any]

CHUNK = 1 << 18
"""Bytes to read at once."""
MAX_HEADER_BYTES = 32 << 20
MAX_BLOB_BYTES = 1 << 30
"""Of all blobs of one frame together."""


class FrameError(Exception):
    """What came is no frame, or what shall go cannot be one. Internal: the caller names whose."""


def pack(header: Header, blobs: Iterable[bytes] = ()) -> bytes:
    """Return one frame.

    Raises:
        FrameError: It is too large, or the header is not JSON.
    """
    blobs = list(blobs)
    sizes = [len(blob) for blob in blobs]
    try:
        text = json.dumps({**header, "blobs": sizes}, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"not JSON: {error}") from None
    _check_size("header", len(text), MAX_HEADER_BYTES)
    _check_size("blobs", sum(sizes), MAX_BLOB_BYTES)
    return b"".join([struct.pack(">I", len(text)), text, *blobs])


class Frames:
    """Cuts a stream of bytes into frames. Whatever is wrong with them is a FrameError."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._header: Header | None = None
        self._missing = 4
        self.taken = 0
        """Bytes fed so far."""

    def feed(self, data: bytes) -> Iterator[tuple[Header, list[bytes]]]:
        """Take bytes in; yield every frame that is whole by now."""
        self._bytes += data
        self.taken += len(data)
        while len(self._bytes) >= self._missing:
            if self._missing == 4:
                (size,) = struct.unpack_from(">I", self._bytes)
                _check_size("header", size, MAX_HEADER_BYTES)
                self._missing = 4 + size
                if not size:
                    raise FrameError("a header is empty")
            elif self._header is None:
                self._header = _read_header(bytes(self._bytes[4 : self._missing]))
                del self._bytes[: self._missing]
                self._missing = sum(self._header["blobs"])
            if self._header is not None and len(self._bytes) >= self._missing:
                yield self._finish(self._header)

    def _finish(self, header: Header) -> tuple[Header, list[bytes]]:
        blobs, start = [], 0
        for size in header.pop("blobs"):
            blobs.append(bytes(self._bytes[start : start + size]))
            start += size
        del self._bytes[:start]
        self._header, self._missing = None, 4
        return header, blobs


def _read_header(text: bytes) -> Header:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a header is not JSON: {error}") from None
    if not isinstance(header, dict) or not isinstance(header.get("id"), int):
        raise FrameError("a header is not an object with an id")
    sizes = header.get("blobs")
    if not isinstance(sizes, list) or not all(type(s) is int and s >= 0 for s in sizes):
        raise FrameError("a header does not say how large its blobs are")
    _check_size("blobs", sum(sizes), MAX_BLOB_BYTES)
    return header


def _check_size(what: str, size: int, limit: int) -> None:
    if size > limit:
        raise FrameError(f"the {what} of a frame: {size:,} of at most {limit:,} bytes")


def error_to_json(error: BaseException) -> Header:
    """Return an error as plain data."""
    if not isinstance(error, RelaxError):
        return {"type": type(error).__name__, "message": one_line(error, None)}
    data: Header = {"type": type(error).__name__, "message": error.message}
    if error.hint is not None:
        data["hint"] = error.hint
    if isinstance(error, ToolError):
        data["kind"] = error.kind.value
    return data


def error_from_json(data: object, failure: type[RelaxError] = RelaxError) -> RelaxError:
    """Return the error that :func:`error_to_json` told of; ``failure`` if it is none of ours."""
    if not isinstance(data, dict):
        return failure("an error that cannot be read")
    kind = getattr(errors, str(data.get("type")), None)
    if not (isinstance(kind, type) and issubclass(kind, RelaxError)):
        kind = failure
    error: RelaxError = kind.__new__(kind)  # some take other arguments than the two that travel
    hint = data.get("hint")
    RelaxError.__init__(
        error, str(data.get("message", "")), hint=None if hint is None else str(hint)
    )
    if isinstance(error, ToolError):
        try:
            error.kind = ToolErrorKind(str(data.get("kind")))
        except ValueError:  # none, or one that is not known here
            error.kind = ToolErrorKind.CRASHED
    return error

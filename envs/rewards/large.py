"""Large texts beside the JSON of a call: media of a transcript may be longer than a header may be.

A worker's arguments are plain JSON data in which pictures, sounds and videos are long texts. Those
travel as bytes of their own; in the JSON stands their number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_LEAST = 1 << 16
"""Characters from which a text is large."""
_NUMBER = "\0large"
"""The one key of an object that stands for a text; no author's data has it."""


def put_aside(data: Any, blobs: list[bytes]) -> Any:
    """Return JSON data with its large texts replaced by numbers; they are appended to ``blobs``."""
    if isinstance(data, str):
        if len(data) < _LEAST:
            return data
        blobs.append(data.encode("utf-8", "surrogatepass"))
        return {_NUMBER: len(blobs) - 1}
    if isinstance(data, Mapping):
        return {key: put_aside(value, blobs) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [put_aside(value, blobs) for value in data]
    return data


def put_back(data: Any, blobs: Sequence[bytes]) -> Any:
    """Return what :func:`put_aside` was given."""
    if isinstance(data, dict):
        if data.keys() == {_NUMBER}:
            return blobs[data[_NUMBER]].decode("utf-8", "surrogatepass")
        return {key: put_back(value, blobs) for key, value in data.items()}
    if isinstance(data, list):
        return [put_back(value, blobs) for value in data]
    return data

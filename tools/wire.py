"""How tool calls and their results travel over HTTP.

Arguments are one JSON object, a result is ``{"content": [parts], "error": null or a kind, …}``. A
text is ``{"type": "text", "text": …}``. Media have two forms. In plain JSON a medium is base64
(``"data"``), which ``curl`` and every language can do. Where both sides can, and they say so
(``Accept``, ``Content-Type``), the body is one frame (:mod:`relax_agent.frames`): four bytes with
the length of the JSON, the JSON, and the bytes of the media one after the other; the JSON says
``"blob": 0`` and so on, and an argument that is a medium is ``"blob:0"``.

What comes in is trusted little: a key given twice, which one side would read differently from the
other, is refused by name.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from relax_agent.errors import ToolError, ToolErrorKind
from relax_agent.frames import FrameError, Frames, pack
from relax_agent.messages import Audio, Image, Part, Text, Video
from relax_agent.tools.result import ToolResult, part_from_json, part_to_json
from relax_agent.tools.types import MEDIA_FORMATS

FRAME_TYPE = "application/x-relax-frame"
JSON_TYPE = "application/json"
SESSION = "X-Tool-Session"
"""The id of the session that a call belongs to."""
DEADLINE = "X-Tool-Deadline"
"""Seconds after which the caller stops waiting."""
EPISODE = "X-Tool-Episode"
CALL_ID = "X-Tool-Call"
REFUSED = "X-Tool-Refused"
"""In an answer: the call was not begun, so that it may be made elsewhere, whatever the tool."""
ENDING, NO_SESSION = "ending", "no session"
"""Why not: what :data:`REFUSED` says."""
MANIFEST_VERSION = 1

_MEDIA: dict[str, type[Image] | type[Audio] | type[Video]] = {
    "image": Image,
    "audio": Audio,
    "video": Video,
}
_KINDS: dict[type[Any], str] = {Image: "image", Audio: "audio", Video: "video"}


# -- results ------------------------------------------------------------------------------------


def dump_result(result: ToolResult, *, framed: bool) -> tuple[bytes, str]:
    """Return a result as a body and its content type.

    Args:
        result: The result.
        framed: Whether the other side reads frames.
    """
    if not framed or all(type(part) is Text for part in result.content):
        return dumps(result.to_json()), JSON_TYPE
    blobs: list[bytes] = []
    data = result.to_json(lambda part: _part_to_frame(part, blobs))
    return pack({"id": 0, **data}, blobs), FRAME_TYPE


def _part_to_frame(part: Part, blobs: list[bytes]) -> dict[str, Any]:
    if isinstance(part, Text):
        return part_to_json(part)
    blobs.append(part.data)
    return {"type": _KINDS[type(part)], "mime": part.mime, "blob": len(blobs) - 1}


def load_result(content_type: str, body: bytes) -> ToolResult:
    """Return the result that a body holds. Raises ValueError on anything else."""
    if content_type != FRAME_TYPE:
        return ToolResult.from_json(json.loads(body))
    header, blobs = _one_frame(body)
    return ToolResult.from_json(header, lambda item: _part_from_frame(item, blobs))


def _part_from_frame(item: Mapping[str, Any], blobs: Sequence[bytes]) -> Part:
    if item["type"] == "text":
        return part_from_json(item)
    return _MEDIA[item["type"]](_blob(item["blob"], blobs), str(item["mime"]))


def _blob(number: Any, blobs: Sequence[bytes]) -> bytes:
    if type(number) is not int or not 0 <= number < len(blobs):
        raise ValueError(f"there is no blob {number!r:.40}")
    return blobs[number]


# -- arguments ----------------------------------------------------------------------------------


def dump_arguments(arguments: Any) -> tuple[bytes, str]:
    """Return arguments as a body and its content type.

    Raises:
        ToolError: They are no JSON.
    """
    blobs: list[bytes] = []
    mimes: list[str] = []

    def medium(value: Any) -> Any:
        if type(value) not in _KINDS:
            raise TypeError(f"a {type(value).__name__} is no JSON")
        blobs.append(value.data)
        mimes.append(value.mime)
        return f"blob:{len(blobs) - 1}"

    try:
        body = json.dumps(arguments, default=medium).encode()
        if not blobs:
            return body, JSON_TYPE
        return pack({"id": 0, "arguments": json.loads(body), "mimes": mimes}, blobs), FRAME_TYPE
    except (TypeError, ValueError, RecursionError, FrameError) as error:
        raise _invalid(f"the arguments are not JSON: {error}") from None


def load_arguments(body: bytes, schema: Mapping[str, Any], *, framed: bool) -> Any:
    """Return the arguments that a body holds; media where the schema wants them.

    Args:
        body: JSON, or a frame.
        schema: What the arguments should be.
        framed: Which of the two.

    Raises:
        ToolError: It is neither JSON nor a frame, or a key stands in it twice.
    """
    if not framed:
        return loads(body) if body else {}
    try:
        header, blobs = _one_frame(body)
        media = [str(mime) for mime in header["mimes"]]
        if len(media) != len(blobs):
            raise ValueError("it does not name the type of each blob")
        return with_media(
            header["arguments"], schema, lambda text, kind: _named(text, kind, media, blobs)
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _invalid(f"the body is not one frame: {error}") from None


def _named(text: str, kind: str, mimes: Sequence[str], blobs: Sequence[bytes]) -> Any:
    digits = text.removeprefix("blob:")
    if digits == text or not (digits.isascii() and digits.isdigit()):
        return text
    number = int(digits[:9])
    return _MEDIA[kind](_blob(number, blobs), mimes[number])


def with_media(value: Any, schema: Mapping[str, Any], read: Any, root: Any = None) -> Any:
    """Return ``value`` with every string that stands for a medium replaced.

    Args:
        value: Plain JSON data.
        schema: Its schema; ``format`` says where media are.
        read: Called with such a string and the kind; returns what takes its place.
        root: The schema that ``$ref`` begins from; ``schema`` itself by default.
    """
    root = schema if root is None else root
    for each in _alternatives(schema, root):
        kind = each.get("format")
        if isinstance(value, str) and kind in MEDIA_FORMATS:
            return read(value, kind)
        if isinstance(value, dict) and ("properties" in each or "additionalProperties" in each):
            known, rest = each.get("properties") or {}, each.get("additionalProperties")
            value = {
                key: with_media(item, inner, read, root)
                if isinstance(inner := known.get(key, rest), Mapping)
                else item
                for key, item in value.items()
            }
        elif isinstance(value, list):
            firsts, rest = each.get("prefixItems") or [], each.get("items")
            inners = [*firsts, *[rest] * (len(value) - len(firsts))]
            value = [
                with_media(item, inner, read, root) if isinstance(inner, Mapping) else item
                for item, inner in zip(value, inners, strict=False)
            ] + value[len(inners) :]
    return value


def _alternatives(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    stack: list[Mapping[str, Any]] = [schema]
    while stack and len(found) < 100:
        each = stack.pop()
        name = str(each.get("$ref", "")).rpartition("/")[2]
        if name and isinstance(inner := (root.get("$defs") or {}).get(name), Mapping):
            stack.append(inner)
        found.append(each)
        for word in ("anyOf", "oneOf", "allOf"):
            stack += [inner for inner in each.get(word) or () if isinstance(inner, Mapping)]
    return found


# -- JSON ---------------------------------------------------------------------------------------


def dumps(data: Any) -> bytes:
    """Return JSON as bytes."""
    try:
        return to_json(data)
    except PydanticSerializationError:  # half a surrogate pair, which no socket takes
        return json.dumps(data, ensure_ascii=False).encode("utf-8", "replace")


def loads(body: bytes) -> Any:
    """Return what a JSON text says.

    Raises:
        ToolError: It is no JSON, or a key stands twice in one of its objects.
    """
    try:
        return _DECODER.decode(body.decode())
    except ToolError:
        raise
    except (ValueError, RecursionError) as error:
        words = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise _invalid(f"the arguments are not JSON: {words}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _invalid(f"argument '{twice[:80]}' is given twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _one_frame(body: bytes) -> tuple[dict[str, Any], list[bytes]]:
    with contextlib.suppress(FrameError):
        found = list(Frames().feed(body))
        if len(found) == 1:
            return found[0]
    raise ValueError("it is damaged")


def data_urls(arguments: Any) -> Any:
    """Return arguments in which every medium is a data URL, for those who read no frames."""
    if type(arguments) in _KINDS:
        return arguments.data_url()
    if isinstance(arguments, dict):
        return {key: data_urls(value) for key, value in arguments.items()}
    return [data_urls(each) for each in arguments] if isinstance(arguments, list) else arguments


def media_part(kind: str, data: str, mime: str) -> Part:
    """Return a medium that came as base64. Raises ValueError."""
    return _MEDIA[kind](base64.b64decode(data, validate=True), mime)


def _invalid(words: str) -> ToolError:
    return ToolError(words, kind=ToolErrorKind.INVALID_ARGUMENTS)

"""Media as arguments: how a model, which can only write text, names a picture it has seen.

A tool may take an :class:`~relax_agent.messages.Image`, an ``Audio`` or a ``Video``. A program
passes the object. A model writes ``image:2`` for the second picture of its conversation,
``image:-1`` for the latest one, or a data URL. Nothing else is read: never a path, never the
network. The conversation is whatever :func:`conversation` names around the call; environments
made of tools do that.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol


class HasMedia(Protocol):
    """A message, as far as it matters here."""

    @property
    def media(self) -> tuple[Any, ...]:
        """Its parts that are not text, in order."""


_CONVERSATION: ContextVar[Sequence[HasMedia]] = ContextVar("conversation", default=())
_REFERENCE = re.compile(r"(image|audio|video):(-?\d{1,6})")
_MAX_SHOWN = 40


@contextlib.contextmanager
def conversation(messages: Sequence[HasMedia]) -> Iterator[None]:
    """Let references in the calls made within mean the media of ``messages``."""
    token = _CONVERSATION.set(messages)
    try:
        yield
    finally:
        _CONVERSATION.reset(token)


def media_schema(kind: str) -> dict[str, Any]:
    """Return the JSON schema of a media argument; its ``format`` tells clients what it is."""
    return {
        "type": "string",
        "format": kind,
        "description": f'"{kind}:1" is the first {kind} of this conversation, "{kind}:-1" the'
        " latest; a data URL works too.",
    }


def read_media(value: Any, cls: type[Any]) -> Any:
    """Return the medium that an argument names.

    Args:
        value: An instance of ``cls``, a reference or a data URL.
        cls: ``Image``, ``Audio`` or ``Video``.

    Raises:
        ValueError: It names none; the words are for a model.
    """
    if isinstance(value, cls):
        return value
    kind = cls.__name__.lower()
    if not isinstance(value, str):
        raise ValueError(f'write "{kind}:1" for the first {kind} of this conversation')
    if value[:5].lower() == "data:":
        return _of_data_url(value, kind, cls)
    found = _REFERENCE.fullmatch(value.strip())
    if found is None or found[1] != kind:
        raise ValueError(
            f'{_short(value)} names no {kind}; write "{kind}:1" for the first one of this'
            " conversation, or a data URL"
        )
    return _nth(kind, cls, int(found[2]))


def _nth(kind: str, cls: type[Any], number: int) -> Any:
    seen = [part for message in _CONVERSATION.get() for part in message.media]
    own = [part for part in seen if isinstance(part, cls)]
    place = number - 1 if number > 0 else number
    if number == 0 or not -len(own) <= place < len(own):
        known = f"it has {len(own)}" if own else "it has none"
        raise ValueError(f"there is no {kind}:{number} in this conversation; {known}")
    return own[place]


def _of_data_url(value: str, kind: str, cls: type[Any]) -> Any:
    head, comma, body = value.partition(",")
    mime, _, coding = head[5:].partition(";")
    if not comma or not coding.lower().endswith("base64") or not mime.startswith(f"{kind}/"):
        raise ValueError(f'a data URL of this kind begins with "data:{kind}/…;base64,"')
    try:
        data = base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"the base64 of its data URL is damaged: {error}") from None
    return cls(data, mime)


def _short(value: str) -> str:
    shown = repr(value[:_MAX_SHOWN])
    return shown if len(value) <= _MAX_SHOWN else f"{shown}…"

"""The prompts of data sets, in the forms they have in the wild, as messages of this project.

A prompt is a string, a list of chat messages, or a list of content parts (OpenAI's and Hugging
Face's spellings). Media stand in it themselves (``{"type": "image", "image": "cat.png"}``), or it
marks places (``{"type": "image"}``, or ``<image>`` in text) that a media column of the same row
fills in order.

Parsing reads no media: it gives :class:`Draft` s, whose media are references. :func:`finish` loads
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from relax_agent.errors import ConfigError
from relax_agent.media.kinds import KINDS, Kind, Media
from relax_agent.media.load import check_media, load_media
from relax_agent.messages import (
    AssistantMessage,
    Audio,
    Image,
    Message,
    Part,
    Text,
    Video,
    from_openai,
)

_MARKER = re.compile("<(image|audio|video)>")
_ROLES = {
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    **{role: role for role in ("system", "user", "assistant", "tool")},
}
_KIND_OF_TYPE: dict[str, Kind] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
}
_TEXT_TYPES = ("text", "input_text", "output_text")
FORMS = "a prompt is text, a list of messages or a list of content parts"


@dataclass(frozen=True, slots=True)
class MediaRef:
    """Media that have not been read yet."""

    kind: Kind
    value: Any
    base: Path | None

    def check(self) -> None:
        """Raise MediaError if it is plain without reading a file that it will not load."""
        check_media(self.value, self.kind, base=self.base)

    def load(self) -> Media:
        """Read it."""
        return load_media(self.value, self.kind, base=self.base)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a media column's next item belongs."""

    kind: Kind


Item: TypeAlias = str | Part | MediaRef | Place


@dataclass(slots=True)
class Draft:
    """A message whose media are not loaded."""

    head: Message
    """The message without its content."""
    content: list[Item] = field(default_factory=list)

    def items(self, kind: type[Any]) -> Iterator[Any]:
        """Yield the items of one type."""
        return (item for item in self.content if isinstance(item, kind))


def parse_prompt(value: Any, *, base: Path | None, marked: Sequence[Kind] = ()) -> list[Draft]:
    """Return the messages that a prompt stands for.

    Args:
        value: The prompt.
        base: The folder that relative paths in it start from.
        marked: Kinds whose markers (``<image>``) in text are places; others are just text.

    Raises:
        ConfigError: It has none of the known forms.
    """
    if hasattr(value, "tolist"):  # a numpy array, as pandas keeps lists
        value = value.tolist()
    if isinstance(value, str):
        drafts = [Draft(Message("user"), [value])]
    elif isinstance(value, (list, tuple)) and value:
        if _is_message(value[0]):
            drafts = [_draft(item, number, base) for number, item in enumerate(value, 1)]
        else:
            drafts = [Draft(Message("user"), [_part(item, base) for item in value])]
    else:
        raise ConfigError(f"the prompt is {_described(value)}", hint=FORMS)
    for draft in drafts:
        draft.content = [piece for item in draft.content for piece in _split(item, marked)]
    _check_roles(drafts)
    return drafts


def is_missing(value: Any) -> bool:
    """Whether it stands for nothing; pandas makes NaN, NA or NaT of what is missing."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float) and value != value


def _described(value: Any) -> str:
    if is_missing(value):
        return "missing"
    if isinstance(value, (list, tuple)):
        return "an empty list"
    return f"a value of type {type(value).__name__}"


def _is_message(item: Any) -> bool:
    return isinstance(item, Message) or (
        isinstance(item, Mapping) and ("role" in item or "from" in item)
    )


def _draft(item: Any, number: int, base: Path | None) -> Draft:
    if isinstance(item, Message):
        return Draft(replace(item, content=()), list(item.content))
    if not isinstance(item, Mapping):
        raise ConfigError(f"message {number} of the prompt is {_described(item)}", hint=FORMS)
    given = {key: value for key, value in item.items() if value is not None}
    role = given.get("role", given.get("from"))
    if not isinstance(role, str) or role not in _ROLES:
        raise ConfigError(f"message {number} of the prompt has the role {role!r}")
    content = given.pop("content", given.pop("value", ""))
    try:
        head = from_openai({**given, "role": _ROLES[role], "content": ""})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"message {number} of the prompt cannot be read: {error!r}") from error
    if hasattr(content, "tolist"):
        content = content.tolist()
    if isinstance(content, (str, Mapping)):
        content = [content]
    if not isinstance(content, (list, tuple)):
        raise ConfigError(f"message {number} of the prompt has {_described(content)} for content")
    return Draft(head, [_part(part, base) for part in content])


def _part(item: Any, base: Path | None) -> Item:
    if isinstance(item, (str, Text, Image, Audio, Video)):
        return item
    if not isinstance(item, Mapping):
        raise ConfigError(f"a content part is {_described(item)}", hint=FORMS)
    given = {key: value for key, value in item.items() if value is not None}
    name = given.pop("type", "text" if "text" in given else None)
    if isinstance(name, str) and name in _TEXT_TYPES:
        text = given.get("text", "")
        if not isinstance(text, str):
            raise ConfigError(f"the text of a content part is {_described(text)}")
        return text
    if not isinstance(name, str) or name not in _KIND_OF_TYPE:
        known = ", ".join(["text", *_KIND_OF_TYPE])
        raise ConfigError(f"a content part of type {name!r}", hint=f"known are {known}")
    kind = _KIND_OF_TYPE[name]
    value = _media_of(given, name, kind)
    return Place(kind) if value is None else MediaRef(kind, value, base)


def _media_of(given: Mapping[str, Any], name: str, kind: Kind) -> Any:
    """Return what a part shows, None if it only marks the place."""
    keys = (name, kind, f"{kind}_url", "source")
    value = next((given[key] for key in keys if key in given), None)
    if value is None:
        value = {key: given[key] for key in ("bytes", "path", "url", "base64") if key in given}
    if isinstance(value, Mapping):
        value = {key: each for key, each in value.items() if each is not None}
        encoded = value.get("base64", value.get("data"))
        if isinstance(encoded, str):
            return f"data:;base64,{encoded}"
        return value or None
    return value


def _split(item: Item, marked: Sequence[Kind]) -> Iterator[Item]:
    """Cut text at the markers of the given kinds."""
    if not isinstance(item, str):
        yield item
        return
    start = 0
    for match in _MARKER.finditer(item):
        kind: Any = match[1]
        if kind in marked:
            if match.start() > start:
                yield item[start : match.start()]
            yield Place(kind)
            start = match.end()
    if item[start:]:
        yield item[start:]


def _check_roles(drafts: Sequence[Draft]) -> None:
    if isinstance(drafts[-1].head, AssistantMessage):
        raise ConfigError(
            "the prompt ends with an assistant message, which may give the answer away",
            hint="leave it out of the prompt, e.g. prompt=lambda row: row['messages'][:-1]",
        )
    if all(draft.head.role == "system" for draft in drafts):
        raise ConfigError("the prompt has no user message")


def fill(drafts: Sequence[Draft], found: Mapping[Kind, Sequence[MediaRef]]) -> None:
    """Put the items of media columns into their places; before the question if it has none.

    Raises:
        ConfigError: There are more places than items or the other way round, or nothing is asked.
    """
    ahead: list[Item] = []
    for kind in KINDS:
        items = found.get(kind, ())
        places = sum(place.kind == kind for draft in drafts for place in draft.items(Place))
        if not places:
            ahead.extend(items)
        elif places != len(items):
            raise ConfigError(
                f"the prompt has {places} {'place' if places == 1 else 'places'} for {kind}s and"
                f" the row has {len(items)}",
                hint=None if kind in found else f"name the column that has them: {kind}s=…",
            )
        else:
            _fill_kind(drafts, kind, iter(items))
    question = [draft for draft in drafts if draft.head.role == "user"] or drafts
    question[-1].content[:0] = ahead
    if not any(_says_something(item) for draft in drafts for item in draft.content):
        raise ConfigError("the prompt is empty", hint=FORMS)


def _fill_kind(drafts: Sequence[Draft], kind: Kind, items: Iterator[MediaRef]) -> None:
    for draft in drafts:
        draft.content = [
            next(items) if isinstance(item, Place) and item.kind == kind else item
            for item in draft.content
        ]


def _says_something(item: Item) -> bool:
    if isinstance(item, Text):
        item = item.text
    return bool(item.strip()) if isinstance(item, str) else True


def finish(drafts: Sequence[Draft]) -> tuple[str | tuple[Part, ...], tuple[Message, ...]]:
    """Load the media and return ``(prompt, messages)`` as a Task holds them."""
    messages = tuple(
        replace(draft.head, content=tuple(_loaded(item) for item in draft.content))
        for draft in drafts
    )
    asked = [message for message in messages if message.role == "user"] or list(messages)
    question = asked[-1]
    prompt = question.content if question.media else question.text
    plain = len(messages) == 1 and messages[0] == Message("user", question.content)
    return prompt, () if plain else messages


def _loaded(item: Item) -> Part:
    if isinstance(item, str):
        return Text(item)
    if isinstance(item, MediaRef):
        return item.load()
    assert not isinstance(item, Place)
    return item

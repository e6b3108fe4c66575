"""``MediaShelf``: pictures, sounds and videos of an episode that a model names in its calls.

    class Watch(ToolEnv):
        tools = MediaShelf(VIDEO_TOOLS + IMAGE_TOOLS)

        def setup(self, task):
            self.session.put("film", task.data["video"])      # the model need not have seen it

A model can only write text, so it has to name the medium that it means. Tools that take media
understand ``image:2``, the second picture of the conversation, by themselves
(:mod:`relax_agent.references`). A shelf adds names: whatever takes an image, an audio or a video
takes the name of one on the shelf, and every medium that a tool gives back is put there under a new
name, which the model reads in front of it. So a model can look into what would never fit in its
context, and go on with what it made.

A shelf goes around any toolset, in process or remote, and around tools of one's own; all that it
looks at are the schemas. Each session has a shelf of its own, with what the toolset's shelf holds
at first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from relax_agent.errors import ConfigError, ToolErrorKind
from relax_agent.media import KINDS, Media, kind_of
from relax_agent.messages import Audio, Image, Part, Text, ToolCall, Video
from relax_agent.references import media_schema
from relax_agent.tools.result import ToolResult
from relax_agent.tools.toolset import AnyToolset, ToolLike, Toolset, warm_up
from relax_agent.tools.wire import with_media

MAX_ITEMS = 256
"""Media on one shelf."""
MAX_BYTES = 512 << 20
"""What all of them together may take."""
_NAME = re.compile(r"[^\W\d_][\w.-]{0,63}")
_SHOWN = 12
_HOW = "The name of {article} {kind}, as it was told, such as {example}."


class MediaShelf:
    """A toolset whose tools take media by name; see the module's docstring."""

    def __init__(
        self,
        tools: AnyToolset | Iterable[ToolLike],
        media: Mapping[str, Media] | None = None,
        *,
        max_items: int = MAX_ITEMS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Put a shelf around tools.

        Args:
            tools: A toolset, or what one is made of.
            media: What lies on the shelf at first, by name.
            max_items: Most media on it; a result that does not fit is a failed call.
            max_bytes: What they may take together.

        Raises:
            ConfigError: A name or a medium makes no sense.
        """
        self._tools: Any = tools if isinstance(tools, AnyToolset) else Toolset(tools)
        self._max_items, self._max_bytes = max_items, max_bytes
        self._closes_tools = True
        self._items: dict[str, Media] = {}
        self._made: Counter[str] = Counter()
        self._media_arguments = {
            each["function"]["name"]: _MediaArguments.of(each) for each in self._tools.schemas()
        }
        for name, medium in (media or {}).items():
            self.put(name, medium)

    # -- what lies on it -------------------------------------------------------------------------

    def put(self, name: str, medium: Media) -> None:
        """Lay a medium on the shelf; one that has this name already is replaced.

        Raises:
            ConfigError: The name is none, or this is no medium, or there is no room.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} cannot name a medium", hint="e.g. 'photo-1.png'")
        if not isinstance(medium, (Image, Audio, Video)):
            raise ConfigError(
                f"{name} is of type {type(medium).__name__}, not an image, an audio or a video",
                hint="relax_agent.media.load_media makes one",
            )
        others = {key: value for key, value in self._items.items() if key != name}
        reason = self._no_room(others, [medium])
        if reason:
            raise ConfigError(reason, hint="raise max_items or max_bytes")
        self._items[name] = medium

    def clear(self) -> None:
        """Take everything off the shelf."""
        self._items.clear()
        self._made.clear()

    def __getitem__(self, name: str) -> Media:
        return self._items[name]

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def listing(self) -> str:
        """Return the names and kinds of all media, for a message to the model."""
        return ", ".join(f"{name} ({kind_of(each)})" for name, each in self._items.items())

    # -- as a toolset ----------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The tools' names, in the order of their schemas."""
        names: tuple[str, ...] = self._tools.names
        return names

    def schemas(self) -> list[dict[str, Any]]:
        """Return the tools' schemas, whose media arguments say that they take names."""
        return [_with_names(each) for each in self._tools.schemas()]

    @property
    def has_sessions(self) -> bool:
        """Whether episodes want a session each; they do, for their own shelf."""
        return True

    def session(self) -> MediaShelf:
        """Return a shelf for one episode, with what this one holds now."""
        has_sessions = getattr(self._tools, "has_sessions", False)
        inner = self._tools.session() if has_sessions else self._tools
        limits = {"max_items": self._max_items, "max_bytes": self._max_bytes}
        shelf = MediaShelf(inner, self._items, **limits)
        shelf._closes_tools = has_sessions
        return shelf

    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call. Failures are results; only cancellation raises."""
        arguments = call.arguments
        wanted = self._media_arguments.get(call.name)
        if wanted is not None and isinstance(arguments, dict) and call.error is None:
            arguments = dict(arguments)
            for name in wanted.names & arguments.keys():
                try:
                    arguments[name] = wanted.resolve(name, arguments[name], self._find)
                except _NotThere as error:
                    message = f"{call.name}: argument '{name}': {error}"
                    return ToolResult.failure(ToolErrorKind.NOT_FOUND, message)
            call = ToolCall(call.name, arguments, call.id, call.error)
        return self._keep(await self._tools.call(call), call.name)

    async def warm_up(self) -> None:
        """Run the tools' warm-up hooks, if they have any in this process."""
        await warm_up(self._tools)

    async def close(self) -> None:
        """Take everything off the shelf and close its tools, unless other sessions use them."""
        self.clear()
        if self._closes_tools:
            await self._tools.close()

    def _find(self, text: str, kind: str) -> Media | str:
        """Return the medium that a text names; the text itself is for the tool to read."""
        name = text.strip()
        found = self._items.get(name)
        if found is not None:
            if kind_of(found) != kind:
                raise _NotThere(f"{name} is of kind {kind_of(found)}, not {kind}")
            return found
        if name[:5].lower() == "data:" or re.match(rf"(?:{'|'.join(KINDS)}):", name):
            return text
        known = [each for each, medium in self._items.items() if kind_of(medium) == kind]
        shown = ", ".join(known[-_SHOWN:]) or "none"
        raise _NotThere(f"there is no {kind} {name[:64]!r}; there is: {shown}")

    def _keep(self, result: ToolResult, tool: str) -> ToolResult:
        """Put a result's media on the shelf, and tell their names."""
        media = [part for part in result.content if isinstance(part, (Image, Audio, Video))]
        if not media or not result.ok:
            return result
        reason = self._no_room(self._items, media)
        if reason:
            message = f"{tool}: {reason}; go on with what there is"
            return ToolResult.failure(ToolErrorKind.TOO_LARGE, message)
        content: list[Part] = []
        for part in result.content:
            if not isinstance(part, Text):
                name = self._new_name(kind_of(part))
                self._items[name] = part
                content.append(Text(f"\n{name}:\n" if content else f"{name}:\n"))
            content.append(part)
        return ToolResult(tuple(content), None, result.duration_s, result.queued_s)

    def _new_name(self, kind: str) -> str:
        while True:
            self._made[kind] += 1
            name = f"{kind}-{self._made[kind]}"
            if name not in self._items:
                return name

    def _no_room(self, items: Mapping[str, Media], more: list[Media]) -> str:
        if len(items) + len(more) > self._max_items:
            return f"there is room for {self._max_items} media"
        size = sum(len(each.data) for each in [*items.values(), *more])
        if size > self._max_bytes:
            return f"all media together may take {self._max_bytes:,} bytes"
        return ""


class _NotThere(Exception):
    """A model named a medium that there is not; the words are for it."""


@dataclass(frozen=True)
class _MediaArguments:
    """The arguments of one tool in which media may be, at any depth."""

    parameters: dict[str, Any]
    names: frozenset[str]

    @classmethod
    def of(cls, schema: Mapping[str, Any]) -> _MediaArguments:
        parameters = schema["function"]["parameters"]
        properties = parameters.get("properties", {})
        names = (name for name, each in properties.items() if _holds_media(each, parameters))
        return cls(parameters, frozenset(names))

    def resolve(self, name: str, value: Any, find: Callable[[str, str], Any]) -> Any:
        schema = self.parameters["properties"][name]
        return with_media(value, schema, find, self.parameters)


def _holds_media(schema: Any, root: Mapping[str, Any]) -> bool:
    """Tell whether a medium can be anywhere in what a schema describes."""
    seen: set[str] = set()
    stack = [schema]
    while stack:
        each = stack.pop()
        if isinstance(each, list):
            stack += each
        elif isinstance(each, Mapping):
            if _is_medium(each):
                return True
            name = str(each.get("$ref", "")).rpartition("/")[2]
            if name and name not in seen:
                seen.add(name)
                stack.append(root.get("$defs", {}).get(name))
            stack += each.values()
    return False


def _is_medium(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "string" and schema.get("format") in KINDS


def _kind(schema: Any) -> str:
    """Return the kind of medium that a schema stands for; also of one that may be null."""
    if not isinstance(schema, Mapping):
        return ""
    if _is_medium(schema):
        return str(schema["format"])
    return next(filter(None, map(_kind, schema.get("anyOf", ()))), "")


def _with_names(schema: dict[str, Any]) -> dict[str, Any]:
    if not _MediaArguments.of(schema).names:
        return schema
    schema = deepcopy(schema)
    parameters = schema["function"]["parameters"]
    told = []
    for each in parameters["properties"].values():
        if kind := _kind(each):
            _describe(each, kind)
            told.append(id(each))
    _describe_within([parameters, *parameters.get("$defs", {}).values()], told)
    return schema


def _describe_within(nodes: list[Any], told: list[int]) -> None:
    """Describe the media in lists and objects, except within nodes that have told already."""
    while nodes:
        each = nodes.pop()
        if id(each) in told:
            continue
        if isinstance(each, dict):
            if _is_medium(each):
                _describe(each, each["format"])
            else:
                nodes += [inner for key, inner in each.items() if key != "$defs"]
        elif isinstance(each, list):
            nodes += each


def _describe(schema: dict[str, Any], kind: str) -> None:
    article = "a" if kind == "video" else "an"
    how = _HOW.format(article=article, kind=kind, example=f"{kind}-1")
    usual = media_schema(kind)["description"]
    schema["description"] = f"{schema.get('description', '')}".replace(usual, "").strip()
    schema["description"] = f"{schema['description']} {how}".strip()
    for each in schema.get("anyOf", ()):
        if _kind(each):
            each.pop("description", None)

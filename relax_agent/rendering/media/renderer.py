"""Messages with media to token ids, on top of a renderer that knows text only.

Each medium is handed down as the text of its one placeholder, wherever it stands: in a user's
message or in a tool's answer, in any turn. In the ids that come back every placeholder is then
replaced by what the medium takes. So any text format serves, and the ids around a medium are
those of that format. At start-up a probe finds a format that loses media; text that merely looks
like a placeholder is made to look like it no longer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

from relax_agent.errors import ConfigError, MediaError, RenderError
from relax_agent.media import Media, kind_of
from relax_agent.messages import AssistantMessage, Message, Text, ToolCall, assistant, user
from relax_agent.rendering.media.processor import MediaProcessor
from relax_agent.rendering.rendered import Placed, Rendered, Renderer
from relax_agent.rendering.streaming import OutputStream


@runtime_checkable
class PreparesMedia(Protocol):
    """A renderer that decodes: await this before a call that renders media."""

    async def prepare(self, media: Sequence[Media]) -> None:
        """Have the media at hand, so that rendering them does not block the event loop."""
        ...


async def prepare_media(renderer: Renderer, messages: Sequence[Message]) -> None:
    """Have the media of messages decoded off the event loop, where the renderer decodes any.

    Raises:
        RenderError: One cannot be read or is of a kind that the model does not take.
    """
    media = [medium for message in messages for medium in message.media]
    if isinstance(renderer, PreparesMedia):
        await renderer.prepare(media)


class MediaRenderer:
    """A text renderer that also takes the media of one model."""

    def __init__(self, text: Renderer, processor: MediaProcessor, name: str = "") -> None:
        """Wrap a renderer.

        Args:
            text: Renders everything else.
            processor: Of the model's folder.
            name: Of the text format, for errors.

        Raises:
            ConfigError: The format loses media.
        """
        self._text, self._processor = text, processor
        self.stop_token_ids = text.stop_token_ids
        self.suppressed_token_ids = processor.suppressed_ids
        """Tokens that stand for media; whoever samples must never sample one."""
        self._words = {kind: processor.word(token) for kind, token in processor.config.pads.items()}
        self._like = re.compile("|".join(map(re.escape, self._words.values())))
        self._probe(name)

    @property
    def summary(self) -> str:
        """One line: how messages become tokens, and what is done about earlier turns."""
        return f"{self._text.summary}; takes {' and '.join(self._words)}"

    def start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Rendered:
        """Return the first prompt of an episode, generation prompt included.

        Raises:
            RenderError: A medium cannot be read or is of a kind that the model does not take, or
                the text renderer refuses.
        """
        return self._expand(self._text.start(self._marked(messages), tools), messages)

    def extend(
        self,
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        history: Sequence[Message] = (),
    ) -> Rendered:
        """Return what to append after a sampled turn; see :class:`Renderer`.

        Raises:
            RenderError: As for :meth:`start`.
        """
        new, old = self._marked(new_messages), self._marked(history)
        rendered = self._text.extend(sampled_ids, new, tools, old)
        whole = new_messages if rendered.fork is None else [*history, *new_messages]
        return self._expand(rendered, whole)

    def parse(self, output_ids: Sequence[int], tools: Sequence[dict[str, Any]]) -> AssistantMessage:
        """Return the message that a model sampled; never raises because of the model's text."""
        return self._text.parse(output_ids, tools)

    def stream(self, tools: Sequence[dict[str, Any]] = ()) -> OutputStream:
        """Return a reader for one turn whose ids arrive in pieces."""
        return self._text.stream(tools)

    def completion(self, message: AssistantMessage) -> list[int]:
        """Return the ids that a model would have sampled for a message, stop token included."""
        return self._text.completion(message)

    async def prepare(self, media: Sequence[Media]) -> None:
        """Decode media in threads, so that rendering them finds them at hand.

        Raises:
            RenderError: One cannot be read or is of a kind that the model does not take.
        """
        try:
            await self._processor.prepare(media)
        except MediaError as error:
            raise RenderError(f"a medium cannot be shown to the model: {error}") from error

    def _marked(self, messages: Sequence[Message]) -> list[Message]:
        return [self._marked_message(message) for message in messages]

    def _marked_message(self, message: Message) -> Message:
        if not message.media and not self._like.search(message.text):
            return message
        texts = []
        # Text that two parts share between them is one text once it is rendered.
        for is_text, parts in groupby(message.content, lambda part: isinstance(part, Text)):
            if is_text:
                joined = "".join(part.text for part in parts if isinstance(part, Text))
                texts.append(self._like.sub(_spaced, joined))
            else:
                texts += [self._word(part) for part in parts if not isinstance(part, Text)]
        return replace(message, content=(Text("".join(texts)),))

    def _word(self, medium: Media) -> str:
        word = self._words.get(kind_of(medium))
        if word is None:
            kinds = " and ".join(self._words)
            raise RenderError(f"a message holds {kind_of(medium)}, but this model takes {kinds}")
        return word

    def _expand(self, rendered: Rendered, messages: Sequence[Message]) -> Rendered:
        """Replace each placeholder by the tokens of its medium."""
        media = [medium for message in messages for medium in message.media]
        pads = set(self._processor.config.pads.values())
        if not media and pads.isdisjoint(rendered.ids):
            return rendered
        ids: list[int] = []
        placed: list[Placed] = []
        left = iter(media)
        for token in rendered.ids:
            if token not in pads:
                ids.append(token)
                continue
            medium = next(left, None)
            if medium is None or self._processor.config.pads[kind_of(medium)] != token:
                raise RenderError("the chat format puts media in another order, or twice")
            layout = self._layout(medium)
            placed.append((len(ids) + len(layout.head), layout.count, medium))
            ids += layout.ids
        if next(left, None) is not None:
            raise RenderError(f"the chat format keeps {len(placed)} of {len(media)} media")
        return Rendered(ids, tuple(placed), rendered.fork)

    def _layout(self, medium: Media) -> Any:
        try:
            return self._processor.layout(medium)
        except MediaError as error:
            raise RenderError(f"a medium cannot be shown to the model: {error}") from error

    def _probe(self, name: str) -> None:
        """Refuse a format that loses what stands in a user's message or in a tool's answer."""
        pad = self._processor.config.pads["image"]
        word = self._words["image"]
        call = ToolCall("look", {}, "call_0")
        said = assistant(tool_calls=[call])
        tool = Message("tool", (Text(word),), name="look", tool_call_id="call_0")
        first = self._text.start([user(word)], []).ids
        later = self._text.extend(
            self._text.completion(said), [tool], [], [user("Look."), said]
        ).ids
        for role, ids in (("user", first), ("tool", later)):
            if ids.count(pad) != 1:
                raise ConfigError(
                    f"the chat format {name or type(self._text).__name__} loses media in messages"
                    f" of role {role}",
                    hint="choose another renderer.name for this model",
                )


def _spaced(found: re.Match[str]) -> str:
    """Make text that looks like a placeholder plain: ``<|image_pad|>`` to ``<| image_pad |>``."""
    return found[0].replace("<|", "<| ").replace("|>", " |>")

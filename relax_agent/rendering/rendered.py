"""What every renderer offers, and what it returns.

A renderer answers with ids to *append*. Only where a chat format rewrites what was said before does
it answer with a whole prompt and the reason for it; the token log then forks.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from relax_agent.errors import RenderError
from relax_agent.media import Media
from relax_agent.messages import AssistantMessage, Message

if TYPE_CHECKING:
    from relax_agent.rendering.streaming import OutputStream


Placed: TypeAlias = tuple[int, int, Media]
"""A medium among ids: where its placeholders begin, how many there are, and it."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Ids that nobody sampled, and the media whose placeholders are among them."""

    ids: list[int]
    media: tuple[Placed, ...] = ()
    fork: str | None = None
    """Why these ids are a whole new prompt; None if they are to be appended."""

    def after(self, start: int) -> Rendered:
        """Return what follows the first ``start`` ids, which must end outside of a medium."""
        kept = (each for each in self.media if each[0] >= start)
        media = tuple((at - start, count, medium) for at, count, medium in kept)
        return Rendered(self.ids[start:], media, self.fork)

    def shared_with(self, ids: Sequence[int], media: Sequence[Placed]) -> int:
        """Return how many first tokens are those of another sequence, its media compared too.

        Never a part of a medium, on either side, and nothing behind a medium that is another one
        with equal tokens.

        Args:
            ids: The other sequence.
            media: Where its media are.
        """
        pairs = zip(self.ids, ids, strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        known = {start: medium for start, _, medium in media}
        for start, count, medium in self.media:
            if start < shared and (shared < start + count or known.get(start) != medium):
                shared = start
        cut = (start for start, count, _ in media if start < shared < start + count)
        return min([shared, *cut])


class Renderer(Protocol):
    """Turns messages into token ids and sampled ids into messages."""

    stop_token_ids: list[int]
    """Tokens that end a turn, the one that closes it first."""

    @property
    def summary(self) -> str:
        """One line: how messages become tokens, and what is done about earlier turns."""
        ...

    def start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Rendered:
        """Return the first prompt of an episode, generation prompt included."""
        ...

    def extend(
        self,
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        history: Sequence[Message] = (),
    ) -> Rendered:
        """Return what to append after a sampled turn, up to the next generation prompt.

        Args:
            sampled_ids: The last turn's ids exactly as they were sampled, and nothing before them.
            new_messages: What came back: tool, user or system messages.
            tools: Schemas of the tools, as given to :meth:`start`.
            history: The conversation up to the sampled message; only formats that rewrite it need
                it, and they answer with a whole prompt and a ``fork``.
        """
        ...

    def parse(self, output_ids: Sequence[int], tools: Sequence[dict[str, Any]]) -> AssistantMessage:
        """Return the message that a model sampled; never raises because of the model's text."""
        ...

    def stream(self, tools: Sequence[dict[str, Any]] = ()) -> OutputStream:
        """Return a reader for one turn whose ids arrive in pieces."""
        ...

    def completion(self, message: AssistantMessage) -> list[int]:
        """Return the ids that a model would have sampled for a message, stop token included."""
        ...


def normalise_tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tool schemas in OpenAI's envelope, keys in one order, whatever shape they came in.

    A bare schema renders to another system prompt than one in its envelope, and a model that was
    trained on one does badly on the other.
    """
    return [_envelope(tool) for tool in tools]


def require_new(messages: Sequence[Message]) -> None:
    """Raise unless there are messages to append, none of them the assistant's own.

    Raises:
        RenderError: there are none, or an assistant message is among them.
    """
    if not messages:
        raise RenderError("there is nothing to append: the environment sent no messages")
    if any(message.role == "assistant" for message in messages):
        raise RenderError("an observation holds an assistant message", hint="send a Rewrite")


def _envelope(tool: dict[str, Any]) -> dict[str, Any]:
    inner = tool.get("function", tool)
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise RenderError(f"a tool schema has no name: {json.dumps(tool)[:80]}")
    first = {key: inner[key] for key in ("name", "description", "parameters") if key in inner}
    rest = {key: value for key, value in inner.items() if key not in first and key != "type"}
    return {"type": "function", "function": first | rest}

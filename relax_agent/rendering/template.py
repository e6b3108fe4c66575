"""Any chat template behind the renderer protocol: text from the template, ids from here on.

What the template writes becomes ids piece by piece, in the order of the log: the first prompt, and
after every turn its end and what came back. Sampled ids are never decoded for it. How far the
template can be trusted to append is proved at start-up (:mod:`.probes`); where it cannot, each turn
renders the whole history and says so in ``Rendered.fork``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from relax_agent.errors import ConfigError, RenderError
from relax_agent.messages import AssistantMessage, Message, assistant, user
from relax_agent.rendering.chat_template import ChatTemplate
from relax_agent.rendering.lookalikes import Lookalikes, shown
from relax_agent.rendering.parsers import TOOL_PARSERS, ToolParser, fold, tool_parser
from relax_agent.rendering.parsers.reasoning import Reasoning
from relax_agent.rendering.probes import Handling, prove
from relax_agent.rendering.rendered import Rendered, normalise_tools, require_new
from relax_agent.rendering.settings import RendererSettings
from relax_agent.rendering.streaming import PROBE, PROBE_TOOLS, OutputStream, parser_of
from relax_agent.rendering.template_text import TemplateText
from relax_agent.rendering.tokens import TokenIds


class TemplateRenderer:
    """A chat template of a model's folder behind the :class:`Renderer` protocol."""

    def __init__(
        self,
        tokenizer: TokenIds,
        template: ChatTemplate,
        settings: RendererSettings | None = None,
        *,
        stop_ids: Sequence[int] = (),
        kept: Collection[str] = (),
    ) -> None:
        """Probe a template.

        Args:
            tokenizer: The model's tokenizer.
            template: Its chat template.
            settings: The recipe's settings.
            stop_ids: Tokens that the model's files name as an end.
            kept: Placeholders of media; see :class:`Lookalikes`.

        Raises:
            ConfigError: the template cannot be used, or only with a fork each turn and the settings
                refuse that, or there is no stop token.
        """
        self.settings = settings or RendererSettings()
        self._tokenizer = tokenizer
        lookalikes = Lookalikes(tokenizer.special, tokenizer.markup, template.source, kept)
        try:
            self._text = TemplateText(
                template, tokenizer, lookalikes, stop_ids, self.settings.reasoning_tags
            )
        except RenderError as error:
            raise ConfigError(f"chat template {template.name}: {error}") from error
        self._bos = tokenizer.convert_tokens_to_ids(template.variables.get("bos_token") or "")
        self.stop_token_ids = self._stop_ids()
        """Tokens that end a turn, the one that closes it first."""
        self._stops = frozenset(self.stop_token_ids)
        self.handling = prove(self._text)
        self._text.leave_tools_out(PROBE_TOOLS)
        self._reads_calls = True
        self._parser = self._choose_parser()
        self._require_allowed()

    @property
    def summary(self) -> str:
        """One line: how this template is handled."""
        template, handling = self._text.template.name, self.handling
        words = [f"chat template {template}: {_HANDLED[handling.kind]}"]
        if handling.why:
            words[0] += f", because {handling.why}"
        between = self._between()
        if between:
            words.append(f"{between!r} follows a turn unsampled")
        words.append(f"stop tokens {' '.join(self._text.stops)}")
        calls = self._parser.name if self._reads_calls else "read by no parser"
        words.append(f"calls {calls}, reasoning {self._parser.reasoning}")
        if not handling.shows_tools:
            words.append("the template shows no tools")
        if handling.dropped:
            words.append(f"messages of role {' and '.join(handling.dropped)} are refused")
        if handling.refused:
            words.append(f"the template refuses {', '.join(handling.refused)}")
        if handling.moves_system:
            words.append("it moves later system messages to the beginning")
        return "; ".join(words)

    def start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Rendered:
        """Return the first prompt of an episode, generation prompt included.

        Raises:
            RenderError: there are no messages, or the template cannot hold one of them.
        """
        if not messages:
            raise RenderError("there is nothing to render: the environment sent no messages")
        self._require_shown(messages)
        if tools and not self._reads_calls:
            raise RenderError(
                f"no parser reads the calls of chat template {self._text.template.name}",
                hint=f"renderer.tool_parser: one of {', '.join(TOOL_PARSERS)}",
            )
        return Rendered(self._one_bos(self._tokenizer.encode(self._text.prompt(messages, tools))))

    def extend(
        self,
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        history: Sequence[Message] = (),
    ) -> Rendered:
        """Return the ids to append after a sampled turn, or a whole prompt where that cannot be.

        Args:
            sampled_ids: The last turn's ids exactly as they were sampled, and nothing before them.
            new_messages: What came back: tool, user or system messages.
            tools: Schemas of the tools, as given to :meth:`start`.
            history: The conversation up to the sampled message; needed to fork.

        Raises:
            RenderError: there are no new messages, one is the assistant's own, or the template
                refuses them.
        """
        require_new(new_messages)
        self._require_shown(new_messages)
        moved = self.handling.moves_system and any(m.role == "system" for m in new_messages)
        if moved and self.settings.on_unstable == "refuse":
            raise RenderError(
                "this chat template moves a system message to the beginning",
                hint="send a Rewrite, or set renderer.on_unstable: fork",
            )
        if moved or self.handling.kind == "forked":
            return self._fork(new_messages, tools, history)
        tail = self._text.tail(new_messages, tools)
        ends = bool(sampled_ids) and sampled_ids[-1] in self._stops
        if not tail.stop:
            return Rendered([*self._closing(sampled_ids, ends), *self._encode(tail.text)])
        ids = self._encode(tail.stop + tail.text)
        stands = ends and (not tail.opens or sampled_ids[-1] == ids[0])
        return Rendered([*self._closing(sampled_ids, ends), *ids[stands:]])

    def parse(self, output_ids: Sequence[int], tools: Sequence[dict[str, Any]]) -> AssistantMessage:
        """Return the message that a model sampled; never raises because of the model's text."""
        ids = list(output_ids)
        stopped = bool(ids) and ids[-1] in self._stops
        stream = self.stream(tools)
        message = fold(stream.feed(ids) + stream.finish())
        return replace(message, finish_reason="stop" if stopped else "length")

    def stream(self, tools: Sequence[dict[str, Any]] = ()) -> OutputStream:
        """Return a reader for one turn whose ids arrive in pieces."""
        schemas, tags = normalise_tools(tools), self.settings.reasoning_tags
        return OutputStream(
            self._tokenizer,
            self._stops,
            self._parser,
            lambda ids: self.parse(ids, tools),
            schemas,
            tags,
        )

    def completion(self, message: AssistantMessage) -> list[int]:
        """Return the ids that a model would have sampled for a message, stop token included.

        Raises:
            RenderError: the template does not write the message right after its generation prompt.
        """
        return self._encode(self._text.said(message))

    def require_tool_media(self) -> None:
        """Refuse a template that shows a picture in a user's message and drops it in a tool's.

        Raises:
            ConfigError: it does.
        """
        picture = [{"type": "text", "text": "zqx"}, {"type": "image", "image": ""}]
        if self._text.shows(picture, "user") and not self._text.shows(picture, "tool"):
            raise ConfigError(
                f"chat template {self._text.template.name} drops images in tool messages",
                hint="renderer.tool_media: insert puts them there all the same",
            )

    def _require_shown(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if message.role in self.handling.dropped:
                raise RenderError(
                    f"chat template {self._text.template.name} leaves out {message.role} messages",
                    hint="say it as a user, or give another renderer.template",
                )

    # -- ids ---------------------------------------------------------------------------------

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text) if text else []

    def _one_bos(self, ids: list[int]) -> list[int]:
        """Return a prompt that begins with exactly one begin-of-sequence token, if there is one.

        Some templates write it and some tokenizers add it; with both there would be two, with
        neither none where the model was trained on one.
        """
        opening = self._tokenizer.opening_ids or ([] if self._bos is None else [self._bos])
        begins = 0
        while opening and ids[begins : begins + len(opening)] == opening:
            begins += len(opening)
        wanted = opening if begins or self._tokenizer.opening_ids else []
        return [*wanted, *ids[begins:]]

    def _closing(self, sampled: Sequence[int], ends: bool) -> list[int]:
        """Return what closes the reasoning of a turn that was cut in the middle of it."""
        if ends or self._parser.reasoning == "none":
            return []
        opened, closed = self.settings.reasoning_tags
        text = self._tokenizer.decode(list(sampled))
        inside = self._parser.reasoning == "opened" or text.lstrip().startswith(opened)
        return self._encode(closed) if inside and closed not in text else []

    def _fork(
        self,
        new: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        history: Sequence[Message],
    ) -> Rendered:
        if not history:
            raise RenderError("this chat template cannot append, and there is no history to render")
        whole = self.start([*history, *new], tools)
        return replace(whole, fork=f"chat template: {self.handling.why or _MOVED}")

    # -- finding out -------------------------------------------------------------------------

    def _stop_ids(self) -> list[int]:
        found = [self._tokenizer.convert_tokens_to_ids(text) for text in self._text.stops]
        ids = [index for index in found if index is not None]
        if not ids:
            raise ConfigError(
                f"chat template {self._text.template.name}: no token ends an answer",
                hint="name an eos_token_id in the model's generation_config.json",
            )
        return ids

    def _require_allowed(self) -> None:
        if self.handling.kind == "forked" and self.settings.on_unstable == "refuse":
            raise ConfigError(
                f"chat template {self._text.template.name} cannot be appended to: "
                f"{self.handling.why}",
                hint="renderer.on_unstable: fork renders the whole history each turn",
            )

    def _choose_parser(self) -> ToolParser:
        reasoning = self._reasoning()
        if self.settings.tool_parser != "auto":
            return tool_parser(self.settings.tool_parser, reasoning)
        try:
            text = shown(self._text.said(assistant(tool_calls=[PROBE])))
        except RenderError:
            text = ""
        for stop in self._text.stops:
            text = text.removesuffix(stop)
        if "zqx_look" not in text:  # no call is shown; the format that most models know
            return tool_parser("hermes", reasoning)
        found = parser_of(text, reasoning)
        self._reads_calls = found is not None  # if not, it is no matter where there are no tools
        return found or tool_parser("hermes", reasoning)

    def _reasoning(self) -> Reasoning:
        if self.settings.reasoning != "auto":
            return self.settings.reasoning
        opened = self.settings.reasoning_tags[0]
        return "opened" if self._text.opening.rstrip().endswith(opened) else "tagged"

    def _between(self) -> str:
        """Return the white space that the template writes between two turns."""
        text = self._text.tail([user("?")], ()).text
        return text[: len(text) - len(text.lstrip())]


_MOVED = "it moves a system message to the beginning"
_HANDLED = {
    "stable": "stable, turns are appended as the template itself writes them",
    "bridged": "bridged, sampled turns stay and what comes between is appended",
    "forked": "forked per turn",
}

__all__ = ["Handling", "TemplateRenderer"]

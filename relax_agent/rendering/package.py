r"""Messages to token ids and back, for one model family.

The formats themselves come from the ``renderers`` package. This module adds what a token log needs:

* **Token in, token out.** :meth:`Renderer.extend` returns only the ids to *append* after a sampled
  turn: the separator that engines never sample (``\n`` after the end of a turn), the new messages
  and the next generation prompt. Sampled ids are never decoded and encoded again, and the cost does
  not grow with the history, because only the last turn is handed to the package.
* A turn that the length limit cut has no stop token; the ids to append then begin with it.
* :meth:`Renderer.parse` reads what a model sampled and never raises because of it: a broken tool
  call is a :class:`~relax_agent.messages.ToolCall` whose ``error`` says what is wrong.
* :meth:`Renderer.completion` is the other direction: the ids that a model would have sampled for a
  message, so that scripted experts go through the same loop as a model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from relax_agent.errors import ConfigError, MissingExtraError, RelaxError, RenderError, one_line
from relax_agent.messages import (
    AssistantMessage,
    Message,
    ToolCall,
    assistant,
    parts,
    to_openai,
    tool_message,
    user,
)
from relax_agent.rendering.lookalikes import BREAK, NO_THOUGHT, Lookalikes, Schemas
from relax_agent.rendering.parsers import ToolParser
from relax_agent.rendering.parsers.values import (
    MALFORMED,
    NO_NAME,
    NOT_JSON,
    UNCLOSED,
    checked_call,
    repeated_key,
)
from relax_agent.rendering.rendered import Rendered, normalise_tools, require_new
from relax_agent.rendering.settings import RendererSettings
from relax_agent.rendering.streaming import PROBE, TAGS, OutputStream, parser_of
from relax_agent.rendering.tokens import TokenIds

_BROKEN = {
    "invalid_json": NOT_JSON,
    "unclosed_block": UNCLOSED,
    "missing_name": NO_NAME,
    "malformed_structure": MALFORMED,
    "unknown_tool": "there is no such tool",
}


class PackageRenderer:
    """A format of the ``renderers`` package behind the :class:`Renderer` protocol."""

    def __init__(
        self, tokenizer: TokenIds, settings: RendererSettings, *, kept: Collection[str] = ()
    ) -> None:
        """Make a format.

        Args:
            tokenizer: The model's tokenizer.
            settings: Its name, and its options.
            kept: Placeholders of media; see :class:`Lookalikes`.

        Raises:
            ConfigError: there is no such format, or it does not fit the tokenizer.
            MissingExtraError: the ``renderers`` package is not installed.
        """
        self._tokenizer, self._settings = tokenizer, settings
        self._lookalikes = Lookalikes(tokenizer.special, tokenizer.markup, kept=kept)
        self._prepared = Schemas(self._lookalikes)
        self._format = _create(tokenizer, settings)
        self._takes_media = _takes_media(self._format)
        self.stop_token_ids = list(self._format.get_stop_token_ids())
        """Tokens that end a turn, the one that closes it first."""
        self._stops = frozenset(self.stop_token_ids)
        self._opening = self._generation_prompt()

    @property
    def summary(self) -> str:
        """One line: how this format is handled."""
        stops = [self._tokenizer.token(index) or "?" for index in self.stop_token_ids]
        return (
            f"chat format {self._settings.name} of renderers: bridged, sampled turns stay and what "
            f"comes between is appended; stop tokens {' '.join(stops)}"
        )

    def start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Rendered:
        """Return the first prompt of an episode, generation prompt included.

        Raises:
            RenderError: there are no messages, or the format cannot hold one of them.
        """
        if not messages:
            raise RenderError("there is nothing to render: the environment sent no messages")
        return Rendered(self._render(messages, tools, add_generation_prompt=True))

    def extend(
        self,
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        history: Sequence[Message] = (),
    ) -> Rendered:
        """Return the ids to append after a sampled turn, up to the next generation prompt.

        Args:
            sampled_ids: The last turn's ids exactly as they were sampled, and nothing before them.
            new_messages: What came back: tool, user or system messages.
            tools: Schemas of the tools, as given to :meth:`start`.
            history: The conversation up to the sampled message, for formats that must re-render.

        Raises:
            RenderError: there are no new messages, one is the assistant's own, or the format cannot
                append them.
        """
        require_new(new_messages)
        plain = [self._plain(message) for message in new_messages]
        turn = list(sampled_ids)
        appended = self._bridge(turn, plain, tools)
        if appended is None and turn and turn[-1] in self._stops:
            # Some formats refuse a turn whose reasoning was never closed. It stays as it was
            # sampled; what follows it depends on its last token alone.
            # Where the prompt has begun a thought, the stand-in closes it.
            closed = [*self._tokenizer.encode("</think>"), turn[-1]]
            appended = self._bridge(turn[-1:], plain, tools) or self._bridge(closed, plain, tools)
        if appended is not None:
            return Rendered(appended)
        if self._settings.on_unstable == "fork" and history:
            whole = self.start([*history, *new_messages], tools)
            return replace(whole, fork=f"the format {self._settings.name} rewrites its history")
        raise RenderError(
            f"the chat format {self._settings.name} cannot append these messages to a sampled turn",
            hint="renderer.on_unstable: fork renders the whole history instead",
        )

    def parse(self, output_ids: Sequence[int], tools: Sequence[dict[str, Any]]) -> AssistantMessage:
        """Return the message that a model sampled; never raises because of the model's text."""
        ids = list(output_ids)
        stopped = bool(ids) and ids[-1] in self._stops
        try:
            parsed = self._format.parse_response(
                ids, tools=normalise_tools(tools) or None, prompt_ids=self._opening
            )
        except Exception as error:
            # The parser met text that nobody thought of (a number of 5,000 digits, 10,000 nested
            # brackets). That is the model's mistake, and an environment answers it as such.
            message = self._unreadable(ids, error)
        else:
            message = AssistantMessage(
                content=parts((parsed.content or "").strip()),
                reasoning=parsed.reasoning_content or None,
                tool_calls=tuple(_call(i, call) for i, call in enumerate(parsed.tool_calls)),
            )
        return replace(message, finish_reason="stop" if stopped else "length")

    def stream(self, tools: Sequence[dict[str, Any]] = ()) -> OutputStream:
        """Return a reader for one turn whose ids arrive in pieces."""
        return OutputStream(
            self._tokenizer,
            self._stops,
            self._parser,
            lambda ids: self.parse(ids, tools),
            normalise_tools(tools),
        )

    @cached_property
    def _parser(self) -> ToolParser | None:
        """The parser of text that reads what this format writes, if there is one."""
        opened = self._tokenizer.decode(self._opening).rstrip().endswith(TAGS[0])
        try:
            ids = self.completion(assistant(tool_calls=[PROBE]))
        except RenderError:
            return None
        return parser_of(self._tokenizer.decode(ids[:-1]), "opened" if opened else "tagged")

    def completion(self, message: AssistantMessage) -> list[int]:
        """Return the ids that a model would have sampled for a message, stop token included.

        Raises:
            RenderError: the format does not write the message right after its generation prompt.
        """
        # Formats add an empty think block to a last message without reasoning; a model that does
        # not think samples none. An answer behind the message turns it into history. Where the
        # prompt has begun a thought, it must be closed: then an empty one is what is sampled.
        answers: list[Message] = [tool_message("9", call) for call in message.tool_calls]
        behind: list[list[Message]] = [answers or [user("?")], []]
        plain = self._plain(message)
        for after in reversed(behind) if message.reasoning else behind:
            body = self._body(plain, after)
            if body is not None:
                return body
        if not message.reasoning:
            mark = self._tokenizer.encode(NO_THOUGHT)
            body = self._body(plain | {"reasoning_content": f"{BREAK}{NO_THOUGHT}{BREAK}"}, [])
            if body is not None:
                return _without(body, mark)
        raise RenderError(
            "this chat format does not write such a message after its generation prompt",
            hint="a message with reasoning needs renderer.enable_thinking",
        )

    def _body(self, plain: dict[str, Any], after: Sequence[Message]) -> list[int] | None:
        """Return a message's ids behind a generation prompt; None if they do not stand there."""
        asked, answers = self._plain(user("?")), [self._plain(message) for message in after]
        with self._told():
            rendered = self._format.render([asked, plain, *answers])
        start = len(self._first_prompt)
        if rendered.token_ids[:start] != self._first_prompt:
            return None
        body = list(rendered.token_ids[start:])
        end = next((i for i, each in enumerate(body) if each in self._stops), None)
        # Some formats end a last message with no stop token.
        return [*body, self.stop_token_ids[0]] if end is None else body[: end + 1]

    def _generation_prompt(self) -> list[int]:
        """Return what stands between a user's message and the first sampled token."""
        self._first_prompt = self._render([user("?")], [], add_generation_prompt=True)
        without = self._render([user("?")], [], add_generation_prompt=False)
        if self._first_prompt[: len(without)] != without:
            raise RenderError("this chat format has no generation prompt of its own")
        return self._first_prompt[len(without) :]

    def _bridge(
        self, turn: list[int], new: list[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> list[int] | None:
        known = [*self._opening, *turn]
        with self._told():
            bridged = self._format.bridge_to_next_turn(
                self._opening, turn, new, tools=self._schemas(tools)
            )
        if bridged is None or bridged.token_ids[: len(known)] != known:
            return None
        return list(bridged.token_ids[len(known) :])

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        plain = [self._plain(message) for message in messages]
        with self._told():
            rendered = self._format.render(
                plain, tools=self._schemas(tools), add_generation_prompt=add_generation_prompt
            )
        return list(rendered.token_ids)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Turn what a format raises, each in its own way, into one kind of error."""
        try:
            yield
        except RelaxError:
            raise
        except Exception as error:
            raise RenderError(
                f"the chat format {self._settings.name} refuses: {one_line(error)}"
            ) from error

    def _schemas(self, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
        return self._prepared.prepare(tools) if tools else None

    def _plain(self, message: Message) -> dict[str, Any]:
        if message.media and not self._takes_media:
            kind = type(message.media[0]).__name__.lower()
            raise RenderError(
                f"a {message.role} message holds {kind}, which this chat format would drop",
                hint="choose a multimodal renderer",
            )
        plain: dict[str, Any] = self._lookalikes.hide(to_openai(message), message.role)
        return _with_kimi_ids(plain) if self._settings.name.startswith("kimi") else plain

    def _unreadable(self, ids: list[int], error: Exception) -> AssistantMessage:
        kept = [token for token in ids if token not in self._stops]
        problem = f"the call cannot be read: {type(error).__name__}"
        return AssistantMessage(
            content=parts(self._tokenizer.decode(kept)),
            tool_calls=(ToolCall("", {}, "call_0", problem),),
        )


def _create(tokenizer: Any, settings: RendererSettings) -> Any:
    try:
        from renderers import config_from_name, create_renderer
    except ImportError:
        raise MissingExtraError("renderers", "train") from None
    # Sampled reasoning stays where it was sampled: the log only ever grows at its end.
    options: dict[str, Any] = {"thinking_retention": "all", **settings.options}
    if settings.enable_thinking is not None:
        options["enable_thinking"] = settings.enable_thinking
    try:
        default = config_from_name(settings.name)
        if default is None:
            raise ConfigError(
                "renderer.name: auto cannot know a local folder", hint="name a format"
            )
        return create_renderer(tokenizer, type(default)(**options))
    except ConfigError:
        raise
    except Exception as error:  # each format refuses a tokenizer in its own way
        reason = " ".join(str(error).split())
        raise ConfigError(f"renderer {settings.name}: {reason}") from error


def _without(ids: list[int], part: list[int]) -> list[int]:
    at = next((i for i in range(len(ids)) if ids[i : i + len(part)] == part), len(ids))
    return ids[:at] + ids[at + len(part) :]


def _with_kimi_ids(plain: dict[str, Any]) -> dict[str, Any]:
    """Return a message with ids that hold the tool's name, which Kimi's formats write nowhere else.

    Ids that a model sampled have it already.
    """

    def named(name: str, index: str) -> str:
        digits = index.removeprefix("call_")
        return index if index.startswith("functions.") else f"functions.{name}:{digits or 0}"

    if "tool_calls" in plain:
        calls = [
            call | {"id": named(call["function"]["name"], call["id"])}
            for call in plain["tool_calls"]
        ]
        plain = plain | {"tool_calls": calls}
    if plain.get("name") and "tool_call_id" in plain:
        plain = plain | {"tool_call_id": named(plain["name"], plain["tool_call_id"])}
    return plain


def _takes_media(chat_format: Any) -> bool:
    from renderers import is_multimodal

    return bool(is_multimodal(chat_format))


def _call(index: int, parsed: Any) -> ToolCall:
    """Turn a parse attempt into a call; a bad one carries its error."""
    name = parsed.name if isinstance(parsed.name, str) else ""
    arguments = parsed.arguments if isinstance(parsed.arguments, dict) else {}
    error = _problem(parsed, name)
    return ToolCall(name, {} if error else arguments, parsed.id or f"call_{index}", error)


def _problem(parsed: Any, name: str) -> str | None:
    if parsed.status != "ok":
        return _BROKEN.get(str(parsed.status), f"the call is broken ({parsed.status})")
    if not name:
        return NO_NAME
    if repeated := repeated_key(parsed.raw or ""):  # the package takes the last one
        return f"{NOT_JSON}: {repeated}"
    return checked_call(name, parsed.arguments).error

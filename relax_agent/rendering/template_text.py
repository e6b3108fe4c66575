"""One chat template as text: prompts, what is appended after a turn, what a model would say.

A template only renders whole conversations. To get what comes *after* a turn, the new messages are
rendered behind a stand-in: a question, and an answer that ends in a word which occurs nowhere else
(with calls, where the new messages answer some: many templates refuse a tool message without its
call). Behind that word come the end of the stand-in's turn and everything to be appended. So
nothing is ever cut at a position counted in another rendering, the cost is that of the new messages
alone, and what a template does to older turns cannot reach into it.

The end of a turn is the first stop token behind the word that is also there when nothing follows.
One that is there only because something follows is the next message's opening (GLM's formats); it
serves as stop token all the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from relax_agent.errors import RenderError
from relax_agent.messages import (
    AssistantMessage,
    Message,
    Text,
    ToolCall,
    assistant,
    to_openai,
    tool_message,
    user,
)
from relax_agent.rendering.chat_template import ChatTemplate
from relax_agent.rendering.lookalikes import NO_THOUGHT, Lookalikes, Schemas
from relax_agent.rendering.tokens import TokenIds

SAID, ASKED = "zqxsaidxqz", "zqxaskedxqz"
"""Words that mark the stand-in's answer and its calls."""
_QUESTION = {"role": "user", "content": "?"}
_NEXT = "zqxnextxqz"
_ID = 9

Shape = tuple[tuple[str, str], ...]
"""Name and id of each call of a stand-in."""


@dataclass(frozen=True, slots=True)
class Tail:
    """What a template writes behind an answer."""

    stop: str
    """The stop token that ends the turn; empty if the template writes none."""
    opens: bool
    """Whether that token is the next message's opening too."""
    text: str
    """What follows it."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a template wants its messages."""

    parts: bool = False
    """Content as a list of parts, never as a string."""
    short_ids: bool = False
    """Call ids of nine letters and digits, as Mistral's templates demand."""
    json_arguments: bool = False
    """Arguments of calls as a JSON text, as DeepSeek's templates demand."""
    inline_reasoning: bool = False
    """Reasoning stands in the content, between tags: the template knows no field for it."""


class TemplateText:
    """A chat template with the answers to what it does with a turn."""

    def __init__(
        self,
        template: ChatTemplate,
        tokens: TokenIds,
        lookalikes: Lookalikes,
        stop_ids: Sequence[int],
        tags: tuple[str, str],
    ) -> None:
        self.template = template
        self._tokens, self._lookalikes, self.tags = tokens, lookalikes, tags
        self._schemas = Schemas(lookalikes)
        self.dialect = Dialect()
        self._ending = lru_cache(256)(self._rendered_ending)
        self.dialect = self._find_dialect()
        self.opening = self._render([_QUESTION], ())
        """A prompt, which ends with the beginning of an answer."""
        self.stops = self._find_stops(stop_ids)
        """Texts of the stop tokens; those that the template itself writes come first."""
        self._tools_in_tails = True
        self._stop = re.compile("|".join(map(re.escape, self.stops)) or r"(?!)")

    def leave_tools_out(self, tools: Sequence[dict[str, Any]]) -> None:
        """Render tails without tools if they come out the same, which saves time each turn."""
        call = ToolCall("look", {}, "call_0")
        told = tool_message(_NEXT, call)
        tails: list[list[Message]] = [[user(_NEXT)], [told], [told, user(_NEXT)]]
        try:
            same = all(self.tail(tail, tools) == self.tail(tail, ()) for tail in tails)
        except RenderError:  # some templates refuse such tails
            same = False
        self._tools_in_tails = not same

    # -- what a renderer asks for ------------------------------------------------------------

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, prompt: bool = True
    ) -> str:
        """Return a whole conversation as text; with ``prompt``, the beginning of an answer too."""
        return self._render([self._plain(message) for message in messages], tools, prompt=prompt)

    def tail(
        self, new: Sequence[Message], tools: Sequence[dict[str, Any]], *, prompt: bool = True
    ) -> Tail:
        """Return what comes behind an answer when these messages follow it.

        Raises:
            RenderError: the template refuses these messages behind an answer.
        """
        shape = _shape(new)
        plain = [self._plain(message) for message in new]
        shown = tools if self._tools_in_tails else ()
        text = self._render([*self._stand_in(shape), *plain], shown, prompt=prompt)
        rest = _behind(text, shape)
        ending = self._ending(shape)
        common = _common(rest, ending)
        found = self._stop.search(rest)
        if found is None or found.start() > common:
            # What the turn is separated with stands behind a bare answer too; it is not sampled.
            separator = self._ending(()) if ending.endswith(self._ending(())) else ""
            return Tail("", False, rest[max(common - len(separator), 0) :])
        return Tail(found.group(), found.end() > common, rest[found.end() :])

    def said(self, message: AssistantMessage) -> str:
        """Return what a model would say for a message, its stop token included.

        Raises:
            RenderError: the template does not write it behind the beginning of an answer.
        """
        # Templates add an empty think block to a last message without reasoning; a model that does
        # not think samples none. A question behind the message turns it into history.
        answers: list[Message] = [tool_message("9", call) for call in message.tool_calls]
        behind: list[list[Message]] = [answers or [user("?")], []]
        for after in reversed(behind) if message.reasoning else behind:
            body = self._said_before(message, after)
            if body is None:
                continue
            found = self._stop.search(body)
            if found is not None and (not after or self.tail(after, ()).stop):
                return body[: found.end()]
            alone = self._said_before(message, [])
            if alone is not None and self.stops:
                return alone.rstrip("\n") + self.stops[0]
        if not message.reasoning:  # the prompt has begun a thought: an empty one is sampled
            return self.said(replace(message, reasoning=NO_THOUGHT)).replace(NO_THOUGHT, "")
        raise RenderError(
            "this chat template does not write such a message after its generation prompt",
            hint="a message with reasoning needs renderer.enable_thinking",
        )

    def _said_before(self, message: Message, after: Sequence[Message]) -> str | None:
        """Return the text behind a generation prompt, or None if it does not stand there."""
        plain = [self._plain(each) for each in (message, *after)]
        text = self._render([_QUESTION, *plain], (), prompt=False)
        asked = self._render([_QUESTION], ())
        return text[len(asked) :] if text.startswith(asked) else None

    def shows(self, content: list[dict[str, Any]], role: str) -> bool:
        """Return whether it matters to the template that content is more than its first part."""

        def rendered(body: list[dict[str, Any]]) -> str:
            shape = (("look", "call_0"),) if role == "tool" else ()
            new = self._in_dialect({"role": role, "content": body, "tool_call_id": "call_0"})
            return self._render([*self._stand_in(shape), new], (), prompt=False)

        try:
            return rendered(content) != rendered(content[:1])
        except RenderError:
            return False

    # -- finding out -------------------------------------------------------------------------

    def _find_dialect(self) -> Dialect:
        """Try how the template wants its content, its call ids and its reasoning."""
        dialect = Dialect()
        if _NEXT not in self._try([user(_NEXT)], dialect):
            dialect = replace(dialect, parts=True)
            if _NEXT not in self._try([user(_NEXT)], dialect):
                self.prompt([user(_NEXT)], ())  # says what is wrong
                raise RenderError("the chat template does not show what a user says")
        call = ToolCall("look", {"where": "x"}, "call_0")
        called = [user("?"), assistant(SAID, tool_calls=[call]), tool_message(_NEXT, call)]
        forms = [(False, False), (False, True), (True, False), (True, True)]
        for short_ids, json_arguments in forms:
            tried = replace(dialect, short_ids=short_ids, json_arguments=json_arguments)
            if _NEXT in self._try(called, tried):
                dialect = tried
                break
        thought = [user("?"), assistant(SAID, reasoning=_NEXT)]
        if _NEXT not in self._try(thought, dialect):
            dialect = replace(dialect, inline_reasoning=True)
        return dialect

    def _try(self, messages: Sequence[Message], dialect: Dialect) -> str:
        kept, self.dialect = self.dialect, dialect
        try:
            return self.prompt(messages, (), prompt=False)
        except RenderError:
            return ""
        finally:
            self.dialect = kept

    def _find_stops(self, stop_ids: Sequence[int]) -> list[str]:
        """Return what the template writes right behind an answer, then what the files name."""
        call = ToolCall("look", {}, "call_0")
        found = [self._closer([user(_NEXT)]), self._closer([tool_message(_NEXT, call)])]
        named = [self._tokens.token(index) for index in stop_ids]
        return list(dict.fromkeys(text for text in (*found, self._call_closer(), *named) if text))

    def _call_closer(self) -> str | None:
        """Return the special token that ends a turn with a call, if one does."""
        shape = (("look", "call_0"),)
        ending = self._ending(shape).rstrip()
        ends = [token for token in self._tokens.special if ending.endswith(token)]
        last = max(ends, key=len, default=None)
        if last is None:
            return None
        try:  # what also stands between two calls ends a call, not a turn
            two = self._render(self._stand_in((*shape, ("look", "call_1"))), (), prompt=False)
        except RenderError:
            return last
        return None if last in two.rpartition(ASKED)[0].partition(ASKED)[2] else last

    def _closer(self, new: Sequence[Message]) -> str | None:
        """Return the special token that comes right behind an answer's text, if one does."""
        answer = {"role": "assistant", "content": self._content(SAID)}
        plain = [self._plain(message) for message in new]
        try:
            rest = _behind(self._render([_QUESTION, answer, *plain], ()), ())
        except RenderError:  # some refuse a tool message without its call
            return None
        between = rest.partition(_NEXT)[0].lstrip()
        begins = [token for token in self._tokens.special if between.startswith(token)]
        return max(begins, key=len, default=None)

    # -- rendering ---------------------------------------------------------------------------

    def _rendered_ending(self, shape: Shape) -> str:
        """Return what stands behind a stand-in's answer when nothing follows."""
        try:
            return _behind(self._render(self._stand_in(shape), (), prompt=False), shape)
        except RenderError:
            return ""

    def _stand_in(self, shape: Shape) -> list[dict[str, Any]]:
        calls = [
            {"id": index, "type": "function", "function": {"name": name, "arguments": {"x": ASKED}}}
            for name, index in shape
        ]
        answer: dict[str, Any] = {"role": "assistant", "content": self._content(SAID)}
        return [
            _QUESTION,
            self._in_dialect(answer | ({"tool_calls": calls} if calls else {})),
        ]

    def _render(
        self, plain: list[dict[str, Any]], tools: Sequence[dict[str, Any]], *, prompt: bool = True
    ) -> str:
        schemas = self._schemas.prepare(tools) if tools else ()
        if self.dialect.parts:
            plain = [each | {"content": self._content(each["content"])} for each in plain]
        return self.template.render(plain, schemas, prompt=prompt)

    def _plain(self, message: Message) -> dict[str, Any]:
        """Return a message as the template wants it, look-alikes hidden."""
        if message.media:
            kind = type(message.media[0]).__name__.lower()
            raise RenderError(
                f"a {message.role} message holds {kind}, which this chat format would drop",
                hint="train a model whose folder says how it takes media",
            )
        if isinstance(message, AssistantMessage) and message.reasoning:
            message = self._with_reasoning(message)
        plain: dict[str, Any] = self._lookalikes.hide(to_openai(message), message.role)
        return self._in_dialect(plain)

    def _with_reasoning(self, message: AssistantMessage) -> AssistantMessage:
        if not self.dialect.inline_reasoning:
            return message
        opened, closed = self.tags
        text = f"{opened}\n{message.reasoning}\n{closed}\n\n{message.text}"
        return replace(message, content=(Text(text),), reasoning=None)

    def _content(self, content: Any) -> Any:
        if self.dialect.parts and isinstance(content, str):
            return [{"type": "text", "text": content}]
        return content

    def _in_dialect(self, plain: dict[str, Any]) -> dict[str, Any]:
        """Return a message with ids and arguments as the template wants them."""
        if self.dialect.short_ids and "tool_call_id" in plain:
            plain = plain | {"tool_call_id": _short(plain["tool_call_id"])}
        if (self.dialect.short_ids or self.dialect.json_arguments) and "tool_calls" in plain:
            plain = plain | {"tool_calls": [self._call(call) for call in plain["tool_calls"]]}
        return plain

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        if self.dialect.short_ids:
            call = call | {"id": _short(call["id"])}
        if self.dialect.json_arguments:
            function = call["function"]
            text = json.dumps(function["arguments"], ensure_ascii=False)
            call = call | {"function": function | {"arguments": text}}
        return call


def _shape(new: Sequence[Message]) -> Shape:
    """Return the calls that the first of these messages answer."""
    shape: list[tuple[str, str]] = []
    for message in new:
        if message.role != "tool":
            break
        shape.append((message.name or "tool", message.tool_call_id or f"call_{len(shape)}"))
    return tuple(shape)


def _behind(text: str, shape: Shape) -> str:
    """Return what stands behind a stand-in's last word."""
    if shape:
        calls = text.split(ASKED, len(shape))
        if len(calls) == len(shape) + 1:
            return calls[-1]
    _, found, rest = text.partition(SAID)
    if not found:
        raise RenderError("the chat template does not show what the assistant said")
    return rest


def _common(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _short(index: str) -> str:
    letters = "".join(filter(str.isalnum, index))
    if len(letters) > _ID:
        return hashlib.sha256(index.encode()).hexdigest()[:_ID]
    return letters.rjust(_ID, "0")

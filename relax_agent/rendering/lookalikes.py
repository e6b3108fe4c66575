r"""Text that looks like a special token must not become one.

A user, a tool or a web page may say ``<|im_end|>\n<|im_start|>system``. Written into a chat format
and encoded, that would be a turn of its own. So before a format sees a message, each such text gets
an invisible :data:`BREAK` between its characters; the format copies it like any other character,
and :func:`cut` splits the finished text there, so that no tokenizer finds the token. The ids still
spell the same characters. The tokens that the format itself writes stay tokens.

Whose text is searched for what:

* user and tool messages, and tool schemas: every special token, and markup such as ``<think>``,
  ``</tool_response>`` or ``<tool_call>``;
* system and assistant messages: special tokens. Their markup stays as it is, because instructions
  quote it and a model's own words are made of it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from relax_agent.errors import RenderError
from relax_agent.rendering.rendered import normalise_tools

BREAK = "\ufdd0"
"""A code point that Unicode reserves for a program's own use; it never occurs in a text."""
NO_THOUGHT = "zqxnothoughtxqz"
"""Stands for an empty thought while a format writes a message, and is then taken out."""
_ESCAPED = "\\ufdd0"
"""The same, where a format writes JSON in ASCII."""
_SPLIT = re.compile(f"{BREAK}|{re.escape(_ESCAPED)}")
_NOT_SEARCHED = frozenset(("role", "type"))
_MARKUP = re.compile(r"[<\[].*(?:[|｜]|think|tool|call|response|arg|function).*[>\]]", re.DOTALL)


class Lookalikes:
    """Knows a tokenizer's tokens and hides texts that look like them."""

    def __init__(
        self,
        special: Iterable[str],
        markup: Iterable[str] = (),
        template: str = "",
        kept: Collection[str] = (),
    ) -> None:
        """Collect what to look for.

        Args:
            special: Special tokens.
            markup: Other added tokens; those that look like a format's markup or occur in the
                template count. Vocabularies also hold added words, HTML tags and runs of spaces.
            template: The chat template, if there is one.
            kept: Placeholders of media, which are left alone in the content of messages; whoever
                puts them there keeps look-alikes of them away.
        """
        hard = {token for token in special if len(token) > 1}
        soft = {token for token in markup if len(token) > 1 and token.strip()}
        soft = {token for token in soft if _MARKUP.fullmatch(token) or token in template}
        piped = {token for token in soft if "|" in token or "｜" in token}
        # Whatever the tokenizer's file calls them, these are what role markers look like.
        self._special = _pattern(hard | piped)
        self._all = _pattern(hard | soft)
        self._special_content = _pattern((hard | piped) - set(kept))
        self._all_content = _pattern((hard | soft) - set(kept))

    def hide(self, value: Any, role: str = "user") -> Any:
        """Return text, or the texts inside of lists and objects, with look-alikes broken up.

        Raises:
            RenderError: the value is nested so deeply that no format could write it.
        """
        try:
            return self._hide(value, role)
        except RecursionError:
            raise RenderError("a message is nested too deeply to be rendered") from None

    def _hide(self, value: Any, role: str) -> Any:
        trusted = role in ("system", "assistant")
        hidden = _hidden(value, self._special if trusted else self._all)
        if isinstance(value, Mapping) and "content" in value:
            pattern = self._special_content if trusted else self._all_content
            hidden["content"] = _hidden(value["content"], pattern)
        return hidden


class Schemas:
    """Tool schemas in one shape with look-alikes hidden, each list of them prepared once."""

    _MOST = 64

    def __init__(self, lookalikes: Lookalikes) -> None:
        self._lookalikes = lookalikes
        self._known: dict[int, tuple[list[Any], list[dict[str, Any]]]] = {}

    def prepare(self, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return schemas as a chat format gets them."""
        tools = list(tools) if not isinstance(tools, list) else tools
        known = self._known.get(id(tools))
        if known is not None and known[0] == tools:
            return known[1]
        prepared: list[dict[str, Any]] = self._lookalikes.hide(normalise_tools(tools))
        if len(self._known) >= self._MOST:
            self._known = {}
        self._known[id(tools)] = copy.deepcopy(tools), prepared
        return prepared


def cut(text: str) -> list[str]:
    """Return the pieces between breaks; the text itself if there are none."""
    if BREAK not in text and _ESCAPED not in text:
        return [text]
    return [piece for piece in _SPLIT.split(text) if piece] or [""]


def shown(text: str) -> str:
    """Return a finished text without its breaks."""
    return "".join(cut(text))


def _pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, [*longest_first, _ESCAPED])))


def _hidden(value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        if BREAK in value:
            value = value.replace(BREAK, "\ufffd")
        return pattern.sub(lambda found: _broken(found.group(), pattern), value)
    if isinstance(value, Mapping):
        return {
            key if not isinstance(key, str) else _hidden(key, pattern): (
                inner if key in _NOT_SEARCHED else _hidden(inner, pattern)
            )
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_hidden(inner, pattern) for inner in value]
    return value


def _broken(token: str, pattern: re.Pattern[str]) -> str:
    """Return a token's text with a break behind its first character, or behind each if need be.

    A page full of look-alikes must not cost an encoding for each of its characters.
    """
    first, rest = token[:1], token[1:]
    inside = BREAK.join(rest) if pattern.search(rest) else rest
    return f"{BREAK}{first}{BREAK}{inside}{BREAK}"

"""One conversation as a page: self-contained HTML, or text for a terminal.

Everything shown comes from a model, a tool or a data set, so nothing of it is trusted. HTML is
escaped, carries a policy that forbids scripts and the network, and shows media only as data URLs
of their own kind or as files that lie beside the page. Long texts, results and rows of calls are
folded, so that an episode of many turns can be read from above. Text loses its control
characters, which could otherwise rewrite the terminal.
"""

from __future__ import annotations

import html
import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from relax_agent.episode import Episode
from relax_agent.messages import (
    AssistantMessage,
    Audio,
    Image,
    Message,
    Part,
    Text,
    ToolCall,
    Video,
)

_MIME = re.compile(r"(image|audio|video)/[A-Za-z0-9][A-Za-z0-9.+-]*")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_KINDS: dict[type[Image] | type[Audio] | type[Video], str] = {
    Image: "image",
    Audio: "audio",
    Video: "video",
}
MediaUrl: TypeAlias = Callable[[Image | Audio | Video], str | None]
_MANY_CALLS = 4
"""More tool calls than these in one message are folded."""
_LONG_CHARACTERS, _LONG_LINES = 2000, 30
"""Longer texts are folded."""


def conversation_text(
    messages: Sequence[Message],
    *,
    title: str = "",
    facts: Mapping[str, str] | None = None,
    width: int = 88,
) -> str:
    """Return a conversation as plain text.

    Args:
        messages: The conversation.
        title: A first line.
        facts: Lines ``name: value`` under the title.
        width: Columns to wrap at.
    """
    blocks = [title] if title else []
    if facts:
        blocks.append("   ".join(f"{name}: {value}" for name, value in facts.items()))
    blocks.extend(_message_text(message, width) for message in messages)
    return plain("\n\n".join(blocks)) + "\n"


def conversation_html(
    messages: Sequence[Message],
    *,
    title: str,
    facts: Mapping[str, str] | None = None,
    actions: Sequence[int] | None = None,
    rewards: Mapping[int, float] | None = None,
    forks: Mapping[int, str] | None = None,
    media_url: MediaUrl | None = None,
    back: str | None = None,
) -> str:
    """Return a conversation as one HTML file; see the module's promise.

    Args:
        messages: The conversation.
        title: The page's title.
        facts: What a line under the title tells, e.g. ``{"reward": "1.0"}``.
        actions: Which messages the policy said, by index; by default every assistant message.
        rewards: What such a message earned, by its index.
        forks: Why history was rewritten, by the index of the first message after it. The rewritten
            messages, up to the next action, are folded.
        media_url: Where a part lies, as a relative link; by default, and where it returns None,
            the page carries the part itself.
        back: A relative link to a page above this one.
    """
    told = "".join(
        f"<div><dt>{_escape(name)}</dt><dd>{_escape(value)}</dd></div>"
        for name, value in (facts or {}).items()
    )
    if actions is None:
        actions = [i for i, message in enumerate(messages) if isinstance(message, AssistantMessage)]
    writer = _Writer(actions, rewards or {}, media_url)
    body = writer.conversation(messages, forks or {})
    up = f'<nav><a href="{_escape(back)}">All episodes</a></nav>' if back else ""
    return _page(title, body, facts=f"<dl>{told}</dl>", up=up, beside=media_url is not None)


def table_page_head(title: str, columns: Sequence[str]) -> str:
    """Return the beginning of a page with one table; rows are appended behind it.

    HTML lets a page end where its rows end: a table that grows is a file that is appended to.
    """
    heads = "".join(f"<th>{_escape(name)}</th>" for name in columns)
    page = _page(title, "<!--rows-->").partition("<!--rows-->")[0]
    return f"{page}<table><thead><tr>{heads}</tr></thead><tbody>\n"


def table_row(cells: Sequence[str], *, link: str | None = None) -> str:
    """Return a row for a page that :func:`table_page_head` began; the first cell is the link."""
    first, *rest = (_escape(cell) for cell in cells)
    if link is not None:
        first = f'<a href="{_escape(link)}">{first}</a>'
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in (first, *rest)) + "</tr>\n"


def episode_text(episode: Episode, *, width: int = 88) -> str:
    """Return an episode's conversation, task, reward and end as plain text."""
    title = f"{episode.env_id} · task {episode.task_id}"
    return conversation_text(
        episode.messages, title=title, facts=episode_facts(episode), width=width
    )


def episode_html(episode: Episode) -> str:
    """Return an episode's conversation, task, reward and end as one HTML file."""
    title = f"{episode.env_id} · task {episode.task_id}"
    return conversation_html(episode.messages, title=title, facts=episode_facts(episode))


def episode_facts(episode: Episode) -> dict[str, str]:
    """Return what a reader of an episode wants to know first, as ``{name: value}``."""
    facts = {"reward": f"{episode.reward:g}", "ended": episode.status.value.replace("_", " ")}
    if episode.detail:
        facts["because"] = episode.detail
    facts["turns"] = str(len(episode.turns))
    facts["sampled tokens"] = str(episode.sampled_tokens)
    facts |= {name.replace("_", " "): f"{value:g}" for name, value in episode.metrics.items()}
    return facts


def call_text(call: ToolCall) -> str:
    """Return a tool call as a person would write it: ``name(argument=value)``."""
    if call.error is not None:
        return f"{call.name or 'call'}: could not be read: {call.error}"
    if not call.name:
        return "(a call that could not be read)"
    items = call.arguments.items()
    return f"{call.name}({', '.join(f'{name}={_value(value)}' for name, value in items)})"


def plain(text: str) -> str:
    """Return text with control characters and text-direction overrides made visible."""
    return _CONTROL.sub(_visible, text)


def _visible(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def _value(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _media_note(part: Image | Audio | Video) -> str:
    return f"[{_KINDS[type(part)]}: {part.mime}, {len(part.data):,} bytes]"


def _heading(message: Message) -> str:
    return f"{message.role} · {message.name}" if message.name else message.role


def _message_text(message: Message, width: int) -> str:
    lines: list[str] = []
    if isinstance(message, AssistantMessage) and message.reasoning:
        lines += ["(thinking)", message.reasoning, "(/thinking)"]
    lines += [p.text if isinstance(p, Text) else _media_note(p) for p in message.content]
    if isinstance(message, AssistantMessage):
        lines += [f"→ {call_text(call)}" for call in message.tool_calls]
        if message.finish_reason != "stop":
            lines.append(f"(cut off: {message.finish_reason})")
    body = "\n".join(lines) or "(empty)"
    return f"── {_heading(message)} ──\n{_wrap(body, width)}"


def _wrap(text: str, width: int) -> str:
    lines = [
        textwrap.fill(
            line,
            width,
            initial_indent="  ",
            subsequent_indent="  ",
            replace_whitespace=False,
            drop_whitespace=False,
            break_on_hyphens=False,
        )
        for line in text.split("\n")
    ]
    return "\n".join(line.rstrip() for line in lines)


def _escape(text: str) -> str:
    return html.escape(plain(text))


class _Writer:
    """Writes messages as HTML: with rewards, forks, and links to media that lie beside the page."""

    def __init__(
        self, actions: Sequence[int], rewards: Mapping[int, float], media_url: MediaUrl | None
    ) -> None:
        self._turns = {index: turn for turn, index in enumerate(actions, 1)}
        self._rewards = rewards
        self._media_url = media_url or (lambda part: None)

    def conversation(self, messages: Sequence[Message], forks: Mapping[int, str]) -> str:
        """Return all messages, one section each; those of a rewritten history are folded."""
        out, index = [], 0
        while index < len(messages):
            if index not in forks:
                out.append(self._section(index, messages[index]))
                index += 1
                continue
            stops = (i for i in range(index + 1, len(messages)) if i in self._turns or i in forks)
            end = next(stops, len(messages))
            inner = "\n".join(self._section(i, messages[i]) for i in range(index, end))
            seen = f"what the model sees from here on: {end - index} messages"
            out.append(
                f'<div class="fork">History was rewritten: {_escape(forks[index])}'
                f"{_folded(seen, inner)}</div>"
            )
            index = end
        return "\n".join(out)

    def _section(self, index: int, message: Message) -> str:
        inner = self._inner(message) or '<p class="note">empty</p>'
        role = _escape(message.role)
        return f'<section class="{role}"><h2>{self._head(index, message)}</h2>{inner}</section>'

    def _head(self, index: int, message: Message) -> str:
        head = _escape(_heading(message))
        if index in self._turns:
            head += f' <span class="turn">turn {self._turns[index]}</span>'
        reward = self._rewards.get(index)
        if reward is not None and reward != 0:
            sign = "good" if reward > 0 else "poor"
            head += f' <span class="{sign}">reward {reward:+g}</span>'
        return head

    def _inner(self, message: Message) -> str:
        inner = ""
        if isinstance(message, AssistantMessage) and message.reasoning:
            inner += _folded("thinking", _paragraph(message.reasoning))
        inner += "".join(self._part(part) for part in message.content)
        if not isinstance(message, AssistantMessage):
            return inner
        calls = [_call_html(call) for call in message.tool_calls]
        if len(calls) > _MANY_CALLS:
            names = Counter(call.name or "?" for call in message.tool_calls)
            what = ", ".join(f"{name} × {n}" if n > 1 else name for name, n in names.items())
            inner += _folded(f"{len(calls)} tool calls: {what}", "".join(calls))
        else:
            inner += "".join(calls)
        if message.finish_reason != "stop":
            inner += f'<p class="note">cut off: {_escape(message.finish_reason)}</p>'
        return inner

    def _part(self, part: Part) -> str:
        if isinstance(part, Text):
            return _text_html(part.text)
        match = _MIME.fullmatch(part.mime)
        if match is None or match[1] != _KINDS[type(part)]:
            return f'<p class="note">{_escape(_media_note(part))}</p>'
        link = self._media_url(part)
        url = part.data_url() if link is None else _escape(link)
        if isinstance(part, Image):
            return f'<img src="{url}" alt="{_escape(_media_note(part))}">'
        return f'<{match[1]} controls src="{url}"></{match[1]}>'


def _paragraph(text: str) -> str:
    return f"<p>{_escape(text)}</p>"


def _folded(summary: str, inner: str) -> str:
    """Return something that opens on a click."""
    return f"<details><summary>{_escape(summary)}</summary>{inner}</details>"


def _text_html(text: str) -> str:
    lines = text.count("\n") + 1
    if len(text) <= _LONG_CHARACTERS and lines <= _LONG_LINES:
        return _paragraph(text)
    begin = " ".join(text[:200].split())[:80]
    return _folded(f"{begin}… ({len(text):,} characters, {lines:,} lines)", _paragraph(text))


def _call_html(call: ToolCall) -> str:
    if call.error is not None:
        return f'<p class="call bad">{_escape(call_text(call))}</p>'
    shown = call_text(call)
    if len(shown) <= 100:
        return f'<p class="call">{_escape(shown)}</p>'
    arguments = json.dumps(call.arguments, ensure_ascii=False, indent=2, default=str)
    inner = f"<pre>{_escape(_readable(call.arguments, arguments))}</pre>"
    if arguments.count("\n") <= _LONG_LINES and len(arguments) <= _LONG_CHARACTERS:
        return f'<div class="call"><b>{_escape(call.name)}</b>{inner}</div>'
    return f'<div class="call">{_folded(f"{shown[:80]}…", inner)}</div>'


def _readable(arguments: Mapping[str, object], otherwise: str) -> str:
    """Show a long text argument, such as a program, with its line breaks."""
    texts = [value for value in arguments.values() if isinstance(value, str)]
    if not any("\n" in text for text in texts):
        return otherwise
    shown = (
        f"{name}:\n{textwrap.indent(value, '  ')}"
        if isinstance(value, str) and "\n" in value
        else f"{name}: {_value(value)}"
        for name, value in arguments.items()
    )
    return "\n".join(shown)


def _page(title: str, body: str, *, facts: str = "", up: str = "", beside: bool = False) -> str:
    """Fill the page in; ``beside``: media may come from files beside it."""
    return _PAGE.format(
        title=_escape(title),
        style=_STYLE,
        facts=facts,
        body=body,
        up=up,
        beside=" 'self' file:" if beside else "",
    )


_STYLE = """
:root { color-scheme: light dark; --line: #d8dbe0; --soft: #f4f5f7; --ink: #1c2024;
  --dim: #646c76; --page: #fff; --user: #3b6fd4; --assistant: #12805c; --tool: #a86a12;
  --bad: #c2410c; }
@media (prefers-color-scheme: dark) { :root { --line: #333a42; --soft: #1d2227; --ink: #e6e8eb;
  --dim: #98a1ab; --page: #14171a; --user: #7aa5f5; --assistant: #4fc296; --tool: #dba04b;
  --bad: #f0824f; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.25rem; margin: 0 0 .75rem; overflow-wrap: anywhere; }
a { color: var(--user); } nav { font-size: .875rem; margin-bottom: .5rem; }
dl { display: flex; flex-wrap: wrap; gap: .25rem 1.5rem; margin: 0 0 1.5rem; }
dt { font-size: .75rem; color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; }
section { border-left: 3px solid var(--line); padding: .1rem 0 .1rem 1rem; margin: 1rem 0; }
section.user { border-color: var(--user); } section.assistant { border-color: var(--assistant); }
section.tool { border-color: var(--tool); margin-left: 1rem; }
h2 { font-size: .8rem; font-weight: 600; color: var(--dim); margin: 0 0 .25rem; }
.turn { font-weight: 400; margin-left: .5rem; } .good, .poor { margin-left: .5rem; }
.good { color: var(--assistant); } .poor { color: var(--bad); }
p, pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .25rem 0; }
.call, pre { font: .875rem/1.5 ui-monospace, monospace; }
.call { background: var(--soft); border: 1px solid var(--line); border-radius: 6px;
  padding: .4rem .6rem; } .bad { border-color: var(--bad); }
details { margin: .25rem 0; } summary { cursor: pointer; overflow-wrap: anywhere; }
.note, summary { color: var(--dim); font-size: .875rem; }
.fork { border-top: 1px dashed var(--dim); color: var(--dim); font-size: .875rem;
  margin: 1.5rem 0; padding: .25rem 0; border-bottom: 1px dashed var(--dim); }
.fork section { color: var(--ink); font-size: 1rem; }
img, video { display: block; max-width: 100%; max-height: 30rem; margin: .5rem 0;
  border-radius: 6px; }
audio { display: block; width: 100%; margin: .5rem 0; }
table { border-collapse: collapse; font-size: .875rem; width: 100%;
  font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--dim); font-weight: 500; }
th, td { padding: .3rem .75rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:{beside}; \
media-src data:{beside}; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{up}
<h1>{title}</h1>
{facts}
{body}
</body>
</html>
"""

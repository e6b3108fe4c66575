"""One conversation as a page: self-contained HTML, or text for a terminal.

Everything shown comes from a model, a tool or a data set, so nothing of it is trusted. HTML is
escaped, carries a policy that forbids scripts and the network, and shows media only as data URLs
of their own kind. Text loses its control characters, which could otherwise rewrite the terminal.
"""

from __future__ import annotations

import html
import json
import re
import textwrap
from collections.abc import Mapping, Sequence

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
    messages: Sequence[Message], *, title: str, facts: Mapping[str, str] | None = None
) -> str:
    """Return a conversation as one HTML file that needs nothing else; see the module's promise.

    Args:
        messages: The conversation.
        title: The page's title.
        facts: What a line under the title tells, e.g. ``{"reward": "1.0"}``.
    """
    told = "".join(
        f"<div><dt>{_escape(name)}</dt><dd>{_escape(value)}</dd></div>"
        for name, value in (facts or {}).items()
    )
    body = "\n".join(_message_html(message) for message in messages)
    return _PAGE.format(title=_escape(title), style=_STYLE, facts=told, body=body)


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


def _message_html(message: Message) -> str:
    inner = ""
    if isinstance(message, AssistantMessage) and message.reasoning:
        inner += f"<details><summary>thinking</summary>{_paragraph(message.reasoning)}</details>"
    inner += "".join(_part_html(part) for part in message.content)
    if isinstance(message, AssistantMessage):
        inner += "".join(_call_html(call) for call in message.tool_calls)
        if message.finish_reason != "stop":
            inner += f'<p class="note">cut off: {_escape(message.finish_reason)}</p>'
    inner = inner or '<p class="note">empty</p>'
    role = _escape(message.role)
    return f'<section class="{role}"><h2>{_escape(_heading(message))}</h2>{inner}</section>'


def _paragraph(text: str) -> str:
    return f"<p>{_escape(text)}</p>"


def _part_html(part: Part) -> str:
    if isinstance(part, Text):
        return _paragraph(part.text)
    match = _MIME.fullmatch(part.mime)
    if match is None or match[1] != _KINDS[type(part)]:
        return f'<p class="note">{_escape(_media_note(part))}</p>'
    url = part.data_url()
    if isinstance(part, Image):
        return f'<img src="{url}" alt="{_escape(_media_note(part))}">'
    return f'<{match[1]} controls src="{url}"></{match[1]}>'


def _call_html(call: ToolCall) -> str:
    if call.error is not None:
        return f'<p class="call bad">{_escape(call_text(call))}</p>'
    arguments = json.dumps(call.arguments, ensure_ascii=False, indent=2, default=str)
    shown = call_text(call)
    if len(shown) > 100:
        name = _escape(call.name)
        return f'<div class="call"><b>{name}</b><pre>{_escape(arguments)}</pre></div>'
    return f'<p class="call">{_escape(shown)}</p>'


_STYLE = """
:root { color-scheme: light dark; --line: #d8dbe0; --soft: #f4f5f7; --ink: #1c2024;
  --dim: #68707a; --page: #fff; --user: #3b6fd4; --assistant: #12805c; --tool: #a86a12; }
@media (prefers-color-scheme: dark) { :root { --line: #333a42; --soft: #1d2227; --ink: #e6e8eb;
  --dim: #98a1ab; --page: #14171a; --user: #7aa5f5; --assistant: #4fc296; --tool: #dba04b; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.25rem; margin: 0 0 .75rem; overflow-wrap: anywhere; }
dl { display: flex; flex-wrap: wrap; gap: .25rem 1.5rem; margin: 0 0 1.5rem; }
dt { font-size: .75rem; color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; }
section { border-left: 3px solid var(--line); padding: .1rem 0 .1rem 1rem; margin: 1rem 0; }
section.user { border-color: var(--user); } section.assistant { border-color: var(--assistant); }
section.tool { border-color: var(--tool); }
h2 { font-size: .8rem; font-weight: 600; color: var(--dim); margin: 0 0 .25rem; }
p, pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .25rem 0; }
.call, pre { font: .875rem/1.5 ui-monospace, monospace; }
.call { background: var(--soft); border: 1px solid var(--line); border-radius: 6px;
  padding: .4rem .6rem; } .bad { border-color: #c2410c; }
.note, summary { color: var(--dim); font-size: .875rem; }
img, video { display: block; max-width: 100%; margin: .5rem 0; border-radius: 6px; }
audio { display: block; width: 100%; margin: .5rem 0; }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; \
media-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
<dl>{facts}</dl>
{body}
</body>
</html>
"""

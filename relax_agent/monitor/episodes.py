"""Two episodes of the same task side by side: what the model did before training and after.

What both were asked stands once, above. Below it each column tells what the model said, which tools
it called (→), what came back (←), and how it ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from relax_agent.episode import Episode
from relax_agent.messages import AssistantMessage, Message
from relax_agent.messages import Text as TextPart
from relax_agent.pages import call_text, plain

_NARROW = 80
_STUCK = "\u00a0"
"""A space that no line is broken at."""


def before_after(before: Episode, after: Episode, *, width: int = 100) -> RenderableType:
    """Return two episodes for a terminal, side by side, or one below the other if it is narrow.

    Args:
        before: What happened before training.
        after: The same task after training.
        width: Columns of the terminal.
    """
    shared = _shared_start(before.messages, after.messages)
    asked = [message for message in before.messages[:shared] if message.role != "system"]
    panels = [
        _panel("before training", before, shared),
        _panel("after training", after, shared),
    ]
    head = [_message(message) for message in asked]
    if width < _NARROW:
        return Group(*head, *panels)
    columns = Table.grid(padding=(0, 1), expand=True)
    columns.add_column(ratio=1)
    columns.add_column(ratio=1)
    columns.add_row(*panels)
    return Group(*head, columns)


def conversation(messages: Sequence[Message]) -> RenderableType:
    """Return a conversation for a terminal. Nothing in it is read as markup."""
    return Group(*(_message(message) for message in messages))


def _shared_start(first: Sequence[Message], second: Sequence[Message]) -> int:
    """Return how many messages both begin with, up to the first that a model wrote."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other or isinstance(one, AssistantMessage):
            break
        count += 1
    return count


def _panel(title: str, episode: Episode, skip: int) -> Panel:
    body = Group(*(_message(message) for message in episode.messages[skip:]), _end(episode))
    return Panel(body, title=title, title_align="left", box=box.ROUNDED, border_style="dim")


def _end(episode: Episode) -> Text:
    good = episode.metrics.get("success", episode.reward) > 0
    words = f"reward {episode.reward:g}, {episode.status.value.replace('_', ' ')}"
    if episode.detail:
        words += f": {episode.detail}"
    return Text(plain(words), style="green" if good else "red")


def _message(message: Message) -> Text:
    if isinstance(message, AssistantMessage):
        return _said(message)
    if message.role == "tool":
        return Text(f"←{_STUCK}{_content(message)}", style="yellow")
    return Text.assemble((f"{plain(message.role)}  ", "dim"), _content(message))


def _said(message: AssistantMessage) -> Text:
    lines = []
    if message.reasoning:
        lines.append((plain(message.reasoning), "dim italic"))
    if message.content:
        lines.append((_content(message), ""))
    lines += [(f"→{_STUCK}{plain(call_text(call))}", "cyan") for call in message.tool_calls]
    if message.finish_reason != "stop":
        lines.append((f"(cut off: {plain(message.finish_reason)})", "red"))
    text = Text()
    for number, (words, style) in enumerate(lines or [("(nothing)", "dim")]):
        text.append("\n" if number else "")
        text.append(words, style)
    return text


def _content(message: Message) -> str:
    return plain(
        " ".join(
            part.text if isinstance(part, TextPart) else f"[{part.mime}, {len(part.data):,} bytes]"
            for part in message.content
        )
    )

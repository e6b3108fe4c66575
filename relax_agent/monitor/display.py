"""What a run shows while it goes: a live view on a terminal, plain lines elsewhere, or nothing.

All displays are given one :class:`RunView`, which collects what the run has told so far and derives
from it what people want to know (speed, time left). They only differ in how they show it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from relax_agent.monitor.words import duration, rough_duration, shares, sparkline
from relax_agent.pages import plain

TRAINING = "training"
"""The phase in which steps are counted."""

_RECENT = 10
_PLAIN_EVERY_S = 10.0


@dataclass
class RunView:
    """What a run has told so far."""

    name: str
    total_steps: int
    clock: Callable[[], float] = time.monotonic
    started: float = 0.0
    phase: str = "starting"
    """What the run is doing; see :data:`TRAINING`."""
    done: int = 0
    """How much of the phase is done."""
    total: int = 0
    """How much the phase has to do; 0 if that is unknown."""
    steps: list[Mapping[str, Any]] = field(default_factory=list)
    """The metrics of every step of this process, in order."""
    evals: list[tuple[int, float]] = field(default_factory=list)
    """Greedy success on held-out tasks as ``(step, success)``."""
    in_flight: int | None = None
    """Episodes that are being sampled now."""

    def __post_init__(self) -> None:
        self.started = self.clock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return self.clock() - self.started

    @property
    def step(self) -> int:
        """The last finished step."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    def recent(self, name: str) -> float | None:
        """Return the mean of a metric over the last steps; None if it was not told."""
        values = [row[name] for row in self.steps[-_RECENT:] if row.get(name) is not None]
        return sum(values) / len(values) if values else None

    def tokens_per_s(self) -> float | None:
        """Return sampled tokens trained on per second of the last steps."""
        tokens, seconds = self.recent("tokens"), self.recent("wall_s")
        return tokens / seconds if tokens is not None and seconds else None

    def left_s(self) -> float | None:
        """Return the seconds that the remaining steps will take at the pace of the last ones."""
        seconds = self.recent("wall_s")
        return None if seconds is None else seconds * max(0, self.total_steps - self.step)


class Display(Protocol):
    """Shows a view."""

    def update(self) -> None:
        """Tell that the view has changed."""

    def step(self) -> None:
        """Tell that another step is done."""

    def print(self, what: RenderableType) -> None:
        """Show something once, above whatever is shown all the time."""

    def close(self) -> None:
        """Leave the terminal as it was, with the last state on it. Idempotent."""


class QuietDisplay:
    """Shows nothing."""

    def update(self) -> None:
        """Do nothing."""

    def step(self) -> None:
        """Do nothing."""

    def print(self, what: RenderableType) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class PlainDisplay:
    """Writes a line a step, and now and then one about a long phase before it."""

    def __init__(self, view: RunView, console: Console) -> None:
        self._view = view
        self._console = console
        self._phase = ""
        self._last = 0.0

    def update(self) -> None:
        """Write a line if the phase is new, or has gone on for long enough."""
        view, now = self._view, self._view.clock()
        if view.phase == TRAINING and view.phase == self._phase:
            return
        if view.phase != self._phase or now - self._last >= _PLAIN_EVERY_S:
            self._phase, self._last = view.phase, now
            self._write(f"{duration(view.elapsed_s):>12}  {view.phase}{_of(view)}")

    def step(self) -> None:
        """Write the step's line."""
        self._phase = TRAINING
        self._write(step_line(self._view))

    def print(self, what: RenderableType) -> None:
        """Write it."""
        self._console.print(what)

    def close(self) -> None:
        """Do nothing: every line was written when it came."""

    def _write(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


class LiveDisplay:
    """Keeps a few lines at the bottom of a terminal up to date, a few times a second."""

    def __init__(self, view: RunView, console: Console) -> None:
        self._view = view
        self._live = Live(
            get_renderable=lambda: live_view(view, console.width),
            console=console,
            refresh_per_second=4,
        )
        self._live.start()

    def update(self) -> None:
        """Do nothing: the view is looked at again in a moment."""

    def step(self) -> None:
        """Do nothing: the view is looked at again in a moment."""

    def print(self, what: RenderableType) -> None:
        """Print above the live lines."""
        self._live.console.print(what)

    def close(self) -> None:
        """Draw the last state and stop."""
        self._live.stop()


def make_display(view: RunView, console: Console, *, quiet: bool) -> Display:
    """Return the display that suits the console."""
    if quiet:
        return QuietDisplay()
    return LiveDisplay(view, console) if console.is_terminal else PlainDisplay(view, console)


def step_line(view: RunView) -> str:
    """Return one line about the last step."""
    row = view.steps[-1]
    parts = [f"step {view.step:>{len(str(view.total_steps))}}/{view.total_steps}"]
    for name, label, form in _LINE:
        if row.get(name) is not None:
            parts.append(f"{label} {row[name]:{form}}")
    if row.get("staleness_mean") is not None:
        parts.append(f"staleness {row['staleness_mean']:.2f}, most {row['staleness_max']}")
    if row.get("skipped"):
        parts.append(f"no update: {plain(str(row['skipped']))}")
    if row.get("wall_s") is not None:
        parts.append(f"{row['wall_s']:.1f} s")
    left = view.left_s()
    if left:
        parts.append(f"{rough_duration(left)} left")
    return "  ".join(parts)


_LINE = [
    ("success", "success", ".3f"),
    ("reward", "reward", ".3f"),
    ("loss", "loss", "+.4f"),
    ("grad_norm", "grad norm", ".3f"),
    ("logprob_mismatch", "mismatch", ".1e"),
]


def live_view(view: RunView, width: int) -> RenderableType:
    """Return the lines of the live display for a terminal of ``width`` columns."""
    table = Table.grid(padding=(0, 2), expand=False)
    table.add_column(style="dim", width=10, no_wrap=True)
    table.add_column(ratio=1)
    room = max(10, min(width, 100) - 16)
    for label, content in _rows(view, room):
        table.add_row(label, content)
    return Padding(Group(_headline(view), table), (1, 0, 0, 1))


def _headline(view: RunView) -> Text:
    return Text.assemble((view.name, "bold"), ("  " + duration(view.elapsed_s), "dim"))


def _rows(view: RunView, room: int) -> Sequence[tuple[str, RenderableType]]:
    rows: list[tuple[str, RenderableType]] = []
    if view.phase == TRAINING:
        left = view.left_s()
        note = f"{view.step}/{view.total_steps}"
        if left:
            note += f", {rough_duration(left)} left"
        rows.append(("step", _bar(view.step, view.total_steps, note, room)))
    else:
        rows.append(("now", _bar(view.done, view.total, f"{view.phase}{_of(view)}", room)))
    rows.extend(_learning(view, room))
    rows.extend(_machinery(view))
    return rows


def _learning(view: RunView, room: int) -> list[tuple[str, RenderableType]]:
    rows: list[tuple[str, RenderableType]] = []
    success = view.recent("success")
    if success is not None:
        course = [float(row["success"]) for row in view.steps if row.get("success") is not None]
        line = Text.assemble(
            (f"{success:.2f}  ", "bold"), (sparkline(course, min(40, room - 26)), "green")
        )
        if len(course) > 1:
            line.append(f"  mean of {min(_RECENT, len(course))} steps", "dim")
        rows.append(("success", line))
    reward = view.recent("reward")
    if reward is not None:
        rows.append(("reward", Text(f"{reward:.2f}")))
    if view.evals:
        told = " → ".join(f"{value:.2f}" for _, value in view.evals)
        rows.append(("held out", Text.assemble(told, ("  greedy", "dim"))))
    return rows


def _machinery(view: RunView) -> list[tuple[str, RenderableType]]:
    rows: list[tuple[str, RenderableType]] = []
    speed = view.tokens_per_s()
    parts = [] if speed is None else [f"{speed:,.0f} tokens/s"]
    if view.in_flight is not None:
        parts.append(f"{view.in_flight} episodes in flight")
    if parts:
        rows.append(("speed", Text(" · ".join(parts))))
    if view.steps and view.steps[-1].get("staleness_mean") is not None:
        last = view.steps[-1]
        words = f"mean {last['staleness_mean']:.2f}, most {last['staleness_max']}"
        rows.append(("staleness", Text(words)))
    split = shares(view.steps[-1].get("time_s") or {}, least=0.03) if view.steps else ""
    if split:
        rows.append(("time", Text(split)))
    return rows


def _bar(done: int, total: int, note: str, room: int) -> RenderableType:
    if total <= 0 or room < len(note) + 10:
        return Text(note)
    grid = Table.grid(padding=(0, 2))
    width = min(30, room - len(note) - 2)
    bar = ProgressBar(total, done, width=width, complete_style="green", finished_style="green")
    grid.add_row(bar, Text(note))
    return grid


def _of(view: RunView) -> str:
    return f" {view.done}/{view.total}" if view.total else ""

"""An evaluation as people see it: a bar while it runs, a table at the end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from relax_agent.envs.evaluation import UNASKED, EvalJob, EvalReport, is_success
from relax_agent.envs.playing import Play


class EvalDisplay:
    """A bar with the success so far, on standard error; nothing where ``quiet``."""

    def __init__(self, title: str, total: int, *, quiet: bool = False) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("success {task.fields[success]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=quiet,
        )
        self._bar = self._progress.add_task(title, total=total, success="–")
        self._asked = self._good = self._unasked = 0

    def add(self, job: EvalJob, play: Play) -> None:
        """Count one episode."""
        if play.status in UNASKED:
            self._unasked += 1
        else:
            self._asked += 1
            self._good += is_success(play)
        shown = f"{self._good / self._asked:.2f}" if self._asked else "–"
        if self._unasked:
            shown += f", {self._unasked} could not be asked"
        self._progress.update(self._bar, advance=1, success=shown)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()


def report_table(report: EvalReport, *, title: str, folder: Path | None = None) -> None:
    """Print a report.

    Args:
        report: The report.
        title: A line above it.
        folder: Where the episodes lie, for the last line.
    """
    console = Console()
    console.print(title, style="italic", highlight=False)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows(report).items():
        table.add_row(name, value)
    console.print(table)
    if folder is not None:
        page = folder / "index.html"
        console.print(f"episodes: {page if page.exists() else folder}", highlight=False)


def rows(report: EvalReport) -> dict[str, str]:
    """Return what the table tells, in its order."""
    told = {"episodes": f"{report.episodes} of {report.tasks} tasks"}
    if report.unasked:
        told["not asked"] = f"{report.unasked}: run it again to play them"
    if report.success is not None:
        told["success"] = str(report.success)
    if len(report.pass_at) > 1:
        told["pass@k"] = _by_k(report.pass_at)
        told["pass^k"] = _by_k(report.pass_all)
    if report.reward is not None:
        told["reward"] = str(report.reward)
    told |= {name.replace("_", " "): str(mean) for name, mean in report.metrics.items()}
    if report.episodes:
        told.setdefault("turns", f"{report.turns:.2f}")
        told["tokens"] = f"{report.prompt_tokens:.0f} in, {report.completion_tokens:.0f} out"
    told["ended"] = ", ".join(
        f"{count} {status.replace('_', ' ')}" for status, count in report.statuses.items()
    )
    if report.details:
        told["because"] = "\n".join(f"{n} × {words}" for words, n in report.details.items())
    told["time"] = f"{report.duration_s:.1f} s"
    return told


def _by_k(values: Mapping[int, float]) -> str:
    return "   ".join(f"{k}: {value:.3f}" for k, value in values.items())

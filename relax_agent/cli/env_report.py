"""A check's report as a table for people."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from relax_agent.cli.env_table import print_plainly
from relax_agent.envs.checking import Report
from relax_agent.pages import plain

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
_WORDS = {"ok": "ok", "warn": "warning", "fail": "FAILED", "skip": "not done"}


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], object]]:
    """Show on a terminal which check runs; silent where nobody looks."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda name: None
        return
    with console.status("building") as status:
        yield lambda name: status.update(f"checking: {name}")


def print_report(report: Report) -> None:
    """Print what a check found; whole lines where the output goes to a file or a pipe."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column()
    for row in report:
        message = Text(plain(row.message))
        if row.where:
            message.append(f"  {plain(row.where)}", style="dim")
        style = _STYLES[row.status]
        table.add_row(Text(row.check), Text(_WORDS[row.status], style), message)
    style = "bold red" if report.failures else "yellow" if report.warnings else "green"
    print_plainly(table, Text(f"{report.env}: {report.summary()}", style))

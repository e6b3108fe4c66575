"""The table in docs/errors.md as data, and the check that an error was told as it says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from relax_agent import errors

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"


@dataclass(frozen=True)
class Row:
    """One way to go wrong."""

    error: type[errors.RelaxError]
    statuses: tuple[int, ...]


def table():
    """Return ``{what is wrong: Row}``."""
    cells = re.findall(r"^\| (.+?) \| `(\w+)` \| .+ \| ([\d, ]+) \|$", PAGE.read_text(), re.M)
    return {
        words: Row(getattr(errors, name), tuple(map(int, statuses.split(","))))
        for words, name, statuses in cells
    }


def told(words, status, err):
    """Check how a program ended and what it said; return the last line of standard error."""
    row = table()[words]
    assert status in row.statuses, f"status {status}: {err}"
    assert "Traceback" not in err, err
    line = err.rstrip("\n").split("\n")[-1]
    assert re.match(r"error: \S", line), err
    return line


def told_by(words, error):
    """Check an error itself against its row; return its words."""
    row = table()[words]
    assert type(error) is row.error
    assert error.exit_code in row.statuses
    assert "\n" not in str(error)
    return str(error)

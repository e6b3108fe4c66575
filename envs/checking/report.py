"""What a check found: rows that say what to change, and where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from relax_agent.errors import EnvCheckFailed

Status: TypeAlias = Literal["ok", "warn", "fail", "skip"]
_WORDS = {"ok": "ok", "warn": "warning", "fail": "FAILED", "skip": "not checked"}


@dataclass(frozen=True, slots=True)
class Row:
    """One finding of one check."""

    check: str
    """The check's name, such as ``seed``."""
    status: Status
    """``ok``; ``warn`` for what should be changed; ``fail`` for what must be; ``skip`` if it could
    not be checked.
    """
    message: str
    """What is wrong and what to do, or what was seen."""
    where: str = ""
    """The place in the author's code, ``file:line``, where it is known."""


@dataclass(slots=True)
class Report:
    """All rows about one environment."""

    env: str
    """The environment's id, or its class."""
    rows: list[Row] = field(default_factory=list)
    duration_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing failed; warnings do not count."""
        return not self.failures

    @property
    def failures(self) -> list[Row]:
        """What must be changed."""
        return [row for row in self.rows if row.status == "fail"]

    @property
    def warnings(self) -> list[Row]:
        """What should be changed."""
        return [row for row in self.rows if row.status == "warn"]

    def require(self, *, warnings: bool = False) -> Report:
        """Return this report, or raise EnvCheckFailed with all that is wrong.

        Args:
            warnings: Whether warnings count as failures.
        """
        bad = [*self.failures, *(self.warnings if warnings else ())]
        if bad:
            raise EnvCheckFailed(self.env, [_sentence(row) for row in bad])
        return self

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "env": self.env,
            "ok": self.ok,
            "duration_s": round(self.duration_s, 3),
            "rows": [asdict(row) for row in self.rows],
        }

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __str__(self) -> str:
        width = max((len(row.check) for row in self.rows), default=0)
        lines = [f"{row.check:{width}}  {_WORDS[row.status]:11}  {_told(row)}" for row in self.rows]
        return "\n".join([f"{self.env}: {self.summary()}", *lines])

    def summary(self) -> str:
        """Return how it went in one line."""
        counts = {status: sum(row.status == status for row in self.rows) for status in _WORDS}
        parts = [f"{counts['ok']} checks ok"]
        parts += [f"{counts['fail']} failed"] if counts["fail"] else []
        if counts["warn"]:
            parts.append(f"{counts['warn']} warning{'s' if counts['warn'] > 1 else ''}")
        parts += [f"{counts['skip']} not done"] if counts["skip"] else []
        return f"{', '.join(parts)} in {self.duration_s:.1f} s"


class Findings:
    """Where one check puts what it finds. Without a finding it is ok."""

    def __init__(self, check: str, fine: str) -> None:
        self._check = check
        self._fine = fine
        self._rows: list[Row] = []

    def fail(self, message: str, where: str = "") -> None:
        """Say what must be changed."""
        self._add("fail", message, where)

    def warn(self, message: str, where: str = "") -> None:
        """Say what should be changed."""
        self._add("warn", message, where)

    def skip(self, message: str) -> None:
        """Say why this was not checked."""
        self._add("skip", message, "")

    def seen(self, message: str) -> None:
        """Say what was seen where all is well, in place of the usual words."""
        self._fine = message

    def _add(self, status: Status, message: str, where: str) -> None:
        row = Row(self._check, status, message, where)
        if all((each.status, each.message) != (status, message) for each in self._rows):
            self._rows.append(row)

    @property
    def empty(self) -> bool:
        """Whether nothing is wrong so far."""
        return not self._rows

    def rows(self) -> Sequence[Row]:
        """Return the findings, or that all is well."""
        return self._rows or [Row(self._check, "ok", self._fine)]


def _told(row: Row) -> str:
    return f"{row.message} ({row.where})" if row.where else row.message


def _sentence(row: Row) -> str:
    return f"{row.check}: {_told(row)}"

"""The local queue's index: one SQLite row a group, so that a killed run knows where it was.

Write-ahead logging keeps every statement atomic and survives ``kill -9`` of the process. A power
cut could lose the last statements; :meth:`Index.flush` (an ``fsync`` of the log, done in a thread)
makes them durable where that matters: before a checkpoint relies on an ack. The file is locked for
as long as it is open: two runs cannot share a queue by mistake.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from relax_agent.errors import StorageError


class State(StrEnum):
    """Where a group is in its life."""

    RESERVED = "reserved"
    READY = "ready"
    LEASED = "leased"
    ACKED = "acked"
    COMMITTED = "committed"
    FILTERED = "filtered"
    DROPPED = "dropped"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Row:
    """One group as the index knows it."""

    number: int
    """Counts from 1 in the order of the starts; names the payload file."""
    id: str
    task_id: str
    state: State
    began: int
    """The step whose weights it began with."""
    step: int | None
    """The step that it was leased for, and trained by if it was; in the order ``place``."""
    place: int | None


_COLUMNS = "number, id, task_id, state, began, step, place"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    task_id TEXT NOT NULL,
    state TEXT NOT NULL,
    began INTEGER NOT NULL,
    step INTEGER,
    place INTEGER,
    detail TEXT NOT NULL DEFAULT ''
);
CREATE INDEX IF NOT EXISTS groups_by_state ON groups (state);
"""


class Index:
    """Rows of groups in one SQLite file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._guard():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                path, timeout=0.5, isolation_level=None, check_same_thread=False
            )
        try:
            with self._guard():
                self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = NORMAL")
                self._db.executescript(_SCHEMA)
        except StorageError:
            self._db.close()
            raise

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            hint = "another run uses this queue" if "locked" in str(error) else None
            raise StorageError(f"cannot use {self._path}: {error}", hint=hint) from error
        except (sqlite3.DatabaseError, OSError) as error:
            raise StorageError(f"cannot use {self._path}: {error}") from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._guard():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def add(self, group_id: str, task_id: str, began: int) -> int:
        """Insert a reserved group and return its number."""
        with self._transaction() as db:
            cursor = db.execute(
                "INSERT INTO groups (id, task_id, state, began) VALUES (?, ?, ?, ?)",
                (group_id, task_id, State.RESERVED, began),
            )
            number = cursor.lastrowid
        assert number is not None
        return number

    def set_state(self, numbers: Iterable[int], state: State, detail: str = "") -> None:
        """Move groups to another state; the step that they were leased for stays on record."""
        with self._transaction() as db:
            db.executemany(
                "UPDATE groups SET state = ?, detail = ? WHERE number = ?",
                [(state, detail, number) for number in numbers],
            )

    def lease(self, numbers: Sequence[int], step: int) -> None:
        """Move groups to ``leased`` for ``step``, in this order."""
        with self._transaction() as db:
            db.executemany(
                "UPDATE groups SET state = ?, step = ?, place = ? WHERE number = ?",
                [(State.LEASED, step, place, number) for place, number in enumerate(numbers)],
            )

    def ack(self, numbers: Sequence[int], step: int) -> None:
        """Move groups to ``acked`` by ``step``, in this order, after what it trained before."""
        with self._transaction() as db:
            (first,) = db.execute(
                "SELECT COUNT(*) FROM groups WHERE step = ? AND state = ?", (step, State.ACKED)
            ).fetchone()
            db.executemany(
                "UPDATE groups SET state = ?, step = ?, place = ? WHERE number = ?",
                [(State.ACKED, step, first + i, number) for i, number in enumerate(numbers)],
            )

    def commit(self, step: int) -> list[int]:
        """Make acks up to ``step`` final; return the numbers of those groups."""
        with self._transaction() as db:
            rows = db.execute(
                "UPDATE groups SET state = ? WHERE state = ? AND step <= ? RETURNING number",
                (State.COMMITTED, State.ACKED, step),
            ).fetchall()
        return [number for (number,) in rows]

    def delete(self, numbers: Iterable[int]) -> None:
        """Forget groups, as if they had never started."""
        with self._transaction() as db:
            db.executemany("DELETE FROM groups WHERE number = ?", [(n,) for n in numbers])

    def rows(self, *states: State) -> list[Row]:
        """Return the groups in these states (all, if none is named), in the order of the starts."""
        where = f"WHERE state IN ({', '.join('?' * len(states))})" if states else ""
        with self._guard():
            found = self._db.execute(
                f"SELECT {_COLUMNS} FROM groups {where} ORDER BY number", states
            ).fetchall()
        return [
            Row(n, i, t, State(s), began, step, place) for n, i, t, s, began, step, place in found
        ]

    def state_of(self, group_id: str) -> State | None:
        """Return the state of a group; None if it is unknown."""
        with self._guard():
            row = self._db.execute("SELECT state FROM groups WHERE id = ?", (group_id,)).fetchone()
        return None if row is None else State(row[0])

    def counts(self) -> dict[State, int]:
        """Return how many groups are in each state."""
        with self._guard():
            found = self._db.execute("SELECT state, COUNT(*) FROM groups GROUP BY state").fetchall()
        return {State(state): count for state, count in found}

    def flush(self) -> None:
        """Put everything written so far on the disk; may run in another thread."""
        for path in (self._path.with_name(self._path.name + "-wal"), self._path):
            try:
                handle = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                continue
            try:
                os.fsync(handle)
            except OSError as error:
                raise StorageError(f"cannot flush {path}: {error.strerror}") from error
            finally:
                os.close(handle)

    def close(self) -> None:
        """Close the file and give up its lock."""
        self._db.close()

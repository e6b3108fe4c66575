"""Ready-made SQL: ``sql`` and ``schema`` over an SQLite database that nothing can change.

    database = SqlDatabase.open("shop.sqlite")            # a file, opened read-only
    database = SqlDatabase.build(lambda db: db.executescript(SCRIPT))    # in memory
    env = MyEnv(tools=database.toolset())

A model's query meets three guards. SQLite itself refuses what is not a read (read-only file,
``query_only``, an authorizer that knows SELECT and nothing else: no ATTACH, no extension, no PRAGMA
but those that describe tables). Size limits keep values, statements and results small. And a
deadline that SQLite's progress handler watches ends what runs too long, such as a recursion without
an end. Every database has one connection in one thread of its own, so a slow query delays nobody
else. Whatever goes wrong is told to the model in words that it can act on.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import re
import sqlite3
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from relax_agent.errors import ConfigError, ToolError, ToolErrorKind
from relax_agent.threads import Worker
from relax_agent.tools.declaration import tool
from relax_agent.tools.toolset import Toolset

Rows: TypeAlias = tuple[list[str], list[tuple[Any, ...]]]
Builder: TypeAlias = Callable[[sqlite3.Connection], object]
"""Fills a new database; runs in the database's thread, before the guards are up."""

_DESCRIBING = ("table_info", "table_xinfo", "table_list",
               "foreign_key_list", "index_list", "index_info")  # fmt: skip
_TABLE_FUNCTIONS = [*(f"pragma_{name}" for name in _DESCRIBING), "json_each", "json_tree"]
_HARMFUL = ("load_extension", "fts3_tokenizer", "readfile", "writefile", "edit")
_SCHEMA = """
    SELECT sql FROM sqlite_master
    WHERE type IN ('table', 'view') AND sql NOT NULL AND name NOT LIKE 'sqlite!_%' ESCAPE '!'
    ORDER BY rowid"""
_COLUMNS = "FROM sqlite_master t, pragma_table_info(t.name) c WHERE t.type IN ('table', 'view')"
_MORE_TABLES = "cut off: SELECT name FROM sqlite_master, pragma_table_info('…') show the rest"
_PROGRESS_STEPS = 5_000
"""Instructions of SQLite's machine between two looks at the clock; a fraction of a millisecond."""
_TOOL_TIMEOUT_S = 30.0
"""The time limit that counts is the database's own; this one is for a thread that is stuck."""


@dataclass(frozen=True, slots=True)
class SqlLimits:
    """What one query may take."""

    timeout_s: float = 2.0
    max_rows: int = 50
    """Rows that a result shows; it says when there are more."""
    max_cell_chars: int = 200
    max_result_chars: int = 8_000
    max_query_chars: int = 10_000
    max_value_bytes: int = 250_000
    """Size of any string or blob, stored or computed; larger ones are an error."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ConfigError(f"{name} must be > 0, not {value}")
        if self.timeout_s >= _TOOL_TIMEOUT_S:
            raise ConfigError(f"timeout_s must be below {_TOOL_TIMEOUT_S:g}, not {self.timeout_s}")


class SqlDatabase:
    """One read-only connection in one thread, and the two tools that use it."""

    def __init__(self, connect: Callable[[], sqlite3.Connection], limits: SqlLimits | None) -> None:
        self.limits = limits or SqlLimits()
        self._connect = connect
        self._session: _Session | None = None

    @classmethod
    def open(cls, path: Path | str, *, limits: SqlLimits | None = None) -> SqlDatabase:
        """Use a database file. It is opened read-only.

        Raises:
            ConfigError: there is no such file, or it is no database.
        """
        file = Path(path).resolve()
        if not file.is_file():
            raise ConfigError(f"there is no database {path}")

        def connect() -> sqlite3.Connection:
            return sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)

        try:
            with contextlib.closing(connect()) as connection:
                connection.execute("SELECT count(*) FROM sqlite_master")
        except sqlite3.Error as error:
            raise ConfigError(f"{path} cannot be used as a database: {error}") from error
        return cls(connect, limits)

    @classmethod
    def build(cls, builder: Builder, *, limits: SqlLimits | None = None) -> SqlDatabase:
        """Use a new database in memory, which ``builder`` fills at the first query."""
        return cls(partial(_in_memory, builder), limits)

    async def rebuild(self, builder: Builder) -> None:
        """Forget the database and fill a new one in memory; the tools stay the same objects."""
        await self.close()
        self._connect = partial(_in_memory, builder)

    def toolset(self) -> Toolset:
        """Return the tools ``sql`` and ``schema``."""
        return Toolset([self.sql, self.schema])

    @tool(timeout=_TOOL_TIMEOUT_S, idempotent=True)
    async def sql(self, query: str) -> str:
        """Run one SELECT statement on the SQLite database and return the rows as a table.

        Args:
            query: The statement, in SQLite's dialect.
        """
        if len(query) > self.limits.max_query_chars:
            raise _wrong(f"the query is longer than {self.limits.max_query_chars:,} characters")
        if not query.strip(" \t\r\n;"):
            raise _wrong("the query is empty; write one SELECT statement")
        names, rows = await self.rows(query, self.limits.max_rows + 1)
        if not names:
            raise _wrong("there is no statement in the query; write one SELECT statement")
        return _table(names, rows, self.limits)

    @tool(timeout=_TOOL_TIMEOUT_S, idempotent=True)
    async def schema(self) -> str:
        """Show the tables and views of the database with their columns."""
        _, rows = await self.rows(_SCHEMA, 1000)
        text = "\n".join(f"{' '.join(row[0].split())};" for row in rows)
        if len(text) > self.limits.max_result_chars:
            return f"{text[: self.limits.max_result_chars]}\n({_MORE_TABLES})"
        return text or "The database holds no table."

    async def rows(self, query: str, count: int) -> Rows:
        """Run a query within the limits; return its columns' names and at most ``count`` rows."""
        if self._session is None:
            self._session = _Session(self._connect, self.limits)
        session, ticket = self._session, _Ticket(self.limits.timeout_s)
        try:
            return await session.worker.run(lambda: session.run(query, count, ticket))
        except asyncio.CancelledError:
            # The thread may be stuck inside one instruction: leave it, and begin anew.
            ticket.cancelled = True
            if self._session is session:
                await self.close()
            raise

    async def close(self) -> None:
        """End the connection and its thread; a later query opens both again."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def __del__(self) -> None:
        if self._session is not None:
            self._session.close()


class _Session:
    """A connection and the thread that it lives in."""

    def __init__(self, connect: Callable[[], sqlite3.Connection], limits: SqlLimits) -> None:
        self.worker = Worker("relax-sql")
        self._connect = connect
        self._limits = limits
        self._connection: sqlite3.Connection | None = None
        self._names: dict[str, list[str]] = {}
        self._running = _Ticket(0.0)

    def close(self) -> None:
        """End the query that runs, then the connection, then the thread."""
        self._running.cancelled = True
        self.worker.post(self._disconnect)
        self.worker.close()

    def run(self, query: str, count: int, ticket: _Ticket) -> Rows:
        """Run one query, in the thread."""
        self._running = ticket.start()
        try:
            cursor = self._connected().execute(query)
            names = [column[0] for column in cursor.description or ()]
            return names, cursor.fetchmany(count)
        except UnicodeEncodeError:
            raise _wrong("the query holds half a character, which no text can hold") from None
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
            raise self._explained(error, ticket) from None

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            connection = self._connect()
            # A file may hold text that is none; a row with it can still be read.
            connection.text_factory = partial(str, encoding="utf-8", errors="replace")
            for kind, column in (("table", "t.name"), ("column", "c.name")):
                rows = connection.execute(f"SELECT DISTINCT {column} {_COLUMNS} LIMIT 1000")
                self._names[kind] = [row[0] for row in rows]
            _guard(connection, self._limits)
            connection.set_progress_handler(lambda: self._running.is_over, _PROGRESS_STEPS)
            self._connection = connection
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _explained(self, error: Exception, ticket: _Ticket) -> ToolError:
        """Return an error that says what to write instead."""
        text = str(error)
        if ticket.is_over and "interrupt" in text:
            limit = f"the query was stopped after {self._limits.timeout_s:g} s"
            return ToolError(f"{limit}; make it simpler", kind=ToolErrorKind.TIMEOUT)
        if re.search("not authorized|authorization|prohibited|readonly", text):
            words = f"{text}: the database can only be read; write one SELECT statement"
            return ToolError(words, kind=ToolErrorKind.DENIED)
        if "one statement at a time" in text:
            return _wrong("write one statement, without another one after it")
        if found := re.search(r"no such (table|column): (.+)", text):
            return _wrong(f"{text}; {self._nearest(found[1], found[2])}")
        return _wrong(text)

    def _nearest(self, kind: str, name: str) -> str:
        names = self._names[kind]
        near = difflib.get_close_matches(name.rpartition(".")[2], names, n=1)
        return f"did you mean {near[0]}?" if near else f"{kind}s: {', '.join(names[:20])}"


@dataclass(slots=True)
class _Ticket:
    """One query's time: it is over when the deadline has passed or the caller has gone."""

    timeout_s: float
    deadline: float = 0.0
    cancelled: bool = False

    def start(self) -> _Ticket:
        self.deadline = time.monotonic() + self.timeout_s
        return self

    @property
    def is_over(self) -> bool:
        return self.cancelled or time.monotonic() > self.deadline


def _in_memory(builder: Builder) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    builder(connection)
    connection.commit()
    return connection


def _guard(connection: sqlite3.Connection, limits: SqlLimits) -> None:
    """Let a connection do nothing but read, and read nothing that is too large."""
    for name in _TABLE_FUNCTIONS:  # their first use declares them, which is more than reading
        connection.execute(f"SELECT 1 FROM {name}('[]')").fetchall()
    connection.execute("PRAGMA query_only = ON")
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, limits.max_value_bytes)
    connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, 4 * limits.max_query_chars)
    connection.setlimit(sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 100)
    connection.setlimit(sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, 50)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.set_authorizer(_authorize)


def _authorize(
    action: int, first: str | None, second: str | None, database: str | None, view: str | None
) -> int:
    """Allow what a SELECT is made of; everything else, known or not, is refused."""
    if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE):
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION and str(second).lower() not in _HARMFUL:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_PRAGMA and str(first).lower() in _DESCRIBING:
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _table(names: list[str], rows: list[tuple[Any, ...]], limits: SqlLimits) -> str:
    """Return the rows as lines of cells, and say what is missing."""
    shown = [" | ".join(_cell(value, limits.max_cell_chars) for value in row) for row in rows]
    lines, size = [" | ".join(names)], 0
    for line in shown[: limits.max_rows]:
        size += len(line) + 1
        if size > limits.max_result_chars:
            break
        lines.append(line)
    if len(lines) <= len(rows):
        lines.append(f"({len(lines) - 1} rows are shown, there are more: use LIMIT or aggregate)")
    elif not rows:
        lines.append("(no rows)")
    return "\n".join(lines)


def _cell(value: Any, limit: int) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    text = str(value).replace("\n", "\\n").replace("|", "¦")
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _wrong(message: str) -> ToolError:
    return ToolError(message, kind=ToolErrorKind.INVALID_ARGUMENTS)

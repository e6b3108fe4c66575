"""Ready-made SQL: nothing is ever written, nothing runs for ever, and errors say what to write."""

import asyncio
import sqlite3
import threading
import time

import pytest

from relax_agent.errors import ConfigError, ToolErrorKind
from relax_agent.messages import ToolCall
from relax_agent.tools.sql import SqlDatabase, SqlLimits

ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
SCRIPT = """
CREATE TABLE towns (id INTEGER PRIMARY KEY, name TEXT, people INTEGER);
INSERT INTO towns VALUES (1, 'Arden', 10), (2, 'Brill', 20), (3, NULL, 30);
CREATE VIEW large AS SELECT name FROM towns WHERE people > 15;
CREATE TABLE blobs (data BLOB);
INSERT INTO blobs VALUES (zeroblob(12)), ('a|b'), ('line
break');
"""


def fill(database):
    database.executescript(SCRIPT)


def ask(*queries, database=None, **limits):
    """Run queries one after the other and return their results."""

    async def main():
        used = database or SqlDatabase.build(fill, limits=SqlLimits(**limits))
        tools = used.toolset()
        try:
            return [await tools.call(ToolCall("sql", {"query": query}, "c")) for query in queries]
        finally:
            await used.close()

    return asyncio.run(main())


def threads():
    """Return the threads that databases live in."""
    return {thread for thread in threading.enumerate() if thread.name == "relax-sql"}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a #1?x=y.sqlite"
    with sqlite3.connect(path) as database:
        fill(database)
    database.close()
    return path


@pytest.mark.parametrize(
    ("query", "table"),
    [
        ("SELECT name, people FROM towns", "name | people\nArden | 10\nBrill | 20\nNULL | 30"),
        ("select count(*) as n from large;", "n\n2"),
        ("SELECT name FROM towns WHERE 0", "name\n(no rows)"),
        ("SELECT data FROM blobs", "data\n<12 bytes>\na¦b\nline\\nbreak"),
        ("WITH t AS (SELECT 1 AS a) SELECT * FROM t", "a\n1"),
        ("VALUES (1, 'x')", "column1 | column2\n1 | x"),
        ("SELECT name FROM pragma_table_info('towns')", "name\nid\nname\npeople"),
        ("PRAGMA foreign_key_list(towns)", "(no rows)"),
        ("SELECT value FROM json_each('[1, 2]')", "value\n1\n2"),
        ("SELECT upper('é'), round(2.5), 1e999", "upper('é') | round(2.5) | 1e999\né | 3.0 | inf"),
    ],
)
def test_reading_gives_a_table(query, table):
    (result,) = ask(query)
    assert result.ok
    assert result.text.endswith(table)


@pytest.mark.parametrize(
    "query",
    [
        "INSERT INTO towns VALUES (9, 'x', 1)",
        "UPDATE towns SET people = 0",
        "DELETE FROM towns",
        "WITH t AS (SELECT 1) DELETE FROM towns",
        "REPLACE INTO towns VALUES (1, 'x', 1)",
        "DROP TABLE towns",
        "ALTER TABLE towns ADD COLUMN x",
        "CREATE TABLE t (a)",
        "CREATE TEMP TABLE t (a)",
        "CREATE TEMP VIEW v AS SELECT 1",
        "CREATE VIRTUAL TABLE v USING fts5(a)",
        "CREATE TRIGGER t AFTER INSERT ON towns BEGIN SELECT 1; END",
        "CREATE INDEX i ON towns (name)",
        "ATTACH '/tmp/other.sqlite' AS other",
        "ATTACH ':memory:' AS other",
        "DETACH main",
        "SELECT load_extension('x')",
        "SELECT LOAD_EXTENSION('x', 'y')",
        "SELECT fts3_tokenizer('simple')",
        "PRAGMA query_only = OFF",
        "PRAGMA writable_schema = 1",
        "PRAGMA journal_mode = DELETE",
        "PRAGMA temp_store_directory = '/tmp'",
        "PRAGMA user_version = 7",
        "SELECT * FROM pragma_query_only(0)",
        "VACUUM",
        "VACUUM INTO '/tmp/copy.sqlite'",
        "ANALYZE",
        "BEGIN",
        "SAVEPOINT s",
        "COMMIT",
    ],
)
def test_whatever_is_not_reading_is_denied_and_changes_nothing(query, file):
    for database in (SqlDatabase.build(fill), SqlDatabase.open(file)):
        denied, after, tables = ask(
            query,
            "SELECT count(*), sum(people), count(name) FROM towns",
            "SELECT count(*) FROM sqlite_master",
            database=database,
        )
        assert denied.error in (ToolErrorKind.DENIED, ToolErrorKind.INVALID_ARGUMENTS)
        assert after.text.endswith("3 | 60 | 2") and tables.text.endswith("\n3")
    assert denied.error is ToolErrorKind.DENIED or "no such" in denied.text or "COMMIT" in query


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("", "is empty"),
        (" ; \n", "is empty"),
        ("SELECT naem FROM towns", "did you mean name?"),
        ("SELECT t.nam FROM towns t", "did you mean name?"),
        ("SELECT * FROM town", "did you mean towns?"),
        ("SELECT * FROM qqq", "tables: towns, large, blobs"),
        ("SELEC 1", "syntax error"),
        ("SELECT 1; SELECT 2", "one statement"),
        ("SELECT 'open", "unrecognized token"),
        ("SELECT ?", "binding"),
        ("SELECT '\x00'", "null character"),
        ("SELECT '\ud800'", "half a character"),
        ("SELECT " + "(" * 500 + "1" + ")" * 500, "sql: "),
        ("SELECT 1" + " UNION SELECT 1" * 90, "too many terms"),
        ("SELECT '" + "x" * 20_000 + "'", "longer than 10,000 characters"),
        ("SELECT zeroblob(100000000)", "too big"),
        ("SELECT hex(zeroblob(200000))", "too big"),
        ("SELECT no_such_function(1)", "no such function"),
    ],
)
def test_what_is_wrong_is_told_so_that_a_model_can_act_on_it(query, words):
    (result,) = ask(query)
    assert result.error is ToolErrorKind.INVALID_ARGUMENTS
    assert words in result.text
    assert len(result.text) < 400


def test_an_endless_recursion_is_stopped_and_the_database_goes_on():
    began = time.monotonic()
    endless, after = ask(ENDLESS, "SELECT 1", timeout_s=0.2)
    assert time.monotonic() - began < 3
    assert endless.error is ToolErrorKind.TIMEOUT and "after 0.2 s" in endless.text
    assert after.text == "1\n1"


def test_a_join_of_everything_with_everything_is_stopped():
    query = "SELECT count(*) FROM " + ", ".join(f"towns t{i}" for i in range(30))
    (result,) = ask(query, timeout_s=0.2)
    assert result.error is ToolErrorKind.TIMEOUT


def test_rows_cells_and_text_are_limited_and_the_model_is_told():
    many = (
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT {}) SELECT x FROM c"
    )
    fits, more = ask(many.format(5), many.format(6), max_rows=5)
    assert fits.text == "x\n1\n2\n3\n4\n5"
    assert "5 rows are shown, there are more" in more.text
    (long,) = ask("SELECT hex(zeroblob(5000)) AS h", max_cell_chars=10)
    assert long.text == "h\n000000000…"
    (wide,) = ask(many.format(50), max_result_chars=20)
    assert len(wide.text) < 120 and "there are more" in wide.text


def test_the_schema_shows_tables_and_views():
    async def main():
        database = SqlDatabase.build(fill)
        result = await database.toolset().call(ToolCall("schema", {}, "c"))
        await database.close()
        return result.text

    text = asyncio.run(main())
    assert "CREATE TABLE towns (id INTEGER PRIMARY KEY, name TEXT, people INTEGER);" in text
    assert "CREATE VIEW large" in text and len(text.splitlines()) == 3


def test_an_empty_database_says_so():
    async def main():
        database = SqlDatabase.build(lambda connection: None)
        text = await database.schema()
        await database.close()
        return text

    assert asyncio.run(main()) == "The database holds no table."


def test_a_file_is_opened_whatever_its_name_and_never_made(file, tmp_path):
    (result,) = ask("SELECT count(*) FROM towns", database=SqlDatabase.open(file))
    assert result.text == "count(*)\n3"
    with pytest.raises(ConfigError, match="there is no database"):
        SqlDatabase.open(tmp_path / "none.sqlite")
    assert not (tmp_path / "none.sqlite").exists()
    (tmp_path / "text").write_text("this is not a database at all" * 50)
    with pytest.raises(ConfigError, match="cannot be used"):
        SqlDatabase.open(tmp_path / "text")


def test_one_slow_query_delays_neither_the_loop_nor_another_database():
    async def main():
        slow = SqlDatabase.build(fill, limits=SqlLimits(timeout_s=5))
        quick = SqlDatabase.build(fill)
        running = asyncio.ensure_future(slow.rows(ENDLESS, 1))
        await asyncio.sleep(0)
        answers = [await quick.rows("SELECT 1", 1) for _ in range(20)]
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert running.cancelled()
        assert await slow.rows("SELECT 2", 1) == (["2"], [(2,)])
        await slow.close()
        await quick.close()
        return answers

    assert asyncio.run(main()) == [(["1"], [(1,)])] * 20


def test_queries_of_one_message_run_one_after_the_other_in_one_thread():
    async def main():
        database, before = SqlDatabase.build(fill), threads()
        results = await asyncio.gather(*(database.rows(f"SELECT {n}", 1) for n in range(30)))
        new = threads() - before
        await database.close()
        return [rows for _, rows in results], len(new)

    rows, count = asyncio.run(main())
    assert rows == [[(n,)] for n in range(30)]
    assert count == 1


def test_a_closed_database_leaves_no_thread_and_opens_again():
    async def main():
        database, before = SqlDatabase.build(fill), threads()
        await database.close()
        await database.rows("SELECT 1", 1)
        (thread,) = threads() - before
        await database.close()
        await database.close()
        await asyncio.to_thread(thread.join, 5)
        assert not thread.is_alive()
        assert (await database.rows("SELECT count(*) FROM towns", 1))[1] == [(3,)]
        await database.close()

    asyncio.run(main())


def test_a_rebuilt_database_keeps_its_tools():
    async def main():
        database = SqlDatabase.build(fill)
        tools = database.toolset()
        await database.rebuild(lambda connection: connection.execute("CREATE TABLE other (a)"))
        result = await tools.call(ToolCall("schema", {}, "c"))
        await database.close()
        return result.text

    assert asyncio.run(main()) == "CREATE TABLE other (a);"


@pytest.mark.parametrize("limits", [{"timeout_s": 0}, {"timeout_s": 30}, {"max_rows": -1}])
def test_limits_that_make_no_sense_are_refused(limits):
    with pytest.raises(ConfigError, match=next(iter(limits))):
        SqlLimits(**limits)


def test_a_cancelled_query_gives_its_thread_up_and_the_next_one_gets_another():
    """A thread stuck inside one instruction of SQLite must not block the database for good."""

    async def main():
        stuck = threading.Event()

        def build(connection):
            fill(connection)
            if not stuck.is_set():
                stuck.wait(20)

        database = SqlDatabase.build(build)
        first = asyncio.ensure_future(database.rows("SELECT 1", 1))
        await asyncio.sleep(0.05)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.ensure_future(database.rows("SELECT 2", 1))
        await asyncio.sleep(0.05)
        stuck.set()
        result = await asyncio.wait_for(second, 5)
        await database.close()
        return result

    assert asyncio.run(main())[1] == [(2,)]


def test_a_builder_that_fails_is_told():
    def broken(connection):
        connection.execute("CREATE TABLE")

    (result,) = ask("SELECT 1", database=SqlDatabase.build(broken))
    assert not result.ok and "incomplete input" in result.text


@pytest.mark.filterwarnings("error")
def test_a_call_that_is_cancelled_before_it_begins_leaves_no_coroutine_behind():
    async def main():
        database = SqlDatabase.build(fill)
        call = asyncio.ensure_future(database.toolset().call(ToolCall("schema", {}, "c")))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await database.close()
        return call.cancelled()

    assert asyncio.run(main())


def test_a_query_that_holds_no_statement_is_refused_in_words():
    for result in ask("-- nothing", "/* nothing */ ;", "SELECT '\ud800'"):
        assert result.error is ToolErrorKind.INVALID_ARGUMENTS
        assert "codec" not in result.text and "(no rows)" not in result.text


def test_a_row_whose_text_is_none_can_still_be_read(tmp_path):
    path = tmp_path / "odd.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (a TEXT)")
        connection.execute("INSERT INTO t VALUES (CAST(x'6f77ff6c' AS TEXT))")
    (result,) = ask("SELECT a FROM t", database=SqlDatabase.open(path))
    assert result.text == "a\now\ufffdl"


def test_a_schema_that_is_cut_off_says_so():
    async def main():
        database = SqlDatabase.build(fill, limits=SqlLimits(max_result_chars=60))
        result = await database.toolset().call(ToolCall("schema", {}, "c"))
        await database.close()
        return result.text

    assert "(cut off: SELECT name FROM sqlite_master" in asyncio.run(main())

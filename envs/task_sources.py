"""Where tasks come from: tables and columns on one side, a :class:`TaskSet` on the other.

Every row is looked at once, when the set is made: what is missing or wrong is told then, with the
file and the row, and not hours later. Media are not read for that, only whether they are there and
begin like media. A set keeps a row's id and number; its task is built when it is looked up.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from relax_agent.envs.task_columns import Columns, Mapper, Row
from relax_agent.envs.task_tables import (
    DatasetTable,
    JoinedTable,
    MemoryTable,
    ParquetTable,
    Table,
    read_csv,
    read_jsonl,
)
from relax_agent.envs.tasks import LazyTask, Task, chosen_for_eval
from relax_agent.errors import ConfigError, MediaError, MissingExtraError

if TYPE_CHECKING:
    import datasets

Paths: TypeAlias = Path | str | Sequence[Path | str]
Sides: TypeAlias = tuple[list[Task | LazyTask], list[Task | LazyTask]]
"""Tasks to train on, tasks held out."""
Source: TypeAlias = Iterable[Task | Row] | Callable[[], Iterable[Task | Row]]

MAX_TASKS = 1_000_000
"""What a generator may give before it is taken for an endless one."""
HELD_OUT = ("validation", "eval", "val", "valid", "dev", "test")
"""Names of splits to evaluate on, the best first."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A table and what its columns mean."""

    table: Table
    mapper: Mapper


class RowTask:
    """A task that is built from its row when it is looked up."""

    __slots__ = ("_index", "_rows", "id")

    def __init__(self, task_id: str, rows: Rows, index: int) -> None:
        self.id, self._rows, self._index = task_id, rows, index

    @property
    def where(self) -> str:
        """Where the row is."""
        return self._rows.table.where(self._index)

    def load(self) -> Task:
        """Build the task; reads its media."""
        table = self._rows.table
        with located(table, self._index):
            row = table.row(self._index)
            return self._rows.mapper.build(row, self.id, table.base_of(self._index))

    def __getstate__(self) -> tuple[Any, ...]:
        return self.id, self._rows, self._index

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.id, self._rows, self._index = state


@contextlib.contextmanager
def located(table: Table, index: int, *, looking: bool = False) -> Iterator[None]:
    """Say in an error which row it is about; ``looking`` through data, it is a ConfigError."""
    try:
        yield
    except (ConfigError, MediaError) as error:
        cls = ConfigError if looking else type(error)
        raise cls(f"{table.where(index)}: {error.message}", hint=error.hint) from error


@dataclass(frozen=True)
class Holdout:
    """How one source is split in two."""

    share: float | None = None
    ids: Collection[str] | None = None

    def check(self, *, given: bool, by_column: bool) -> None:
        """Raise ConfigError if splits are chosen in more than one way."""
        ways = {
            "eval": given,
            "eval_share": self.share is not None,
            "eval_ids": self.ids is not None,
            "split": by_column,
        }
        chosen = [name for name, is_given in ways.items() if is_given]
        if len(chosen) > 1:
            raise ConfigError(f"{' and '.join(chosen)} both say what is held out: give one")
        if self.share is not None and not 0 < self.share < 1:
            raise ConfigError(f"eval_share={self.share!r} is not between 0 and 1")
        if isinstance(self.ids, str):
            raise ConfigError("eval_ids is a string, not a list of ids")

    @property
    def needed(self) -> bool:
        """Whether tasks are chosen one by one."""
        return self.share is not None or self.ids is not None

    def divide(self, tasks: Iterable[Task | LazyTask]) -> Sides:
        """Divide tasks into those to train on and those held out."""
        sides: Sides = ([], [])
        wanted = None if self.ids is None else {str(each) for each in self.ids}
        for task in tasks:
            if wanted is not None:
                held_out = task.id in wanted
                wanted.discard(task.id)
            else:
                held_out = self.share is not None and chosen_for_eval(task.id, self.share)
            sides[held_out].append(task)
        if wanted:
            raise ConfigError(f"eval_ids names tasks that do not exist, e.g. {min(wanted)!r}")
        return sides


def tasks_of(rows: Rows, prefix: str) -> Iterator[tuple[RowTask, Row]]:
    """Look at each row of a table, and yield its task and the row.

    Args:
        rows: The table and its columns.
        prefix: Begins the ids of rows without one: ``train-1``, ``train-2``, …
    """
    table, mapper = rows.table, rows.mapper
    for index, row in enumerate(table.rows()):
        with located(table, index, looking=True):
            mapper.check(row, table.base_of(index))
            task_id = mapper.id_of(row) or f"{prefix}-{index + 1}"
        yield RowTask(task_id, rows, index), row


def divide_table(train: Table, eval: Table | None, holdout: Holdout, columns: Columns) -> Sides:
    """Return the tasks of one or two tables, each in its split."""
    mapper = Mapper(columns)
    holdout.check(given=eval is not None, by_column=mapper.split is not None)
    if mapper.split is not None:
        return _divide_by_column(Rows(train, mapper))
    if holdout.needed:
        return holdout.divide(task for task, _ in tasks_of(Rows(train, mapper), "row"))
    sides: Sides = ([task for task, _ in tasks_of(Rows(train, mapper), "train")], [])
    if eval is not None:
        sides[1].extend(task for task, _ in tasks_of(Rows(eval, mapper), "eval"))
    return sides


def _divide_by_column(rows: Rows) -> Sides:
    found: dict[str, list[Task | LazyTask]] = {}
    for task, row in tasks_of(rows, "row"):
        found.setdefault(rows.mapper.split_of(row), []).append(task)
    train, held_out = choose_splits(found, "train", "auto", "the column for the split")
    return found[train], found[held_out] if held_out else []


def choose_splits(
    names: Collection[str], train: str, eval: str | None, what: str
) -> tuple[str, str | None]:
    """Return the names of the split to train on and of the one to evaluate on.

    Raises:
        ConfigError: There is no such split.
    """
    if eval == "auto":
        eval = next((name for name in HELD_OUT if name in names and name != train), None)
    for name in (train, eval):
        if name is not None and name not in names:
            raise ConfigError(
                f"{what} has no split {name!r}", hint=f"it has {', '.join(map(repr, names))}"
            )
    if train == eval:
        raise ConfigError(f"{what}: {train!r} cannot be both trained on and held out")
    return train, eval


# -- files ------------------------------------------------------------------------------------


def _files(given: Paths) -> list[Path]:
    found = [given] if isinstance(given, (str, Path)) else list(given)
    if not found:
        raise ConfigError("a list of files is empty")
    return [Path(each) for each in found]


def _joined(tables: list[Table]) -> Table:
    return tables[0] if len(tables) == 1 else JoinedTable(tables)


def from_files(
    kind: str, train: Paths, eval: Paths | None, holdout: Holdout, columns: Columns
) -> Sides:
    """Return the tasks of files, several of which may make up one split."""
    heavy = Mapper(columns).media_columns

    def read(paths: Paths) -> Table:
        def one(path: Path) -> Table:
            if kind == "parquet":
                return ParquetTable(path, heavy)
            return read_csv(path) if kind == "csv" else read_jsonl(path)

        return _joined([one(path) for path in _files(paths)])

    return divide_table(read(train), None if eval is None else read(eval), holdout, columns)


# -- datasets ---------------------------------------------------------------------------------


def from_dataset(
    source: Any,
    *,
    name: str | None,
    train: str,
    eval: str | None,
    limit: int | None,
    holdout: Holdout,
    columns: Columns,
) -> Sides:
    """Return the tasks of a ``datasets`` object, of a folder, or of a data set on the hub."""
    try:
        import datasets
    except ImportError:
        raise MissingExtraError("datasets", "envs") from None
    what = source if isinstance(source, str) else "the data set"
    if isinstance(source, (str, Path)):
        source = _load_dataset(str(source), name)
    if isinstance(source, (datasets.DatasetDict, datasets.IterableDatasetDict)):
        chosen = holdout.needed or "split" in columns
        names = choose_splits(source, train, None if chosen and eval == "auto" else eval, what)
        parts = [None if each is None else source[each] for each in names]
    else:
        if eval not in (None, "auto"):
            raise ConfigError(f"{what} has no splits, so no {eval!r}", hint="eval_share=0.1")
        parts = [source, None]
    tables = [
        None if part is None else _dataset_table(part, what, limit, columns) for part in parts
    ]
    assert tables[0] is not None
    return divide_table(tables[0], tables[1], holdout, columns)


def _load_dataset(source: str, name: str | None) -> Any:
    import datasets

    saved = ("dataset_dict.json", "state.json")
    try:
        if any((Path(source) / each).is_file() for each in saved):
            return datasets.load_from_disk(source)
        return datasets.load_dataset(source, name)
    except Exception as error:  # of datasets, the hub, the network, or any of their formats
        words = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"the data set {source!r} cannot be loaded: {words or type(error).__name__}"
        ) from error


def _dataset_table(
    data: datasets.Dataset | datasets.IterableDataset,
    what: str,
    limit: int | None,
    columns: Columns,
) -> Table:
    import datasets

    heavy = Mapper(columns).media_columns
    if limit is not None and limit < 1:
        raise ConfigError(f"limit={limit}: at least 1")
    if isinstance(data, datasets.Dataset):
        if limit is not None:
            data = data.select(range(min(limit, len(data))))
        table: Table = DatasetTable(data, what, heavy)
    elif isinstance(data, datasets.IterableDataset):
        if limit is None:
            raise ConfigError(f"{what} is a stream, which may not end", hint="limit=1000")
        stream = data.decode(False) if data.features else data
        table = MemoryTable([dict(row) for row in itertools.islice(stream, limit)], what)
    else:
        raise ConfigError(
            f"{type(data).__name__} is not a data set",
            hint="a datasets.Dataset, DatasetDict or IterableDataset, a folder, or a hub id",
        )
    if not len(table):
        raise ConfigError(f"{what} has no rows")
    return table


# -- Python -----------------------------------------------------------------------------------


def from_generator(
    train: Source,
    eval: Source | None,
    *,
    limit: int | None,
    holdout: Holdout,
    columns: Columns,
) -> Sides:
    """Return the tasks that Python code makes: tasks as they are, rows by their columns."""
    mapper = Mapper(columns)
    holdout.check(given=eval is not None, by_column=mapper.split is not None)
    if mapper.split is not None:
        return _divide_by_column(Rows(_table_of(train, "train", limit), mapper))
    if holdout.needed:
        return holdout.divide(_made(train, "row", limit, mapper))
    held_out = [] if eval is None else list(_made(eval, "eval", limit, mapper))
    return list(_made(train, "train", limit, mapper)), held_out


def _made(
    source: Source, prefix: str, limit: int | None, mapper: Mapper
) -> Iterator[Task | LazyTask]:
    items = _collect(source, prefix, limit)
    table = MemoryTable([{} if isinstance(item, Task) else item for item in items], prefix)
    rows = Rows(table, mapper)
    for index, item in enumerate(items):
        if isinstance(item, Task):
            yield item
            continue
        with located(table, index, looking=True):
            mapper.check(item, None)
            task_id = mapper.id_of(item) or f"{prefix}-{index + 1}"
        yield RowTask(task_id, rows, index)


def _table_of(source: Source, name: str, limit: int | None) -> Table:
    items = _collect(source, name, limit)
    if any(isinstance(item, Task) for item in items):
        raise ConfigError("split= names a column, but these are tasks", hint="give rows")
    return MemoryTable([item for item in items if not isinstance(item, Task)], name)


def _collect(source: Source, name: str, limit: int | None) -> list[Task | Row]:
    made: Any = source() if callable(source) else source
    if isinstance(made, (str, bytes, Mapping)) or not isinstance(made, Iterable):
        hint = (
            "async generators: [item async for item in …] first"
            if hasattr(made, "__aiter__")
            else "a list, a generator, or a function that returns one"
        )
        if hasattr(made, "close") and hasattr(made, "send"):
            made.close()  # a coroutine that nobody awaited
        raise ConfigError(f"{name}: tasks cannot be made of {type(made).__name__}", hint=hint)
    most = MAX_TASKS if limit is None else limit
    items = list(itertools.islice(made, most + (limit is None)))
    if limit is None and len(items) > most:
        raise ConfigError(f"{name} gives more than {most} tasks", hint="limit=… takes the first")
    if not items:
        hint = "a generator can be read once: give the function that makes it"
        raise ConfigError(f"{name} gives no tasks", hint=hint)
    for number, item in enumerate(items, 1):
        if not isinstance(item, (Task, Mapping)):
            raise ConfigError(
                f"{name}, row {number} is of type {type(item).__name__}",
                hint="a Task, or a dict with a prompt",
            )
    return items

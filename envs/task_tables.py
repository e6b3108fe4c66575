"""Tables that tasks come from: JSONL, CSV, Parquet, a ``datasets`` data set, rows in memory.

A :class:`Table` gives any row by its number, and all rows in order. Text formats stay in memory
as rows. Parquet and ``datasets`` stay in their compact form, and columns with media stay on disk:
a row's media are read when its task is looked up.
"""

from __future__ import annotations

import bisect
import csv
import itertools
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_agent.errors import ConfigError, MissingExtraError
from relax_agent.media.kinds import HEAD_BYTES

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

    from relax_agent.envs.task_columns import Row

_BATCH_ROWS = 64
_PACKED = (b"\x1f\x8b", b"BZ", b"\x28\xb5")
"""How gzip, bzip2 and zstd files begin."""


class Table(ABC):
    """Rows of data."""

    base: Path | None = None
    """The folder that relative paths in it start from."""

    @abstractmethod
    def __len__(self) -> int:
        """Return how many rows there are."""

    @abstractmethod
    def row(self, index: int) -> Row:
        """Return one row; it belongs to the caller."""

    @abstractmethod
    def where(self, index: int) -> str:
        """Say where a row is, for people."""

    def rows(self) -> Iterator[Row]:
        """Yield all rows in order, to look at; encoded media may be cut off after their head."""
        return (self.row(index) for index in range(len(self)))

    def base_of(self, index: int) -> Path | None:
        """Return the folder that relative paths in a row start from."""
        return self.base


def _own(value: Any) -> Any:
    """Copy lists and dicts, so that what an episode changes in its task stays there."""
    if type(value) is dict:
        return {key: _own(each) for key, each in value.items()}
    if type(value) is list:
        return [_own(each) for each in value]
    return value


class MemoryTable(Table):
    """Rows that are in memory."""

    def __init__(
        self, rows: Sequence[Row], name: str, *, unit: str = "row",
        numbers: Sequence[int] | None = None, base: Path | None = None,
    ) -> None:  # fmt: skip
        self._rows, self._name, self._unit, self._numbers = rows, name, unit, numbers
        self.base = base

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        """Return a copy of one row."""
        return {key: _own(value) for key, value in self._rows[index].items()}

    def where(self, index: int) -> str:
        """Say which line or item it is."""
        number = index + 1 if self._numbers is None else self._numbers[index]
        return f"{self._name}, {self._unit} {number}"

    def rows(self) -> Iterator[Row]:
        """Yield the rows themselves."""
        return iter(self._rows)


class JoinedTable(Table):
    """Several tables one after the other."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._ends = list(itertools.accumulate(map(len, tables)))

    def _place(self, index: int) -> tuple[Table, int]:
        number = bisect.bisect_right(self._ends, index)
        return self._tables[number], index - (self._ends[number - 1] if number else 0)

    def __len__(self) -> int:
        return self._ends[-1]

    def row(self, index: int) -> Row:
        """Return one row of one of them."""
        table, inner = self._place(index)
        return table.row(inner)

    def where(self, index: int) -> str:
        """Say where it is in its own table."""
        table, inner = self._place(index)
        return table.where(inner)

    def rows(self) -> Iterator[Row]:
        """Yield the rows of each."""
        return itertools.chain.from_iterable(table.rows() for table in self._tables)

    def base_of(self, index: int) -> Path | None:
        """Return the folder of its own table."""
        table, inner = self._place(index)
        return table.base_of(inner)


# -- text files -------------------------------------------------------------------------------


def _unreadable(path: Path, error: OSError) -> ConfigError:
    if isinstance(error, IsADirectoryError):
        inside = sorted(each.name for each in path.iterdir())
        hint = f"name files in it, e.g. {str(path / inside[0])!r}" if inside else "it is empty"
        return ConfigError(f"cannot read tasks from {path}: it is a folder", hint=hint)
    return ConfigError(f"cannot read tasks from {path}: {error.strerror or error}")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield numbered lines. Only line feeds end one: JSON may hold other separators as they are."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if number == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                try:
                    yield number, raw.decode().rstrip("\r\n")
                except UnicodeDecodeError as error:
                    raise ConfigError(
                        f"{path}, line {number} is not UTF-8: {error.reason}",
                        hint="unpack it first" if raw[:2] in _PACKED else "save it as UTF-8",
                    ) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def read_jsonl(path: Path) -> Table:
    """Read a file with one JSON object a line; blank lines do not count."""
    rows: list[Row] = []
    numbers: list[int] = []
    for number, line in _lines(path):
        if line.strip():
            rows.append(_json_object(line, f"{path}, line {number}", first=not rows))
            numbers.append(number)
    _require_rows(rows, path)
    return MemoryTable(rows, str(path), unit="line", numbers=numbers, base=path.parent)


def _json_object(line: str, where: str, *, first: bool) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        hint = None
        if first and line.strip() == "[":
            hint = "one JSON list is not JSONL: TaskSet.from_generator(json.load(open(…)))"
        raise ConfigError(f"{where} is not JSON: {error}", hint=hint) from error
    if not isinstance(row, dict):
        raise ConfigError(
            f"{where} is a {type(row).__name__}, not an object",
            hint='one task a line: {"prompt": …, "answer": …}',
        )
    return row


def _require_rows(rows: Sequence[Any], path: Path) -> None:
    if not rows:
        raise ConfigError(f"{path} has no tasks: it is empty")


def read_csv(path: Path) -> Table:
    """Read a CSV file with a header, or a tab-separated one if its name ends in ``.tsv``."""
    limit = csv.field_size_limit(sys.maxsize)  # a prompt may be longer than 128 KiB
    delimiter = "\t" if path.suffix == ".tsv" else ","
    rows: list[Row] = []
    numbers: list[int] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter=delimiter, strict=True)
            names = reader.fieldnames or []
            if len(names) > len(set(names)):
                raise ConfigError(f"{path}: two columns have the same name", hint=", ".join(names))
            for row in reader:
                _check_fields(row, path, reader.line_num)
                rows.append(row)
                numbers.append(reader.line_num)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8: {error.reason}", hint="save the file as UTF-8"
        ) from error
    except csv.Error as error:
        raise ConfigError(f"{path}, after line {reader.line_num}: {error}") from error
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        csv.field_size_limit(limit)
    _require_rows(rows, path)
    return MemoryTable(rows, str(path), unit="line", numbers=numbers, base=path.parent)


def _check_fields(row: Mapping[Any, Any], path: Path, line: int) -> None:
    if None in row or None in row.values():
        names = [name for name in row if name is not None]
        raise ConfigError(
            f"{path}, line {line} has {'more' if None in row else 'fewer'} fields than the"
            f" {len(names)} of the header"
        )


# -- Arrow ------------------------------------------------------------------------------------


def _plain_rows(table: pa.Table) -> list[dict[str, Any]]:
    rows = table.to_pylist()
    for row in rows:
        row.pop("__index_level_0__", None)  # what pandas leaves
    return rows


def _heads(table: pa.Table, columns: Iterable[str]) -> pa.Table:
    """Cut encoded media off after their head, where that is cheap."""
    import pyarrow as pa

    for name in set(columns) & set(table.column_names):
        number = table.column_names.index(name)
        kind = table.schema.field(number).type
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_struct(kind):
            chunks = [_head(chunk) for chunk in table.column(number).chunks]
            if chunks:
                table = table.set_column(number, name, pa.chunked_array(chunks))
    return table


def _head(array: Any) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_struct(array.type):
        names = [array.type.field(n).name for n in range(array.type.num_fields)]
        inner = [_head(array.field(n)) for n in range(len(names))]
        return pa.StructArray.from_arrays(inner, names, mask=array.is_null())
    if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type):
        return pc.binary_slice(array, 0, HEAD_BYTES)
    return array


class ParquetTable(Table):
    """A Parquet file. Columns of media are read from it row group by row group, as needed."""

    def __init__(self, path: Path, heavy: Iterable[str] = ()) -> None:
        self._path, self.base = path, path.parent
        with self._open() as file:
            names = file.schema_arrow.names
            self._heavy = [name for name in names if name in set(heavy)]
            self._light = self._read(file, [name for name in names if name not in self._heavy])
            meta = file.metadata
            sizes = [meta.row_group(number).num_rows for number in range(meta.num_row_groups)]
        self._ends = list(itertools.accumulate(sizes))
        self._cached: tuple[int, pa.Table] | None = None
        _require_rows(range(len(self)), path)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cached": None}

    def _open(self) -> Any:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise MissingExtraError("pyarrow", "envs") from None
        try:
            self._path.open("rb").close()  # its words for what is wrong are shorter
            return pq.ParquetFile(self._path)
        except OSError as error:
            raise _unreadable(self._path, error) from error
        except (pa.ArrowException, ValueError) as error:
            raise ConfigError(f"{self._path} is not a Parquet file: {error}") from error

    def _read(self, file: Any, columns: list[str], group: int | None = None) -> pa.Table:
        import pyarrow as pa

        try:
            if group is None:
                return file.read(columns=columns, use_threads=False)
            return file.read_row_group(group, columns=columns, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(f"{self._path} is damaged: {error}") from error

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, index: int) -> Row:
        """Return one row; reads its row group's media."""
        (row,) = _plain_rows(self._light.slice(index, 1)) if self._light.num_columns else ({},)
        if self._heavy:
            group = bisect.bisect_right(self._ends, index)
            inner = index - (self._ends[group - 1] if group else 0)
            (media,) = self._group(group).slice(inner, 1).to_pylist()
            row |= media
        return row

    def _group(self, number: int) -> pa.Table:
        cached = self._cached
        if cached is None or cached[0] != number:
            with self._open() as file:
                cached = self._cached = number, self._read(file, self._heavy, number)
        return cached[1]

    def rows(self) -> Iterator[Row]:
        """Yield all rows; holds a few of them at a time."""
        import pyarrow as pa

        with self._open() as file:
            try:
                for batch in file.iter_batches(batch_size=_BATCH_ROWS, use_threads=False):
                    yield from _plain_rows(_heads(pa.Table.from_batches([batch]), self._heavy))
            except (pa.ArrowException, OSError) as error:
                raise ConfigError(f"{self._path} is damaged: {error}") from error

    def where(self, index: int) -> str:
        """Say which row it is."""
        return f"{self._path}, row {index + 1}"


class DatasetTable(Table):
    """A ``datasets.Dataset``. Its rows are taken as they are stored: media stay encoded."""

    def __init__(self, data: datasets.Dataset, name: str, heavy: Iterable[str] = ()) -> None:
        self._transformed = data.format["type"] == "custom"  # the author's own function
        self._data = data if self._transformed else data.with_format("arrow")
        self._name, self._heavy = name, set(heavy)

    def __len__(self) -> int:
        return len(self._data)

    def row(self, index: int) -> Row:
        """Return one row."""
        if self._transformed:
            return dict(self._data[index])
        (row,) = _plain_rows(self._data[index])
        return row

    def rows(self) -> Iterator[Row]:
        """Yield all rows; holds a few of them at a time."""
        if self._transformed:
            yield from super().rows()
            return
        for start in range(0, len(self), _BATCH_ROWS):
            yield from _plain_rows(_heads(self._data[start : start + _BATCH_ROWS], self._heavy))

    def where(self, index: int) -> str:
        """Say which row it is."""
        return f"{self._name}, row {index + 1}"

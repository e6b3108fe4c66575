"""Which column of a data set is what: rows become tasks.

A column is named, or given as a function of the row. What is not said has a default: the prompt is
in ``prompt``; the answer in ``answer`` and the id in ``id``, where there are such columns; all that
is left goes into ``Task.data``.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

from relax_agent.envs.task_prompts import Draft, MediaRef, fill, finish, is_missing, parse_prompt
from relax_agent.envs.tasks import Task
from relax_agent.errors import ConfigError
from relax_agent.media.kinds import KINDS, Kind

Row: TypeAlias = Mapping[str, Any]
Column: TypeAlias = str | Callable[[Row], Any]
"""A column's name, the way to a value in it (``reward_model.ground_truth``), or a function."""


class Columns(TypedDict, total=False):
    """What the columns of a data set are for."""

    prompt: Column
    """What is asked: text, chat messages, or content parts. Default: ``prompt``."""
    answer: Column
    """The gold answer. Default: ``answer``, or nothing if there is no such column."""
    id: Column
    """Text or whole numbers, each once. Default: ``id``, or else the number of the row."""
    data: Sequence[str]
    """What else the environment wants to know. Default: whatever is left. A column that is itself
    called ``data`` and holds objects is spread out.
    """
    images: str | Sequence[str]
    """Columns with a picture, or a list of pictures, a row."""
    audios: str | Sequence[str]
    """The same for sounds."""
    videos: str | Sequence[str]
    """The same for videos."""
    split: Column
    """Says which split a row belongs to."""
    media_folder: Path | str
    """Where relative paths of media start. Default: the folder of the data file."""


_MEDIA_KEYS: dict[Kind, str] = {"image": "images", "audio": "audios", "video": "videos"}


class Mapper:
    """Turns rows into tasks as :class:`Columns` says."""

    def __init__(self, columns: Columns) -> None:
        _check_columns(columns)
        self._prompt: Column = columns.get("prompt", "prompt")
        self._answer = columns.get("answer")
        self._id = columns.get("id")
        self._data = columns.get("data")
        self._media: dict[Kind, tuple[str, ...]] = {}
        given: Mapping[str, Any] = columns
        for kind, key in _MEDIA_KEYS.items():
            if key in given:
                names = given[key]
                self._media[kind] = (names,) if isinstance(names, str) else tuple(names)
        self.split = columns.get("split")
        folder = columns.get("media_folder")
        self._folder = None if folder is None else Path(folder)

    @property
    def media_columns(self) -> set[str]:
        """Columns whose values may be large, and are only needed when a task is looked up."""
        return {name for names in self._media.values() for name in names}

    def id_of(self, row: Row) -> str | None:
        """Return a row's own id, or None if it has none."""
        if self._id is None and "id" not in row:
            return None
        value = find(row, "id" if self._id is None else self._id)
        if isinstance(value, str) and value.strip() and _is_unicode(value):
            return value
        if not isinstance(value, (str, bool)) and hasattr(value, "__index__"):
            return str(operator.index(value))
        raise ConfigError(f"the id is {value!r}", hint="an id is text or a whole number")

    def split_of(self, row: Row) -> str:
        """Return the name of the split that a row says it belongs to."""
        assert self.split is not None
        return str(find(row, self.split)).strip().lower()

    def check(self, row: Row, base: Path | None) -> None:
        """Raise ConfigError or MediaError if the row makes no task; reads no media."""
        for draft in self._drafts(row, base):
            for ref in draft.items(MediaRef):
                ref.check()
        self._answer_of(row)
        self._rest(row)

    def build(self, row: Row, task_id: str, base: Path | None) -> Task:
        """Return the row's task with its media loaded."""
        prompt, messages = finish(self._drafts(row, base))
        return Task(task_id, prompt, self._answer_of(row), self._rest(row), messages)

    def _drafts(self, row: Row, base: Path | None) -> list[Draft]:
        base = self._folder or base
        drafts = parse_prompt(find(row, self._prompt), base=base, marked=tuple(self._media))
        found = {
            kind: [MediaRef(kind, value, base) for name in names for value in _items(row, name)]
            for kind, names in self._media.items()
        }
        fill(drafts, found)
        return drafts

    def _answer_of(self, row: Row) -> Any:
        if self._answer is None and "answer" not in row:
            return None
        answer = find(row, "answer" if self._answer is None else self._answer)
        if answer is not None and is_missing(answer):
            raise ConfigError(f"the answer is {answer!r}", hint="null says that there is none")
        return answer

    def _rest(self, row: Row) -> dict[str, Any]:
        if self._data is not None:
            return {name: find(row, name) for name in self._data}
        used = {self._prompt, self._answer or "answer", self._id or "id", self.split}
        used |= self.media_columns
        rest = {key: value for key, value in row.items() if key not in used}
        if isinstance(rest.get("data"), Mapping):
            inner = rest.pop("data")
            for key in inner:
                if key in rest:
                    raise ConfigError(f"{key!r} is a column, and also in the column 'data'")
            rest |= inner
        elif "data" in rest and rest["data"] is None:
            del rest["data"]
        return rest


def _check_columns(columns: Columns) -> None:
    known = list(Columns.__annotations__)
    for key, value in columns.items():
        if key not in known:
            raise ConfigError(f"there is no option {key!r}", hint=_nearest(key, known))
        if key in ("prompt", "answer", "id", "split"):
            fits = isinstance(value, str) or callable(value)
            form = "a column's name or a function of the row"
        elif key == "media_folder":
            fits, form = isinstance(value, (str, Path)), "a folder"
        else:
            names = [value] if isinstance(value, str) and key != "data" else value
            fits = isinstance(names, (list, tuple)) and all(isinstance(n, str) for n in names)
            form = "a list of columns' names"
        if not fits:
            raise ConfigError(f"{key}={value!r} is not {form}")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"there are {', '.join(map(repr, known)) or 'none'}"


def find(row: Row, column: Column) -> Any:
    """Return the value of a column in a row.

    Raises:
        ConfigError: There is no such column; names the nearest one.
    """
    if not isinstance(column, str):
        try:
            return column(row)
        except Exception as error:
            name = getattr(column, "__name__", repr(column))
            raise ConfigError(f"the function {name} failed on it: {error!r}") from error
    if column in row:
        return row[column]
    value: Any = row
    for step in column.split("."):
        if not isinstance(value, Mapping) or step not in value:
            known = [key for key in row if isinstance(key, str)]
            raise ConfigError(f"there is no column {column!r}", hint=_nearest(column, known))
        value = value[step]
    return value


def _items(row: Row, name: str) -> Sequence[Any]:
    """Return the media of one column: none, one or several."""
    value = find(row, name)
    if is_missing(value) or (isinstance(value, str) and not value):
        return ()
    if getattr(getattr(value, "dtype", None), "kind", "") == "O":  # how pandas keeps lists
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [item for item in value if item is not None]
    return (value,)


assert set(_MEDIA_KEYS) == set(KINDS)

"""Tasks: what episodes are about, in a fixed order that can be resumed.

A :class:`TaskSet` has a ``train`` and an ``eval`` split that share no id. The order in which
training visits tasks is a pure function of (seed, position): every pass over the split is one
permutation, and a run that goes on at position ``n`` sees what it would have seen. ``fingerprint``
changes with any task, so a checkpoint can refuse other data.

Tasks come from Python or from data (:mod:`relax_agent.envs.task_sources`). Those from data are
built when they are looked up, so that a set over a hundred thousand pictures keeps none of them in
memory. A set may also know nothing but ids (:meth:`TaskSet.of_ids`): that is what stands beside an
environment which runs in another process and keeps its answers there.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, Unpack

from relax_agent.errors import ConfigError, EnvError
from relax_agent.messages import Message, Part, parts
from relax_agent.threads import THREADS

if TYPE_CHECKING:
    import datasets

    from relax_agent.envs.task_columns import Columns
    from relax_agent.envs.task_sources import Paths, Source

Split: TypeAlias = Literal["train", "eval"]
SPLITS: tuple[Split, Split] = ("train", "eval")


class _Secrets:
    """What only the environment may see. No dataclass fields: ``asdict`` and ``repr`` skip them."""

    __slots__ = ("_answer", "_data")
    _answer: Any
    _data: Mapping[str, Any]

    @property
    def answer(self) -> Any:
        return self._answer

    @property
    def data(self) -> Mapping[str, Any]:
        return self._data


@dataclass(frozen=True, slots=True, eq=False)
class Task(_Secrets):
    """One row of data. Only ``id`` leaves the environment's side by itself.

    Neither ``repr`` nor ``dataclasses.asdict`` shows ``answer`` or ``data``.
    """

    id: str
    prompt: str | tuple[Part, ...] = ""
    """What the model is asked, as text or content parts."""
    answer: InitVar[Any] = None
    """The gold answer; never in a message, never printed with the task."""
    data: InitVar[Mapping[str, Any] | None] = None
    """Whatever else the environment needs to know."""
    messages: tuple[Message, ...] = ()
    """The conversation that poses the task, where one user message does not say it all.

    ``prompt`` is then the content of its last user message.
    """

    def __post_init__(self, answer: Any, data: Mapping[str, Any] | None) -> None:
        object.__setattr__(self, "_answer", answer)
        object.__setattr__(self, "_data", {} if data is None else data)
        if not isinstance(self.prompt, str):
            object.__setattr__(self, "prompt", parts(self.prompt))

    def to_messages(self) -> list[Message]:
        """Return the messages that pose the task."""
        return list(self.messages) or [Message("user", parts(self.prompt))]

    def _state(self) -> tuple[Any, ...]:
        return self.id, self.prompt, self.answer, self.data, self.messages

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Task) and self._state() == other._state()

    def __hash__(self) -> int:
        return hash(self.id)

    def __reduce__(self) -> tuple[Any, ...]:
        return Task, self._state()


# As defaults of the constructor they became class attributes, which hide the two properties.
for _name in ("answer", "data"):
    delattr(Task, _name)


class LazyTask(Protocol):
    """A task that is built when it is looked up."""

    @property
    def id(self) -> str:
        """The id of the task."""

    def load(self) -> Task:
        """Build the task; reads its media."""


class TaskSet:
    """All tasks of an environment, in two splits."""

    def __init__(
        self, train: Iterable[Task | LazyTask] = (), eval: Iterable[Task | LazyTask] = ()
    ) -> None:
        self._tasks: dict[str, Task | LazyTask | None] = {}
        self._ids = {"train": self._add(train), "eval": self._add(eval)}
        self._fingerprint: str | None = None

    def _add(self, tasks: Iterable[Task | LazyTask]) -> tuple[str, ...]:
        ids = []
        for task in tasks:
            if not isinstance(getattr(task, "id", None), str):
                raise ConfigError(
                    f"{type(task).__name__} is no task, or its id is no text",
                    hint="Task('an-id', …); TaskSet.from_generator takes rows that are dicts",
                )
            if task.id in self._tasks:
                places = [getattr(self._tasks[task.id], "where", ""), getattr(task, "where", "")]
                told = f": {places[0]} and {places[1]}" if all(places) else ""
                raise ConfigError(f"two tasks have the id {task.id!r}{told}")
            self._tasks[task.id] = task
            ids.append(task.id)
        return tuple(ids)

    @classmethod
    def of_ids(
        cls, train: Iterable[str], eval: Iterable[str] = (), fingerprint: str = ""
    ) -> TaskSet:
        """Return a set that knows ids and nothing else, for an environment in another process.

        Order, splits and fingerprint are as in the set that it stands for; looking a task up is
        an error, since prompt and answer stay with the environment.
        """
        known = cls(map(Task, train), map(Task, eval))
        known._tasks = dict.fromkeys(known._tasks)
        known._fingerprint = fingerprint
        return known

    @classmethod
    def split(cls, tasks: Iterable[Task], *, eval_share: float) -> TaskSet:
        """Hold out a share of the tasks, chosen by a hash of the id.

        A task stays in its split when others are added or removed.
        """
        sides: tuple[list[Task], list[Task]] = ([], [])
        for task in tasks:
            sides[chosen_for_eval(task.id, eval_share)].append(task)
        return cls(*sides)

    @classmethod
    def from_jsonl(
        cls,
        train: Paths,
        eval: Paths | None = None,
        *,
        eval_share: float | None = None,
        eval_ids: Collection[str] | None = None,
        **columns: Unpack[Columns],
    ) -> TaskSet:
        """Read one task a line: ``{"prompt": …, "answer": …}``.

        Args:
            train: A file, or several.
            eval: The held-out tasks' file or files.
            eval_share: Or hold out a share of ``train``, chosen by a hash of the id.
            eval_ids: Or hold out these.
            columns: What the columns are for, if they are not called ``prompt``, ``answer`` and
                ``id``; which hold media. See :class:`~relax_agent.envs.task_columns.Columns`.

        Raises:
            ConfigError: Something is wrong with a file or a row; names it.
        """
        return cls._from_files("jsonl", train, eval, eval_share, eval_ids, columns)

    @classmethod
    def from_csv(
        cls,
        train: Paths,
        eval: Paths | None = None,
        *,
        eval_share: float | None = None,
        eval_ids: Collection[str] | None = None,
        **columns: Unpack[Columns],
    ) -> TaskSet:
        """Read a CSV file with a header (``.tsv``: separated by tabs); see :meth:`from_jsonl`."""
        return cls._from_files("csv", train, eval, eval_share, eval_ids, columns)

    @classmethod
    def from_parquet(
        cls,
        train: Paths,
        eval: Paths | None = None,
        *,
        eval_share: float | None = None,
        eval_ids: Collection[str] | None = None,
        **columns: Unpack[Columns],
    ) -> TaskSet:
        """Read Parquet; see :meth:`from_jsonl`. Media columns stay on disk until looked up."""
        return cls._from_files("parquet", train, eval, eval_share, eval_ids, columns)

    @classmethod
    def _from_files(
        cls,
        kind: str,
        train: Paths,
        eval: Paths | None,
        eval_share: float | None,
        eval_ids: Collection[str] | None,
        columns: Columns,
    ) -> TaskSet:
        from relax_agent.envs.task_sources import Holdout, from_files

        return cls(*from_files(kind, train, eval, Holdout(eval_share, eval_ids), columns))

    @classmethod
    def from_dataset(
        cls,
        source: datasets.Dataset | datasets.DatasetDict | datasets.IterableDataset | Path | str,
        *,
        name: str | None = None,
        train: str = "train",
        eval: str | None = "auto",
        limit: int | None = None,
        eval_share: float | None = None,
        eval_ids: Collection[str] | None = None,
        **columns: Unpack[Columns],
    ) -> TaskSet:
        """Take a data set of the ``datasets`` library.

        Args:
            source: An object of that library, a folder, or the id of a data set on the hub.
            name: Its configuration, for a folder or an id.
            train: The split to train on.
            eval: The split that is held out; ``auto`` takes the first there is of
                ``validation``, ``eval``, ``val``, ``valid``, ``dev`` and ``test``; None: none.
            limit: At most so many rows a split. A stream (``IterableDataset``) needs it.
            eval_share: Or hold out a share of ``train``.
            eval_ids: Or hold out these.
            columns: See :meth:`from_jsonl`.

        Raises:
            ConfigError: It cannot be loaded, or something is wrong with a row; names it.
        """
        from relax_agent.envs.task_sources import Holdout, from_dataset

        sides = from_dataset(
            source,
            name=name,
            train=train,
            eval=eval,
            limit=limit,
            holdout=Holdout(eval_share, eval_ids),
            columns=columns,
        )
        return cls(*sides)

    @classmethod
    def from_generator(
        cls,
        train: Source,
        eval: Source | None = None,
        *,
        limit: int | None = None,
        eval_share: float | None = None,
        eval_ids: Collection[str] | None = None,
        **columns: Unpack[Columns],
    ) -> TaskSet:
        """Take tasks, or rows, that Python code makes.

        Args:
            train: A list, a generator, or a function that returns one. It may give tasks, or
                dicts that are read like rows of a file.
            eval: The same for the held-out tasks.
            limit: Takes the first so many of each; an endless generator needs it.
            eval_share: Or hold out a share of ``train``.
            eval_ids: Or hold out these.
            columns: See :meth:`from_jsonl`.

        Raises:
            ConfigError: It gives nothing, or something else; names the item.
        """
        from relax_agent.envs.task_sources import Holdout, from_generator

        holdout = Holdout(eval_share, eval_ids)
        return cls(*from_generator(train, eval, limit=limit, holdout=holdout, columns=columns))

    @property
    def ids_only(self) -> bool:
        """Whether this set knows ids only, see :meth:`of_ids`."""
        return next(iter(self._tasks.values()), self) is None

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        return map(self.__getitem__, self._tasks)

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._tasks

    def _find(self, task_id: str) -> Task | LazyTask:
        if task_id not in self._tasks:
            raise EnvError(
                f"there is no task {task_id!r}", hint=f"e.g. {next(iter(self._tasks), '')!r}"
            )
        task = self._tasks[task_id]
        if task is None:
            raise EnvError(
                f"only the id of task {task_id!r} is known here: the rest stays with its"
                " environment, in another process",
                hint="reset(options={'task': id}) poses it there",
            )
        return task

    def __getitem__(self, task_id: str) -> Task:
        task = self._find(task_id)
        return task if isinstance(task, Task) else task.load()

    async def fetch(self, task_id: str) -> Task:
        """Look a task up without blocking the event loop while its media are read."""
        task = self._find(task_id)
        return task if isinstance(task, Task) else await THREADS.run(task.load)

    def __repr__(self) -> str:
        return f"TaskSet(train={len(self._ids['train'])}, eval={len(self._ids['eval'])})"

    def ids(self, split: Split = "train") -> Sequence[str]:
        """Return the ids of one split, in the order given."""
        if split not in self._ids:
            raise ConfigError(f"there is no split {split!r}", hint="train or eval")
        return self._ids[split]

    def sample_order(self, seed: int, *, split: Split = "train", position: int = 0) -> TaskOrder:
        """Return the endless, resumable order of one split."""
        return TaskOrder(self.ids(split), seed, position)

    def fingerprint(self) -> str:
        """Return a hash of every task's id, messages, answer and data, in order.

        Media count with their bytes, so this reads all of them (the first time). It is the same
        in every process, and for the same tasks from another source.

        Raises:
            ConfigError: A task holds something without a stable form; or a media file is gone.
        """
        if self._fingerprint is None:
            from relax_agent.envs.task_fingerprint import fingerprint

            self._fingerprint = fingerprint(
                (split, self[task_id]) for split in SPLITS for task_id in self._ids[split]
            )
        return self._fingerprint


def chosen_for_eval(task_id: str, eval_share: float) -> bool:
    """Say whether a task is held out: by its id and nothing else."""
    if not 0 <= eval_share <= 1:
        raise ConfigError(f"eval_share={eval_share!r} is not between 0 and 1")
    number = int.from_bytes(hashlib.sha256(task_id.encode("utf-8", "surrogatepass")).digest()[:8])
    return number < eval_share * 2**64


class TaskOrder:
    """An endless order of task ids: permutation after permutation of one split.

    ``position`` counts the ids taken; it is all that a checkpoint has to keep.
    """

    def __init__(self, ids: Sequence[str], seed: int, position: int = 0) -> None:
        if not ids:
            raise ConfigError("this split has no tasks")
        if position < 0:
            raise ConfigError(f"position={position}: it counts from 0")
        self.position = position
        self._ids = tuple(ids)
        self._seed = seed
        self._epoch = -1
        self._order: list[str] = []

    @property
    def epoch(self) -> int:
        """Full passes before the next id."""
        return self.position // len(self._ids)

    def __iter__(self) -> TaskOrder:
        return self

    def __next__(self) -> str:
        if self.epoch != self._epoch:
            self._epoch = self.epoch
            self._order = list(self._ids)
            random.Random(f"{self._seed}/{self._epoch}").shuffle(self._order)
        task_id = self._order[self.position % len(self._ids)]
        self.position += 1
        return task_id

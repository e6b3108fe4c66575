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
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from relax_agent.errors import ConfigError, EnvError
from relax_agent.messages import Message, Part, parts
from relax_agent.threads import THREADS

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
            if task.id in self._tasks:
                raise ConfigError(f"two tasks have the id {task.id!r}")
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
            number = int.from_bytes(hashlib.sha256(task.id.encode()).digest()[:8])
            sides[number < eval_share * 2**64].append(task)
        return cls(*sides)

    @classmethod
    def from_jsonl(cls, train: Path | str, eval: Path | str | None = None) -> TaskSet:
        """Read one task a line: ``{"id"?, "prompt", "answer"?, "data"?}``."""
        return cls(
            _read_jsonl(Path(train), "train"), _read_jsonl(Path(eval), "eval") if eval else ()
        )

    @property
    def ids_only(self) -> bool:
        """Whether this set knows ids only, see :meth:`of_ids`."""
        return any(task is None for task in self._tasks.values())

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
        """Return a hash of every task's id, prompt, answer and data, in order."""
        if self._fingerprint is None:
            self._fingerprint = self._compute_fingerprint()
        return self._fingerprint

    def _compute_fingerprint(self) -> str:
        digest = hashlib.sha256()
        for split in SPLITS:
            for task_id in self._ids[split]:
                task = self[task_id]
                row = [split, task.id, repr(parts(task.prompt)), task.answer, dict(task.data)]
                digest.update(json.dumps(row, sort_keys=True, default=repr).encode())
        return digest.hexdigest()[:16]


class TaskOrder:
    """An endless order of task ids: permutation after permutation of one split.

    ``position`` counts the ids taken; it is all that a checkpoint has to keep.
    """

    def __init__(self, ids: Sequence[str], seed: int, position: int = 0) -> None:
        if not ids:
            raise ConfigError("this split has no tasks")
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


def _read_jsonl(path: Path, prefix: str) -> Iterator[Task]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read tasks from {path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = row["prompt"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}, line {number} is not a task: {error!r}", hint='{"prompt": …, "answer": …}'
            ) from error
        task_id = str(row.get("id", f"{prefix}-{number}"))
        yield Task(task_id, str(prompt), row.get("answer"), row.get("data") or {})

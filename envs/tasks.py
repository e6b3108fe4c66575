"""Tasks: what episodes are about, in a fixed order that can be resumed.

A :class:`TaskSet` has a ``train`` and an ``eval`` split that share no id. The order in which
training visits tasks is a pure function of (seed, position): every pass over the split is one
permutation, and a run that goes on at position ``n`` sees what it would have seen. ``fingerprint``
changes with any task, so a checkpoint can refuse other data.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from relax_agent.errors import ConfigError, EnvError
from relax_agent.messages import Part, parts

Split: TypeAlias = Literal["train", "eval"]
SPLITS: tuple[Split, Split] = ("train", "eval")


@dataclass(frozen=True, slots=True)
class Task:
    """One row of data. Only ``id`` leaves the environment's side by itself."""

    id: str
    prompt: str | tuple[Part, ...] = ""
    """What the model is asked, as text or content parts."""
    answer: Any = field(default=None, repr=False)
    """The gold answer; never in a message, never printed with the task."""
    data: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Whatever else the environment needs to know."""


class TaskSet:
    """All tasks of an environment, in two splits."""

    def __init__(self, train: Iterable[Task], eval: Iterable[Task] = ()) -> None:
        self._tasks: dict[str, Task] = {}
        self._ids = {"train": self._add(train), "eval": self._add(eval)}

    def _add(self, tasks: Iterable[Task]) -> tuple[str, ...]:
        ids = []
        for task in tasks:
            if task.id in self._tasks:
                raise ConfigError(f"two tasks have the id {task.id!r}")
            self._tasks[task.id] = task
            ids.append(task.id)
        return tuple(ids)

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

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks.values())

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._tasks

    def __getitem__(self, task_id: str) -> Task:
        if task_id not in self._tasks:
            raise EnvError(
                f"there is no task {task_id!r}", hint=f"e.g. {next(iter(self._tasks), '')!r}"
            )
        return self._tasks[task_id]

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
        digest = hashlib.sha256()
        for split in SPLITS:
            for task_id in self._ids[split]:
                task = self._tasks[task_id]
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

"""The run folder: where everything of one run lies, and how a later run finds it again.

runs/<name>/
recipe.yaml        the whole resolved recipe
run.json           fingerprint of what checkpoints depend on; locked while the run goes on
metrics.jsonl      one object a step
evals.jsonl        one object an evaluation on held-out tasks
tensorboard/       the same as events
reward.png         the curves
episodes.jsonl     every trained episode as people read it
eval-000020.jsonl  the episodes of one evaluation
tool_calls.jsonl   every call of a tool, where the recipe asks for it (tools.trace)
warm_start/        what the expert played
queue/             payloads and index of the trajectory queue
weights/           what is being published; only the newest version stays
checkpoints/       step-000020/, …; each complete or absent
export/            the trained model as a Hugging Face folder
outcome.json       what a finished run has reached
logs/              one file a child process
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from relax_agent.errors import ConfigError, ResumeError, StorageError
from relax_agent.files import replace_file
from relax_agent.run.checkpoints import Checkpoints
from relax_agent.run.recipe import Recipe, dump_recipe, parse_recipe

STATE_FILE = "run.json"
OUTCOME_FILE = "outcome.json"


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run. Creating it makes the folders."""

    path: Path

    @classmethod
    def create(cls, recipe: Recipe) -> RunFolder:
        """Make a fresh folder; a name that is taken gets a number, so nothing is overwritten.

        Raises:
            StorageError: It cannot be made.
        """
        names = itertools.chain([recipe.name], (f"{recipe.name}-{n}" for n in itertools.count(2)))
        try:
            recipe.runs.mkdir(parents=True, exist_ok=True)
            for name in names:
                folder = cls(recipe.runs / name)
                try:
                    folder.path.mkdir()
                except FileExistsError:
                    continue
                folder._fill(recipe)
                return folder
        except OSError as error:
            raise StorageError(
                f"cannot make a run folder in {recipe.runs}: {error.strerror or error}",
                hint="free space or set runs=<another folder>",
            ) from None
        raise AssertionError("itertools.count never ends")

    @classmethod
    def reopen(cls, path: Path, recipe: Recipe) -> RunFolder:
        """Find the folder of an earlier run of the same recipe. Nothing is changed yet.

        Raises:
            ResumeError: It is no run folder, or of a run that differs in what a checkpoint holds.
        """
        state = _read_object(path / STATE_FILE)
        if state is None:
            raise ResumeError(
                f"{path} is not a run folder: no readable {STATE_FILE}",
                hint="give the folder that an earlier run printed",
            )
        if state.get("fingerprint") != recipe.fingerprint():
            raise ResumeError(
                f"{path} belongs to another run: {_difference(path, recipe)}",
                hint="use the recipe of that run, or start a new one without --resume",
            )
        return cls(path)

    def _fill(self, recipe: Recipe) -> None:
        for folder in (self.logs, self.weights, self.checkpoints.folder):
            folder.mkdir()
        replace_file(self.path / "recipe.yaml", dump_recipe(recipe).encode())
        state = {"name": recipe.name, "seed": recipe.seed, "fingerprint": recipe.fingerprint()}
        replace_file(self.path / STATE_FILE, json.dumps(state).encode())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out for the length of a block; the lock dies with this process.

        Raises:
            ResumeError: The run goes on in another process.
        """
        with (self.path / STATE_FILE).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ResumeError(
                    f"{self.path} is in use: that run still goes on in another process",
                    hint="end it first, or start a new run without --resume",
                ) from None
            yield

    def sweep(self, last_step: int) -> None:
        """Delete what a killed process left half-written or began after ``last_step``."""
        self.checkpoints.sweep()
        for folder in self.weights.iterdir():
            shutil.rmtree(folder, ignore_errors=True)
        for file in self.path.glob("eval-*.jsonl"):
            if file.stem[5:].isdecimal() and int(file.stem[5:]) > last_step:
                file.unlink()

    @property
    def logs(self) -> Path:
        """Log files of child processes."""
        return self.path / "logs"

    @property
    def weights(self) -> Path:
        """Weights on their way to the engines."""
        return self.path / "weights"

    @property
    def checkpoints(self) -> Checkpoints:
        """All checkpoints."""
        return Checkpoints(self.path / "checkpoints")

    @property
    def queue(self) -> Path:
        """The trajectory queue's folder."""
        return self.path / "queue"

    @property
    def export(self) -> Path:
        """The trained model in Hugging Face's layout."""
        return self.path / "export"

    @property
    def episodes(self) -> Path:
        """All trained episodes."""
        return self.path / "episodes.jsonl"

    @property
    def tool_calls(self) -> Path:
        """All calls of tools, warm start and evaluations included."""
        return self.path / "tool_calls.jsonl"

    def eval_episodes(self, step: int) -> Path:
        """Return the file with the episodes of the evaluation after ``step`` steps."""
        return self.path / f"eval-{step:06d}.jsonl"

    def version(self, number: int) -> Path:
        """Return the folder of one published version."""
        return self.weights / f"v{number:06d}"

    def drop_versions_before(self, number: int) -> None:
        """Delete published versions that no engine will load any more."""
        for folder in self.weights.glob("v*"):
            if int(folder.name[1:]) < number:
                shutil.rmtree(folder, ignore_errors=True)

    def read_outcome(self) -> dict[str, Any] | None:
        """Return what the finished run has reached; None if it is not finished."""
        return _read_object(self.path / OUTCOME_FILE)

    def write_outcome(self, outcome: dict[str, Any]) -> None:
        """Mark the run as finished."""
        replace_file(self.path / OUTCOME_FILE, json.dumps(outcome).encode())


def _read_object(file: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _difference(path: Path, recipe: Recipe) -> str:
    """Name the first settings that differ from the recipe stored in a run folder."""
    file = path / "recipe.yaml"
    try:
        old = _flat(parse_recipe(yaml.safe_load(file.read_text("utf-8")), str(file)).identity())
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ConfigError):
        return "its recipe cannot be read"
    new = _flat(recipe.identity())
    names = sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k))
    shown = [f"{k} was {old.get(k)!r}, is {new.get(k)!r}" for k in names[:3]]
    if len(names) > 3:
        shown.append(f"and {len(names) - 3} more")
    return "; ".join(shown) or "it was made by another version"


def _flat(data: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(data, dict):
        return {prefix: data}
    out: dict[str, Any] = {}
    for key, value in data.items():
        out.update(_flat(value, f"{prefix}.{key}" if prefix else str(key)))
    return out

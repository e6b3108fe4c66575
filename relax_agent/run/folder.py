"""The run folder: where everything of one run lies, and how a later run finds it again.

runs/<name>/
recipe.yaml        the whole resolved recipe
run.json           fingerprint of what checkpoints depend on
metrics.jsonl      one object a step
tensorboard/       the same as events
reward.png         the curves
episodes.jsonl     every episode as people read it
queue/             payloads and index of the trajectory queue
weights/           what is being published; only the newest version stays
checkpoints/       step-000020/, …; each complete or absent
export/            the trained model as a Hugging Face folder
logs/              one file a child process
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_agent.errors import ResumeError, StorageError
from relax_agent.run.recipe import Recipe, dump_recipe

STATE_FILE = "run.json"


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run. Creating it makes the folders."""

    path: Path

    @classmethod
    def create(cls, recipe: Recipe) -> RunFolder:
        """Make a fresh folder; a name that is taken gets a number, so nothing is overwritten."""
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
        """Open the folder of an earlier run of the same recipe.

        Raises:
            ResumeError: it is no run folder, or of a run that differs in what a checkpoint holds.
        """
        try:
            state = json.loads((path / STATE_FILE).read_text())
        except (OSError, ValueError):
            raise ResumeError(
                f"{path} is not a run folder: no readable {STATE_FILE}",
                hint="give the folder that an earlier run printed",
            ) from None
        if state.get("fingerprint") != recipe.fingerprint():
            raise ResumeError(
                f"{path} belongs to another run: {_difference(path, recipe)}",
                hint="use the recipe of that run, or start a new one without --resume",
            )
        return cls(path)

    def _fill(self, recipe: Recipe) -> None:
        for folder in (self.logs, self.weights, self.checkpoints):
            folder.mkdir()
        (self.path / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
        write_json(
            self.path / STATE_FILE,
            {"name": recipe.name, "seed": recipe.seed, "fingerprint": recipe.fingerprint()},
        )

    @property
    def logs(self) -> Path:
        """Log files of child processes."""
        return self.path / "logs"

    @property
    def weights(self) -> Path:
        """Weights on their way to the engines."""
        return self.path / "weights"

    @property
    def checkpoints(self) -> Path:
        """All checkpoints."""
        return self.path / "checkpoints"

    @property
    def queue(self) -> Path:
        """The trajectory queue's folder."""
        return self.path / "queue"

    @property
    def export(self) -> Path:
        """The trained model in Hugging Face's layout."""
        return self.path / "export"

    def version(self, number: int) -> Path:
        """Return the folder of one published version."""
        return self.weights / f"v{number:06d}"

    def drop_versions_before(self, number: int) -> None:
        """Delete published versions that no engine will load any more."""
        for folder in self.weights.glob("v*"):
            if int(folder.name[1:]) < number:
                shutil.rmtree(folder, ignore_errors=True)

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint after ``step`` steps."""
        return self.checkpoints / f"step-{step:06d}"

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """Return the newest complete checkpoint as ``(steps done, folder)``."""
        complete = sorted(p.parent for p in self.checkpoints.glob("step-*/conductor.json"))
        return (int(complete[-1].name[5:]), complete[-1]) if complete else None

    def drop_old_checkpoints(self, keep: int) -> None:
        """Delete all but the newest ``keep`` complete checkpoints."""
        complete = sorted(p.parent for p in self.checkpoints.glob("step-*/conductor.json"))
        for folder in complete[:-keep]:
            (folder / "conductor.json").unlink()  # incomplete from here on, even if killed
            shutil.rmtree(folder, ignore_errors=True)


def write_json(path: Path, data: Any) -> None:
    """Write JSON so that the file is either the old one or the whole new one.

    Raises:
        StorageError: the file cannot be written, e.g. the disk is full.
    """
    part = path.with_name(path.name + ".part")
    try:
        with part.open("w", encoding="utf-8") as file:
            json.dump(data, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}", hint="free space and resume the run"
        ) from None


def _difference(path: Path, recipe: Recipe) -> str:
    """Name the first settings that differ from the recipe stored in a run folder."""
    import yaml

    try:
        old = _flat(yaml.safe_load((path / "recipe.yaml").read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError):
        return "its recipe cannot be read"
    new = _flat(recipe.model_dump(mode="json"))
    names = sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k))
    shown = [f"{k} was {old.get(k)!r}, is {new.get(k)!r}" for k in names[:3]]
    return "; ".join(shown) or "it was made by another version"


def _flat(data: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(data, dict):
        return {prefix: data}
    out: dict[str, Any] = {}
    for key, value in data.items():
        out.update(_flat(value, f"{prefix}.{key}" if prefix else str(key)))
    return out

"""The checkpoints of one run: where they lie, whether they are whole, which one to go on from.

    checkpoints/step-000020/    what the trainer wrote, and
        conductor.json          what the conductor needs; written last, so it makes the rest count

Step 0 is the state after the warm start. A checkpoint without its last file was never finished and
is deleted when the run is opened again. One that is damaged is refused before anything starts.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_agent.errors import ResumeError
from relax_agent.files import replace_file, require_whole_safetensors

STATE_FILE = "conductor.json"


@dataclass
class Progress:
    """Where a run stands; what a checkpoint holds of the conductor."""

    step: int = 0
    """Optimizer steps done."""
    version: int = 0
    """Weight version that the trainer stands at, and that the engines serve."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What the run wants to find again after a resume."""


@dataclass(frozen=True)
class Checkpoint:
    """One whole checkpoint."""

    path: Path
    progress: Progress


class Checkpoints:
    """The folder of all checkpoints of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint after ``step`` steps."""
        return self.folder / f"step-{step:06d}"

    def complete(self, progress: Progress) -> None:
        """Make what the trainer has saved count as the checkpoint of this step."""
        state = {"step": progress.step, "version": progress.version, "extra": progress.extra}
        replace_file(self.path(progress.step) / STATE_FILE, json.dumps(state).encode())

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint; None if none was completed.

        Raises:
            ResumeError: It is damaged.
        """
        paths = self._finished()
        if not paths:
            return None
        try:
            for file in sorted(paths[-1].glob("*.safetensors")):
                require_whole_safetensors(file)
            return Checkpoint(paths[-1], _read_progress(paths[-1] / STATE_FILE))
        except (OSError, ValueError) as error:
            older = paths[-2].name if len(paths) > 1 else None
            instead = f"to go on from {older}" if older else "to begin again"
            raise ResumeError(
                f"the checkpoint {paths[-1]} is damaged: {error}",
                hint=f"delete that folder {instead}",
            ) from None

    def keep_newest(self, count: int) -> None:
        """Delete all but the newest ``count`` checkpoints."""
        for path in self._finished()[:-count]:
            (path / STATE_FILE).unlink()  # incomplete from here on, even if killed
            shutil.rmtree(path, ignore_errors=True)

    def sweep(self) -> None:
        """Delete what a killed process left half-written."""
        finished = set(self._finished())
        for path in self.folder.iterdir():
            if path not in finished:
                shutil.rmtree(path, ignore_errors=True)

    def _finished(self) -> list[Path]:
        return sorted(file.parent for file in self.folder.glob(f"step-*/{STATE_FILE}"))


def _read_progress(file: Path) -> Progress:
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        return Progress(int(state["step"]), int(state["version"]), dict(state["extra"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file.name} cannot be read ({error!r})") from None

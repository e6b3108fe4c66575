"""Metrics on disk: one JSON object a line, each written at once and as a whole.

A file survives the death of its writer: a torn last line is dropped when the file is next opened.
A run that goes on from a checkpoint first cuts off the lines of the steps that it will do again,
so that a step stands in the file once. JSON knows neither NaN nor infinity: they become null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_agent.errors import StorageError
from relax_agent.files import append_to_file, replace_file


class MetricsWriter:
    """Appends objects to a file."""

    def __init__(self, path: Path, *, last_step: int | None = None) -> None:
        """Open a file for more lines.

        Args:
            path: The file; its folder must exist.
            last_step: Lines whose ``step`` is beyond it are cut off. None keeps all.

        Raises:
            StorageError: The file cannot be read or written.
        """
        self._path = path
        if path.is_file():
            _rewrite(path, last_step)
        else:
            append_to_file(path, b"")

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append one object, whole or not at all.

        Raises:
            StorageError: The disk is full, or the folder is gone.
        """
        append_to_file(self._path, to_line(metrics).encode())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all objects of a metrics file; a torn last line is left out.

    Raises:
        StorageError: The file cannot be read, or a line in its midst is not a JSON object.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    return [_parse(path, number, line) for number, line in enumerate(lines[:-1], 1) if line.strip()]


def to_line(metrics: Mapping[str, Any]) -> str:
    """Return metrics as one line of strict JSON, its line break included."""
    return json.dumps(_finite(metrics), allow_nan=False) + "\n"


def scalars(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return every number in nested metrics under a name such as ``time_s/forward``."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            found |= scalars(value, f"{prefix}{name}/")
        elif _is_number(value):
            found[f"{prefix}{name}"] = float(value)
    return found


def _is_number(value: Any) -> bool:
    return hasattr(value, "__float__")


def _finite(value: Any) -> Any:
    """Return a value that strict JSON can hold; NumPy's and torch's scalars become plain ones."""
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if value is None or isinstance(value, (str, int)):
        return value
    if _is_number(value):
        number = float(value)
        return number if math.isfinite(number) else None
    return str(value)


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        item = json.loads(line)
    except ValueError as error:
        raise StorageError(f"{path}, line {number}: not JSON: {error}") from None
    if not isinstance(item, dict):
        raise StorageError(f"{path}, line {number}: not an object")
    return item


def _rewrite(path: Path, last_step: int | None) -> None:
    kept = [
        item for item in read_metrics(path) if last_step is None or item.get("step", 0) <= last_step
    ]
    replace_file(path, "".join(map(to_line, kept)).encode())

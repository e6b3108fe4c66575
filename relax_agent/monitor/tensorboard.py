"""TensorBoard events without torch or TensorFlow: the ``tensorboard`` package writes them itself.

Every number of a step becomes one scalar; nested metrics get a folder of their own
(``time_s/forward``). A run that goes on from a checkpoint tells TensorBoard to forget the steps
beyond it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_agent.errors import MissingExtraError, StorageError
from relax_agent.monitor.metrics import scalars


class TensorBoardWriter:
    """Writes events into one folder."""

    def __init__(self, folder: Path, *, last_step: int | None = None) -> None:
        """Open a new event file.

        Args:
            folder: Where event files lie; made if need be.
            last_step: Events of later steps, from an earlier process, are to be forgotten.
        """
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise MissingExtraError("tensorboard", "train") from None
        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        self._folder = folder
        self._writer: Any = self._try(lambda: EventFileWriter(str(folder), flush_secs=10))
        if last_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(last_step + 1, session_log=start)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write every number of ``metrics`` as a scalar of ``step``."""
        values = [
            self._summary.Value(tag=name, simple_value=number)
            for name, number in scalars(metrics).items()
            if name != "step"
        ]
        self._add(step, summary=self._summary(value=values))

    def close(self) -> None:
        """Write what is buffered and close the file. Idempotent."""
        writer, self._writer = self._writer, None
        if writer is not None:
            self._try(writer.close)

    def _add(self, step: int, **what: Any) -> None:
        event = self._event(wall_time=time.time(), step=step, **what)
        self._try(lambda: self._writer.add_event(event))

    def _try(self, action: Any) -> Any:
        try:
            return action()
        except OSError as error:
            raise StorageError(
                f"cannot write events into {self._folder}: {error.strerror or error}",
                hint="free space and resume the run",
            ) from error

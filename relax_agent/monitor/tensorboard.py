"""TensorBoard events without torch or TensorFlow: the ``tensorboard`` package encodes them itself.

Every number of a step becomes one scalar; nested metrics get a folder of their own
(``time_s/forward``). Events are on disk when a call returns: the package's own writer would hold
them back in a thread, lose them when the run is killed, and print a trace on a full disk. A run
that goes on from a checkpoint tells TensorBoard to forget the steps beyond it.
"""

from __future__ import annotations

import io
import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_agent.errors import MissingExtraError
from relax_agent.files import append_to_file, storage_error
from relax_agent.monitor.metrics import scalars

_NUMBERS = itertools.count()


class TensorBoardWriter:
    """Writes events into one folder."""

    def __init__(self, folder: Path, *, last_step: int | None = None) -> None:
        """Begin a new event file.

        Args:
            folder: Where event files lie; made if need be.
            last_step: Events of later steps, from an earlier process, are to be forgotten.

        Raises:
            StorageError: It cannot be written.
        """
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            raise MissingExtraError("tensorboard", "train") from None
        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        self._encode: Any = RecordWriter
        # TensorBoard finds the files by the begin of their names and reads them in this order.
        name = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        self._path = folder / f"events.out.tfevents.{name}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(folder, error) from None
        self._add(0, file_version="brain.Event:2")
        if last_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(last_step + 1, session_log=start)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write every number of ``metrics`` as a scalar of ``step``.

        Raises:
            StorageError: The disk is full.
        """
        values = [
            self._summary.Value(tag=name, simple_value=number)
            for name, number in scalars(metrics).items()
            if name != "step"
        ]
        self._add(step, summary=self._summary(value=values))

    def _add(self, step: int, **what: Any) -> None:
        event = self._event(wall_time=time.time(), step=step, **what)
        record = io.BytesIO()
        self._encode(record).write(event.SerializeToString())
        append_to_file(self._path, record.getvalue())

"""One thread that owns the model and everything that is computed with it.

Whatever touches the model comes in through one inbox and happens between two forwards: new
requests, aborts, pauses, weight updates. So there are no locks, and no request ever sees half
of an update. In each turn of its loop the thread empties the inbox and makes one step of the
:class:`~relax_agent.engines.embedded.batch.Batch`.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Literal, TypeVar

import torch

from relax_agent.engines.embedded.batch import Batch
from relax_agent.engines.embedded.requests import Job
from relax_agent.engines.embedded.sequence import Sequence
from relax_agent.engines.embedded.weights import (
    Shapes,
    WeightSession,
    read_bucket,
    read_folder,
)
from relax_agent.errors import EngineError, EngineRejected, EngineUnavailable

PauseMode = Literal["abort", "retract", "in_place"]
_T = TypeVar("_T")
_IDLE_S = 1.0


class Scheduler:
    """Runs requests on a model. Public methods may be called from any thread."""

    def __init__(
        self,
        batch: Batch,
        shapes: Shapes,
        *,
        version: str = "0",
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare; :meth:`start` begins to serve.

        Args:
            batch: The requests and the model that serves them.
            shapes: Names and shapes of the checkpoint's tensors.
            version: Version of the weights in force.
            on_death: Called from the thread if it ends by an error of its own.
        """
        self.batch = batch
        batch.version = version
        self.paused = False
        self.last_update_s = 0.0
        """Seconds that the last weight update took."""
        self._shapes = shapes
        self._on_death = on_death
        self._session: WeightSession | None = None
        self._when_drained: deque[Callable[[], None]] = deque()
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="scheduler", daemon=True)

    # What other threads call.

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the current forward; open requests fail."""
        self._stopped.set()
        self._inbox.put(lambda: None)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def version(self) -> str:
        """Version of the weights in force."""
        return self.batch.version

    def submit(self, job: Job) -> Sequence:
        """Begin a request; its ``done`` future gives the :class:`Outcome`."""
        sequence = Sequence(job)
        self._inbox.put(lambda: self.batch.enqueue(sequence))
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Drop a request that nobody waits for any more."""
        self._inbox.put(lambda: self.batch.abort(lambda other: other is sequence))

    def abort(self, rid: str | None) -> Future[int]:
        """End the requests of this id, or all with None; each returns its partial answer."""
        return self.call(
            lambda: self.batch.abort(lambda sequence: rid is None or sequence.job.rid == rid)
        )

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop decoding."""
        return self.call(lambda: self._pause(mode))

    def resume(self) -> Future[None]:
        """Go on decoding."""
        return self.call(lambda: setattr(self, "paused", False))

    def flush_cache(self) -> Future[bool]:
        """Forget cached prefixes; False while requests hold rows."""
        return self.call(self._flush)

    def set_version(self, version: str, *, abort_all: bool = False) -> Future[None]:
        """Rename the weights in force."""
        return self.call(lambda: self._set_version(version, abort_all))

    def begin_update(self) -> Future[None]:
        """Open a session of weight updates."""
        return self.call(self._begin_update)

    def add_bucket(self, bucket: bytes, version: str | None) -> Future[None]:
        """Take some tensors, one safetensors file."""
        return self.call(lambda: self._add_bucket(bucket, version))

    def load_folder(
        self, folder: Path, version: str | None, *, abort_all: bool = False
    ) -> Future[None]:
        """Take all tensors of a folder: in force at the session's end, or at once without one."""

        def load() -> None:
            if abort_all:
                self.batch.abort(lambda _: True)
            if self._session is not None:
                return self._add_folder(self._session, folder, version)
            return self._load_now(folder, version)

        return self.call(load, drained=lambda: self._session is None)

    def end_update(self) -> Future[None]:
        """Put the session's weights in force."""
        return self.call(self._end_update, drained=lambda: True)

    def call(
        self, work: Callable[[], _T], *, drained: Callable[[], bool] = lambda: False
    ) -> Future[_T]:
        """Run ``work`` between two forwards.

        Args:
            work: What to do; its exception becomes the future's.
            drained: Asked first: whether it has to wait until no request is running, unless
                decoding is paused. No request is admitted meanwhile.
        """
        future: Future[_T] = Future()
        future.set_running_or_notify_cancel()  # no longer cancellable: it will be answered

        def attempt() -> None:
            try:
                result = work()
            except Exception as error:  # handed over, not swallowed
                future.set_exception(error)
            else:
                future.set_result(result)

        def arrive() -> None:
            if drained():
                self._when_drained.append(attempt)
            else:
                attempt()

        self._inbox.put(arrive)
        return future

    # The thread.

    def _loop(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopped.is_set():
                    self._take_inbox()
                    self._run_drained()
                    if self._can_step():
                        self._guarded_step()
        except BaseException:
            self.batch.fail_all(EngineUnavailable("the engine's scheduler has died"))
            self._on_death()
            raise
        self.batch.fail_all(EngineUnavailable("the engine is shutting down"))

    def _take_inbox(self) -> None:
        """Do what has come in; wait for something if there is nothing else to do."""
        try:
            if not self._can_step() and not self._can_run_drained():
                self._inbox.get(timeout=_IDLE_S)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass

    def _can_step(self) -> bool:
        if self.paused:
            return False
        return bool(self.batch.running) or (bool(self.batch.waiting) and not self._when_drained)

    def _can_run_drained(self) -> bool:
        return bool(self._when_drained) and (self.paused or not self.batch.running)

    def _run_drained(self) -> None:
        while self._can_run_drained():
            self._when_drained.popleft()()

    def _guarded_step(self) -> None:
        """Make one step; an error in it fails the requests that were in it and nothing else."""
        try:
            self.batch.step(admit=not self._when_drained)
        except Exception as error:
            traceback.print_exc()
            self.batch.fail_running(EngineError(f"the engine failed in a forward: {error!r}"))

    # Control.

    def _pause(self, mode: PauseMode) -> None:
        self.paused = True
        if mode == "abort":
            self.batch.abort(lambda _: True)
        elif mode == "retract":
            self.batch.retract_all()

    def _flush(self) -> bool:
        if self.batch.running:
            return False
        self.batch.tree.clear()
        return True

    def _set_version(self, version: str, abort_all: bool) -> None:
        if abort_all:
            self.batch.abort(lambda _: True)
        self.batch.version = version

    # Weights.

    def _begin_update(self) -> None:
        if self._session is not None:
            raise EngineRejected(
                "a weight-update session is already open; call end_weight_update() first"
            )
        self._session = WeightSession(self.batch.runner.model, self._shapes)

    def _add_bucket(self, bucket: bytes, version: str | None) -> None:
        if self._session is None:
            raise EngineRejected(
                "update_weights_from_tensor must run between "
                "begin_weight_update() and end_weight_update()"
            )
        self._session.add(read_bucket(bucket))
        self._session.version = version or self._session.version

    def _add_folder(self, session: WeightSession, folder: Path, version: str | None) -> None:
        session.add(read_folder(folder))
        session.version = version or session.version

    def _end_update(self) -> None:
        session, self._session = self._session, None
        if session is None:
            raise EngineRejected(
                "no weight-update session is open; call begin_weight_update() first"
            )
        self._commit(session)

    def _load_now(self, folder: Path, version: str | None) -> None:
        session = WeightSession(self.batch.runner.model, self._shapes)
        self._add_folder(session, folder, version)
        self._commit(session)

    def _commit(self, session: WeightSession) -> None:
        started = time.perf_counter()
        session.commit()
        self.batch.new_weights(session.version)
        self.last_update_s = time.perf_counter() - started

"""Continuous batching: one thread that owns the model and all running requests.

Everything that touches the model comes in through one inbox and happens between two forwards:
new requests, aborts, pauses, weight updates. So there are no locks, and no request ever sees
half of an update. In each turn of its loop the thread empties the inbox, admits waiting
requests, runs one forward over the new tokens of all rows, samples one token per row, and lets
go of what has ended.

A request that joins first looks its tokens up in the prefix cache and reads only the rest. If
a request admitted in the same turn is about to read what it needs too (members of one group),
it waits one turn and finds it cached.

**Weights and keys.** ``epoch`` counts weight changes. The prefix cache is cleared with each,
and a row whose keys were begun under an older epoch (an ``in_place`` pause keeps it running) is
never put into the cache.
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
from typing import Any, Literal, TypeVar

import torch

from relax_agent.engines.embedded.kv import Pool
from relax_agent.engines.embedded.prefix import PrefixTree
from relax_agent.engines.embedded.requests import Job
from relax_agent.engines.embedded.runner import ModelRunner
from relax_agent.engines.embedded.sampling import Sampler
from relax_agent.engines.embedded.sequence import Outcome, Sequence
from relax_agent.engines.embedded.weights import WeightSession, read_bucket, read_folder
from relax_agent.errors import EngineError, EngineRejected, EngineUnavailable

PauseMode = Literal["abort", "retract", "in_place"]
_T = TypeVar("_T")
_IDLE_S = 1.0


class Scheduler:
    """Runs requests on a model. Public methods may be called from any thread."""

    def __init__(
        self,
        runner: ModelRunner,
        shapes: dict[str, tuple[int, ...]],
        *,
        max_running: int,
        max_prefill: int = 4096,
        cache_tokens: int = 0,
        version: str = "0",
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare; :meth:`start` begins to serve.

        Args:
            runner: The model and its slots.
            shapes: Names and shapes of the checkpoint's tensors.
            max_running: Rows that decode together.
            max_prefill: Prompt tokens read in one forward, unless one prompt is longer.
            cache_tokens: Size of the prefix cache.
            version: Version of the weights in force.
            on_death: Called from the thread if it ends by an error of its own.
        """
        self.runner = runner
        self.version = version
        self.paused = False
        self.epoch = 0
        self.counters = {"requests": 0, "prompt_tokens": 0, "cached_tokens": 0, "steps": 0}
        self.counters |= {"generated_tokens": 0, "aborted": 0, "retractions": 0}
        self.last_update_s = 0.0
        self._shapes = shapes
        self._on_death = on_death
        self._max_running, self._max_prefill = max_running, max_prefill
        self._tree = PrefixTree(cache_tokens)
        self._pool = Pool(runner.slots.shape, cache_tokens)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._sampler: Sampler | None = None
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
    def running(self) -> int:
        """Requests that hold a row."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that do not hold a row yet."""
        return len(self._waiting)

    @property
    def cached(self) -> int:
        """Tokens in the prefix cache."""
        return len(self._tree)

    def submit(self, job: Job) -> Sequence:
        """Begin a request; its ``done`` future gives the :class:`Outcome`."""
        sequence = Sequence(job)
        self._inbox.put(lambda: self._enqueue(sequence))
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Drop a request that nobody waits for any more."""
        self._inbox.put(lambda: self._abort(lambda other: other is sequence))

    def abort(self, rid: str | None) -> Future[int]:
        """End the requests of this id, or all with None; each returns its partial answer."""
        return self.call(
            lambda: self._abort(lambda sequence: rid is None or sequence.job.rid == rid)
        )

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop decoding."""
        return self.call(lambda: self._pause(mode))

    def resume(self) -> Future[None]:
        """Go on decoding."""
        return self.call(self._resume)

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
                self._abort(lambda _: True)
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
            self._fail_all(EngineUnavailable("the engine's scheduler has died"))
            self._on_death()
            raise
        self._fail_all(EngineUnavailable("the engine is shutting down"))

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
        return bool(self._running) or (bool(self._waiting) and not self._when_drained)

    def _can_run_drained(self) -> bool:
        return bool(self._when_drained) and (self.paused or not self._running)

    def _run_drained(self) -> None:
        while self._can_run_drained():
            self._when_drained.popleft()()

    def _guarded_step(self) -> None:
        """Make one step; an error in it fails the requests that were in it and nothing else."""
        try:
            self._step()
        except Exception as error:
            traceback.print_exc()
            self._fail_rows(EngineError(f"the engine failed in a forward: {error!r}"))

    def _fail_rows(self, error: EngineError) -> None:
        failed, self._running, self._sampler = self._running, [], None
        self._tree.clear()
        self.runner.slots.wipe()
        for sequence in failed:
            sequence.done.set_exception(error)

    def _fail_all(self, error: EngineError) -> None:
        for sequence in (*self._running, *self._waiting):
            sequence.done.set_exception(error)
        self._running, self._waiting = [], deque()

    # One step.

    def _step(self) -> None:
        first_new = len(self._running)
        if not self._when_drained:
            self._admit()
        rows = self._running
        if not rows:
            return
        if self._sampler is None:
            self._sampler = Sampler([row.job.sampling for row in rows])
        full = [at for at, row in enumerate(rows) if row.needs_prompt_logprobs]
        new = [row.pending() for row in rows]
        logits, prompt_logits = self.runner.forward(new, [row.length for row in rows], full)
        for row, fresh in zip(rows, new, strict=True):
            row.length += len(fresh)
        for at, values in zip(full, prompt_logits, strict=True):
            rows[at].take_prompt_logprobs(values)
        for at in range(first_new, len(rows)):
            if len(new[at]) > 1:
                self._remember(at)
        self._sample(logits)
        self.counters["steps"] += 1

    def _sample(self, logits: torch.Tensor) -> None:
        assert self._sampler is not None
        rows = self._running
        counters = [len(row.output_ids) for row in rows]
        tokens, logprobs = self._sampler.sample(logits, counters)
        ended = [
            at
            for at, (row, token, logprob) in enumerate(zip(rows, tokens, logprobs, strict=True))
            if row.accept(token, logprob, self.version)
        ]
        for at in reversed(ended):
            self._finish(at)

    def _finish(self, at: int) -> None:
        row = self._running[at]
        if row.failure is not None:
            self.runner.slots.wipe_row(at)
            self._release(at)
            row.done.set_exception(EngineError(row.failure))
            return
        self._remember(at)
        outcome = self._outcome(row, at)
        self._release(at)
        row.done.set_result(outcome)

    def _release(self, at: int) -> Sequence:
        """Free row ``at``; the last row takes its place."""
        row, last = self._running[at], self._running.pop()
        if last is not row:
            self.runner.slots.move(len(self._running), at, last.length)
            self._running[at] = last
        self._sampler = None
        return row

    def _outcome(self, row: Sequence, at: int | None) -> Outcome:
        """Gather the answer of a request, which may hold row ``at``."""
        self.counters["generated_tokens"] += len(row.output_ids)
        return row.outcome(self.version, None if at is None else self._routes(at))

    def _routes(self, at: int) -> Any:
        """Return the routes of all that row ``at`` has read, if its request wants them."""
        row = self._running[at]
        return self.runner.row_routes(at, row.length) if row.job.return_routes else None

    # Admission.

    def _enqueue(self, sequence: Sequence) -> None:
        self.counters["requests"] += 1
        self._waiting.append(sequence)

    def _admit(self) -> None:
        """Give rows to waiting requests, in order, as far as everything fits."""
        admitted: list[tuple[Sequence, Any]] = []
        deferred: list[Sequence] = []
        budget, longest = self._max_prefill, max((r.limit for r in self._running), default=0)
        while self._waiting and len(self._running) + len(admitted) < self._max_running:
            sequence = self._waiting[0]
            rows = len(self._running) + len(admitted) + 1
            if not self.runner.slots.fits(rows, max(longest, sequence.limit)):
                break
            known = self._lookup(sequence)
            fresh = len(sequence.tokens) - len(known)
            if fresh > budget and admitted:
                break
            self._waiting.popleft()
            if self._tree.capacity and any(
                sequence.shares(other, len(known)) for other, _ in admitted
            ):
                deferred.append(sequence)
                continue
            budget, longest = budget - fresh, max(longest, sequence.limit)
            admitted.append((sequence, known))
        self._waiting.extendleft(reversed(deferred))
        if admitted:
            self._place(admitted, longest)

    def _lookup(self, sequence: Sequence) -> Any:
        """Find the cached part; at least one token is left to read, for its logits."""
        if sequence.needs_prompt_logprobs:
            return self._tree.match(())
        return self._tree.match(sequence.tokens[:-1])

    def _place(self, admitted: list[tuple[Sequence, Any]], longest: int) -> None:
        slots, count = self.runner.slots, len(self._running)
        try:
            slots.reserve(count + len(admitted), longest, count)
        except (RuntimeError, MemoryError) as error:
            for sequence, _ in admitted:
                sequence.done.set_exception(EngineError(f"no memory for its keys: {error}"))
            return
        for sequence, known in sorted(admitted, key=lambda pair: pair[0].unread(len(pair[1]))):
            if len(known):
                slots.load(len(self._running), self._pool, known)
            sequence.begin(len(known), self.epoch)
            self.counters["prompt_tokens"] += len(sequence.job.input_ids)
            self.counters["cached_tokens"] += len(known)
            self._running.append(sequence)
        self._sampler = None

    def _remember(self, at: int) -> None:
        """Put what row ``at`` has read into the prefix cache."""
        row = self._running[at]
        if row.epoch != self.epoch or not self._tree.capacity:
            return
        start, indices = self._tree.insert(row.tokens[: row.length])
        if len(indices):
            self.runner.slots.store(at, start, self._pool, indices)

    # Control.

    def _abort(self, wanted: Callable[[Sequence], bool]) -> int:
        before = self.counters["aborted"]
        for at in reversed(range(len(self._running))):
            if wanted(self._running[at]):
                self._end_aborted(self._running[at], at)
                self._release(at)
        stay: deque[Sequence] = deque()
        for sequence in self._waiting:
            if wanted(sequence):
                self._end_aborted(sequence, None)
            else:
                stay.append(sequence)
        self._waiting = stay
        return self.counters["aborted"] - before

    def _end_aborted(self, sequence: Sequence, at: int | None) -> None:
        self.counters["aborted"] += 1
        sequence.finish_reason = {"type": "abort", "message": "Aborted"}
        sequence.done.set_result(self._outcome(sequence, at))

    def _pause(self, mode: PauseMode) -> None:
        self.paused = True
        if mode == "abort":
            self._abort(lambda _: True)
        elif mode == "retract":
            for at, sequence in enumerate(self._running):
                sequence.retract(self._routes(at))
            self.counters["retractions"] += len(self._running)
            self._waiting.extendleft(reversed(self._running))
            self._running, self._sampler = [], None

    def _resume(self) -> None:
        self.paused = False

    def _flush(self) -> bool:
        if self._running:
            return False
        self._tree.clear()
        return True

    def _set_version(self, version: str, abort_all: bool) -> None:
        if abort_all:
            self._abort(lambda _: True)
        self.version = version

    # Weights.

    def _begin_update(self) -> None:
        if self._session is not None:
            raise EngineRejected(
                "a weight-update session is already open; call end_weight_update() first"
            )
        self._session = WeightSession(self.runner.model, self._shapes)

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
        session = WeightSession(self.runner.model, self._shapes)
        self._add_folder(session, folder, version)
        self._commit(session)

    def _commit(self, session: WeightSession) -> None:
        started = time.perf_counter()
        session.commit()
        self.epoch += 1
        self._tree.clear()
        self.version = session.version or self.version
        self.last_update_s = time.perf_counter() - started

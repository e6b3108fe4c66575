"""The requests that decode together, and those that wait to join them.

:meth:`Batch.step` admits waiting requests, runs one forward over the new tokens of all rows,
samples one token per row, and lets go of what has ended. Request ``running[i]`` owns row ``i``
of the slots.

A request that joins first looks its tokens up in the prefix cache and reads only the rest. If
a request admitted in the same step is about to read what it needs too (members of one group),
it waits one step and finds it cached. Rows take slots as they grow; when these run out, the
youngest row is retracted: it waits again and finds what it had read in the cache.

**Weights and keys.** ``epoch`` counts weight changes. The prefix cache is cleared with each,
and a row whose keys were begun under an older epoch (an ``in_place`` pause keeps it running) is
never put into the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from relax_agent.engines.embedded.kv import Pool
from relax_agent.engines.embedded.prefix import Indices, PrefixTree
from relax_agent.engines.embedded.runner import ModelRunner
from relax_agent.engines.embedded.sampling import Sampler
from relax_agent.engines.embedded.sequence import Outcome, Routes, Sequence
from relax_agent.errors import EngineError

_HEADROOM = 32
"""Tokens that a row must be able to grow by when it joins."""


class Batch:
    """All open requests. Belongs to the scheduler's thread."""

    def __init__(
        self, runner: ModelRunner, *, max_running: int, max_prefill: int, cache_tokens: int
    ) -> None:
        """Begin empty.

        Args:
            runner: The model and its slots.
            max_running: Rows that decode together.
            max_prefill: Prompt tokens read in one forward, unless one prompt is longer.
            cache_tokens: Size of the prefix cache.
        """
        self.runner = runner
        self.version = "0"
        """Weight version given to sampled tokens."""
        self.epoch = 0
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.tree = PrefixTree(cache_tokens)
        self.counters = {
            "requests": 0,
            "prompt_tokens": 0,
            "cached_tokens": 0,
            "generated_tokens": 0,
            "aborted": 0,
            "retractions": 0,
            "steps": 0,
        }
        self._pool = Pool(runner.slots.shape, cache_tokens)
        self._max_running, self._max_prefill = max_running, max_prefill
        self._sampler: Sampler | None = None

    def enqueue(self, sequence: Sequence) -> None:
        """Take a new request."""
        self.counters["requests"] += 1
        self.waiting.append(sequence)

    def step(self, *, admit: bool = True) -> None:
        """Sample one token for every row; with ``admit`` waiting requests join first."""
        self._grow()
        first_new = len(self.running)
        if admit:
            self._admit()
        rows = self.running
        if not rows:
            return
        full = [at for at, row in enumerate(rows) if row.needs_prompt_logprobs]
        new = [row.pending() for row in rows]
        media = [row.job.prompt for row in rows]
        lengths = [row.length for row in rows]
        logits, prompt_logits = self.runner.forward(new, lengths, full, media)
        for row, fresh in zip(rows, new, strict=True):
            row.length += len(fresh)
        for at, values in zip(full, prompt_logits, strict=True):
            rows[at].take_prompt_logprobs(values)
        for at in range(first_new, len(rows)):
            if len(new[at]) > 1:
                self._remember(at)
        self._sample(logits)
        self.counters["steps"] += 1

    def abort(self, wanted: Callable[[Sequence], bool]) -> int:
        """End some requests with what they have; return how many."""
        before = self.counters["aborted"]
        for at in reversed(range(len(self.running))):
            if wanted(self.running[at]):
                self._end_aborted(self.running[at], self._routes(at))
                self._release(at)
        waiting, self.waiting = self.waiting, deque()
        for sequence in waiting:
            if wanted(sequence):
                self._end_aborted(sequence, None)
            else:
                self.waiting.append(sequence)
        return self.counters["aborted"] - before

    def retract_all(self) -> None:
        """Give all rows up; their requests wait, in order, before all others."""
        for at in reversed(range(len(self.running))):
            self._retract(at)

    def new_weights(self, version: str | None) -> None:
        """Take note that the model's weights have changed."""
        self.epoch += 1
        self.tree.clear()
        self.version = version or self.version

    def fail_running(self, error: EngineError) -> None:
        """Fail all requests that hold a row, and distrust everything that was computed."""
        failed, self.running, self._sampler = self.running, [], None
        self.tree.clear()
        self.runner.slots.wipe()
        for sequence in failed:
            sequence.done.set_exception(error)

    def fail_all(self, error: EngineError) -> None:
        """Fail all requests."""
        failed = [*self.running, *self.waiting]
        self.running, self.waiting, self._sampler = [], deque(), None
        for sequence in failed:
            sequence.done.set_exception(error)

    # Admission.

    def _admit(self) -> None:
        """Give rows to waiting requests, in order, as far as everything fits."""
        admitted: list[tuple[Sequence, Indices]] = []
        deferred: list[Sequence] = []
        budget, longest = self._max_prefill, self._longest()
        while self.waiting and len(self.running) + len(admitted) < self._max_running:
            sequence, rows = self.waiting[0], len(self.running) + len(admitted) + 1
            length = max(longest, min(sequence.limit, len(sequence.tokens) + _HEADROOM))
            known = self._lookup(sequence)
            fresh = len(sequence.tokens) - len(known)
            if not self.runner.slots.fits(rows, length) or (fresh > budget and admitted):
                break
            self.waiting.popleft()
            if any(sequence.shares(other, len(known)) for other, _ in admitted):
                deferred.append(sequence)
                continue
            budget, longest = budget - fresh, length
            admitted.append((sequence, known))
        self.waiting.extendleft(reversed(deferred))
        if admitted:
            self._place(admitted, longest)

    def _lookup(self, sequence: Sequence) -> Indices:
        """Find the cached part; at least one token is left to read, for its logits."""
        return self.tree.match(() if sequence.needs_prompt_logprobs else sequence.keys[:-1])

    def _place(self, admitted: list[tuple[Sequence, Indices]], longest: int) -> None:
        """Give rows: those with one token to read come first, as the forward wants them."""
        slots, used = self.runner.slots, len(self.running)
        try:
            slots.reserve(used + len(admitted), longest, used)
        except (RuntimeError, MemoryError) as error:
            for sequence, _ in admitted:
                sequence.done.set_exception(EngineError(f"no memory for its keys: {error}"))
            return
        for sequence, known in sorted(admitted, key=lambda pair: pair[0].unread(len(pair[1]))):
            if len(known):
                slots.load(len(self.running), self._pool, known)
            if sequence.begin(len(known), self.epoch):
                self.counters["prompt_tokens"] += len(sequence.job.input_ids)
                self.counters["cached_tokens"] += len(known)
            self.running.append(sequence)
        self._sampler = None

    def _longest(self) -> int:
        """Return how many tokens the longest row will hold after the next forward."""
        return max((len(row.tokens) for row in self.running), default=0)

    def _grow(self) -> None:
        """Make room for one more token in every row, if need be by retracting the youngest."""
        slots = self.runner.slots
        while len(self.running) > 1 and not slots.fits(len(self.running), self._longest()):
            youngest = max(range(len(self.running)), key=lambda at: self.running[at].arrived)
            self._remember(youngest)
            self._retract(youngest)
        if self.running:
            slots.reserve(len(self.running), self._longest(), len(self.running))

    # Rows.

    def _sample(self, logits: torch.Tensor) -> None:
        rows = self.running
        if self._sampler is None:
            self._sampler = Sampler([row.job.sampling for row in rows], self.runner.suppressed)
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
        row = self.running[at]
        if row.failure is not None:
            self.runner.slots.wipe_row(at)
            self._release(at)
            row.done.set_exception(EngineError(row.failure))
            return
        self._remember(at)
        outcome = self._outcome(row, self._routes(at))
        self._release(at)
        row.done.set_result(outcome)

    def _end_aborted(self, sequence: Sequence, routes: Routes | None) -> None:
        self.counters["aborted"] += 1
        sequence.finish_reason = {"type": "abort", "message": "Aborted"}
        sequence.done.set_result(self._outcome(sequence, routes))

    def _outcome(self, sequence: Sequence, routes: Routes | None) -> Outcome:
        self.counters["generated_tokens"] += len(sequence.output_ids)
        return sequence.outcome(self.version, routes)

    def _release(self, at: int) -> None:
        """Free row ``at``; the last row takes its place."""
        row, last = self.running[at], self.running.pop()
        if last is not row:
            self.runner.slots.move(len(self.running), at, last.length)
            self.running[at] = last
        self._sampler = None

    def _retract(self, at: int) -> None:
        """Send row ``at`` back to the head of those who wait."""
        self.counters["retractions"] += 1
        sequence = self.running[at]
        sequence.retract(self._routes(at))
        self._release(at)
        self.waiting.appendleft(sequence)

    def _routes(self, at: int) -> Routes | None:
        """Return the routes of all that row ``at`` has read, if its request wants them."""
        row = self.running[at]
        return self.runner.row_routes(at, row.length) if row.job.return_routes else None

    def _remember(self, at: int) -> None:
        """Put what row ``at`` has read into the prefix cache."""
        row = self.running[at]
        if row.epoch != self.epoch:
            return
        start, indices = self.tree.insert(row.keys[: row.length])
        if len(indices):
            self.runner.slots.store(at, start, self._pool, indices)

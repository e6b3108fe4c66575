"""The local queue: payload files and an SQLite index in one folder, owned by one process.

What is open (reserved, stored, leased) is mirrored in memory, so that every decision is made
between two awaits and no two waiters can take the same slot or group. A decision is written to the
index first and to memory second. Waiters sleep on one event that every change replaces; each looks
again for itself. Slots go to whoever asked first.

The order of a lease is: what was leased before (and given back, or by an abandoned future), as it
was leased then; then the group begun with the oldest weights; then the one that was finished first.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from pathlib import Path

from relax_agent.episode import Group
from relax_agent.errors import LeaseLost, QueueError
from relax_agent.queue.admission import age, capacity
from relax_agent.queue.index import Index, State
from relax_agent.queue.payload import PayloadFolder, save_group
from relax_agent.queue.planning import Entry, Planner
from relax_agent.queue.protocol import DropReason, Lease, LeasedGroup, QueueStats, Restored
from relax_agent.queue.recovery import Recovery, recover
from relax_agent.queue.settings import QueueSettings
from relax_agent.queue.waiting import Waiters, in_thread

_OPEN = (State.RESERVED, State.READY, State.LEASED)
_TRAINED = (State.ACKED, State.COMMITTED)


@dataclass(slots=True)
class _Held:
    """A lease that is neither acknowledged nor released."""

    entries: list[Entry]
    expires: float
    """Time of the event loop."""


class LocalQueue:
    """A :class:`~relax_agent.queue.protocol.TrajectoryQueue` in one folder."""

    def __init__(self, folder: Path, settings: QueueSettings, *, groups_per_step: int) -> None:
        """Open or create the queue.

        Args:
            folder: Holds ``index.sqlite`` and ``groups/``; created if missing.
            settings: The recipe's part about the queue.
            groups_per_step: How many groups one optimizer step trains.

        Raises:
            StorageError: the folder cannot be used, or another run uses it.
        """
        self._settings = settings
        self._planner = Planner(settings, groups_per_step)
        self._capacity = capacity(settings.max_staleness, groups_per_step)
        self._index = Index(folder / "index.sqlite")
        self._payloads = PayloadFolder(folder / "groups")
        self._open: dict[str, Entry] = {}
        self._leases: dict[str, _Held] = {}
        self._tickets: list[object] = []
        self._waiters = Waiters()
        self._closed = False
        self._trained_step = 0
        self._published: int | None = None
        self._finished = 0
        self._last_put = float("-inf")
        self._duplicates = self._redelivered = 0
        self._unrestored = bool(self._index.counts())

    # -- the rollout's side ------------------------------------------------------------------

    async def reserve(self, group_id: str, task_id: str, *, timeout: float) -> None:
        """Wait for a free slot and charge it to a new group; see the protocol for the errors."""
        self._require_restored()
        self._require_new(group_id)
        deadline = asyncio.get_running_loop().time() + timeout
        ticket = object()
        self._tickets.append(ticket)
        try:
            await self._waiters.until(
                lambda: True if self._tickets[0] is ticket and self._has_room() else None,
                deadline=lambda: deadline,
                wake=self._next_expiry,
                why=lambda: f"no slot became free within {timeout:g} s: {self._describe()}",
            )
            self._require_new(group_id)  # somebody else may have asked for it meanwhile
            began = self._sampling_step()
            number = self._index.add(group_id, task_id, began)
            self._open[group_id] = Entry(number, group_id, began)
        finally:
            self._tickets.remove(ticket)
            self._waiters.notify()

    async def put(self, group: Group) -> bool:
        """Store a finished group. A late or repeated put is ignored, counted and gives False."""
        entry = self._open.get(group.id)
        if entry is None or entry.state is not State.RESERVED or entry.storing:
            self._duplicates += 1
            return False
        path = self._payloads.path(entry.number)
        entry.storing = True
        try:
            await in_thread(save_group, path, group)
            if self._open.get(group.id) is not entry:  # dropped while it was being written
                path.unlink(missing_ok=True)
                return False
            self._index.set_state([entry.number], State.READY)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            entry.storing = False
        self._finished += 1
        entry.finish(self._finished)
        self._last_put = asyncio.get_running_loop().time()
        self._waiters.notify()
        return True

    async def drop(self, group_id: str, reason: DropReason, detail: str = "") -> bool:
        """End a reserved or ready group without training it, and free its slot."""
        entry = self._open.get(group_id)
        if entry is None or entry.state is State.LEASED:
            return False
        self._end(entry, State(reason), detail)
        self._waiters.notify()
        return True

    def published(self, step: int) -> None:
        """Say that the engines now sample with the weights that step ``step`` made.

        Until the first call a group is taken to begin with the newest trained step's weights.
        """
        self._published = step
        self._waiters.notify()

    def fail(self, error: BaseException) -> None:
        """Say that the producer has failed: every waiter raises ProducerFailed at once."""
        self._waiters.fail(error)

    # -- the trainer's side ------------------------------------------------------------------

    async def lease(self, count: int, *, step: int, timeout: float) -> Lease:
        """Hand out ``count`` groups for step ``step``; see the protocol for the errors."""
        self._require_restored()
        if step <= self._trained_step:
            raise QueueError(f"step {step} cannot be leased: step {self._trained_step} is trained")
        if count > self._capacity:
            raise QueueError(
                f"{count} groups can never be there: at most {self._capacity} may be open"
            )
        start = asyncio.get_running_loop().time()

        def deadline() -> float:
            quiet = max(start, self._last_put) + self._settings.no_progress_s
            return min(start + timeout, quiet)

        chosen = await self._waiters.until(
            lambda: self._choose(count, step),
            deadline=deadline,
            wake=self._next_expiry,
            why=lambda: self._why_not(count, step, start, timeout),
        )
        self._index.lease([entry.number for entry in chosen], step)
        for place, entry in enumerate(chosen):
            entry.assign(State.LEASED, step, place)
        lease_id = uuid.uuid4().hex
        expires = asyncio.get_running_loop().time() + self._settings.lease_timeout_s
        self._leases[lease_id] = _Held(chosen, expires)
        groups = tuple(
            LeasedGroup(entry.id, self._payloads.path(entry.number), age(entry.began, step))
            for entry in chosen
        )
        masks = self._settings.beyond == "mask"
        return Lease(lease_id, step, groups, self._settings.max_staleness if masks else None)

    async def ack(self, lease: Lease, step: int) -> None:
        """Say that step ``step`` has trained the lease; LeaseLost if it is not held any more."""
        self._expire()
        held = self._leases.get(lease.id)
        if held is None:
            raise LeaseLost(
                f"the lease of step {lease.step} is not held any more: its groups may be trained"
                " by somebody else",
                hint="restore the last checkpoint, or raise queue.lease_timeout_s",
            )
        if step < self._trained_step:
            raise QueueError(f"step {step} is acknowledged after step {self._trained_step}")
        self._index.ack([entry.number for entry in held.entries], step)
        del self._leases[lease.id]
        for entry in held.entries:
            del self._open[entry.id]
        self._trained_step = step
        self._waiters.notify()
        await in_thread(self._index.flush)

    async def release(self, lease: Lease) -> None:
        """Give the groups back untrained. A lease that is gone already is ignored."""
        self._give_back(lease.id)

    async def commit(self, step: int) -> None:
        """Make all acks up to ``step`` final and delete their payloads."""
        numbers = self._index.commit(step)
        await in_thread(self._index.flush)
        await in_thread(self._payloads.delete, numbers)

    # -- resume ------------------------------------------------------------------------------

    async def restore(self, step: int) -> Restored:
        """Go back to the checkpoint of ``step`` (0: the beginning), before anything is leased."""
        if self._leases:
            raise QueueError("a lease is out: restore comes before the first lease")
        self._index.commit(step)
        found = recover(
            self._index.rows(), step, lambda number: self._payloads.path(number).exists()
        )
        kept = [row.number for row in (*found.replayed, *found.ready)]
        self._index.delete(row.number for row in found.cleared)
        self._index.set_state(kept, State.READY)
        self._reopen(found)
        self._trained_step, self._published, self._unrestored = step, None, False
        await in_thread(self._index.flush)
        await in_thread(self._payloads.keep_only, kept)
        self._waiters.notify()
        offered = sorted(self._open.values(), key=lambda entry: entry.order)
        return Restored(
            tuple(entry.id for entry in offered), tuple(row.id for row in found.cleared)
        )

    def _reopen(self, found: Recovery) -> None:
        self._open.clear()
        for row in found.replayed:
            entry = self._open[row.id] = Entry(row.number, row.id, row.began)
            entry.assign(State.READY, row.step or 0, row.place or 0)
        for row in found.ready:
            self._finished += 1
            entry = self._open[row.id] = Entry(row.number, row.id, row.began)
            entry.finish(self._finished)
        self._redelivered += len(found.replayed)

    async def groups(self) -> dict[str, str]:
        """Return the id of every known group with its task id, in the order of their start."""
        return {row.id: row.task_id for row in self._index.rows()}

    # -- looking at it -----------------------------------------------------------------------

    async def stats(self) -> QueueStats:
        """Return the counts of this moment."""
        counts = self._index.counts()
        begun = [entry.began for entry in self._open.values()]
        return QueueStats(
            started=sum(counts.values()),
            reserved=counts.get(State.RESERVED, 0),
            ready=counts.get(State.READY, 0),
            leased=counts.get(State.LEASED, 0),
            trained=sum(counts.get(state, 0) for state in _TRAINED),
            filtered=counts.get(State.FILTERED, 0),
            dropped=counts.get(State.DROPPED, 0),
            failed=counts.get(State.FAILED, 0),
            cancelled=counts.get(State.CANCELLED, 0),
            capacity=self._capacity,
            duplicates=self._duplicates,
            redelivered=self._redelivered,
            oldest_age=max(0, age(min(begun), self._trained_step + 1)) if begun else 0,
        )

    async def close(self) -> None:
        """Wake every waiter with QueueError and close the files. Idempotent."""
        if not self._closed:
            self._closed = True
            self._waiters.close()
            self._index.close()

    # -- decisions ---------------------------------------------------------------------------

    def _sampling_step(self) -> int:
        """Return the step whose weights a group that starts now begins with."""
        return self._trained_step if self._published is None else self._published

    def _has_room(self) -> bool:
        self._expire()
        return self._planner.has_room(
            self._open.values(), began=self._sampling_step(), following=self._trained_step + 1
        )

    def _choose(self, count: int, step: int) -> list[Entry] | None:
        """Return the groups of the next lease; None if it has to wait."""
        self._expire()
        if self._settings.beyond == "drop":
            self._drop_too_old(step)
        return self._planner.choose(self._open.values(), count, step)

    def _drop_too_old(self, step: int) -> None:
        bound = self._settings.max_staleness
        for entry in self._in_state(State.READY):
            if age(entry.began, step) > bound:
                detail = f"stale: {age(entry.began, step)} steps old, the bound is {bound}"
                self._end(entry, State.DROPPED, detail)
                self._waiters.notify()

    def _in_state(self, state: State) -> list[Entry]:
        return [entry for entry in self._open.values() if entry.state is state]

    def _end(self, entry: Entry, state: State, detail: str) -> None:
        self._index.set_state([entry.number], state, detail)
        del self._open[entry.id]
        self._payloads.delete([entry.number])

    def _expire(self) -> None:
        now = asyncio.get_running_loop().time()
        for lease_id in [key for key, held in self._leases.items() if held.expires <= now]:
            self._give_back(lease_id)

    def _next_expiry(self) -> float:
        return min((held.expires for held in self._leases.values()), default=float("inf"))

    def _give_back(self, lease_id: str) -> None:
        held = self._leases.get(lease_id)
        if held is None:
            return
        self._index.set_state([entry.number for entry in held.entries], State.READY)
        del self._leases[lease_id]
        for entry in held.entries:
            entry.state = State.READY
        self._redelivered += len(held.entries)
        self._waiters.notify()

    # -- words --------------------------------------------------------------------------------

    def _require_restored(self) -> None:
        if self._unrestored:
            raise QueueError(
                "the queue holds groups of an earlier run", hint="call restore(step) first"
            )

    def _require_new(self, group_id: str) -> None:
        known = self._index.state_of(group_id)
        if known is not None:
            raise QueueError(f"group {group_id} was started before and is {known}")

    def _describe(self) -> str:
        states = {state: len(self._in_state(state)) for state in _OPEN}
        ended = {
            state: count
            for state, count in self._index.counts().items()
            if state in (State.FILTERED, State.DROPPED, State.FAILED) and count
        }
        parts = [f"{count} {state}" for state, count in (states | ended).items()]
        return f"{len(self._open)} of {self._capacity} slots in use ({', '.join(parts)})"

    def _why_not(self, count: int, step: int, start: float, timeout: float) -> str:
        now = asyncio.get_running_loop().time()
        waited = now - start
        ready = sorted(self._in_state(State.READY), key=lambda entry: entry.order)
        if len(ready) >= count:
            oldest = min(self._in_state(State.RESERVED), key=lambda entry: entry.began)
            missing = f"waited for unfinished group {oldest.id}, which would become too old"
        else:
            missing = f"{len(ready)} of {count} groups were there"
        quiet = "" if waited >= timeout else ", and nothing new came"
        return f"no data for step {step} after {waited:.0f} s{quiet}: {missing}; {self._describe()}"

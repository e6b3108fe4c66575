"""The contract of a trajectory queue: what rollout, trainer and resume may rely on.

    reserve ──▶ put ──▶ lease ──▶ ack(step) ──▶ commit(checkpoint step)
       │                 ▲  │        │
       └─▶ drop          └──┴────────┘  release, lease expiry, restore(older step)

**Slots.** ``reserve`` charges a slot, ``ack`` and ``drop`` free it; at most
``(max_staleness + 1) * groups_per_step`` are charged at once. **Exactly once.** An ack is
provisional until a checkpoint of that step is committed; restoring checkpoint k offers again
everything acknowledged after it, so that in the lineage of checkpoints that lives on each group is
trained once. **Steps** are counted from 1: step s trains on weights that s - 1 steps made.
**Time** is the event loop's clock; every wait has a limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from relax_agent.episode import Group

DropReason = Literal["filtered", "dropped", "failed", "cancelled"]
"""Why a group that was started will not be trained.

``filtered``: finished, but it has nothing to teach. ``dropped``: given up (too few members, too
old). ``failed``: env or engine failed. ``cancelled``: the run stopped first; restore forgets it, so
that its task is run again.
"""


@dataclass(frozen=True, slots=True)
class LeasedGroup:
    """A group handed to the trainer."""

    id: str
    path: Path
    """Its payload, for :func:`relax_agent.queue.payload.load_group`."""
    age: int
    """Steps between the weights that began it and the weights that it trains."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Groups handed out together for one step, and not yet acknowledged."""

    id: str
    step: int
    """The optimizer step that they are for, counted from 1."""
    groups: tuple[LeasedGroup, ...]
    max_token_age: int | None = None
    """Tokens older than this many weight versions must be masked; None: train on all."""

    @property
    def paths(self) -> list[Path]:
        """The payload files, in the order in which they are to be trained."""
        return [group.path for group in self.groups]


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore did."""

    offered: tuple[str, ...]
    """Groups that can be leased now, in the order of the lease."""
    cleared: tuple[str, ...]
    """Groups that must be run again, because nothing of them is left."""


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Counts of groups. ``started`` is the sum of all other states."""

    started: int
    reserved: int
    """Being rolled out."""
    ready: int
    leased: int
    trained: int
    filtered: int
    dropped: int
    failed: int
    cancelled: int
    capacity: int
    """The most groups that may be started and not yet trained."""
    duplicates: int
    """Late or repeated puts that were ignored, since this process began."""
    redelivered: int
    """Groups offered again after a release, an expired lease or a restore."""
    oldest_age: int
    """Steps since the oldest open group began; 0 if none is open."""

    @property
    def open(self) -> int:
        """Groups started and not yet trained, filtered, dropped or failed."""
        return self.reserved + self.ready + self.leased


class TrajectoryQueue(Protocol):
    """Where finished groups wait for the trainer."""

    async def reserve(self, group_id: str, task_id: str, *, timeout: float) -> None:
        """Wait for a free slot and charge it to a new group.

        Raises:
            NoData: no slot within ``timeout`` seconds.
            ProducerFailed: :meth:`fail` was called.
            QueueError: the group is known already.
        """

    async def put(self, group: Group) -> bool:
        """Store a finished group. A late or repeated put is ignored, counted and gives False."""

    async def drop(self, group_id: str, reason: DropReason, detail: str = "") -> bool:
        """End a reserved or ready group without training it, and free its slot.

        Returns False if it has ended already.
        """

    async def lease(self, count: int, *, step: int, timeout: float) -> Lease:
        """Hand out ``count`` groups for optimizer step ``step``; surplus groups stay.

        Raises:
            NoData: not enough groups within ``timeout`` seconds, or no progress at all for the
                time in the settings; the message says what was missing.
            ProducerFailed: whoever fills the queue has failed; carries the cause.
        """

    async def ack(self, lease: Lease, step: int) -> None:
        """Say that step ``step`` has trained the lease. Provisional until :meth:`commit`.

        Raises:
            LeaseLost: it expired, was released, or was never given.
        """

    async def release(self, lease: Lease) -> None:
        """Give the groups back untrained. A lease that is gone already is ignored."""

    async def commit(self, step: int) -> None:
        """Make all acks up to ``step`` final, because a checkpoint of it is on the disk."""

    async def restore(self, step: int) -> Restored:
        """Go back to the checkpoint of ``step`` (0: the beginning), before anything is leased."""

    async def groups(self) -> dict[str, str]:
        """Return the id of every known group with its task id, in the order of their start."""

    def published(self, step: int) -> None:
        """Say that the engines now sample with the weights that step ``step`` made."""

    def fail(self, error: BaseException) -> None:
        """Say that the producer has failed: every waiter raises ProducerFailed at once."""

    async def stats(self) -> QueueStats:
        """Return the counts of this moment."""

    async def close(self) -> None:
        """Wake every waiter with QueueError and close the files. Idempotent."""

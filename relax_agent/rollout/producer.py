"""Keeps groups in flight and the queue filled, until it is cancelled.

The n-th group of a run is the n-th task of the order, under an id made from n. After a resume the
groups that the queue knows are passed over, and those it has lost are run again: the position in
the tasks needs no file of its own, and one old group cannot pin it.

A group starts as soon as the queue has a slot and fewer episodes run than may; it is handed to the
queue as soon as it is finished, whatever the others do. Every group that was started ends exactly
once: put, filtered, dropped, failed, or cancelled with the run.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable

from relax_agent.errors import NoData, RunFailed
from relax_agent.queue import DropReason, TrajectoryQueue
from relax_agent.queue.waiting import first_cause
from relax_agent.rollout.groups import GroupOutcome, GroupRunner

_RESERVE_S = 60.0
"""One wait for a slot; repeated for as long as the trainer takes."""


class Producer:
    """Fills a queue with groups."""

    def __init__(
        self,
        queue: TrajectoryQueue,
        groups: GroupRunner,
        tasks: Iterable[str],
        *,
        max_episodes: int,
        max_failures_in_a_row: int = 16,
        on_group: Callable[[GroupOutcome], None] | None = None,
    ) -> None:
        """Prepare; nothing runs yet.

        Args:
            queue: Restored already, if it holds groups of an earlier run.
            groups: Runs one group.
            tasks: Task ids in the order of the run, from its very beginning.
            max_episodes: No group starts while so many episodes run.
            max_failures_in_a_row: So many failed groups one after another end the run.
            on_group: Called with every finished group, before the queue gets it.
        """
        self._queue = queue
        self._groups = groups
        self._tasks = tasks
        self._max_episodes = max_episodes
        self._max_failures_in_a_row = max_failures_in_a_row
        self._on_group = on_group
        self._running = 0
        self._changed = asyncio.Event()
        self._failures_in_a_row = 0
        self.ended: Counter[str] = Counter()
        """Groups that this producer has ended, by ``put`` or the reason."""

    @property
    def running_episodes(self) -> int:
        """Episodes that run or wait for an environment."""
        return self._running

    async def run(self) -> None:
        """Produce until cancelled, or until the tasks end.

        A failure reaches the queue's consumer at once, and the caller when all groups have ended.
        """
        try:
            known = await self._queue.groups()
            async with asyncio.TaskGroup() as running:
                for number, task_id in enumerate(self._tasks):
                    group_id = f"g{number:08d}"
                    if group_id not in known:
                        await self._start(group_id, task_id, running)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            cause = first_cause(error)
            self._queue.fail(cause)
            raise cause from None

    async def _start(self, group_id: str, task_id: str, running: asyncio.TaskGroup) -> None:
        while self._running >= self._max_episodes:
            self._changed.clear()
            await self._changed.wait()
        await self._reserve(group_id, task_id)
        self._running += self._groups.size
        running.create_task(self._produce(group_id, task_id), name=group_id)

    async def _reserve(self, group_id: str, task_id: str) -> None:
        while True:
            try:
                return await self._queue.reserve(group_id, task_id, timeout=_RESERVE_S)
            except NoData:
                continue  # the trainer is busy; whether that takes too long is for it to judge

    async def _produce(self, group_id: str, task_id: str) -> None:
        """Run one group to its end. A defect reaches the consumer before the siblings stop."""
        members = self._groups.size

        def on_member() -> None:
            nonlocal members
            members -= 1
            self._release(1)

        try:
            outcome = await self._groups.run(group_id, task_id, on_member=on_member)
            await self._hand_over(outcome)
        except asyncio.CancelledError:
            await self._drop(group_id, "cancelled", "the run ended first")
            raise
        except BaseException as error:
            cause = first_cause(error)
            self._queue.fail(cause)
            await self._drop(group_id, "failed", f"{type(cause).__name__}: {cause}")
            raise
        finally:
            self._release(members)

    def _release(self, episodes: int) -> None:
        self._running -= episodes
        self._changed.set()

    async def _hand_over(self, outcome: GroupOutcome) -> None:
        if self._on_group is not None:
            self._on_group(outcome)
        if outcome.reason is None:
            await self._queue.put(outcome.group)
            self.ended["put"] += 1
        else:
            await self._drop(outcome.group.id, outcome.reason, outcome.detail)
        self._count_failures(outcome)

    async def _drop(self, group_id: str, reason: DropReason, detail: str) -> None:
        if await self._queue.drop(group_id, reason, detail):
            self.ended[reason] += 1

    def _count_failures(self, outcome: GroupOutcome) -> None:
        if outcome.reason not in ("dropped", "failed"):
            self._failures_in_a_row = 0
            return
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self._max_failures_in_a_row:
            raise RunFailed(
                f"{self._failures_in_a_row} groups failed one after another; the last one:"
                f" {outcome.detail}"
            )

"""May a group start, and which groups does a step get? Decisions over the open groups.

The arithmetic is in :mod:`relax_agent.queue.admission`; here it meets groups in their states.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from relax_agent.queue.admission import first_crowded, may_start, must_wait
from relax_agent.queue.index import State
from relax_agent.queue.settings import QueueSettings

_ASSIGNED, _FRESH = 0, 1


@dataclass(slots=True)
class Entry:
    """An open group."""

    number: int
    id: str
    began: int
    """The step whose weights it began with."""
    state: State = State.RESERVED
    order: tuple[int, int, int] = (_FRESH, 0, 0)
    """Sorts the ready groups: what is bound to a step, by step and place, before what is not."""
    storing: bool = False
    """Its payload is being written."""

    def assign(self, state: State, step: int, place: int) -> None:
        """Bind it to a step: it is leased for it now, or was by an abandoned future."""
        self.state, self.order = state, (_ASSIGNED, step, place)

    def finish(self, serial: int) -> None:
        """Make it ready, behind those that began with older weights or were finished before."""
        self.state, self.order = State.READY, (_FRESH, self.began, serial)


@dataclass(frozen=True, slots=True)
class Planner:
    """The rules of one queue."""

    settings: QueueSettings
    groups_per_step: int

    def has_room(self, entries: Collection[Entry], *, began: int, following: int) -> bool:
        """Tell whether one more group may start.

        Args:
            entries: All open groups.
            began: The step whose weights the new group would begin with.
            following: The next step that is not trained yet.
        """
        bound = self.settings.max_staleness
        if not may_start(len(entries), max_staleness=bound, groups_per_step=self.groups_per_step):
            return False
        if self.settings.on_straggler == "overtake":
            return True
        begun = [self._pressing(entry, following) for entry in entries]
        crowded = first_crowded(
            [*begun, began],
            next_step=following,
            max_staleness=bound,
            groups_per_step=self.groups_per_step,
        )
        return crowded is None

    def choose(self, entries: Iterable[Entry], count: int, step: int) -> list[Entry] | None:
        """Return the groups of the lease for ``step``; None if it has to wait."""
        every = list(entries)
        ready = sorted((e for e in every if e.state is State.READY), key=lambda e: e.order)
        if len(ready) < count:
            return None
        if self.settings.on_straggler == "wait" and must_wait(
            (entry.began for entry in every if entry.state is State.RESERVED),
            (self._pressing(entry, step + 1) for entry in ready[count:]),
            step=step,
            max_staleness=self.settings.max_staleness,
            groups_per_step=self.groups_per_step,
        ):
            return None
        return ready[:count]

    def _pressing(self, entry: Entry, following: int) -> int:
        """Return the start of a group as it counts when steps are planned from ``following`` on.

        A group that is bound to a step uses up a place of that step, as if it were that old. A
        finished group that is too old already cannot be trained before the
        following step, and counts as due there: it must not keep the groups from starting that
        fill up its step.
        """
        bound = self.settings.max_staleness
        began = entry.began
        if entry.order[0] == _ASSIGNED:
            began = min(began, entry.order[1] - 1 - bound)
        if entry.state is not State.RESERVED:
            began = max(began, following - 1 - bound)
        return began

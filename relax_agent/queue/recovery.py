"""What a restart makes of the groups in the index. A pure function of their rows.

Going back to a checkpoint begins a new future. What the abandoned one had leased, trained or not,
is leased again in the same steps and the same order, so that the new future is the same future: no
group comes before the weights that sampled it. Where a part of that is lost (the payloads of a
checkpoint newer than this one are gone), the rest would meet other weights than it was sampled for,
and all of it is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from relax_agent.queue.index import Row, State


@dataclass(slots=True)
class Recovery:
    """The open groups after a restart, each list in the order of the starts."""

    replayed: list[Row] = field(default_factory=list)
    """Leased by the abandoned future, and to be leased again as it was."""
    ready: list[Row] = field(default_factory=list)
    """Finished, and never leased."""
    cleared: list[Row] = field(default_factory=list)
    """To be forgotten, so that their tasks are run again."""


def recover(rows: Iterable[Row], step: int, has_payload: Callable[[int], bool]) -> Recovery:
    """Sort the groups out.

    Args:
        rows: All groups; what ``step`` has trained is committed already.
        step: The checkpoint's step.
        has_payload: Whether the payload of a group's number is there.
    """
    found = Recovery()
    broken = False
    for row in rows:
        if row.state in (State.ACKED, State.READY, State.LEASED):
            there = has_payload(row.number)
            leased = row.step is not None
            broken |= leased and not there
            (found.cleared if not there else found.replayed if leased else found.ready).append(row)
        elif row.state in (State.RESERVED, State.CANCELLED):
            found.cleared.append(row)
        elif row.state is State.COMMITTED and (row.step or 0) > step:
            broken = True
            found.cleared.append(row)
    if not broken:
        return found
    every = [*found.cleared, *found.replayed, *found.ready]
    return Recovery(cleared=sorted(every, key=lambda row: row.number))

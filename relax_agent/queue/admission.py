"""When a group may start and when a step may be leased. Pure functions of counts and steps.

Words: step s (from 1) trains on the weights that s - 1 steps made, which have *age* 0 then. A group
that began with the weights of step v and is trained in step s has age ``s - 1 - v``. A group is
*open* from its start until it is trained, filtered, dropped or failed.

**Count.** ``open < (max_staleness + 1) * groups_per_step``. The count alone decides, never a
version number: a recovered version cannot inflate it.

**Age.** The count does not bound the age, because a slow group can be overtaken again and again. A
group that began at v must be trained in step ``v + max_staleness + 1`` at the latest; a step takes
``groups_per_step`` groups. Deadlines with unit work can all be met exactly if for every n the next
n steps have room for all groups that are due within them (Hall's condition), and taking the
earliest deadline first keeps it so. :func:`first_crowded` looks for the n that breaks it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def capacity(max_staleness: int, groups_per_step: int) -> int:
    """Return the most groups that may be open at once."""
    return (max_staleness + 1) * groups_per_step


def may_start(open_groups: int, *, max_staleness: int, groups_per_step: int) -> bool:
    """Tell whether one more group may start while ``open_groups`` are open."""
    return open_groups < capacity(max_staleness, groups_per_step)


def last_step(began: int, max_staleness: int) -> int:
    """Return the last step that may train a group begun with the weights of step ``began``."""
    return began + max_staleness + 1


def age(began: int, step: int) -> int:
    """Return the age, in steps, at which step ``step`` trains a group begun at ``began``."""
    return step - 1 - began


def first_crowded(
    began: Iterable[int], *, next_step: int, max_staleness: int, groups_per_step: int
) -> int | None:
    """Return the first step by which more groups are due than the steps up to it can train.

    Args:
        began: For every group that is to be trained, the step whose weights it began with.
        next_step: The first step that can train any of them.
        max_staleness: The bound on the age.
        groups_per_step: How many groups one step trains.

    Returns:
        The step, or None if every group can meet its bound.
    """
    due = Counter(last_step(start, max_staleness) for start in began)
    total = 0
    for step in sorted(due):
        total += due[step]
        if total > max(0, step - next_step + 1) * groups_per_step:
            return step
    return None


def must_wait(
    unfinished: Iterable[int],
    finished: Iterable[int],
    *,
    step: int,
    max_staleness: int,
    groups_per_step: int,
) -> bool:
    """Tell whether training ``step`` now would push an unfinished group past the bound.

    Args:
        unfinished: Starts of the groups that still run.
        finished: Starts of the finished groups that ``step`` would leave for later.
        step: The step that would be trained now, without any of these groups.
        max_staleness: The bound on the age.
        groups_per_step: How many groups one step trains.

    A crowd of finished groups alone is no reason to wait: nothing would come of it.
    """
    running = sorted(unfinished)
    if not running:
        return False
    crowded = first_crowded(
        [*running, *finished],
        next_step=step + 1,
        max_staleness=max_staleness,
        groups_per_step=groups_per_step,
    )
    return crowded is not None and last_step(running[0], max_staleness) <= crowded

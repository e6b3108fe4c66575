"""Where the time of one process went.

A :class:`Timeline` charges every moment to exactly one name: the part that was opened last and is
still open, or ``other`` when none is. So nested parts are taken out of the outer one, parts that
occur several times add up, and the parts of a lap sum to the wall time of that lap, whatever the
code does. The clock is injected, which lets tests hold the sums exactly.

    timeline = Timeline()
    with timeline.part("forward"):
        ...
        with timeline.part("communication"):
            ...
    timeline.lap()   # {"forward": 1.2, "communication": 0.3, "other": 0.01}

One timeline belongs to one thread. Roles that overlap (the tasks of an event loop, several
processes) keep one each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OTHER = "other"
"""The name for time that no part claims."""


class Timeline:
    """Seconds per named part since the last lap."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mark = clock()
        self._seconds: dict[str, float] = {}
        self._open: list[list[str]] = []
        # Lists, not strings: each entry has its own identity, so that the right one of two
        # equally named parts is closed when parts end in another order than they began.

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Charge the time of the ``with`` block to ``name``."""
        if name == OTHER:
            raise ValueError(f"{OTHER!r} is what remains; give the part another name")
        entry = [name]
        self._charge()
        self._open.append(entry)
        try:
            yield
        finally:
            self._charge()
            self._open = [each for each in self._open if each is not entry]

    def snapshot(self) -> dict[str, float]:
        """Return seconds per part since the last lap; ``other`` comes last.

        A part that is still open counts up to now.
        """
        self._charge()
        parts = {name: spent for name, spent in self._seconds.items() if name != OTHER}
        return {**parts, OTHER: self._seconds.get(OTHER, 0.0)}

    def lap(self) -> dict[str, float]:
        """Return :meth:`snapshot` and begin a new lap."""
        parts = self.snapshot()
        self._seconds = {}
        return parts

    def _charge(self) -> None:
        now = self._clock()
        name = self._open[-1][0] if self._open else OTHER
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._mark
        self._mark = now

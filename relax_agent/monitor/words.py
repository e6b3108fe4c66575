"""How numbers of a run are written for people: durations, sparklines, shares of time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

_BARS = "▁▂▃▄▅▆▇█"


def duration(seconds: float) -> str:
    """Return seconds in the two units that matter: ``41 s``, ``4 min 12 s``, ``2 h 5 min``."""
    whole = round(max(0.0, seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def rough_duration(seconds: float) -> str:
    """Return seconds as an estimate is said: ``under 1 min``, ``5 min``, ``2 h 5 min``."""
    minutes = round(max(0.0, seconds) / 60)
    if minutes < 1:
        return "under 1 min"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def sparkline(values: Sequence[float], width: int, low: float = 0.0, high: float = 1.0) -> str:
    """Return the course of values as ``width`` bars at most; each bar is a mean of its share.

    Args:
        values: What to draw, oldest first.
        width: How many characters at most.
        low: What the lowest bar stands for.
        high: What the highest bar stands for.
    """
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count)] + [len(values)]
    bars = []
    for start, end in itertools.pairwise(edges):
        mean = sum(values[start:end]) / (end - start)
        place = (mean - low) / (high - low) * len(_BARS)
        bars.append(_BARS[min(len(_BARS) - 1, max(0, int(place)))])
    return "".join(bars)


def shares(seconds: Mapping[str, float], *, least: float = 0.01) -> str:
    """Return ``forward 41 % · backward 30 % · …``, the largest first, without tiny parts."""
    total = sum(seconds.values())
    if total <= 0:
        return ""
    parts = sorted(seconds.items(), key=lambda item: -item[1])
    return " · ".join(
        f"{name.replace('_', ' ')} {spent / total:.0%}".replace("%", " %")
        for name, spent in parts
        if spent / total >= least
    )

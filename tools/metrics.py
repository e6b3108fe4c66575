"""What a tool server counts, in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping

from relax_agent.tools.result import ToolResult
from relax_agent.tools.running import LEFT_BEHIND

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""Upper bounds of the latency histogram's buckets."""


class ToolMetrics:
    """Counters of one server process."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        """By tool and outcome: ``ok`` or the kind of the failure."""
        self.in_flight = 0
        """Calls that run or wait."""
        self.refused = 0
        """Calls that were not begun: too large, or the server is about to end."""
        self._buckets: dict[str, list[int]] = defaultdict(lambda: [0] * (len(_BOUNDS_S) + 1))
        self._seconds: Counter[str] = Counter()

    def add(self, tool: str, result: ToolResult) -> None:
        """Count a call that has ended."""
        self.calls[tool, "ok" if result.error is None else result.error.value] += 1
        self._buckets[tool][bisect_left(_BOUNDS_S, result.duration_s)] += 1
        self._seconds[tool] += result.duration_s  # type: ignore[assignment]

    def text(self, sessions: Mapping[str, float], worker: int | None = None) -> str:
        """Return everything as Prometheus reads it.

        Args:
            sessions: More numbers, by name; a name that ends in ``_total`` is a counter.
            worker: The number of this process, if the server has several.
        """
        lines = _Lines(worker)
        for (tool, outcome), count in sorted(self.calls.items()):
            lines.add("calls_total", count, tool=tool, outcome=outcome)
        failed: Counter[str] = Counter()
        for (_, outcome), count in self.calls.items():
            failed[outcome] += count
        del failed["ok"]
        for kind, count in sorted(failed.items()):
            lines.add("errors_total", count, kind=kind)
        self._histogram(lines)
        lines.add("calls_in_flight", self.in_flight)
        lines.add("refused_total", self.refused)
        lines.add("left_behind_total", LEFT_BEHIND.total)
        lines.add("left_behind", LEFT_BEHIND.running)
        for name, value in sessions.items():
            lines.add(name, value)
        return lines.text()

    def _histogram(self, lines: _Lines) -> None:
        for tool, buckets in sorted(self._buckets.items()):
            total = 0
            for bound, count in zip((*_BOUNDS_S, "+Inf"), buckets, strict=True):
                total += count
                lines.add("call_seconds_bucket", total, tool=tool, le=str(bound))
            lines.add("call_seconds_sum", round(self._seconds[tool], 6), tool=tool)
            lines.add("call_seconds_count", total, tool=tool)


class _Lines:
    """Lines of the text format, each family with its type before it."""

    def __init__(self, worker: int | None) -> None:
        self._labels = {} if worker is None else {"worker": str(worker)}
        self._lines: list[str] = []
        self._typed: set[str] = set()

    def add(self, name: str, value: float, **labels: str) -> None:
        family = name
        kind = "counter" if name.endswith("_total") else "gauge"
        for end in ("_bucket", "_sum", "_count"):
            if name.startswith("call_seconds"):
                family, kind = family.removesuffix(end), "histogram"
        if family not in self._typed:
            self._typed.add(family)
            self._lines.append(f"# TYPE relax_tool_{family} {kind}")
        shown = ",".join(f'{key}="{text}"' for key, text in {**labels, **self._labels}.items())
        braces = f"{{{shown}}}" if shown else ""
        self._lines.append(f"relax_tool_{name}{braces} {value}")

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


def joined(texts: list[str]) -> str:
    """Return the metrics of several processes as one text: each family in one piece."""
    families: dict[str, list[str]] = {}
    order: list[str] = []
    for text in texts:
        head = ""
        for line in text.splitlines():
            if line.startswith("#"):
                head = line
                if head not in families:
                    families[head] = []
                    order.append(head)
            else:
                families[head].append(line)
    return "\n".join(line for head in order for line in (head, *families[head])) + "\n"

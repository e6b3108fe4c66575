"""What a run must have reached. A run that misses it says which figure and ends with an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from relax_agent.run.recipe import GoalSettings

FIRST_STEPS = 3
LAST_STEPS = 10


@dataclass
class Outcome:
    """The figures by which a run is judged."""

    steps: int = 0
    """Optimizer steps that were made, skipped ones not counted."""
    success_first: float | None = None
    """Mean sampled success of the first 3 steps."""
    success_last: float | None = None
    """Mean sampled success of the last 10 steps."""
    greedy_before: float | None = None
    """Greedy success on held-out tasks before the first step."""
    greedy_after: float | None = None
    """The same after the last step."""
    routes_replayed: float | None = None
    """Least share of routed choices that a step replayed; None where replay is off."""
    missed: list[str] = field(default_factory=list)
    """Each goal that was not reached, in words."""

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain JSON data."""
        return asdict(self)


def judge(
    metrics: Sequence[dict[str, Any]],
    goal: GoalSettings,
    *,
    greedy_before: float | None,
    greedy_after: float | None,
    replay: bool,
) -> Outcome:
    """Compare a run's metrics (one mapping a step, as in ``metrics.jsonl``) with its goal."""
    successes = [float(line["success"]) for line in metrics]
    made = [line for line in metrics if not line.get("skipped")]
    outcome = Outcome(
        steps=len(made),
        success_first=_mean(successes[:FIRST_STEPS]),
        success_last=_mean(successes[-LAST_STEPS:]),
        greedy_before=greedy_before,
        greedy_after=greedy_after,
        routes_replayed=min((line["routes_replayed"] for line in made), default=None)
        if replay
        else None,
    )
    outcome.missed = list(_missed(outcome, goal))
    return outcome


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _missed(outcome: Outcome, goal: GoalSettings) -> list[str]:
    rise = _difference(outcome.success_last, outcome.success_first)
    greedy = _difference(outcome.greedy_after, outcome.greedy_before)
    wanted = [
        ("optimizer steps", outcome.steps, 1),
        ("sampled success of the last 10 steps", outcome.success_last, goal.success_last),
        ("rise of sampled success over the first 3 steps", rise, goal.success_rise),
        ("rise of greedy held-out success", greedy, goal.greedy_rise),
    ]
    if outcome.routes_replayed is not None:
        wanted.append(("share of routes replayed", outcome.routes_replayed, goal.routes_replayed))
    return [
        f"{name}: {'none' if value is None else f'{value:.3g}'}, wanted at least {least:g}"
        for name, value, least in wanted
        if least is not None and (value is None or value < least)
    ]


def _difference(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before

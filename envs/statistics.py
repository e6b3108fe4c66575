"""Statistics of an evaluation: means with confidence intervals, and pass@k.

Samples of one task are not independent of each other, so the error of a mean is computed from the
means of the tasks (clustered by task, every task with equal weight).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond the table the normal's
# 1.96 is at most 2 % too small.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


_FEWEST = 5
"""Tasks below which a spread says too little for an interval."""
_Z95 = 1.959964


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over tasks with its 95 % confidence interval."""

    value: float
    low: float | None = None
    """Lower end; None, as ``high``, where there are too few tasks to tell."""
    high: float | None = None

    def __str__(self) -> str:
        shown = f"{self.value:.3f}"
        if self.low is None or self.high is None:
            return shown
        return f"{shown} ({self.low:.3f} to {self.high:.3f})"


def clustered_mean(samples: Mapping[str, Sequence[float]]) -> Mean | None:
    """Return the mean of the tasks' means, with a t interval; None if there are no samples.

    Args:
        samples: Values by task.
    """
    means = [statistics.fmean(values) for values in samples.values() if values]
    if not means:
        return None
    value = statistics.fmean(means)
    if len(means) < _FEWEST:
        return Mean(value)
    half = _t95(len(means) - 1) * statistics.stdev(means) / math.sqrt(len(means))
    return Mean(value, value - half, value + half)


def clustered_share(samples: Mapping[str, Sequence[float]]) -> Mean | None:
    """Return the mean of the tasks' shares, with an interval that stays between 0 and 1.

    Wilson's score interval (Wilson 1927). Its variance is that of a coin at 0 or 1, where no spread
    is seen, and otherwise what the tasks' means show, if that is less: samples of one task add
    little where they agree and much where they do not.

    Args:
        samples: Values from 0 to 1, by task.
    """
    means = [statistics.fmean(values) for values in samples.values() if values]
    if not means:
        return None
    count, value = len(means), statistics.fmean(means)
    spread = statistics.variance(means) if count > 1 else 0.0
    coin = value * (1 - value)
    # How many independent coins would be as sure of the mean; never fewer than there are tasks.
    effective = (
        max(float(count), count * coin / spread) if spread > 0 and coin > 0 else float(count)
    )
    centre = (value + _Z95**2 / (2 * effective)) / (1 + _Z95**2 / effective)
    half = (
        _Z95
        / (1 + _Z95**2 / effective)
        * math.sqrt(coin / effective + _Z95**2 / (4 * effective**2))
    )
    return Mean(value, max(0.0, min(value, centre - half)), min(1.0, max(value, centre + half)))


def _t95(freedom: int) -> float:
    return _T95[freedom - 1] if freedom <= len(_T95) else 1.96


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Return the chance that at least one of ``k`` samples succeeds, estimated without bias.

    One minus the share of the ``k``-subsets of the samples that hold no success
    (Chen et al. 2021, arXiv 2107.03374, equation 1).

    Raises:
        ValueError: ``k`` is not between 1 and the number of samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs {k} samples, there are {samples}")
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def pass_all_k(samples: int, successes: int, k: int) -> float:
    """Return the chance that all of ``k`` samples succeed (pass^k), estimated without bias.

    The share of the ``k``-subsets that hold successes only (Yao et al. 2024, arXiv 2406.12045).
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass^{k} needs {k} samples, there are {samples}")
    return math.comb(successes, k) / math.comb(samples, k)

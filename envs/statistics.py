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


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over tasks with the half width of its 95 % confidence interval."""

    value: float
    half_width: float | None
    """None where a single task says nothing about the spread."""

    def __str__(self) -> str:
        shown = f"{self.value:.3f}"
        return shown if self.half_width is None else f"{shown} ± {self.half_width:.3f}"


def clustered_mean(samples: Mapping[str, Sequence[float]]) -> Mean | None:
    """Return the mean of the tasks' means; None if there are no samples.

    Args:
        samples: Values by task.
    """
    means = [statistics.fmean(values) for values in samples.values() if values]
    if not means:
        return None
    value = statistics.fmean(means)
    if len(means) == 1:
        return Mean(value, None)
    quantile = _T95[len(means) - 2] if len(means) - 2 < len(_T95) else 1.96
    return Mean(value, quantile * statistics.stdev(means) / math.sqrt(len(means)))


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

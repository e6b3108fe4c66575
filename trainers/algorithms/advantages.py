"""Advantages: what an episode's reward says, compared with the rest of its group. Plain NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

VARIANCE_TOLERANCE = 1e-6
"""Rewards whose range is below this share of their size count as equal: seven rewards of 0.3 have
a float32 standard deviation of 3e-8, and dividing by it would turn rounding into a signal.
"""


def zero_variance(rewards: npt.ArrayLike) -> bool:
    """Tell whether ``rewards [episodes]`` are equal up to rounding (or fewer than two)."""
    values = np.asarray(rewards, np.float64)
    if values.size < 2:
        return True
    scale = max(1.0, float(np.abs(values).max()))
    return float(np.ptp(values)) <= VARIANCE_TOLERANCE * scale


def group_advantages(rewards: npt.ArrayLike, *, normalize_std: bool = True) -> Floats:
    """Return ``A_i = (r_i − mean(r)) / std(r)``, ``[episodes]``; all 0 where rewards are equal.

    DeepSeekMath (arXiv 2402.03300), eq. 1 of the GRPO section; ``std`` is the population's.
    Without ``normalize_std`` the division is left out (Dr. GRPO, arXiv 2503.20783).

    Args:
        rewards: ``[episodes]``, finite.
        normalize_std: Divide by the standard deviation.
    """
    values = np.asarray(rewards, np.float64)
    if zero_variance(values):
        return np.zeros_like(values)
    centred = values - values.mean()
    return centred / values.std() if normalize_std else centred


def shuffled(rewards: npt.ArrayLike, seed: tuple[int, int]) -> Floats:
    """Return the rewards ``[episodes]`` in an order drawn from ``seed``, for diagnosis."""
    values = np.asarray(rewards, np.float64)
    return values[np.random.default_rng(seed).permutation(values.size)]

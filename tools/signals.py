"""Measuring sounds with numpy: level, spectrum and pitch. Arrays in, arrays out.

Pitch is YIN (de Cheveigné and Kawahara, 2002): a frame is compared with itself, moved by every lag
in question; the smallest lag at which the difference, divided by its mean over all shorter lags,
falls below a threshold is the period. Everything runs over many frames at once.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np

    Floats: TypeAlias = np.ndarray[Any, np.dtype[Any]]

STEP_S = 0.01
"""Seconds between two pitches."""
FRAME_S = 0.064
"""Seconds of sound that one pitch is found in, on top of the longest period."""
RANGE_DB = 80.0
"""What a spectrogram shows below the loudest place."""
COLUMNS = 800
"""Most moments of a spectrogram."""
_WINDOW_S = 0.032
_THRESHOLD = 0.1
_UNSURE = 0.25
"""Differences above this are no pitch, even where they are the least."""
_SILENCE = 1e-8
"""Mean square of a frame in which nothing is looked for (-80 dBFS)."""
_BLOCK = 256


def decibels(amplitude: float) -> float | None:
    """Return an amplitude in dB of full scale; None for 0."""
    return None if amplitude <= 0 else round(20 * math.log10(amplitude), 1)


def levels(samples: Floats, rate: int, most: int) -> list[float]:
    """Return the root mean squares of at most ``most`` equal pieces of 0.1 s or more."""
    import numpy as np

    count = min(most, len(samples), int(len(samples) / rate / 0.1))
    return [
        float(np.sqrt(np.mean(samples[piece].astype(np.float64) ** 2)))
        for piece in pieces(len(samples), max(1, count))
    ]


def pieces(length: int, count: int) -> list[slice]:
    """Cut a length into so many pieces that differ by one at most, evenly distributed."""
    edges = [round(length * number / count) for number in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def spectrogram(samples: Floats, rate: int) -> Floats:
    """Return power in dB below the loudest place, float32 ``[frequencies, moments]``.

    Frequencies go from 0 to half the rate. Each moment is the mean of all windows (Hann, half
    overlapping) that begin in it, so that nothing is left out.
    """
    import numpy as np

    size = 1 << max(6, round(math.log2(max(64, _WINDOW_S * rate))))
    hop = size // 2
    count = max(1, math.ceil(len(samples) / hop) - 1)
    samples = np.pad(samples, (0, (count + 1) * hop - len(samples)))
    windows = np.lib.stride_tricks.sliding_window_view(samples, size)[::hop]
    shape = np.hanning(size).astype(np.float32)
    moments = pieces(count, min(COLUMNS, count))
    power = np.stack(
        [(np.abs(np.fft.rfft(windows[m] * shape)) ** 2).mean(axis=0) for m in moments], axis=1
    )
    loudest = max(float(power.max()), 1e-20)
    relative = 10 * np.log10(np.maximum(power / loudest, 1e-20))
    clipped: Floats = np.maximum(relative, -RANGE_DB).astype(np.float32)
    return clipped


def track_pitch(samples: Floats, rate: int, lowest_hz: float, highest_hz: float) -> Floats:
    """Return the pitch every 10 ms, float64 ``[steps]``; NaN where there is none.

    Args:
        samples: ``[frames]``.
        rate: Samples a second.
        lowest_hz: Lowest pitch that is looked for.
        highest_hz: Highest one; well below half the rate.
    """
    import numpy as np

    longest = math.ceil(rate / lowest_hz) + 1
    shortest = max(2, math.floor(rate / highest_hz))
    window = round(FRAME_S * rate)
    span = window + longest
    if len(samples) < span:
        if len(samples) < window:
            return np.empty(0)
        samples = np.pad(samples, (0, span - len(samples)))
    frames = np.lib.stride_tricks.sliding_window_view(samples, span)[:: round(STEP_S * rate)]
    blocks = [
        _periods(frames[i : i + _BLOCK].astype(np.float64), window, shortest)
        for i in range(0, len(frames), _BLOCK)
    ]
    return rate / np.concatenate(blocks)


def _periods(frames: Floats, window: int, shortest: int) -> Floats:
    """Return the period of each frame ``[frames, samples]`` in samples; NaN if it has none."""
    import numpy as np

    difference = _difference(frames, window)
    lags = difference.shape[1]
    means = np.cumsum(difference[:, 1:], axis=1) / np.arange(1, lags)
    normal = np.ones_like(difference)
    np.divide(difference[:, 1:], means, out=normal[:, 1:], where=means > 1e-12)
    rows = np.arange(len(frames))
    inside = normal[:, shortest : lags - 1]
    below = inside < _THRESHOLD
    first = below.argmax(axis=1)
    # From the first lag below the threshold down to the bottom of that valley.
    rises = np.diff(inside, axis=1, append=np.inf) >= 0
    places = np.arange(inside.shape[1])
    bottom = (rises & (places >= first[:, None])).argmax(axis=1)
    found = below.any(axis=1)
    lag = shortest + np.where(found, bottom, inside.argmin(axis=1))
    sure = normal[rows, lag] < _UNSURE
    loud = np.mean(frames[:, :window] ** 2, axis=1) > _SILENCE
    return np.where(sure & loud, _refined(normal, rows, lag), np.nan)


def _difference(frames: Floats, window: int) -> Floats:
    """Return Σ (x[i] - x[i + lag])² over the window, ``[frames, lags]``."""
    import numpy as np

    span = frames.shape[1]
    size = 1 << (span + window - 1).bit_length()
    head = np.fft.rfft(frames[:, :window], size)
    products = np.fft.irfft(np.fft.rfft(frames, size) * head.conj(), size)[:, : span - window]
    sums = np.concatenate([np.zeros((len(frames), 1)), np.cumsum(frames**2, axis=1)], axis=1)
    energy = sums[:, window:span] - sums[:, : span - window]
    return np.maximum(energy[:, :1] + energy - 2 * products, 0.0)


def _refined(values: Floats, rows: Floats, lag: Floats) -> Floats:
    """Return where the parabola through a minimum and its neighbours is lowest."""
    import numpy as np

    left, here, right = (values[rows, lag + step] for step in (-1, 0, 1))
    bend = left - 2 * here + right
    move = np.zeros_like(here)
    np.divide(left - right, 2 * bend, out=move, where=bend > 1e-12)
    return lag + np.clip(move, -1.0, 1.0)

"""Measuring sounds: level with numpy, spectrum and pitch with librosa. Arrays in, arrays out.

Pitch is librosa's YIN, in frames whose mean was taken away. YIN names a period for every frame, so
whether there is one is seen from how like itself the frame is, moved by that period (its normalised
autocorrelation). librosa's ``pyin`` says that by itself, but its Viterbi search keeps the
interpreter to itself for seconds, during which an event loop in the same process stands still.

librosa compiles when first used: seconds in a process, half a minute of a busy machine in the
first process of all (numba keeps what it compiled). It is imported where it is used.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

from relax_agent.errors import MissingExtraError

if TYPE_CHECKING:
    import numpy as np

    Floats: TypeAlias = np.ndarray[Any, np.dtype[Any]]

STEP_S = 0.01
"""Seconds between two pitches."""
SHORTEST_S = 0.064
"""Shortest sound that a pitch is looked for in."""
RANGE_DB = 80.0
"""What a spectrogram shows below the loudest place."""
COLUMNS = 800
"""Most moments of a spectrogram."""
_WINDOW_S = 0.032
_FRAME_S = 0.128
_SURE = 0.6
"""Least likeness of a frame with itself, a period later: 1 is a clean tone, noise is below 0.2."""
_SILENCE = 1e-8
"""Mean square of a frame in which nothing is looked for (-80 dBFS)."""
_MARGIN = 1.1
"""How far YIN looks beyond what is asked for: what lies nearest at an edge is no pitch there."""
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

    librosa = _librosa()
    size = 1 << max(6, round(math.log2(max(64, _WINDOW_S * rate))))
    hop = size // 2
    count = max(1, math.ceil(len(samples) / hop) - 1)
    samples = librosa.util.fix_length(samples, size=(count + 1) * hop)
    power = np.empty((hop + 1, min(COLUMNS, count)), np.float32)
    for column, moment in enumerate(pieces(count, power.shape[1])):  # not all at once: memory
        piece = samples[moment.start * hop : (moment.stop + 1) * hop]
        waves = librosa.stft(piece, n_fft=size, hop_length=hop, center=False)
        power[:, column] = (np.abs(waves) ** 2).mean(axis=1)
    loudest = max(float(power.max()), 1e-12)
    relative = librosa.power_to_db(power, ref=loudest, amin=1e-20, top_db=None)
    clipped: Floats = np.clip(relative, -RANGE_DB, 0.0)
    return clipped


def track_pitch(samples: Floats, rate: int, lowest_hz: float, highest_hz: float) -> Floats:
    """Return the pitch every 10 ms, float64 ``[steps]``; NaN where there is none.

    Args:
        samples: ``[frames]``; of less than :data:`SHORTEST_S` no step is returned.
        rate: Samples a second.
        lowest_hz: Lowest pitch that is looked for.
        highest_hz: Highest one; well below half the rate.
    """
    import numpy as np

    if len(samples) < SHORTEST_S * rate:
        return np.empty(0)
    librosa = _librosa()
    size = round(_FRAME_S * rate)
    samples = librosa.util.fix_length(samples, size=max(size, len(samples)))
    frames = librosa.util.frame(samples, frame_length=size, hop_length=round(STEP_S * rate), axis=0)
    blocks = [
        _pitches(frames[i : i + _BLOCK], rate, lowest_hz, highest_hz)
        for i in range(0, len(frames), _BLOCK)
    ]
    return np.concatenate(blocks)


def note(hertz: float) -> str:
    """Name the nearest note, A4 being 440 Hz, and how many cents it is off."""
    librosa = _librosa()
    number = float(librosa.hz_to_midi(hertz))
    name = librosa.midi_to_note(number, unicode=False)
    return f"{name} {round(100 * (number - round(number))):+d} cents"


def _pitches(frames: Floats, rate: int, lowest_hz: float, highest_hz: float) -> Floats:
    """Return the pitch of each frame ``[frames, samples]``; NaN if it has none."""
    import numpy as np

    librosa = _librosa()
    size = frames.shape[1]
    frames = frames - frames.mean(axis=1, keepdims=True)
    low, high = lowest_hz / _MARGIN, highest_hz * _MARGIN
    found = librosa.yin(frames, fmin=low, fmax=high, sr=rate, frame_length=size, center=False)[:, 0]
    lags = np.rint(rate / found).astype(int)
    products = librosa.autocorrelate(frames, axis=1, max_size=int(lags.max()) + 1)
    power = products[:, 0]
    alike = products[np.arange(len(frames)), lags] * size / (size - lags)
    asked = (found > 0.98 * lowest_hz) & (found < 1.02 * highest_hz)
    heard = (power > _SILENCE * size) & (alike > _SURE * power)
    return np.where(asked & heard, found, np.nan)


def _librosa() -> Any:
    try:
        import librosa
    except ImportError as error:
        raise MissingExtraError("librosa", "media") from error
    return librosa

"""Sound to the log-mel features of an audio tower.

A clip is resampled to the rate that the features are made for *before* anything is counted, so
one second is the same number of tokens whatever the file's own rate. Nothing is padded to the
longest of a batch and nothing is cut: limits on text never reach a waveform.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from relax_agent.errors import MediaError, MissingExtraError
from relax_agent.media import decode_audio
from relax_agent.messages import Audio
from relax_agent.rendering.media.config import SoundConfig

Floats = npt.NDArray[np.float32]

_TOKENS_OF_CHUNK = 13
"""Tokens of a whole chunk of 100 frames, as the tower's three convolutions leave them."""


def read_sound(audio: Audio, config: SoundConfig) -> Floats:
    """Return a clip as one channel at the features' rate, ``[samples]``.

    Raises:
        MediaError: It is damaged, empty or too short for a single frame.
    """
    samples, _ = decode_audio(audio, config.rate)
    mono: Floats = samples.mean(axis=0, dtype=np.float32)
    if len(mono) <= max(config.hop, config.window // 2):
        raise MediaError(f"a sound of {1000 * len(mono) / config.rate:.0f} ms is too short to hear")
    return mono


def frames_of(samples: int, config: SoundConfig) -> int:
    """Return how many frames of features so many samples give."""
    return samples // config.hop


def tokens_of(frames: int, config: SoundConfig) -> int:
    """Return how many tokens so many frames become in the tower."""
    chunk = 2 * config.n_window
    whole, rest = divmod(frames, chunk)
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return rest + whole * _TOKENS_OF_CHUNK


def log_mel(samples: Floats, config: SoundConfig) -> Floats:
    """Return features ``[bands, frames]``."""
    extract = _extractor(tuple(sorted(config.options.items())))
    found: Any = extract(
        [samples],
        sampling_rate=config.rate,
        padding=True,
        truncation=False,
        return_attention_mask=False,
        return_tensors="np",
    )["input_features"][0]
    return np.ascontiguousarray(found[:, : frames_of(len(samples), config)], dtype=np.float32)


@lru_cache(maxsize=4)
def _extractor(options: tuple[tuple[str, Any], ...]) -> Any:
    try:
        from transformers import WhisperFeatureExtractor
    except ImportError:
        raise MissingExtraError("transformers", "train") from None
    return WhisperFeatureExtractor(padding_value=0.0, **dict(options))

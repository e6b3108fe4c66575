"""Ready-made sound tools: cut, resample, look at, and measure.

    env = MyEnv(tools=AUDIO_TOOLS)                 # sounds of the conversation: "audio:1"
    relax-agent tools serve relax_agent.tools.audio

Sounds come back as 16-bit WAV, which nearly every model reads. What is measured, and how:

- loudness is the root mean square in dBFS, not LUFS: 0 dBFS is full scale, so a sine of full
  scale has -3.0; there is no weighting by frequency, and channels are mixed first;
- pitch is librosa's YIN, every 10 ms in 128 ms of sound, for one voice or instrument at a time; it
  is right within 1 %, and where the sound is not alike a period later, there is none;
- a spectrogram shows power in dB below the loudest place, over time and linear frequency.

soundfile, soxr and librosa do the work, PyAV for MP4 and WebM (all in the ``media`` extra). librosa
compiles when it is first used, and keeps that on disk: the very first picture or pitch on a machine
takes a core for 20 s (30 to 45 where others are busy on it), the first of a process for 3. A server
does this before it is ready (:func:`warm_up`); elsewhere ``await toolset.warm_up()`` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field

from relax_agent.media import decode_audio, encode_wav
from relax_agent.messages import Audio, Image
from relax_agent.tools.declaration import tool
from relax_agent.tools.pictures import Span, span_in, told, wrong
from relax_agent.tools.signals import (
    SHORTEST_S,
    STEP_S,
    decibels,
    levels,
    note,
    pieces,
    spectrogram,
    track_pitch,
)
from relax_agent.tools.spectrum_picture import paint_spectrum

if TYPE_CHECKING:
    import numpy as np

MAX_SECONDS = 900.0
"""Longest sound that a tool is given."""
MAX_OUTPUT_BYTES = 32 << 20
"""Largest sound that a tool gives back: 17 minutes of 16 kHz, one channel."""
MAX_PITCH_SECONDS = 60.0
_PITCH_RATE = 32_000
_POINTS = 40
"""Moments that a course over time shows."""
_DECODE_S = 40.0

Seconds = Annotated[float, Field(ge=0)]
SoundReply = list[str | Audio]


class Clip(NamedTuple):
    """A stretch of a decoded sound."""

    samples: np.ndarray[Any, Any]
    """float32 ``[channels, frames]``."""
    rate: int
    span: Span

    @property
    def mono(self) -> np.ndarray[Any, Any]:
        """All channels mixed, ``[frames]``."""
        mixed: np.ndarray[Any, Any] = self.samples.mean(axis=0)
        return mixed

    @property
    def told(self) -> str:
        """Where it lies in the whole sound."""
        return f"{self.span.start:.2f} to {self.span.end:.2f} s{self.span.note}"


def warm_up() -> None:
    """Load the libraries and run everything once, so that no call waits for that."""
    import numpy as np

    tone = encode_wav(np.sin(np.arange(8000) / 8).astype(np.float32), 8000)
    resample_audio(tone, 16_000)
    audio_spectrogram(tone)
    audio_pitch(tone)


_sound_tool = tool(
    timeout=60.0,
    max_concurrency=8,
    max_output_bytes=MAX_OUTPUT_BYTES,
    idempotent=True,
    warm_up=warm_up,
)


@_sound_tool
def cut_audio(audio: Audio, start: Seconds = 0.0, end: Seconds | None = None) -> SoundReply:
    """Cut a piece out of a sound.

    Args:
        audio: The sound.
        start: Where the piece begins, in seconds.
        end: Where it ends; by default where the sound ends.
    """
    clip = _open(audio, start, end)
    return _give(clip.samples, clip.rate, clip.told)


@_sound_tool
def resample_audio(
    audio: Audio, sample_rate: Annotated[int, Field(ge=1000, le=192_000)], mono: bool = False
) -> SoundReply:
    """Change how many samples a second a sound has.

    Args:
        audio: The sound.
        sample_rate: In Hz, such as 16000.
        mono: Mix all channels into one.
    """
    clip = _open(audio, 0.0, None)
    samples = clip.mono[None] if mono else clip.samples
    _check_size(samples.shape[1] * sample_rate / clip.rate, len(samples), sample_rate)
    changed = _resample(samples, clip.rate, sample_rate)
    return _give(changed, sample_rate, f"Resampled from {clip.rate} Hz")


@_sound_tool
def audio_spectrogram(
    audio: Audio, start: Seconds = 0.0, end: Seconds | None = None
) -> list[str | Image]:
    """Show a sound as a picture: time to the right, frequency upwards, brighter is louder.

    Args:
        audio: The sound.
        start: Where to begin, in seconds.
        end: Where to end; by default where the sound ends.
    """
    clip = _open(audio, start, end)
    levels_db = spectrogram(clip.mono, clip.rate)
    picture = paint_spectrum(levels_db, clip.span.start, clip.span.end, clip.rate / 2)
    return [f"{clip.told}, 0 to {clip.rate / 2:g} Hz; black is 80 dB below the loudest", picture]


@_sound_tool
def audio_loudness(
    audio: Audio, start: Seconds = 0.0, end: Seconds | None = None
) -> dict[str, Any]:
    """Measure how loud a sound is, as a whole and over time.

    Root mean square and peak in dBFS: 0 is as loud as a sound can be; null is digital silence.

    Args:
        audio: The sound.
        start: Where to begin, in seconds.
        end: Where to end; by default where the sound ends.
    """
    import numpy as np

    clip = _open(audio, start, end)
    mono = clip.mono
    values = levels(mono, clip.rate, _POINTS)
    return {
        **_about(clip),
        "rms_dbfs": decibels(float(np.linalg.norm(mono)) / len(mono) ** 0.5),
        "peak_dbfs": decibels(float(abs(clip.samples).max())),
        "over_time": _course(
            (clip.span.end - clip.span.start) / len(values), [decibels(each) for each in values]
        ),
    }


@_sound_tool
def audio_pitch(
    audio: Audio,
    start: Seconds = 0.0,
    end: Seconds | None = None,
    lowest_hz: Annotated[float, Field(ge=40, le=1000)] = 60.0,
    highest_hz: Annotated[float, Field(ge=80, le=2000)] = 1000.0,
) -> dict[str, Any]:
    """Find the pitch of one voice or instrument, as a whole and over time.

    Args:
        audio: The sound.
        start: Where to begin, in seconds.
        end: Where to end; by default where the sound ends, at most a minute later.
        lowest_hz: Lower tones are not looked for.
        highest_hz: Higher tones are not looked for.
    """
    if highest_hz <= lowest_hz:
        raise wrong(f"highest_hz ({highest_hz:g}) must be above lowest_hz ({lowest_hz:g})")
    clip = _open(audio, start, end)
    length = clip.span.end - clip.span.start
    if length > MAX_PITCH_SECONDS:
        raise wrong(f"{length:.0f} s are too long; at most {MAX_PITCH_SECONDS:g}: give start, end")
    mono = _resample(clip.mono[None], clip.rate, _PITCH_RATE)[0]
    track = track_pitch(mono, _PITCH_RATE, lowest_hz, highest_hz)
    return {**_about(clip), **_pitch_facts(track, clip.span)}


AUDIO_TOOLS = (cut_audio, resample_audio, audio_spectrogram, audio_loudness, audio_pitch)


def _open(audio: Audio, start: float, end: float | None) -> Clip:
    with told():
        samples, rate = decode_audio(audio, max_seconds=MAX_SECONDS, timeout_s=_DECODE_S)
    span = span_in(round(samples.shape[1] / rate, 6), start, end, "sound")
    first = min(int(span.start * rate), samples.shape[1] - 1)
    last = max(first + 1, round(span.end * rate))
    return Clip(samples[:, first:last], rate, span)


def _give(samples: np.ndarray[Any, Any], rate: int, words: str) -> SoundReply:
    channels, frames = samples.shape
    _check_size(frames, channels, rate)
    kind = {1: "mono", 2: "stereo"}.get(channels, f"{channels} channels")
    return [f"{words}: {frames / rate:.2f} s, {rate} Hz, {kind}", encode_wav(samples, rate)]


def _check_size(frames: float, channels: int, rate: int) -> None:
    most = (MAX_OUTPUT_BYTES - 1024) / (2 * channels)
    if frames > most:
        raise wrong(
            f"{frames / rate:.0f} s of {rate} Hz with {channels} channels are too much to give"
            f" back; at most {most / rate:.0f} s: cut a piece, or use a lower sample rate"
        )


def _resample(samples: np.ndarray[Any, Any], rate: int, wanted: int) -> np.ndarray[Any, Any]:
    if rate == wanted:
        return samples
    import numpy as np
    import soxr

    changed = np.atleast_2d(soxr.resample(samples.T, rate, wanted).T)
    if changed.shape[1] == 0:
        raise wrong(f"the sound is too short for {wanted} Hz")
    return changed


def _about(clip: Clip) -> dict[str, Any]:
    about: dict[str, Any] = {
        "start_s": round(clip.span.start, 3),
        "end_s": round(clip.span.end, 3),
        "sample_rate": clip.rate,
        "channels": len(clip.samples),
    }
    return {**about, "note": clip.span.note.strip(" ()")} if clip.span.note else about


def _course(step_s: float, values: list[float | None]) -> dict[str, Any]:
    """Tell values of equal pieces of time, the first of which begins at the start."""
    return {"step_s": round(step_s, 4), "values": values}


def _pitch_facts(track: np.ndarray[Any, Any], span: Span) -> dict[str, Any]:
    """Say in few numbers what a track ``[steps]`` shows; NaN is a step without a pitch."""
    import numpy as np

    if not len(track):
        short = span.end - span.start
        raise wrong(f"{short:.3f} s are too short; give at least {SHORTEST_S:g} s")
    heard = track[~np.isnan(track)]
    facts: dict[str, Any] = {"voiced_share": round(len(heard) / len(track), 3)}
    if not len(heard):
        return {**facts, "median_hz": None, "words": "no pitch was found: noise, silence or chords"}
    low, median, high = (float(each) for each in np.percentile(heard, [5, 50, 95]))
    facts |= {"median_hz": round(median, 1), "median_note": note(median)}
    facts |= {"low_hz": round(low, 1), "high_hz": round(high, 1)}
    cut = pieces(len(track), min(_POINTS, len(track)))
    facts["over_time"] = _course(
        STEP_S * len(track) / len(cut), [_median(track[each]) for each in cut]
    )
    return facts


def _median(values: np.ndarray[Any, Any]) -> float | None:
    """Return the middle of a piece's pitches; None where most of it has none."""
    import numpy as np

    heard = values[~np.isnan(values)]
    return round(float(np.median(heard)), 1) if 2 * len(heard) >= len(values) else None

"""Ready-made sound tools: right samples and measures, and words for whatever else is asked."""

import asyncio
import json
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_agent.errors import MissingExtraError, ToolErrorKind
from relax_agent.media import decode_audio, decode_image, encode_wav
from relax_agent.messages import Audio, ToolCall
from relax_agent.tools import Toolset
from relax_agent.tools import audio as tools
from relax_agent.tools.audio import AUDIO_TOOLS
from relax_agent.tools.signals import decibels, note, spectrogram, track_pitch
from relax_agent.tools.spectrum_picture import ticks

RATE = 8000
TOOLS = Toolset(AUDIO_TOOLS)
SOFT = (None, ToolErrorKind.INVALID_ARGUMENTS)


def tone(hertz, seconds=1.0, rate=RATE, amplitude=0.5):
    return amplitude * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


RAMP = encode_wav(np.arange(2 * RATE, dtype=np.int16), RATE)
STEREO = encode_wav(np.stack([tone(300), tone(500)]), RATE)


def call(name, sound=RAMP, **arguments):
    return asyncio.run(TOOLS.call(ToolCall(name, {"audio": sound, **arguments}, "c")))


def facts(result):
    assert result.ok, result.text
    return json.loads(result.text)


def test_a_cut_is_those_samples():
    result = call("cut_audio", start=0.5, end=1.25)
    samples, rate = decode_audio(result.content[-1])
    assert rate == RATE and result.text == "0.50 to 1.25 s: 0.75 s, 8000 Hz, mono"
    assert (np.round(samples[0] * 32768) == np.arange(4000, 10000)).all()
    assert "stereo" in call("cut_audio", STEREO, end=0.1).text


@pytest.mark.parametrize(
    ("span", "words"),
    [
        ({"start": 2}, "start is 2 s, but the sound ends at 2 s"),
        ({"start": 1, "end": 1}, "end (1 s) must be after start (1 s)"),
        ({"start": 1.5, "end": 0.5}, "must be after start"),
        ({"start": -1}, "argument 'start'"),
        ({"end": float("nan")}, "argument 'end'"),
        ({"start": float("inf")}, "argument 'start'"),
        ({"start": "0:01"}, "argument 'start'"),
    ],
)
def test_a_span_that_is_none_is_refused_in_words(span, words):
    for name in ("cut_audio", "audio_spectrogram", "audio_loudness", "audio_pitch"):
        result = call(name, **span)
        assert result.error is ToolErrorKind.INVALID_ARGUMENTS and words in result.text


def test_a_span_beyond_the_end_is_cut_off_and_that_is_said():
    assert "(the sound ends at 2 s): 0.50 s" in call("cut_audio", start=1.5, end=60).text
    assert facts(call("audio_loudness", end=9))["note"] == "the sound ends at 2 s"


def test_resampling_keeps_length_and_pitch():
    result = call("resample_audio", encode_wav(tone(440), RATE), sample_rate=16_000)
    samples, rate = decode_audio(result.content[-1])
    assert rate == 16_000 and abs(samples.shape[1] - 16_000) <= 1
    assert abs(np.fft.rfft(samples[0])).argmax() == 440
    mixed, _ = decode_audio(call("resample_audio", STEREO, sample_rate=4000, mono=True).content[-1])
    assert mixed.shape[0] == 1


@pytest.mark.parametrize("rate", [0, -1, 999, 192_001, 10**30, 8000.5])
def test_rates_out_of_range_are_refused(rate):
    assert call("resample_audio", sample_rate=rate).error is ToolErrorKind.INVALID_ARGUMENTS


def test_what_would_be_too_large_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr(tools, "MAX_OUTPUT_BYTES", 65_536)
    result = call("resample_audio", sample_rate=192_000)
    assert result.error is ToolErrorKind.INVALID_ARGUMENTS and "at most 0 s" in result.text
    assert call("cut_audio").ok


def test_loudness_is_the_root_mean_square_in_dbfs():
    sound = encode_wav(np.concatenate([tone(200, amplitude=1.0), np.zeros(RATE)]), RATE)
    whole = facts(call("audio_loudness", sound))
    assert whole["rms_dbfs"] == pytest.approx(-6.0, abs=0.05) and whole["peak_dbfs"] == 0.0
    course = whole["over_time"]
    assert course["step_s"] == 0.1 and len(course["values"]) == 20
    assert course["values"][0] == pytest.approx(-3.0, abs=0.1) and course["values"][-1] is None
    assert facts(call("audio_loudness", sound, start=1))["rms_dbfs"] is None
    assert decibels(0.0) is None


@pytest.mark.parametrize("hertz", [41.2, 60.0, 82.4, 220.0, 440.0, 1000.0, 1990.0])
def test_pitch_is_found_and_named(hertz):
    asked = {} if 60 <= hertz <= 1000 else {"lowest_hz": 40, "highest_hz": 2000}
    found = facts(call("audio_pitch", encode_wav(tone(hertz), RATE), **asked))
    assert found["median_hz"] == pytest.approx(hertz, rel=0.01) and found["voiced_share"] > 0.95
    if hertz == 440:
        assert found["median_note"].startswith("A4 ")


def test_notes_are_named_with_what_they_are_off():
    assert [note(hertz) for hertz in (440, 439.99, 27.5, 262.5, 1108.73)] == [
        "A4 +0 cents", "A4 +0 cents", "A0 +0 cents", "C4 +6 cents", "C#6 +0 cents",
    ]  # fmt: skip


@pytest.mark.parametrize(("hertz", "lowest", "highest"), [(100, 400, 1000), (300, 80, 81)])
def test_a_tone_outside_what_is_asked_for_is_none_at_its_edge(hertz, lowest, highest):
    sound = encode_wav(tone(hertz), RATE)
    found = facts(call("audio_pitch", sound, lowest_hz=lowest, highest_hz=highest))
    assert found["median_hz"] is None
    within = encode_wav(tone((lowest + highest) / 2), RATE)
    assert facts(call("audio_pitch", within, lowest_hz=lowest, highest_hz=highest))[
        "median_hz"
    ] == pytest.approx((lowest + highest) / 2, rel=0.01)


def test_a_voice_in_noise_still_has_its_pitch():
    voice = sum(tone(120 * n, amplitude=1 / n) for n in range(1, 12))
    noise = np.random.default_rng(0).normal(size=RATE) * voice.std() * 0.4
    found = facts(call("audio_pitch", encode_wav(0.1 * (voice + noise), RATE)))
    assert found["median_hz"] == pytest.approx(120, rel=0.01) and found["voiced_share"] > 0.95


def test_without_librosa_the_extra_is_named_and_the_rest_works(monkeypatch):
    monkeypatch.setitem(sys.modules, "librosa", None)
    for name in ("audio_pitch", "audio_spectrogram"):
        result = call(name)
        assert result.error is ToolErrorKind.CRASHED and "librosa" in result.text
    assert call("audio_loudness").ok and call("resample_audio", sample_rate=4000).ok
    with pytest.raises(MissingExtraError, match=r"relax-agent\[media\]"):
        note(440)


def test_the_loop_goes_on_while_a_long_sound_is_measured():
    """librosa's pyin would hold the interpreter for seconds."""
    sound = encode_wav(np.tile(tone(200), 60), RATE)

    async def main():
        started, beats = asyncio.get_running_loop().time(), 0
        task = asyncio.create_task(TOOLS.call(ToolCall("audio_pitch", {"audio": sound}, "c")))
        while not task.done():
            await asyncio.sleep(0.001)
            beats += 1
        assert (await task).ok
        return beats, asyncio.get_running_loop().time() - started

    note(440)
    beats, seconds = asyncio.run(main())
    assert beats > 20 * seconds


def test_pitch_is_the_fundamental_even_where_it_is_missing():
    voice = sum(tone(150 * n, amplitude=0.2) for n in (2, 3, 4, 5))
    assert facts(call("audio_pitch", encode_wav(voice, RATE)))["median_hz"] == pytest.approx(
        150, rel=0.005
    )


def test_noise_and_silence_have_no_pitch():
    noise = np.random.default_rng(0).normal(size=RATE) * 0.1
    for samples in (noise, np.zeros(RATE), np.full(RATE, 0.3)):
        track = track_pitch(np.asarray(samples, np.float32), RATE, 60, 1000)
        assert np.isnan(track).mean() > 0.9
    found = facts(call("audio_pitch", encode_wav(np.zeros(RATE), RATE)))
    assert found["median_hz"] is None and found["voiced_share"] == 0


def test_a_pitch_that_changes_is_seen_over_time():
    sound = encode_wav(np.concatenate([tone(200), np.zeros(RATE), tone(400)]), RATE)
    values = facts(call("audio_pitch", sound))["over_time"]["values"]
    assert values[5] == pytest.approx(200, rel=0.01) and values[20] is None
    assert values[-5] == pytest.approx(400, rel=0.01)


def test_pitch_has_limits_that_are_told():
    long = encode_wav(np.zeros(61 * 1000, np.int16), 1000)
    assert "at most 60: give start, end" in call("audio_pitch", long).text
    assert call("audio_pitch", long, start=10, end=12).ok
    assert "too short" in call("audio_pitch", end=0.01).text
    assert "above lowest_hz" in call("audio_pitch", lowest_hz=500, highest_hz=400).text


def test_a_spectrogram_shows_where_the_energy_is():
    samples = np.concatenate([tone(1000, 0.5), tone(3000, 0.5)]).astype(np.float32)
    levels = spectrogram(samples, RATE)
    hertz = np.linspace(0, RATE / 2, len(levels))
    assert hertz[levels[:, 3].argmax()] == pytest.approx(1000, abs=20)
    assert hertz[levels[:, -4].argmax()] == pytest.approx(3000, abs=20)
    assert levels.max() == 0 and levels.min() >= -80
    picture = np.asarray(decode_image(call("audio_spectrogram", STEREO).content[-1]))
    bright = picture[12:412, 464].sum(axis=1)  # the column in the middle of the spectrum
    row = 400 * (1 - 500 / (RATE / 2))
    assert bright[int(row) - 4 : int(row) + 5].max() > 600 > bright[:200].max()


def test_no_time_of_a_long_sound_is_left_out():
    samples = np.zeros(120 * RATE, np.float32)
    samples[77 * RATE + 123] = 1.0
    levels = spectrogram(samples, RATE)
    assert levels.shape[1] == 800
    assert levels.max(axis=0).argmax() == pytest.approx(77 / 120 * 800, abs=1)


def test_ticks_are_round_numbers_within():
    assert ticks(0, 3, 8) == [0, 0.5, 1, 1.5, 2, 2.5, 3]
    assert ticks(0.3, 0.42, 6) == [0.3, 0.32, 0.34, 0.36, 0.38, 0.4, 0.42]
    assert ticks(0, 22050, 6) == [0, 5000, 10000, 15000, 20000]


@pytest.mark.parametrize("data", [b"", b"no sound", RAMP.data[:40], b"RIFF" + bytes(40)])
def test_a_damaged_sound_is_told_without_hints_for_programs(data):
    for name in ("cut_audio", "audio_loudness"):
        result = call(name, Audio(data))
        assert result.error is ToolErrorKind.INVALID_ARGUMENTS and "→" not in result.text


def test_a_sound_that_unfolds_to_hours_is_refused():
    import io

    import soundfile

    file = io.BytesIO()
    soundfile.write(file, np.zeros(901 * 1000, np.int16), 1000, format="FLAC")
    result = call("audio_loudness", Audio(file.getvalue(), "audio/flac"))
    assert result.error is ToolErrorKind.INVALID_ARGUMENTS and "more than 900 s" in result.text


def test_the_samples_of_all_channels_together_are_limited(monkeypatch):
    monkeypatch.setattr("relax_agent.media.audio.MAX_VALUES", 20_000)
    assert call("audio_loudness").ok  # 16,000 of one channel
    result = call("audio_loudness", encode_wav(np.zeros((2, 2 * RATE), np.int16), RATE))
    assert "more than 20,000 samples in all channels" in result.text


moments = st.one_of(
    st.floats(), st.sampled_from([0, 1e-9, 0.125, 1.999999, 2, 2.0001, 1e308, None])
)


@settings(max_examples=60, deadline=None)
@given(moments, moments)
def test_any_span_gives_a_sound_or_a_soft_error(start, end):
    for name in ("cut_audio", "audio_loudness", "audio_pitch", "audio_spectrogram"):
        assert call(name, start=start, end=end).error in SOFT


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 700), st.integers(1, 4), st.sampled_from([1, 1000, 44_100, 384_000]))
def test_any_sound_however_short_or_odd_is_measured_or_refused(frames, channels, rate):
    sound = encode_wav(np.full((channels, frames), 0.25), rate)
    assert call("cut_audio", sound).ok and call("audio_loudness", sound).ok
    assert call("audio_spectrogram", sound).ok
    assert call("audio_pitch", sound).error in SOFT
    assert call("resample_audio", sound, sample_rate=16_000).error in SOFT


def test_warming_up_once_serves_all():
    assert {tool.warm_up for tool in AUDIO_TOOLS} == {tools.warm_up}
    asyncio.run(TOOLS.warm_up())

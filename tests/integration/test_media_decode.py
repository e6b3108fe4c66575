"""Decoding with the real libraries: frames and samples, or a typed error, never a hang or a crash.

Most of it is T80: files with one frame, with odd rates, cut off, damaged or not videos at all.
"""

import asyncio
import functools
import io
import random
import re
import subprocess
import sys
import tempfile
import zlib
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from relax_agent.errors import ConfigError, MediaError, MissingExtraError
from relax_agent.media import (
    decode_audio,
    decode_image,
    decode_video,
    decode_video_async,
    encode_mp4,
    encode_png,
    encode_wav,
)
from relax_agent.media.video import read_timeline
from relax_agent.messages import Audio, Image, Video

av = pytest.importorskip("av")
sf = pytest.importorskip("soundfile")
PIL = pytest.importorskip("PIL.Image")


def shades(count, size=(32, 64)):
    """Frames that are told apart by their shade: frame n is about 8 n."""
    return [np.full((*size, 3), 8 * n, np.uint8) for n in range(count)]


def numbers(frames):
    return [round(float(frame.mean()) / 8) for frame in frames]


def container(fmt, codec, times, unit=Fraction(1, 1000), pix_fmt="yuv420p", **options):
    """A video whose frame n is shown from ``times[n]`` on, in seconds."""
    file = io.BytesIO()
    with av.open(file, "w", format=fmt) as out:
        stream = out.add_stream(codec, rate=25, options=options)
        stream.width, stream.height, stream.pix_fmt = 64, 32, pix_fmt
        stream.codec_context.time_base = unit
        for pixels, time in zip(shades(len(times)), times, strict=True):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = round(time / unit), unit
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return Video(file.getvalue())


# -- videos -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fps", [23.976, 1, 1000, 29.97, 7, Fraction(24000, 1001)])
@pytest.mark.parametrize("count", [1, 3, 25])
def test_every_frame_comes_back_at_its_time(fps, count):
    frames, times = decode_video(encode_mp4(shades(count), fps))
    assert frames.shape == (count, 32, 64, 3)
    assert frames.dtype == np.uint8
    assert numbers(frames) == list(range(count))
    assert times == pytest.approx([n / float(fps) for n in range(count)], rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("count", [1, 2, 3, 24])
def test_frames_are_spread_over_the_time_and_never_repeated(count):
    clip = encode_mp4(shades(24), 8)
    frames, times = decode_video(clip, frames=count)
    assert len(frames) == len(times) == len(set(times)) == count
    gaps = np.diff(times)
    assert count < 3 or gaps.max() - gaps.min() <= 1 / 8 + 1e-9
    assert times == [pytest.approx(n / 8) for n in numbers(frames)]


def test_a_video_with_fewer_frames_gives_each_once():
    frames, times = decode_video(encode_mp4(shades(3), 2), frames=50)
    assert (numbers(frames), times) == ([0, 1, 2], [0.0, 0.5, 1.0])


def test_moments_give_the_frames_that_are_shown_then():
    clip = encode_mp4(shades(10), 10)
    frames, times = decode_video(clip, times=[0.95, 0.0, 0.31, 0.3, 0.3, 1.0])
    assert numbers(frames) == [9, 0, 3, 3, 3, 9]
    assert times == pytest.approx([0.9, 0.0, 0.3, 0.3, 0.3, 0.9])
    with pytest.raises(MediaError, match=r"there is no frame at 1\.2 s: the video ends at 1"):
        decode_video(clip, times=[0.5, 1.2])


def test_a_moment_that_the_file_rounded_is_found():
    """2/3 s is 0.667 s in a file that counts milliseconds."""
    clip = container("matroska", "libx264", [n / 3 for n in range(9)])
    frames, _ = decode_video(clip, times=[n / 3 for n in range(9)])
    assert numbers(frames) == list(range(9))
    fast = encode_mp4(shades(20), 1000)
    assert numbers(decode_video(fast, times=[0.0005, 0.0049, 0.005]).frames) == [0, 4, 5]


@pytest.mark.parametrize(
    "wish", [{"frames": 0}, {"frames": 2, "times": [0]}, {"times": []}, {"times": [-1]},
             {"times": [float("nan")]}],
)  # fmt: skip
def test_a_wish_without_sense_is_told(wish):
    with pytest.raises(ConfigError, match=r"frames|times"):
        decode_video(encode_mp4(shades(3), 2), **wish)


@pytest.mark.parametrize(
    ("fmt", "codec", "pix_fmt"),
    [("mp4", "libx264", "yuv420p"), ("mov", "libx264", "yuv420p"), ("webm", "libvpx", "yuv420p"),
     ("webm", "libvpx-vp9", "yuv420p"), ("matroska", "libx264", "yuv420p"),
     ("avi", "mpeg4", "yuv420p"), ("gif", "gif", "rgb8")],
)  # fmt: skip
def test_containers(fmt, codec, pix_fmt):
    unit = Fraction(1, 25) if fmt == "avi" else Fraction(1, 1000)
    clip = container(fmt, codec, [n / 25 for n in range(12)], unit, pix_fmt=pix_fmt)
    frames, times = decode_video(clip, frames=4)
    assert times == pytest.approx([n / 25 for n in numbers(frames)], abs=0.011)
    assert len(frames) == 4


@pytest.mark.parametrize("fmt", ["mp4", "matroska"])
def test_a_rate_that_varies_is_followed_by_time(fmt):
    """10 frames in the first second, then 40 in the second one."""
    moments = [n / 10 for n in range(10)] + [1 + n / 40 for n in range(16)]
    clip = container(fmt, "libx264", moments)
    frames, times = decode_video(clip, times=[0.55, 1.0, 1.26])
    assert (numbers(frames), times) == ([5, 10, 20], pytest.approx([0.5, 1.0, 1.25]))
    spread = decode_video(clip, frames=7).times
    assert max(np.diff(spread)) < 0.31


@pytest.mark.parametrize("fmt", ["mp4", "matroska", "avi"])
@pytest.mark.parametrize("gop", ["1", "5", "250"])
@pytest.mark.parametrize("bf", ["0", "2"])
def test_frames_that_are_jumped_to_are_those_of_the_whole_video(fmt, gop, bf):
    times = [n / 25 for n in range(30)]
    clip = container(fmt, "libx264", times, Fraction(1, 25), g=gop, bf=bf)
    whole = decode_video(clip)
    assert numbers(whole.frames) == list(range(30))
    chosen = decode_video(clip, times=[0.0, 0.1, 0.44, 0.45, 0.9, 1.16])
    places = [0, 2, 11, 11, 22, 29]
    assert chosen.times == [whole.times[n] for n in places]
    assert (chosen.frames == whole.frames[places]).all()


def test_a_video_that_was_filmed_sideways_is_upright():
    """The matrix of an MP4 track says how players turn it."""
    data = bytearray(WHOLE)
    matrix = data.index(b"tkhd") + 4 + 40
    ones, zero = (1 << 16).to_bytes(4, "big"), bytes(4)
    minus = (2**32 - (1 << 16)).to_bytes(4, "big")
    data[matrix : matrix + 20] = zero + ones + zero + minus + zero
    assert decode_video(Video(bytes(data)), frames=2).frames.shape == (2, 64, 32, 3)


@pytest.mark.parametrize("size", [(31, 47), (32, 48), (2, 16), (1, 1), (50, 100)])
def test_every_size_keeps_its_pixels(size):
    frames = decode_video(encode_mp4(shades(3, size), 5)).frames
    assert frames.shape == (3, *size, 3)
    assert numbers(frames) == [0, 1, 2]


def sound_only(fmt="mp4", codec="aac", count=4800):
    file = io.BytesIO()
    with av.open(file, "w", format=fmt) as out:
        stream = out.add_stream(codec, rate=48000, layout="mono")
        wave = np.sin(np.arange(count) / 10).astype(np.float32)[None]
        frame = av.AudioFrame.from_ndarray(wave, format="fltp", layout="mono")
        frame.rate = 48000
        for block in av.AudioResampler("fltp", "mono", 48000, frame_size=960).resample(frame):
            out.mux(stream.encode(block))
        out.mux(stream.encode())
    return file.getvalue()


WHOLE = encode_mp4(shades(24), 12).data


@functools.cache
def moov_first():
    """The same video with its index at the beginning, as on web pages: cut off, it still opens."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.mp4"
        fast = {"movflags": "+faststart"}
        with av.open(io.BytesIO(WHOLE)) as inside, av.open(str(path), "w", options=fast) as out:
            stream = out.add_stream_from_template(inside.streams.video[0])
            for packet in inside.demux(inside.streams.video[0]):
                if packet.size:
                    packet.stream = stream
                    out.mux(packet)
        return path.read_bytes()


BROKEN = {
    "only sound": (sound_only(), "without a picture track"),
    "nothing": (b"", "a video of 0 bytes"),
    "text": (b"hello, I am a video", "not a video that can be read"),
    "garbage behind a right beginning": (WHOLE[:32] + bytes(range(256)) * 40, "damaged|without"),
    "only the beginning": (WHOLE[:40], "damaged|without"),
    "without the index": (WHOLE[: WHOLE.index(b"moov") - 4], "damaged"),
    "cut off in the middle": (moov_first()[: len(moov_first()) * 2 // 3], "cut off|damaged"),
    "a picture": (encode_png(shades(1)[0]).data, "it is image/png"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_video_is_a_typed_error(name):
    """T80."""
    data, words = BROKEN[name]
    with pytest.raises(MediaError, match=words) as told:
        decode_video(Video(data), frames=4)
    assert "\n" not in str(told.value)
    assert "/" not in str(told.value).replace("video/mp4", "").replace("image/png", "")


def damaged(seed):
    chance = random.Random(seed)
    data = bytearray(moov_first() if seed % 2 else WHOLE)
    if seed % 3 == 0:
        return bytes(data[: chance.randrange(len(data))])
    first = bytes(data).find(b"moov") if seed % 3 == 1 else 0
    for _ in range(chance.choice([1, 4, 40])):
        data[chance.randrange(first, len(data))] = chance.randrange(256)
    return bytes(data)


def test_damaged_videos_give_frames_or_a_typed_error():
    """T80. In a process of its own: a crash of native code would end it."""
    code = (
        "import test_media_decode as t\n"
        "from relax_agent.errors import MediaError\n"
        "ends = {'frames': 0, 'error': 0}\n"
        "for seed in range(300):\n"
        "    try:\n"
        "        found = t.decode_video(t.Video(t.damaged(seed)), frames=4, timeout_s=20)\n"
        "        assert len(found.frames) == len(found.times) > 0\n"
        "        ends['frames'] += 1\n"
        "    except MediaError:\n"
        "        ends['error'] += 1\n"
        "print(ends['frames'], ends['error'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, cwd=Path(__file__).parent, timeout=120
    )
    assert done.returncode == 0, done.stderr[-500:]
    frames, errors = map(int, done.stdout.split())
    assert frames + errors == 300
    assert min(frames, errors) > 30


def test_no_frame_of_a_file_that_was_cut_off_is_made_up():
    """Readers commonly repeat the last frame that they could decode."""
    whole = moov_first()
    for share in (0.5, 0.8, 0.95):
        with pytest.raises(MediaError):
            decode_video(Video(whole[: int(len(whole) * share)]), frames=8)


def test_a_video_that_takes_too_much_or_too_long_is_refused():
    clip = encode_mp4(shades(24), 8)
    with pytest.raises(MediaError, match="24 frames of 64×32 take 0 MiB, more than 0 → ask for"):
        decode_video(clip, max_bytes=64 * 32 * 3 * 20)
    assert len(decode_video(clip, frames=20, max_bytes=64 * 32 * 3 * 20).frames) == 20
    with pytest.raises(MediaError, match="decoding a video took more than 0 s"):
        decode_video(clip, timeout_s=0)


def test_a_timeline_says_when_frames_are_shown():
    line = read_timeline(encode_mp4(shades(24), 8))
    assert (len(line.pts), line.duration_s) == (24, 3.0)
    slides = read_timeline(container("gif", "gif", [0, 0.1, 0.5], pix_fmt="rgb8"))
    assert slides.times == pytest.approx([0, 0.1, 0.5])


# -- with decord, when it is asked for ---------------------------------------------------------


def decord_frames(part, **wishes):
    pytest.importorskip("decord")
    return decode_video(part, backend="decord", **wishes)


def assert_like_pyav(part, **wishes):
    ours, theirs = decode_video(part, **wishes), decord_frames(part, **wishes)
    assert theirs.times == pytest.approx(ours.times, abs=2e-4)
    assert (theirs.frames.dtype, theirs.frames.shape) == (np.uint8, ours.frames.shape)
    assert np.abs(theirs.frames.astype(int) - ours.frames).max() <= 2
    return theirs


@pytest.mark.parametrize("fps", [23.976, 1, 1000, 7])
@pytest.mark.parametrize("count", [1, 3, 25])
def test_decord_gives_the_same_of_good_files(fps, count):
    clip = encode_mp4(shades(count), fps)
    assert numbers(assert_like_pyav(clip).frames) == list(range(count))
    assert_like_pyav(clip, frames=2)
    assert_like_pyav(clip, times=[0.0, 0.5 * count / fps, 0.5 * count / fps])


@pytest.mark.parametrize("fmt", ["mp4", "mov", "matroska"])
@pytest.mark.parametrize("gop", ["1", "5", "250"])
@pytest.mark.parametrize("bf", ["0", "2"])
def test_decord_jumps_to_the_same_frames(fmt, gop, bf):
    clip = container(fmt, "libx264", [n / 25 for n in range(30)], Fraction(1, 25), g=gop, bf=bf)
    chosen = assert_like_pyav(clip, times=[0.0, 0.1, 0.44, 0.45, 0.9, 1.16, 0.1])
    assert numbers(chosen.frames) == [0, 2, 11, 11, 22, 29, 2]


@pytest.mark.parametrize("fmt", ["mp4", "matroska"])
def test_decord_follows_a_rate_that_varies_by_time(fmt):
    moments = [n / 10 for n in range(10)] + [1 + n / 40 for n in range(16)]
    clip = container(fmt, "libx264", moments)
    chosen = assert_like_pyav(clip, times=[0.55, 1.0, 1.26, 0.3])
    assert numbers(chosen.frames) == [5, 10, 20, 3]
    assert_like_pyav(clip, frames=7)
    thirds = container("matroska", "libx264", [n / 3 for n in range(9)])
    assert_like_pyav(thirds, times=[n / 3 for n in range(9)])
    pause = container(fmt, "libx264", [0, *(5000 + n / 25 for n in range(20))])
    chosen = decord_frames(pause, times=[0, 5000, 5000.04, 5000.44, 5000.76])
    assert numbers(chosen.frames) == [0, 1, 2, 12, 20]


@pytest.mark.parametrize("size", [(31, 47), (50, 100), (48, 80), (33, 50), (32, 96)])
def test_decord_keeps_the_pixels_of_a_size(size):
    assert_like_pyav(encode_mp4(shades(3, size), 5))


@pytest.mark.parametrize("width", [16, 24, 48, 72])
def test_a_size_that_decord_cannot_read_is_a_typed_error(width):
    clip = encode_mp4(shades(3, (32, width)), 5)
    with pytest.raises(MediaError, match=r"decord cannot read .*→ backend=\"pyav\" may") as told:
        decord_frames(clip)
    assert "\n" not in str(told.value)
    assert len(decode_video(clip).frames) == 3


def test_what_decord_cannot_time_or_read_is_a_typed_error():
    ordered = [n / 25 for n in range(12)]
    reordered = container("avi", "mpeg4", ordered, Fraction(1, 25), bf="2")
    with pytest.raises(MediaError, match="decord finds no time"):
        decord_frames(reordered, frames=4)
    with pytest.raises(MediaError, match="decord cannot read"):
        decord_frames(container("gif", "gif", [0, 0.1, 0.5], pix_fmt="rgb8"))
    with pytest.raises(MediaError, match="not a video"):
        decord_frames(Video(b"hello, I am a video"))


def test_the_limits_hold_for_decord_too():
    clip = encode_mp4(shades(24), 8)
    with pytest.raises(MediaError, match="24 frames of 64×32"):
        decord_frames(clip, max_bytes=64 * 32 * 3 * 20)
    with pytest.raises(MediaError, match="more than 0 s"):
        decord_frames(clip, timeout_s=0)
    with pytest.raises(MediaError, match="no frame at 9 s"):
        decord_frames(clip, times=[9])
    with pytest.raises(ConfigError, match="frames=0"):
        decord_frames(clip, frames=0)


def test_decord_without_its_package_and_an_unknown_backend(monkeypatch):
    """Nothing is decoded with another library instead."""
    monkeypatch.setitem(sys.modules, "decord", None)
    clip = encode_mp4(shades(3), 5)
    with pytest.raises(MissingExtraError, match=r"decord is not installed → pip install"):
        decode_video(clip, backend="decord")
    with pytest.raises(ConfigError, match=r"backend='ffmpeg' is not known → pyav, decord"):
        decode_video(clip, backend="ffmpeg")
    assert asyncio.run(decode_video_async(clip, backend="pyav")).frames.shape[0] == 3


def test_decord_in_a_thread():
    pytest.importorskip("decord")
    clip = encode_mp4(shades(6), 5)
    found = asyncio.run(decode_video_async(clip, frames=3, backend="decord"))
    assert (found.frames == decode_video(clip, frames=3).frames).all()


# -- sounds -----------------------------------------------------------------------------------


def tone(rate, seconds=0.5, channels=1):
    wave = 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(rate * seconds)) / rate)
    return np.tile(wave, (channels, 1)).astype(np.float32)


def loudest_hz(samples, rate):
    return np.argmax(np.abs(np.fft.rfft(samples))) * rate / len(samples)


def written(fmt, rate, samples, subtype=None):
    file = io.BytesIO()
    sf.write(file, samples.T, rate, format=fmt, subtype=subtype)
    return Audio(file.getvalue())


@pytest.mark.parametrize("channels", [1, 2])
def test_wav_comes_back_to_16_bits(channels):
    samples, rate = decode_audio(encode_wav(tone(16000, channels=channels), 16000))
    assert (samples.shape, rate, samples.dtype) == ((channels, 8000), 16000, np.float32)
    assert np.abs(samples - tone(16000, channels=channels)).max() < 1e-4


@pytest.mark.parametrize("fmt", ["WAV", "FLAC", "OGG", "MP3", "AIFF"])
@pytest.mark.parametrize("wanted", [None, 16000, 48000])
def test_formats_and_rates(fmt, wanted):
    samples, rate = decode_audio(written(fmt, 44100, tone(44100)), wanted)
    assert rate == (wanted or 44100)
    assert samples.shape[0] == 1
    assert samples.shape[1] == pytest.approx(rate * 0.5, rel=0.2)
    assert loudest_hz(samples[0], rate) == pytest.approx(440, abs=5)


@pytest.mark.parametrize(("fmt", "codec"), [("mp4", "aac"), ("webm", "libopus"), ("adts", "aac")])
def test_sound_in_containers_that_soundfile_does_not_read(fmt, codec):
    samples, rate = decode_audio(Audio(sound_only(fmt, codec)), 16000)
    assert (samples.shape[0], rate) == (1, 16000)
    assert samples.shape[1] == pytest.approx(1600, abs=1000)


def test_the_sound_of_a_video():
    with pytest.raises(MediaError, match="a file without sound"):
        decode_audio(Audio(WHOLE))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes"),
        (b"hello", "not an audio"),
        (b"RIFF\xff\xff\xff\x7fWAVE" + bytes(100), "a damaged sound"),
        (b"fLaC" + bytes(100), "a damaged sound"),
        (b"ID3\x04" + bytes(100), "a damaged sound|without samples"),
        (b"OggS" + bytes(100), "a damaged sound"),
        (b"\0\0\0\x20ftypisom" + bytes(100), "a damaged sound|without sound"),
        (encode_wav(np.zeros(10), 8000).data[:44], "without samples"),
        (written("WAV", 8000, np.full((1, 9), np.nan), "FLOAT").data, "not finite"),
        (encode_png(shades(1)[0]).data, "it is image/png"),
    ],
)
def test_a_broken_sound_is_a_typed_error(data, words):
    with pytest.raises(MediaError, match=words) as told:
        decode_audio(Audio(data))
    assert "\n" not in str(told.value)


def test_an_error_names_the_true_type_and_no_address():
    with pytest.raises(MediaError) as told:
        decode_audio(Audio(b"fLaC" + bytes(100)))
    assert re.fullmatch(r"a damaged sound \(audio/flac\): [\w ,.'-]+", str(told.value))
    with pytest.raises(MediaError, match=r"\(image/jpeg\)"):
        decode_image(Image(b"\xff\xd8\xff\xe0" + bytes(50)))


def test_a_sound_that_was_cut_off_gives_what_there_is():
    data = encode_wav(tone(16000), 16000).data
    assert 0 < decode_audio(Audio(data[: len(data) // 2]))[0].shape[1] < 8000


def test_hours_of_silence_in_a_small_file_end_at_the_limit():
    silence = written("FLAC", 8000, np.zeros((1, 8000 * 60)))
    assert len(silence.data) < 20_000
    with pytest.raises(MediaError, match="a sound of more than 5 s → max_seconds"):
        decode_audio(silence, max_seconds=5)
    with pytest.raises(MediaError, match="took more than 0 s"):
        decode_audio(silence, timeout_s=0)


@pytest.mark.parametrize("rate", [0, -1, 1.5, "16k", None, 10**9])
def test_a_rate_that_is_none_is_told(rate):
    with pytest.raises(MediaError, match="a sample rate is a whole number"):
        encode_wav(np.zeros(8), rate)
    if rate is not None:
        with pytest.raises(MediaError, match="a sample rate is a whole number"):
            decode_audio(encode_wav(np.zeros(8), 8000), rate)


# -- pictures ---------------------------------------------------------------------------------


def saved(fmt, picture, **options):
    file = io.BytesIO()
    picture.save(file, fmt, **options)
    return Image(file.getvalue())


@pytest.mark.parametrize("fmt", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_pictures_of_every_format_are_rgb(fmt):
    picture = decode_image(saved(fmt, PIL.new("RGB", (6, 4), (200, 30, 40))))
    assert (picture.mode, picture.size) == ("RGB", (6, 4))
    assert np.abs(np.asarray(picture).astype(int) - (200, 30, 40)).max() < 12


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [("RGBA", (255, 0, 0, 0), (255, 255, 255)), ("RGBA", (255, 0, 0, 255), (255, 0, 0)),
     ("LA", (0, 0), (255, 255, 255)), ("L", 7, (7, 7, 7)), ("1", 1, (255, 255, 255)),
     ("I;16", 65535, (255, 255, 255)), ("I;16", 257 * 9, (9, 9, 9)), ("P", 0, (0, 0, 0))],
)  # fmt: skip
def test_modes_and_transparency(mode, colour, expected):
    picture = decode_image(saved("PNG", PIL.new(mode, (2, 2), colour)))
    assert (np.asarray(picture) == expected).all()


def test_a_photo_that_was_taken_sideways_is_upright():
    exif = PIL.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    assert decode_image(saved("JPEG", PIL.new("RGB", (6, 4)), exif=exif)).size == (4, 6)


def bomb(width, height):
    """A PNG of a few kilobytes that says it is huge."""
    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x00\x00\x00\x00"

    def chunk(name, body):
        return len(body).to_bytes(4, "big") + name + body + zlib.crc32(name + body).to_bytes(4)

    body = zlib.compress(bytes(100_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes"),
        (b"hello", "not an image"),
        (b"\x89PNG\r\n\x1a\n" + bytes(50), "a damaged picture|cannot be read"),
        (encode_png(np.zeros((64, 64, 3), np.uint8)).data[:60], "a damaged picture|cannot be"),
        (saved("JPEG", PIL.effect_noise((64, 64), 90)).data[:900], "a damaged picture"),
        (b"\xff\xd8\xff\xe0" + bytes(50), "cannot be read"),
        (bomb(9_000, 9_000), "a picture of 9000×9000 pixels, more than 64 million"),
        (bomb(50_000, 50_000), "a picture of too many pixels"),
        (bomb(2**31 - 1, 2**31 - 1), "too many pixels|a damaged picture|cannot"),
        (bomb(8000, 8000), "a damaged picture"),
        (encode_wav(np.zeros(9), 8000).data, "it is audio/wav"),
    ],
)
def test_a_broken_picture_is_a_typed_error(data, words):
    with pytest.raises(MediaError, match=words) as told:
        decode_image(Image(data))
    assert "\n" not in str(told.value)


def test_the_limit_on_pixels_is_the_callers():
    picture = encode_png(np.zeros((10, 10, 3), np.uint8))
    assert decode_image(picture, max_pixels=100).size == (10, 10)
    with pytest.raises(MediaError, match="10×10 pixels"):
        decode_image(picture, max_pixels=99)

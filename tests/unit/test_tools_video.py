"""Ready-made video tools: the frame of that moment, and words for whatever else is asked."""

import asyncio
import io
import json

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_agent.errors import MediaError, ToolErrorKind
from relax_agent.media import decode_audio, decode_image, decode_video, encode_mp4
from relax_agent.media.clock import Deadline
from relax_agent.media.stream import stream_frames
from relax_agent.media.video import read_timeline
from relax_agent.messages import Image, Text, ToolCall, Video
from relax_agent.tools import Toolset
from relax_agent.tools import video as tools
from relax_agent.tools.video import VIDEO_TOOLS

TOOLS = Toolset(VIDEO_TOOLS)
SOFT = (None, ToolErrorKind.INVALID_ARGUMENTS)
FPS, COUNT = 10, 40


def film(colors, size=(24, 32)):
    """A film of one colour a frame."""
    frames = np.zeros((len(colors), *size, 3), np.uint8)
    frames[:] = np.asarray(colors, np.uint8)[:, None, None]
    return encode_mp4(frames, FPS)


GREYS = [(6 * n, 6 * n, 6 * n) for n in range(COUNT)]
GREY = film(GREYS)
SCENES = film([(200, 0, 0)] * 12 + [(0, 150, 0)] * 20 + [(90, 90, 90)] * 8)


def call(name, video=GREY, **arguments):
    return asyncio.run(TOOLS.call(ToolCall(name, {"video": video, **arguments}, "c")))


def level(image):
    return round(float(np.asarray(decode_image(image))[12, 16].mean()) / 6)


def test_the_frames_are_those_shown_at_these_times_in_the_order_asked_for():
    result = call("video_frames", times=[2.05, 0, 3.99, 2.0])
    assert [level(p) for p in result.content if isinstance(p, Image)] == [20, 0, 39, 20]
    assert [p.text.strip() for p in result.content if isinstance(p, Text)] == [
        "At 2.05 s:", "At 0 s:", "At 3.99 s:", "At 2 s:",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ([5], "no frame at 5 s: the video ends at 4 s"),
        ([-1], "argument 'times.0'"),
        ([], "at least 1"),
        ([0.1] * 17, "at most 16"),
        ([float("nan")], "NaN"),
        ([1, float("inf")], "Infinity"),
        (["soon"], "argument 'times.0'"),
        (1.0, "list"),
    ],
)
def test_times_that_are_none_are_refused_in_words(times, words):
    result = call("video_frames", times=times)
    assert result.error is ToolErrorKind.INVALID_ARGUMENTS and words in result.text


def test_a_cut_is_those_frames():
    result = call("cut_video", start=1, end=2.5)
    piece = decode_video(result.content[-1])
    assert [round(f[12, 16].mean() / 6) for f in piece.frames] == list(range(10, 25))
    assert result.text.startswith("1.00 to 2.50 s: 15 frames, 10.00 a second")
    assert len(decode_video(call("cut_video", start=3.95, end=3.951).content[-1]).frames) == 1
    assert "(the video ends at 4 s)" in call("cut_video", start=3, end=99).text


@pytest.mark.parametrize(
    ("span", "words"),
    [
        ({"start": 4}, "start is 4 s, but the video ends at 4 s"),
        ({"start": 1, "end": 1}, "must be after start"),
        ({"start": 2, "end": 1}, "must be after start"),
        ({"start": -0.1}, "argument 'start'"),
        ({"end": float("nan")}, "argument 'end'"),
    ],
)
def test_a_span_that_is_none_is_refused_in_words(span, words):
    for name in ("cut_video", "video_contact_sheet", "video_scenes"):
        result = call(name, **span)
        assert result.error is ToolErrorKind.INVALID_ARGUMENTS and words in result.text


def test_a_cut_of_more_than_a_minute_is_refused():
    slow = encode_mp4(np.zeros((7, 16, 16, 3), np.uint8), 0.1)
    assert "70 s are too long; at most 60" in call("cut_video", slow).text
    assert call("cut_video", slow, end=30).ok


def test_a_contact_sheet_shows_frames_in_order_with_their_times():
    result = call("video_contact_sheet", frames=4)
    sheet = np.asarray(decode_image(result.content[-1]))
    assert sheet.shape == (2 * 28, 2 * 36, 3)
    shown = [sheet[y + 22, x + 30].mean() / 6 for y in (2, 30) for x in (2, 38)]
    assert [round(each) for each in shown] == [5, 15, 25, 35]
    assert result.text == "4 frames from 0.00 to 4.00 s; the whole video has 4 s"
    few = call("video_contact_sheet", frames=36, start=3.75)
    assert few.text.startswith("3 frames")
    for count in (0, -1, 37, 10**20, 2.5):
        assert call("video_contact_sheet", frames=count).error is ToolErrorKind.INVALID_ARGUMENTS


def test_scene_changes_are_found_where_the_picture_changes_at_once():
    found = json.loads(call("video_scenes", SCENES).text)
    assert found == {
        "duration_s": 4.0,
        "scenes": [
            {"start_s": 0.0, "end_s": 1.2},
            {"start_s": 1.2, "end_s": 3.2},
            {"start_s": 3.2, "end_s": 4.0},
        ],
    }
    late = json.loads(call("video_scenes", SCENES, start=2, end=3).text)["scenes"]
    assert late == [{"start_s": 2.0, "end_s": 3.0}]


def test_flashes_within_half_a_second_are_one_change():
    flash = film([(0, 0, 0)] * 10 + [(255, 255, 255)] * 2 + [(0, 0, 0)] * 10)
    assert len(json.loads(call("video_scenes", flash).text)["scenes"]) == 2


def test_many_scenes_are_cut_short_with_a_note(monkeypatch):
    monkeypatch.setattr(tools, "_MAX_SCENES", 2)
    found = json.loads(call("video_scenes", SCENES).text)
    assert len(found["scenes"]) == 2 and "3 scenes were found" in found["note"]


def with_sound(seconds=1.0, rate=16_000):
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        picture = container.add_stream("libx264", rate=10)
        picture.width = picture.height = 16
        picture.pix_fmt = "yuv420p"
        sound = container.add_stream("aac", rate=rate)
        for number in range(round(10 * seconds)):
            pixels = np.full((16, 16, 3), 20 * number, np.uint8)
            container.mux(picture.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        wave = np.sin(np.arange(round(seconds * rate)) * 2 * np.pi * 440 / rate)
        frame = av.AudioFrame.from_ndarray(
            wave[None].astype(np.float32), format="fltp", layout="mono"
        )
        frame.sample_rate = rate
        container.mux(sound.encode(frame))
        container.mux(picture.encode())
        container.mux(sound.encode())
    return Video(file.getvalue())


def test_the_sound_of_a_video_can_be_taken_out():
    result = call("video_sound", with_sound(), start=0.25, end=0.75)
    samples, rate = decode_audio(result.content[-1])
    assert rate == 16_000 and samples.shape[1] == 8000
    assert abs(np.fft.rfft(samples[0])).argmax() == 220  # 440 Hz for half a second
    silent = call("video_sound")
    assert silent.error is ToolErrorKind.INVALID_ARGUMENTS and "without sound" in silent.text


@pytest.mark.parametrize("data", [b"", b"no video", GREY.data[:200], GREY.data[:-700]])
def test_a_damaged_video_is_told_without_hints_for_programs(data):
    for tool in VIDEO_TOOLS:
        arguments = {"times": [0]} if tool.name == "video_frames" else {}
        result = call(tool.name, Video(data), **arguments)
        assert result.error is ToolErrorKind.INVALID_ARGUMENTS and "→" not in result.text


def test_an_animated_gif_is_a_video_too():
    import PIL.Image

    frames = [PIL.Image.new("RGB", (32, 24), (60 * n,) * 3) for n in range(4)]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=500)
    gif = Video(file.getvalue(), "image/gif")
    shown = call("video_frames", gif, times=[1.2])
    assert np.asarray(decode_image(shown.content[-1]))[0, 0].tolist() == [120] * 3
    assert len(decode_video(call("cut_video", gif, start=0.5, end=1.5).content[-1]).frames) == 2
    assert "no sound" in call("video_sound", gif).text


def test_what_takes_too_long_ends_by_itself_and_says_so(monkeypatch):
    monkeypatch.setattr(tools, "_WORK_S", -1.0)
    result = call("video_scenes")
    assert result.error is ToolErrorKind.INVALID_ARGUMENTS and "took more than" in result.text


def test_large_frames_are_made_smaller_and_small_ones_stay():
    wide = encode_mp4(np.full((2, 30, 1300, 3), 90, np.uint8), FPS)
    shown = decode_image(call("video_frames", wide, times=[0]).content[-1])
    assert shown.size == (1024, 24)
    piece = decode_video(call("cut_video", wide).content[-1])
    assert piece.frames.shape[1:3] == (14, 640)
    assert decode_image(call("video_frames", times=[0]).content[-1]).size == (32, 24)


def test_streamed_frames_are_those_of_the_decoder_whatever_is_asked_for():
    line = read_timeline(GREY)
    whole = decode_video(GREY).frames
    wanted = [39, 3, 3, 17]
    found = list(stream_frames(GREY, line, wanted, Deadline(60, "decoding")))
    assert [number for number, _ in found] == [3, 17, 39]
    assert all((pixels == whole[number]).all() for number, pixels in found)
    with pytest.raises(MediaError, match="took more"):
        list(stream_frames(GREY, line, wanted, Deadline(-1, "decoding")))


moments = st.one_of(st.floats(), st.sampled_from([0, 1e-9, 0.1, 3.999999, 4, 4.0001, 1e308, None]))


@settings(max_examples=40, deadline=None)
@given(moments, moments)
def test_any_span_gives_a_video_or_a_soft_error(start, end):
    for name in ("cut_video", "video_contact_sheet", "video_scenes", "video_sound"):
        assert call(name, start=start, end=end).error in SOFT
    assert call("video_frames", times=[start, end]).error in SOFT


def test_warming_up_once_serves_all():
    assert {tool.warm_up for tool in VIDEO_TOOLS} == {tools.warm_up}
    asyncio.run(TOOLS.warm_up())

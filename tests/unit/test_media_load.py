"""Media from whatever people have: the right part, or one line that says what is wrong."""

import base64
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_agent.errors import MediaError
from relax_agent.media import (
    KINDS,
    check_media,
    count_kinds,
    encode_mp4,
    encode_png,
    encode_wav,
    kind_of,
    load_media,
    mime_of,
)
from relax_agent.messages import Audio, Image, Text, Video

PNG = encode_png(np.zeros((2, 2, 3), np.uint8))
WAV = encode_wav(np.zeros(80), 8000)
HEADS = [
    (b"\x89PNG\r\n\x1a\n", "image", "image/png"),
    (b"\xff\xd8\xff\xe0\0\x10JFIF", "image", "image/jpeg"),
    (b"GIF89a", "image", "image/gif"),
    (b"GIF87a", "video", "image/gif"),
    (b"RIFF\0\0\0\0WEBPVP8 ", "image", "image/webp"),
    (b"BM" + bytes(12) + b"\x28\0\0\0", "image", "image/bmp"),
    (b"II*\0", "image", "image/tiff"),
    (b"RIFF\0\0\0\0WAVEfmt ", "audio", "audio/wav"),
    (b"fLaC\0", "audio", "audio/flac"),
    (b"ID3\x04", "audio", "audio/mpeg"),
    (b"\xff\xfb\x90\x64", "audio", "audio/mpeg"),
    (b"\xff\xf1\x50\x80", "audio", "audio/aac"),
    (b"OggS\0", "audio", "audio/ogg"),
    (b"OggS\0", "video", "video/ogg"),
    (b"\0\0\0\x20ftypisom", "video", "video/mp4"),
    (b"\0\0\0\x20ftypisom", "audio", "audio/mp4"),
    (b"\0\0\0\x20ftypM4A ", "audio", "audio/mp4"),
    (b"\0\0\0\x14ftypqt  ", "video", "video/quicktime"),
    (b"\0\0\0\x08wide", "video", "video/mp4"),
    (b"RIFF\0\0\0\0AVI LIST", "video", "video/x-msvideo"),
    (b"\x1a\x45\xdf\xa3\x01\x42\x82\x84webm", "video", "video/webm"),
    (b"\x1a\x45\xdf\xa3\x01\x42\x82\x88matroska", "video", "video/x-matroska"),
    (b"\x1a\x45\xdf\xa3\x01\x42\x82\x84webm", "audio", "audio/webm"),
]


@pytest.mark.parametrize(("head", "kind", "mime"), HEADS)
def test_the_first_bytes_tell_the_type(head, kind, mime):
    assert mime_of(head, kind) == mime
    assert mime_of(head + bytes(1000), kind) == mime


@pytest.mark.parametrize(
    ("head", "kind"),
    [(b"", "image"), (b"BM hello", "image"), (b"\xff\xff\xff\xff", "audio"), (b"PK\3\4", "video"),
     (b"\x89PNG\r\n\x1a\n", "audio"), (b"fLaC", "video"), (b"<svg>", "image"), (b"\xff", "audio")],
)  # fmt: skip
def test_other_bytes_are_no_media_of_that_kind(head, kind):
    assert mime_of(head, kind) is None


@given(st.binary(max_size=100), st.sampled_from(KINDS))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_media_or_one_clear_line(data, kind):
    try:
        part = load_media(data, kind)
    except MediaError as error:
        assert "\n" not in str(error)
    else:
        assert (part.data, kind_of(part)) == (data, kind)
        assert part.mime == mime_of(data, kind)


def test_the_bytes_stay_as_they_are_and_the_type_is_what_they_show(tmp_path):
    (tmp_path / "named_wrongly.jpg").write_bytes(PNG.data)
    url = "data:image/jpeg;base64," + base64.b64encode(PNG.data).decode()
    forms = [
        PNG.data,
        bytearray(PNG.data),
        memoryview(PNG.data),
        "named_wrongly.jpg",
        str(tmp_path / "named_wrongly.jpg"),
        (tmp_path / "named_wrongly.jpg"),
        (tmp_path / "named_wrongly.jpg").as_uri(),
        url,
        url.replace("data:", "DATA:"),
        url[:60] + "\n" + url[60:],
        "data:image/png," + "".join(f"%{byte:02x}" for byte in PNG.data),
        {"bytes": PNG.data, "path": None},
        {"bytes": None, "path": "named_wrongly.jpg"},
        {"url": url},
        PNG,
    ]
    for form in forms:
        check_media(form, "image", base=tmp_path)
        assert load_media(form, "image", base=tmp_path) == PNG


def test_decoded_things_are_encoded_without_loss():
    pil = pytest.importorskip("PIL.Image")
    from relax_agent.media import decode_image

    pixels = np.random.default_rng(0).integers(0, 255, (5, 7, 3), np.uint8)
    for value in (pixels, pil.fromarray(pixels)):
        assert (np.asarray(decode_image(load_media(value, "image"))) == pixels).all()
    grey = load_media(pixels[:, :, :1], "image")
    assert (np.asarray(decode_image(grey))[:, :, 0] == pixels[:, :, 0]).all()
    sound = load_media({"array": np.zeros((2, 80)), "sampling_rate": 8000, "path": None}, "audio")
    assert sound == encode_wav(np.zeros((2, 80)), 8000)
    assert load_media({"array": [0.0] * 80, "sampling_rate": 8000}, "audio") == WAV


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (None, "image", "an image cannot be made of None → a path, bytes"),
        (3, "video", "a video cannot be made of a value of type int"),
        ({}, "image", r"a dict with the keys \(none\)"),
        ({"bytes": None, "path": None}, "audio", "a dict with the keys 'bytes', 'path'"),
        ({"array": [0.0]}, "audio", "samples without their rate"),
        ({"array": [0.0], "sampling_rate": 8000}, "image", "cannot be made of"),
        ({"array": [0.0], "sampling_rate": 0}, "audio", "a sample rate is a whole number"),
        ({"array": [0.0], "sampling_rate": "fast"}, "audio", "a sample rate is a whole number"),
        ({"array": [float("nan")], "sampling_rate": 8000}, "audio", "not finite"),
        ({"array": [[0.0], [0.0, 1.0]], "sampling_rate": 8000}, "audio", "form an array"),
        ({"array": [], "sampling_rate": 8000}, "audio", r"samples are \[frames\]"),
        ({"array": np.zeros((90, 2)), "sampling_rate": 8000}, "audio", "90 channels → is it"),
        ({"array": np.zeros(9, np.int64), "sampling_rate": 8000}, "audio", "not int64"),
        (np.zeros((2, 2, 3)), "image", r"an array of uint8, not of float64 → \(255"),
        (np.zeros((2, 2, 2), np.uint8), "image", r"\[height, width, 3 \| 4\], not \[2, 2, 2\]"),
        (np.zeros((0, 2, 3), np.uint8), "image", "2×0 pixels"),
        (np.zeros((4, 2, 2, 3), np.uint8), "video", "a video cannot be made of"),
        (WAV, "image", "of type Audio, not an image"),
        (WAV.data, "image", "it is audio/wav"),
        (b"", "audio", "an audio of 0 bytes"),
        (b"hello", "image", "begins with b'hello'"),
        (b"<!DOCTYPE html>", "image", "a web page that was saved in its place"),
        ("data:image/png;base64,!!!!", "image", "base64 is damaged"),
        ("data:image/png;base64,", "image", "0 bytes"),
        ("data:image/png", "image", "without data"),
        ("https://x.org/a.png", "image", "on the network → download it"),
        ("s3://bucket/a.png", "image", "on the network"),
        ("", "image", "not a path"),
        ("iVBORw0KGgo" * 200, "image", "too long for a path → is it base64"),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded_says_why(value, kind, words):
    with pytest.raises(MediaError, match=words) as told:
        load_media(value, kind)
    assert "\n" not in str(told.value)


def test_files_that_are_none_say_why(tmp_path):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "empty.png").touch()
    os.mkfifo(tmp_path / "pipe.png")
    for name, words in [
        ("gone.png", "there is no file .*gone.png"),
        ("folder.png", "is a folder, not a file"),
        ("pipe.png", "is not a regular file"),
        ("empty.png", "0 bytes"),
        ("/dev/zero", "is not a regular file"),
        ("empty.png/x", "cannot be read: Not a directory"),
    ]:
        with pytest.raises(MediaError, match=words):
            load_media(name, "image", base=tmp_path)


def test_what_is_too_large_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "a.png").open("wb") as file:
        file.write(PNG.data)
        file.truncate(10**12)  # a sparse file: nothing could read it into memory
    with pytest.raises(MediaError, match=r"a\.png has .* MiB, more than 64\.0 → max_bytes"):
        load_media("a.png", "image", base=tmp_path)
    with pytest.raises(MediaError, match=r"more than 64\.0"):
        check_media("a.png", "image", base=tmp_path)
    for value in (PNG.data, PNG):
        with pytest.raises(MediaError, match="this file has"):
            load_media(value, "image", max_bytes=10)


def test_a_check_looks_at_the_head_only():
    check_media(PNG.data[:64], "image")
    check_media({"bytes": WAV.data[:64], "path": None}, "audio")
    check_media(PNG.data_url()[:200], "image")
    with pytest.raises(MediaError, match="it is image/png"):
        check_media(PNG.data_url(), "audio")


def test_counting_is_total_over_the_kinds_of_parts():
    """U26."""
    video = Video(b"")
    assert [kind_of(part) for part in (Text(""), PNG, WAV, video)] == [
        "text", "image", "audio", "video",
    ]  # fmt: skip
    assert count_kinds([Text("a"), PNG, PNG, WAV, video]) == {
        "text": 1, "image": 2, "audio": 1, "video": 1,
    }  # fmt: skip
    assert count_kinds([]) == {"text": 0, "image": 0, "audio": 0, "video": 0}
    with pytest.raises(TypeError, match="str is no content part"):
        count_kinds(["a"])


def test_encoders_give_parts_and_the_same_bytes_again():
    frames = np.zeros((3, 16, 16, 3), np.uint8)
    for make, kind in [
        (lambda: encode_png(frames[0]), Image),
        (lambda: encode_wav(np.zeros(99), 16000), Audio),
        (lambda: encode_mp4(frames, 5), Video),
    ]:
        assert make() == make()
        assert type(make()) is kind
        assert load_media(make().data, kind_of(make())) == make()


@pytest.mark.parametrize("fps", [0, -1, float("nan"), float("inf"), "fast", 1e9])
def test_a_frame_rate_that_is_none_is_told(fps):
    with pytest.raises(MediaError, match="a frame rate is a number above 0"):
        encode_mp4(np.zeros((1, 16, 16, 3), np.uint8), fps)


def test_frames_that_make_no_video_are_told():
    with pytest.raises(MediaError, match="a video needs a frame"):
        encode_mp4([], 5)
    with pytest.raises(MediaError, match=r"frame 1 is \(8, 8\), the first one \(16, 16\)"):
        encode_mp4([np.zeros((16, 16, 3), np.uint8), np.zeros((8, 8, 3), np.uint8)], 5)
    with pytest.raises(MediaError, match="array of uint8"):
        encode_mp4(np.zeros((1, 16, 16, 3)), 5)

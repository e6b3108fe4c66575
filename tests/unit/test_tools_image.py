"""Ready-made picture tools: right pixels, and words instead of failures for whatever is asked."""

import asyncio
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_agent.errors import ToolErrorKind
from relax_agent.media import decode_image, encode_png
from relax_agent.messages import Image, ToolCall, user
from relax_agent.references import conversation
from relax_agent.tools import Toolset
from relax_agent.tools.image import IMAGE_TOOLS, draw_box, image_statistics
from relax_agent.tools.pictures import MAX_OUTPUT_PIXELS, MAX_SIDE

WIDTH, HEIGHT = 40, 30
PIXELS = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
PIXELS[..., 0] = np.arange(WIDTH)  # red tells the column, green the row
PIXELS[..., 1] = np.arange(HEIGHT)[:, None]
PICTURE = encode_png(PIXELS)
TOOLS = Toolset(IMAGE_TOOLS)
SOFT = (None, ToolErrorKind.INVALID_ARGUMENTS)


def call(name, image=PICTURE, **arguments):
    return asyncio.run(TOOLS.call(ToolCall(name, {"image": image, **arguments}, "c")))


def pixels(result):
    assert result.ok, result.text
    return np.asarray(decode_image(result.content[-1]))


def test_a_crop_is_those_pixels():
    result = call("crop_image", left=3, top=5, right=10, bottom=20)
    assert (pixels(result) == PIXELS[5:20, 3:10]).all()
    assert result.text == "Pixels 3,5 to 10,20: 7×15 pixels"


@pytest.mark.parametrize(
    ("unit", "box"),
    [("fraction", (0.25, 0.5, 0.5, 1)), ("thousandth", (250, 500, 500, 1000))],
)
def test_places_can_be_parts_of_the_picture(unit, box):
    arguments = dict(zip(["left", "top", "right", "bottom"], box, strict=True))
    assert (pixels(call("crop_image", unit=unit, **arguments)) == PIXELS[15:30, 10:20]).all()


def test_a_box_beyond_the_edge_is_cut_off_and_that_is_said():
    result = call("crop_image", left=-5, top=20, right=10, bottom=99)
    assert (pixels(result) == PIXELS[20:30, 0:10]).all()
    assert "cut off at the edge" in result.text


@pytest.mark.parametrize(
    ("box", "words"),
    [
        ((40, 0, 50, 10), "outside the picture, which is 40×30"),
        ((-9, 0, 0, 10), "outside the picture"),
        ((5, 5, 5, 9), "the box is empty"),
        ((9, 5, 5, 9), "right \\(5\\) must be beyond left \\(9\\)"),
        ((0.1, 0.1, 0.3, 0.3), "by a pixel"),
        ((float("nan"), 0, 1, 1), "argument 'left'"),
        ((0, 0, float("inf"), 1), "argument 'right'"),
        (("left", 0, 1, 1), "argument 'left'"),
    ],
)
def test_a_box_that_is_none_is_refused_in_words(box, words):
    arguments = dict(zip(["left", "top", "right", "bottom"], box, strict=True))
    for name in ("crop_image", "draw_box"):
        result = call(name, **arguments)
        assert result.error is ToolErrorKind.INVALID_ARGUMENTS
        assert re.search(words, result.text)


def test_a_zoom_shows_the_surroundings_of_a_point_as_large_as_the_whole():
    result = call("zoom_image", x=20, y=15, factor=4)
    shown = pixels(result)
    assert shown.shape == PIXELS.shape
    assert abs(int(shown[15, 20, 0]) - 20) <= 1 and abs(int(shown[15, 20, 1]) - 15) <= 1
    corner = call("zoom_image", x=40, y=30, factor=50)
    assert corner.text.startswith("Pixels 39,29 to 40,30")
    assert (pixels(corner) == PIXELS[29, 39]).all()
    assert (pixels(call("zoom_image", x=0, y=0, factor=1)) == PIXELS).all()


@pytest.mark.parametrize("factor", [0, -1, 0.5, 51, 1e308, float("nan")])
def test_a_zoom_out_of_range_is_refused(factor):
    assert call("zoom_image", x=1, y=1, factor=factor).error is ToolErrorKind.INVALID_ARGUMENTS


def test_quarter_turns_lose_nothing_and_go_clockwise():
    for turns in range(-4, 5):
        turned = pixels(call("rotate_image", degrees=90 * turns))
        assert (turned == np.rot90(PIXELS, -turns)).all()
    slanted = pixels(call("rotate_image", degrees=45))
    assert (slanted[0, 0] == 255).all() and slanted.shape[0] > HEIGHT


def test_resizing_keeps_the_shape_unless_both_sides_are_given():
    assert pixels(call("resize_image", width=20)).shape == (15, 20, 3)
    assert pixels(call("resize_image", height=60)).shape == (60, 80, 3)
    assert pixels(call("resize_image", width=7, height=3)).shape == (3, 7, 3)


@pytest.mark.parametrize(
    "sides",
    [{}, {"width": 0}, {"width": -5}, {"height": MAX_SIDE + 1}, {"width": 10**30},
     {"width": MAX_SIDE, "height": MAX_SIDE}, {"width": 1.5}],
)  # fmt: skip
def test_sides_that_no_picture_can_have_are_refused(sides):
    assert call("resize_image", **sides).error is ToolErrorKind.INVALID_ARGUMENTS


def test_a_box_is_drawn_on_a_copy_with_its_colour_and_label():
    shown = pixels(call("draw_box", left=10, top=12, right=30, bottom=28, color="#0000ff"))
    assert (shown[12, 10] == (0, 0, 255)).all() and (shown[27, 29] == (0, 0, 255)).all()
    assert (shown[20, 20] == PIXELS[20, 20]).all()
    assert (pixels(call("crop_image", left=0, top=0, right=40, bottom=30)) == PIXELS).all()
    box = {"left": 10, "top": 12, "right": 30, "bottom": 28}
    for label in ("owl", "東京 \x00 🦉\n" * 5, "W" * 80):
        assert (pixels(call("draw_box", **box, label=label)) != PIXELS).any()
    assert not call("draw_box", **box, label="x" * 81).ok
    for color in ("no colour", "", "#12", "rgb(1e999,0,0)", "red" * 99):
        assert call("draw_box", **box, color=color).error is ToolErrorKind.INVALID_ARGUMENTS


def test_statistics_are_those_of_the_pixels():
    found = image_statistics(PICTURE)
    assert found["mean_rgb"] == [19.5, 14.5, 0.0] and (found["width"], found["height"]) == (40, 30)
    assert found["std_rgb"][0] == pytest.approx(PIXELS[..., 0].std(), abs=0.05)
    assert sum(found["brightness_histogram"]) == pytest.approx(1)
    halves = np.zeros((10, 10, 3), np.uint8)
    halves[:, 7:] = (255, 0, 0)
    found = json.loads(call("image_statistics", encode_png(halves)).text)
    assert found["dominant_colors"] == [
        {"color": "#000000", "share": 0.7},
        {"color": "#ff0000", "share": 0.3},
    ]
    assert found["brightness_histogram"][0] == 0.7


def test_what_is_too_large_to_show_is_shown_smaller_and_that_is_said():
    wide = encode_png(np.zeros((100, MAX_SIDE + 904, 3), np.uint8))
    result = call("crop_image", wide, left=0, top=0, right=9999, bottom=100)
    assert pixels(result).shape == (81, MAX_SIDE, 3)
    assert "5000×100 pixels, shown smaller at 4096×81" in result.text
    for name, arguments in (("rotate_image", {"degrees": 10}), ("zoom_image", {"x": 5, "y": 5})):
        height, width, _ = pixels(call(name, wide, **arguments)).shape
        assert width <= MAX_SIDE and width * height <= MAX_OUTPUT_PIXELS


@pytest.mark.parametrize("data", [b"", b"no picture", PICTURE.data[:60], PICTURE.data[:-30]])
def test_a_damaged_picture_is_told_without_hints_for_programs(data):
    for tool in IMAGE_TOOLS[:1] + IMAGE_TOOLS[-1:]:
        result = call(tool.name, Image(data), **({} if tool is image_statistics else
            {"left": 0, "top": 0, "right": 1, "bottom": 1}))  # fmt: skip
        assert result.error is ToolErrorKind.INVALID_ARGUMENTS
        assert "pixels=" not in result.text and "→" not in result.text


def test_a_picture_that_unfolds_to_too_much_is_refused_before_it_does():
    import zlib

    def chunk(kind, data):
        body = kind + data
        return len(data).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")

    header = (8_000).to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0"))
    result = call("image_statistics", Image(data))
    assert result.error is ToolErrorKind.INVALID_ARGUMENTS and "more than 40 million" in result.text


def test_a_model_names_a_picture_of_the_conversation():
    with conversation([user([PICTURE])]):
        assert call("resize_image", "image:-1", width=5).ok
        assert "it has 1" in call("resize_image", "image:2", width=5).text


anything = st.one_of(
    st.floats(), st.integers(-(10**40), 10**40), st.sampled_from([0, 1, 39, 40, 30, 1e308, -0.5])
)


@settings(max_examples=60, deadline=None)
@given(st.tuples(anything, anything, anything, anything), st.sampled_from(["pixel", "fraction"]))
def test_any_box_gives_a_picture_or_a_soft_error(box, unit):
    arguments = dict(zip(["left", "top", "right", "bottom"], box, strict=True))
    for name in ("crop_image", "draw_box"):
        assert call(name, unit=unit, **arguments).error in SOFT


@settings(max_examples=60, deadline=None)
@given(anything, anything, anything)
def test_any_point_angle_or_side_gives_a_picture_or_a_soft_error(x, y, factor):
    assert call("zoom_image", x=x, y=y, factor=factor).error in SOFT
    assert call("zoom_image", x=1, y=0.5, factor=abs(factor)).error in SOFT
    assert call("rotate_image", degrees=x).error in SOFT
    assert call("resize_image", width=x, height=y).error in SOFT


def test_every_tool_says_that_a_second_call_does_no_harm_and_warms_up_once():
    assert all(tool.limits.idempotent for tool in IMAGE_TOOLS)
    assert len({tool.warm_up for tool in IMAGE_TOOLS}) == 1
    asyncio.run(TOOLS.warm_up())
    assert draw_box(PICTURE, 1, 1, 5, 5)[0].startswith("Box from 1,1 to 5,5")

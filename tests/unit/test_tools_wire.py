"""How arguments and results travel: whole, and with nothing of it trusted."""

import contextlib
import json
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_agent.errors import ToolError, ToolErrorKind
from relax_agent.frames import pack
from relax_agent.messages import Audio, Image, Text, Video
from relax_agent.tools import ToolResult
from relax_agent.tools.metrics import ToolMetrics, joined
from relax_agent.tools.wire import (
    FRAME_TYPE,
    JSON_TYPE,
    dump_arguments,
    dump_result,
    load_arguments,
    load_result,
    with_media,
)

MEDIUM = {"type": "string", "format": "image"}
SCHEMA = {
    "type": "object",
    "properties": {
        "image": MEDIUM,
        "more": {"anyOf": [{"type": "array", "items": MEDIUM}, {"type": "null"}]},
        "pair": {"type": "array", "prefixItems": [{"type": "string"}, MEDIUM]},
        "named": {"type": "object", "additionalProperties": MEDIUM},
        "inner": {"$ref": "#/$defs/Inner"},
        "text": {"type": "string"},
    },
    "$defs": {
        "Inner": {
            "type": "object",
            "properties": {"image": MEDIUM, "again": {"$ref": "#/$defs/Inner"}},
        }
    },
}
parts = st.one_of(
    st.text().map(Text),
    st.binary().map(Image),
    st.builds(Audio, st.binary(), st.just("audio/flac")),
    st.binary().map(Video),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(parts, max_size=5),
    st.one_of(st.none(), st.sampled_from(ToolErrorKind)),
    st.booleans(),
)
def test_a_result_arrives_as_it_left(content, error, framed):
    result = ToolResult(tuple(content), error, 0.5, 0.25)
    body, content_type = dump_result(result, framed=framed)
    assert load_result(content_type, body) == result
    has_media = any(not isinstance(part, Text) for part in content)
    assert (content_type == FRAME_TYPE) == (framed and has_media)


def test_framed_media_are_bytes_not_base64():
    result = ToolResult((Image(bytes(300_000)),))
    assert len(dump_result(result, framed=True)[0]) < 300_300


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([JSON_TYPE, FRAME_TYPE, "text/html"]))
def test_no_answer_of_a_server_is_anything_but_a_result_or_a_value_error(body, content_type):
    with contextlib.suppress(ValueError, RecursionError):
        assert isinstance(load_result(content_type, body), ToolResult)


ONE, TWO = Image(b"one"), Image(b"two", "image/gif")


def test_media_among_the_arguments_arrive_where_they_were():
    arguments = {
        "image": ONE,
        "more": [TWO, ONE],
        "pair": ["blob:0", TWO],
        "named": {"a": ONE},
        "inner": {"image": ONE, "again": {"image": TWO}},
        "text": "blob:1",
    }
    body, content_type = dump_arguments(arguments)
    assert content_type == FRAME_TYPE
    assert load_arguments(body, SCHEMA, framed=True) == arguments


def test_plain_arguments_stay_json():
    assert dump_arguments({"text": "ä"}) == (json.dumps({"text": "ä"}).encode(), JSON_TYPE)


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", 1j])
def test_what_is_no_json_is_a_soft_error(value):
    with pytest.raises(ToolError, match="not JSON") as raised:
        dump_arguments({"x": value})
    assert raised.value.kind is ToolErrorKind.INVALID_ARGUMENTS


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"a": 1, "a": 2}', "argument 'a' is given twice"),
        (b'{"x": [{"deep": 1, "deep": 1}]}', "argument 'deep' is given twice"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 200_000, "nested too deep"),
        (b'{"a":' * 200_000, "nested too deep"),
    ],
)
def test_odd_json_is_a_soft_error(body, words):
    with pytest.raises(ToolError, match=words) as raised:
        load_arguments(body, SCHEMA, framed=False)
    assert raised.value.kind is ToolErrorKind.INVALID_ARGUMENTS


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xff\xff\xff",
        pack({"id": 0}, [b"x"]),
        pack({"id": 0, "arguments": {}, "mimes": []}, [b"x"]),
        pack({"id": 0, "arguments": {"image": "blob:7"}, "mimes": ["image/png"]}, [b"x"]),
        pack({"id": 0, "arguments": {}, "mimes": 3}),
        pack({"id": 0, "arguments": {}, "mimes": []}) * 2,
    ],
)
def test_a_frame_that_is_none_is_a_soft_error(body):
    with pytest.raises(ToolError, match="not one frame"):
        load_arguments(body, SCHEMA, framed=True)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=100), st.booleans())
def test_no_request_at_all_raises_anything_else(body, framed):
    try:
        load_arguments(body, SCHEMA, framed=framed)
    except ToolError as error:
        assert error.kind is ToolErrorKind.INVALID_ARGUMENTS


json_values = st.recursive(
    st.none() | st.integers() | st.text(string.ascii_letters + ":0", max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from([*SCHEMA["properties"], "x"]), json_values))
def test_looking_for_media_changes_nothing_else(arguments):
    assert with_media(arguments, SCHEMA, lambda text, kind: text) == arguments


def test_metrics_of_several_processes_are_one_text_with_each_family_in_one_piece():
    one, two = ToolMetrics(), ToolMetrics()
    one.add("add", ToolResult((Text("1"),), None, 0.003))
    two.add("add", ToolResult.failure(ToolErrorKind.TIMEOUT, "x").timed(100.0))
    text = joined([one.text({"sessions": 2}, 0), two.text({"sessions": 3}, 1)])
    lines = text.splitlines()
    assert len([line for line in lines if line.startswith("# TYPE")]) == len(
        {line for line in lines if line.startswith("# TYPE")}
    )
    assert 'relax_tool_calls_total{tool="add",outcome="ok",worker="0"} 1' in lines
    assert 'relax_tool_errors_total{kind="timeout",worker="1"} 1' in lines
    assert 'relax_tool_call_seconds_bucket{tool="add",le="0.0025",worker="0"} 0' in lines
    assert 'relax_tool_call_seconds_bucket{tool="add",le="0.005",worker="0"} 1' in lines
    assert 'relax_tool_call_seconds_bucket{tool="add",le="60",worker="1"} 0' in lines
    assert 'relax_tool_call_seconds_bucket{tool="add",le="+Inf",worker="1"} 1' in lines
    assert 'relax_tool_sessions{worker="1"} 3' in lines

"""What travels between an environment and its driver arrives equal, or is refused in words."""

import enum
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_agent.envs import Transcript
from relax_agent.envs.serving import wire
from relax_agent.envs.serving.protocol import REQUESTS
from relax_agent.envs.serving.wire import WireError
from relax_agent.errors import EnvError, ToolErrorKind
from relax_agent.messages import (
    AssistantMessage,
    Audio,
    Image,
    Message,
    Rewrite,
    Text,
    ToolCall,
    Usage,
    Video,
    assistant,
    user,
)
from relax_agent.tools import ToolResult

text = st.text(max_size=8)
words = st.none() | text
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(-1e6, 1e6) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
media = st.builds(Image, st.binary(max_size=9), text) | st.builds(Audio, st.binary(max_size=9))
part = st.builds(Text, text) | media | st.builds(Video, st.binary(max_size=9), text)
content = st.lists(part, max_size=4).map(tuple)
call = st.builds(ToolCall, text, st.dictionaries(text, json_values, max_size=3), text, words)
usage = st.builds(Usage, st.integers(0, 99), st.integers(0, 99), st.none() | st.integers(0, 9))
plain = st.builds(Message, st.sampled_from(["system", "user", "tool"]), content, words, words)
said = st.builds(
    AssistantMessage,
    content=content,
    name=words,
    tool_call_id=words,
    reasoning=words,
    tool_calls=st.lists(call, max_size=2).map(tuple),
    usage=usage,
    finish_reason=st.sampled_from(["stop", "length", "abort"]),
)
message = plain | said
observation = st.lists(message, max_size=3) | st.builds(
    Rewrite, st.lists(message, max_size=3).map(tuple), text
)


def travelled(data: dict) -> dict:
    """The same data after a journey as JSON bytes."""
    return wire.loads(wire.dumps(data))


@given(said)
def test_an_action_arrives_equal(action):
    blobs = []
    sent = travelled({"op": "step", "action": wire.message_to_wire(action, blobs)})
    checked = wire.check(REQUESTS["step"], sent, "step")
    assert wire.action_from_wire(checked["action"], blobs) == action


@given(observation, st.floats(-1e9, 1e9), st.dictionaries(text, json_values, max_size=3))
def test_a_step_arrives_equal(seen, reward, info):
    blobs = []
    reply = {
        "observation": wire.observation_to_wire(seen, blobs),
        "reward": reward,
        "terminated": False,
        "truncated": True,
        "info": wire.plain_info("step", info),
    }
    assert wire.read_step(travelled(reply), blobs) == (seen, reward, False, True, info)


def test_media_travel_beside_the_json_and_each_once():
    blobs = []
    data = wire.message_to_wire(user([Image(b"\xff" * 99), "and", Audio(b"a" * 99)]), blobs)
    assert blobs == [b"\xff" * 99, b"a" * 99]
    assert len(wire.dumps(data)) < 200


@pytest.mark.parametrize(
    ("op", "request_", "told"),
    [
        ("step", {"op": "step"}, "action: Field required"),
        ("step", {"op": "step", "action": "42"}, "action"),
        ("step", {"op": "step", "action": {"content": "42"}}, "action.role: Field required"),
        ("step", {"op": "step", "action": {"role": "robot"}}, "action.role"),
        ("step", {"op": "step", "action": {"role": "assistant", "content": 3}}, "action.content"),
        (
            "step",
            {"op": "step", "action": {"role": "assistant", "contents": "x"}},
            "action.contents: Extra",
        ),
        (
            "step",
            {"op": "step", "action": {"role": "assistant", "tool_calls": [{"name": "x"}]}},
            r"action.tool_calls.0.arguments: Field required",
        ),
        (
            "step",
            {
                "op": "step",
                "action": {
                    "role": "assistant",
                    "content": [{"type": "image", "mime": "image/png", "blob": True}],
                },
            },
            "blob",
        ),
        ("reset", {"op": "reset", "seed": "7"}, "seed"),
        ("reset", {"op": "reset", "seed": 1.5}, "seed"),
        ("reset", {"op": "reset", "options": []}, "options"),
        ("call_tool", {"op": "call_tool", "call": None}, "call"),
        ("score_group", {"op": "score_group", "task_id": 3, "members": []}, "task_id"),
    ],
)
def test_what_is_no_request_is_refused_and_named(op, request_, told):
    with pytest.raises(WireError, match=told):
        wire.check(REQUESTS[op], request_, op)


@pytest.mark.parametrize("number", [-1, 1, 10**9])
def test_media_that_did_not_come_along_are_refused(number):
    part = {"type": "image", "mime": "image/png", "blob": number}
    action = {"role": "assistant", "content": [part]}
    with pytest.raises(WireError, match="does not exist"):
        wire.action_from_wire(action, [b"one"])


def test_an_action_is_an_assistants():
    with pytest.raises(WireError, match="role assistant"):
        wire.action_from_wire({"role": "user", "content": "x"}, [])


@pytest.mark.parametrize("junk", ["", "{", "[]", "3", '"x"', b"\xff", "[" * 100_000])
def test_what_is_no_json_object_is_refused(junk):
    with pytest.raises(WireError):
        wire.loads(junk)


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"observation": []},
        {"observation": "x", "reward": 0, "terminated": False, "truncated": False, "info": {}},
        {"observation": [], "reward": "1", "terminated": 0, "truncated": "no", "info": []},
    ],
)
def test_a_reply_that_is_none_is_an_env_error(reply):
    with pytest.raises(EnvError, match=r"the reply to step\(\)"):
        wire.read_step(reply, [])


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: int


def test_an_info_becomes_json_by_stated_rules():
    info = {
        "array": np.arange(3),
        "scalar": np.float32(0.5),
        "tuple": (1, 2),
        "set": {1},
        "enum": Colour.RED,
        "kind": ToolErrorKind.TIMEOUT,
        "point": Point(1),
        "path": Path("a/b"),
        "nan": math.nan,
        "half": "\ud800",
        7: {"deep": [math.inf]},
    }
    data = wire.plain_info("step", info)
    assert json.loads(json.dumps(data, allow_nan=False)) == {
        "array": [0, 1, 2],
        "scalar": 0.5,
        "tuple": [1, 2],
        "set": [1],
        "enum": "red",
        "kind": "timeout",
        "point": {"x": 1},
        "path": "a/b",
        "nan": None,
        "half": "?",
        "7": {"deep": [None]},
    }


@pytest.mark.parametrize("value", [object(), b"\xff\xfe", lambda: 1, Image(b"\xff"), [object()]])
def test_an_info_that_is_not_plain_names_its_key(value):
    with pytest.raises(EnvError, match=r"info\['board'\] of reset\(\) cannot travel"):
        wire.plain_info("reset", {"fine": 1, "board": value})


def test_an_info_that_contains_itself_is_refused():
    loop = {}
    loop["again"] = loop
    with pytest.raises(EnvError):
        wire.plain_info("step", {"board": loop})


def test_transcripts_and_tool_results_arrive_equal():
    call = ToolCall("draw", {"a": 1}, "1")
    failed = ToolResult.failure(ToolErrorKind.TIMEOUT, "slow")
    member = Transcript(
        [user([Image(b"1")]), assistant(tool_calls=[call]), failed.to_message(call)]
    )
    member.calls = [(call, failed)]
    member.reward, member.metrics = 0.5, {"x": 1.0}
    blobs = []
    sent = travelled(
        {
            "op": "score_group",
            "task_id": "t",
            "members": [wire.transcript_to_wire(member, blobs)],
        }
    )
    (data,) = wire.check(REQUESTS["score_group"], sent, "score_group")["members"]
    back = wire.transcript_from_wire(data, blobs)
    assert (list(back), back.reward, back.metrics) == (list(member), 0.5, {"x": 1.0})
    assert [result.error for _, result in back.calls] == [ToolErrorKind.TIMEOUT]
    blobs = []
    result = ToolResult((Text("x"), Image(b"2")), None, 0.25, 0.125)
    assert wire.read_tool(travelled(wire.tool_to_wire(result, blobs)), blobs) == result
    assert wire.read_tool(travelled(wire.tool_to_wire(failed, blobs)), blobs) == failed

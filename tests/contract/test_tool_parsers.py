"""One kit for every parser of tool calls in text: golden files, pieces, cuts and faults."""

import asyncio
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_support import CASES, IDS, TOOLS, TOOLSET, chunks, good_calls, streamed, xml

from relax_agent.errors import ConfigError, RenderError
from relax_agent.messages import ToolCall, to_openai
from relax_agent.rendering import (
    TOOL_PARSERS,
    CallRead,
    ReasoningDelta,
    TextDelta,
    fold,
    tool_parser,
)

NAMES = list(TOOL_PARSERS)
QUICK = settings(max_examples=100, deadline=None)


@pytest.mark.parametrize(("name", "case"), CASES, ids=IDS)
@pytest.mark.parametrize("tools", [TOOLS, ()], ids=["tools", "bare"])
def test_the_whole_text_gives_what_the_pieces_give(name, case, tools):
    """T55: pieces of 1, 2, 7 characters and all at once; with schemas and without (T52)."""
    parser = tool_parser(name)
    whole = parser.parse(case["text"], tools)
    for size in (1, 2, 7, [1, 3, 11], [40, 1]):
        assert streamed(parser, chunks(case["text"], size), tools)[0] == whole


@pytest.mark.parametrize(("name", "case"), CASES, ids=IDS)
def test_golden_files(name, case):
    """T52, T55, T56: calls, content and reasoning are those of the file."""
    message = tool_parser(name).parse(case["text"], TOOLS)
    assert len(message.tool_calls) == len(case["calls"])
    for call, wanted in zip(message.tool_calls, case["calls"], strict=True):
        if "error" in wanted:
            assert wanted["error"] in (call.error or "").replace("Invalid control", "control")
            assert call.arguments == {}
        else:
            assert (call.error, call.name) == (None, wanted["name"])
            assert json.dumps(call.arguments) == json.dumps(wanted["arguments"])  # 1 is not True
    assert message.text == case.get("content", "")
    assert message.reasoning == case.get("reasoning")
    ids = [call.id for call in message.tool_calls]
    assert ids == [f"call_{number}" for number in range(len(ids))]


@pytest.mark.parametrize(("name", "case"), CASES, ids=IDS)
def test_a_cut_output_never_runs_half_a_call(name, case):
    """Cut at every character, a call is whole, or has an error, or is text."""
    parser = tool_parser(name)
    whole = good_calls(parser.parse(case["text"], TOOLS))
    # A call that is drafted in reasoning is one, as long as nothing closes the reasoning.
    begin = case["text"].index("</think>") + len("</think>") if "drafted" in case["name"] else 0
    for end in range(begin, len(case["text"])):
        message = parser.parse(case["text"][:end], TOOLS)
        calls = good_calls(message)
        assert calls == whole[: len(calls)], f"cut at {end}"
        assert all(not call.arguments for call in message.tool_calls if call.error)


# A text of pieces that mean something to some format, so that random texts come close to calls.
FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<tool_call>\n", "\n</tool_call>", "<think>", "</think>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|python_start|>"),
    *("<|python_end|>", "```", "```json\n", "\n```", "tool_call", "<function=", "</function>"),
    *("<parameter=", "</parameter>", "\n<parameter=", "<function=now>\n", "now", "add", "now()"),
    *('{"name": "now", "arguments": {}}', '{"name": "add", "parameters": {"a": 1, "b": '),
    *(
        "[add(a=1, b=",
        '"""',
        "'''",
        "\\u00",
        "NaN",
        "1",
        "\n",
        " ",
        "\x00",
        "\u2028",
        "é",
        "\ud83d",
    ),
    *("\ude00", *"[]{}\"'\\,:;()=<>-*#"),
]
PIECES = st.sampled_from(FRAGMENTS) | st.text(max_size=3)
TEXTS = st.lists(PIECES, max_size=25).map("".join)


@st.composite
def damaged(draw, name):
    """A golden text of the format and one of any, with a few places overwritten."""
    own = [case["text"] for parser, case in CASES if parser == name]
    text = draw(st.sampled_from(own)) + draw(st.sampled_from(CASES))[1]["text"]
    for _ in range(draw(st.integers(0, 3))):
        at, gone = draw(st.integers(0, len(text))), draw(st.integers(0, 9))
        text = text[:at] + draw(PIECES) + text[at + gone :]
    return text


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    reasoning=st.sampled_from(["tagged", "opened", "none"]),
)
def test_any_text_gives_a_message_that_does_not_depend_on_its_pieces(name, data, sizes, reasoning):
    """T55: never an exception, and whatever comes out can be sent, saved and rendered."""
    text = data.draw(TEXTS | damaged(name))
    parser = tool_parser(name, reasoning)
    whole = parser.parse(text, TOOLS)
    assert streamed(parser, chunks(text, sizes))[0] == whole
    assert streamed(parser, chunks(text, 1))[0] == whole
    json.dumps(to_openai(whole), allow_nan=False, ensure_ascii=False).encode()
    assert [call.id for call in whole.tool_calls] == [
        f"call_{number}" for number in range(len(whole.tool_calls))
    ]
    for call in whole.tool_calls:
        assert isinstance(call.arguments, dict)
        assert call.error or call.name


@pytest.mark.parametrize("name", NAMES)
@QUICK
@given(text=TEXTS)
def test_events_come_in_the_order_of_the_text(name, text):
    """Text before, between and after calls keeps its place, and none of it is made up."""
    stream = tool_parser(name, "none").stream(TOOLS)
    text = text.encode("utf-8", "replace").decode()
    at = 0
    for event in stream.feed(text) + stream.finish():
        if isinstance(event, TextDelta):
            for word in event.text.split():
                at = text.index(word, at) + len(word)


def written(name, calls):
    """Write calls as a model of the format does."""
    items = [{"name": tool, "arguments": arguments} for tool, arguments in calls]
    if name == "hermes":
        texts = (json.dumps(item, ensure_ascii=False) for item in items)
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    if name == "llama3":
        return "; ".join(json.dumps({"name": t, "parameters": a}) for t, a in calls)
    if name == "mistral":
        return f"[TOOL_CALLS] {json.dumps(items, ensure_ascii=False)}"
    if name == "pythonic":
        inner = (f"{t}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for t, a in calls)
        return f"[{', '.join(inner)}]"
    if name == "fenced":
        return "\n".join(f"```json\n{json.dumps(item, indent=1)}\n```" for item in items)
    return "\n".join(xml(*call) for call in calls)


# Half surrogate pairs have no place in a call. Marks of all formats may be part of any string.
STRINGS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5) | st.sampled_from(FRAGMENTS),
    max_size=4,
).map(lambda pieces: "".join(pieces).encode("utf-8", "ignore").decode())
AMBIGUOUS = {"<parameter=", "</parameter>", "</function>", "</tool_call>"}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@QUICK
@given(data=st.data())
def test_what_was_written_is_read(name, data):
    """T55, T56: any JSON, marks of the format in its strings, several calls of one tool."""
    strings = STRINGS
    if name == "qwen3_coder":  # its values have no escapes: one tag cannot be part of them
        strings = STRINGS.filter(lambda s: not AMBIGUOUS & set(re.findall(r"</?\w+[=>]", s)))
    writing = st.fixed_dictionaries({"path": strings, "content": strings})
    configuring = st.fixed_dictionaries(
        {},
        optional={
            "options": st.dictionaries(STRINGS, VALUES, max_size=3),
            "flags": st.lists(STRINGS, max_size=3),
            "ratio": st.floats(allow_nan=False, allow_infinity=False),
            "verbose": st.booleans(),
        },
    )
    if name == "qwen3_coder":
        configuring = configuring.filter(lambda a: "<" not in str(a))
    call = (
        st.tuples(st.just("write"), writing)
        | st.tuples(st.just("configure"), configuring)
        | st.just(("now", {}))
    )
    calls = data.draw(st.lists(call, min_size=1, max_size=4))
    message = tool_parser(name).parse(written(name, calls), TOOLS)
    assert [call.error for call in message.tool_calls] == [None] * len(calls)
    assert good_calls(message) == [list(call) for call in calls]
    assert message.text == ""


@pytest.mark.parametrize("name", NAMES)
def test_wrong_calls_become_results_that_the_model_can_act_on(name):
    """T58, T61: an unknown tool, a missing argument, a number in words: the result names it."""
    calls = [
        ("ad", {"a": 1, "b": 2}),
        ("add", {"a": 1}),
        ("add", {"a": 1, "b": "seven"}),
        ("add", {"a": 1, "b": [2]}),
        ("add", {"a": 1, "b": 2}),
    ]
    message = tool_parser(name).parse(written(name, calls), TOOLS)
    shown = [answer(call) for call in message.tool_calls]
    assert [failed for failed, _ in shown] == [True, True, True, True, False]
    for (_, text), word in zip(shown, ["did you mean 'add'", "b", "b", "b", "3"], strict=True):
        assert word in text


def answer(call):
    result = asyncio.run(TOOLSET.call(call))
    return not result.ok, result.text


BROKEN = {
    "hermes": "<tool_call>\n{bad}\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=add\n</tool_call>",
    "llama3": "<|python_tag|>{bad}",
    "mistral": "[TOOL_CALLS]add[ARGS]{bad}",
    "pythonic": "[add(a=1, b=x)]",
    "fenced": "```tool_call\n{bad}\n```",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_call_is_answered_and_not_run(name):
    (call,) = tool_parser(name).parse(BROKEN[name], TOOLS).tool_calls
    failed, text = answer(call)
    assert failed
    assert "could not be read" in text


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_a_model_writes_is_run(name, tmp_path):
    """T53: as an argument, as a name, as the whole call, as a value where a list belongs."""
    file = tmp_path / "was_here"
    code = f"__import__('pathlib').Path({str(file)!r}).touch()"
    for text in (
        written(name, [("configure", {"flags": code})]),
        f"[configure(flags={code})]",
        f"[configure(flags=[{code}])]",
        f"[{code}]",
        xml("configure", {"flags": f"[{code}]"}),
        f"<|python_tag|>{code}",
        f"```python\n{code}\n```",
    ):
        tool_parser(name).parse(text, TOOLS)
        assert not file.exists()


def hard_texts(n):
    """Texts of about ``n`` characters that a careless reader reads again and again."""
    small = {
        "calls": '<tool_call>{"name": "now"}</tool_call>[TOOL_CALLS]now{}\n[now()]\n',
        "openers": "<tool_call>",
        "open strings": '<tool_call>{"',
        "end tags in strings": '<tool_call>{"</tool_call>',
        "the other phase": '<tool_call>{"a":["</tool_call>,",":"',
        "escapes": '<tool_call>{"\\"</tool_call>',
        "brackets": "[",
        "objects": '{"a":',
        "half marks": "<tool_cal<functio<paramete[TOOL_CALL``<|python_ta",
        "parameters": "<tool_call><function=f><parameter=a>\n<parameter=b>1</function>",
        "functions": "</function> </tool_call>",
        "lists": "[f(a='",
        "lists in prose": "x [f(a=[",
        "quotes": "[f(a='''\"\"\"",
        "arrays": '[TOOL_CALLS] [{"name":"f"},',
        "python tags": '<|python_tag|>{"name":"f"};',
        "fences": "\n```json\n{\n```x",
        "open fences": "\n```json",
        "drafts": "<think><tool_call>",
        "space": " \n",
    }
    texts = {key: part * (n // len(part)) for key, part in small.items()}
    texts["a long argument"] = '<tool_call>{"arguments": {"a": "' + "x</tool_call>" * (n // 13)
    texts["one long value"] = "<tool_call><function=f><parameter=a>" + "</function> " * (n // 12)
    texts["space behind a call"] = "<tool_call>{}" + " " * n
    texts["a name"] = "[TOOL_CALLS]" + "a" * n
    texts["a list behind text"] = "x [f(a=" + "1," * (n // 2)
    return texts


@pytest.mark.parametrize("name", NAMES)
def test_the_work_is_linear_in_the_text(name):
    """However hard the text: a few looks at each character, a few dozen if it comes alone."""
    for key, text in hard_texts(30_000).items():
        _, stream = streamed(tool_parser(name), [text])
        assert stream.work <= 12 * len(text), key
    for key, text in hard_texts(3_000).items():
        _, stream = streamed(tool_parser(name), chunks(text, 1))
        assert stream.work <= 60 * len(text), key


@pytest.mark.parametrize("name", NAMES)
def test_a_megabyte_is_no_trouble(name):
    text = "x" * (1 << 20)
    message, stream = streamed(
        tool_parser(name), chunks(written(name, [("write", {"a": text})]), 4096)
    )
    assert message.tool_calls[0].arguments == {"a": text}
    assert stream.work <= 12 * len(text)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_and_nesting_beyond_all_measure_are_soft_errors(name):
    deep = "[" * 50_000 + "]" * 50_000
    for value in (deep, "9" * 5_000, '{"a":' * 9_999, "-" * 50_000 + "1", "(" * 9_999):
        for text in (
            f'<tool_call>{{"name": "configure", "arguments": {{"options": {value}}}}}</tool_call>',
            f"<tool_call><function=configure><parameter=options>{value}</parameter></tool_call>",
            f'<|python_tag|>{{"name": "configure", "parameters": {{"options": {value}}}}}',
            f'[TOOL_CALLS]configure{{"options": {value}}}',
            f"[configure(options={value})]",
            f'```json\n{{"name": "configure", "arguments": {{"options": {value}}}}}\n```',
        ):
            for call in tool_parser(name).parse(text, TOOLS).tool_calls:
                assert answer(call)[0]


def test_calls_come_as_soon_as_they_are_whole_and_text_as_soon_as_it_is_certain():
    stream = tool_parser("hermes").stream()
    assert stream.feed("<think>\nI add") == [ReasoningDelta("I add")]
    assert stream.feed(".</think>\n\nNow <tool") == [ReasoningDelta("."), TextDelta("Now")]
    assert stream.feed(' <tool_call>{"name": "now"}') == [TextDelta(" <tool")]
    assert stream.feed("</tool_call>") == [CallRead(ToolCall("now", {}, "call_0"))]
    assert stream.feed(" \nbye ") == [TextDelta("  \nbye")]
    assert stream.finish() == []
    assert stream.finish() == []
    with pytest.raises(RenderError, match="ended"):
        stream.feed("more")


def test_reasoning_is_where_the_caller_says():
    text = "I add.</think>3"
    opened = tool_parser("hermes", "opened").parse(text)
    assert (opened.reasoning, opened.text) == ("I add.", "3")
    again = tool_parser("hermes", "opened").parse(f"<think>{text}")
    assert (again.reasoning, again.text) == ("I add.", "3")
    tagged = tool_parser("hermes").parse(text)
    assert (tagged.reasoning, tagged.text) == (None, text)
    none = tool_parser("hermes", "none").parse(f"<think>{text}")
    assert (none.reasoning, none.text) == (None, f"<think>{text}")


def test_a_fence_ends_a_block_only_where_it_stands_alone():
    block = written("fenced", [("now", {})])
    assert good_calls(tool_parser("fenced").parse(f"{block} \nbye")) == [["now", {}]]
    message = tool_parser("fenced").parse(f"{block}x\nbye")
    assert (message.text, message.tool_calls) == (f"{block}x\nbye", ())


def test_a_message_says_how_the_output_ended():
    stream = tool_parser("hermes").stream()
    message = fold(stream.feed("Well <tool_call>{") + stream.finish(), "length")
    assert message.finish_reason == "length"
    assert message.tool_calls[0].error


def test_a_parser_that_does_not_exist_is_named_with_the_nearest_that_does():
    with pytest.raises(ConfigError, match="qwen3_code") as raised:
        tool_parser("qwen3_code")
    assert "qwen3_coder" in str(raised.value.hint)
    with pytest.raises(ConfigError) as raised:
        tool_parser("zzz")
    assert "hermes" in str(raised.value.hint)

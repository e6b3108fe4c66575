"""Rendering: token in, token out; what is appended never depends on what came before the turn."""

import json
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_agent.errors import ConfigError, RenderError
from relax_agent.messages import (
    AssistantMessage,
    Image,
    Message,
    ToolCall,
    assistant,
    parts,
    system,
    to_openai,
    tool_message,
    user,
)
from relax_agent.models import ModelSettings, TinySettings, chat_texts, resolve_model
from relax_agent.rendering import RendererSettings, load_renderer, normalise_tools

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
TOOLS = [TOOL]
CALL = ToolCall("calculator", {"expression": "(1+2)*3"}, "call_0")
QUESTION = user("What is (1+2)*3?")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    conversations = [
        [user(f"What is {n}?"), assistant(tool_calls=[CALL]), tool_message(str(n), CALL)]
        for n in range(30)
    ]
    tiny = TinySettings(hidden=16, layers=1, head_dim=8, expert_hidden=16, experts=2)
    work_dir = tmp_path_factory.mktemp("models")
    return resolve_model(ModelSettings(tiny=tiny), work_dir, chat_texts(conversations, TOOLS))


@pytest.fixture(scope="session")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session", params=[None, True, False], ids=["default", "think", "no-think"])
def renderer(folder, request):
    return load_renderer(folder, RendererSettings(enable_thinking=request.param))


@pytest.fixture(scope="session")
def plain(folder):
    return load_renderer(folder, RendererSettings())


def ids_of(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


CONVERSATIONS = [
    [QUESTION],
    [system("Be brief."), QUESTION],
    [QUESTION, assistant("9")],
    [QUESTION, assistant("9"), user("Sure?"), assistant("Yes.\n\nQuite.")],
    [QUESTION, assistant(tool_calls=[CALL]), tool_message("9", CALL), assistant("9")],
    [QUESTION, assistant("Let me see.", tool_calls=[CALL, CALL]), tool_message("9", CALL)],
    [
        QUESTION,
        assistant(tool_calls=[CALL, CALL]),
        tool_message("9", CALL),
        tool_message("9", CALL),
        user("And?"),
        assistant("9", reasoning="It said 9.\nTwice."),
    ],
    [QUESTION, assistant("9", reasoning="old thought"), user("tool_response x")],
    [QUESTION, assistant("9\n"), system("Now in French."), user("12 héllo 😀")],
]


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("tools", [TOOLS, []], ids=["tools", "bare"])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False], ids=["prompt", "closed"])
def test_the_chat_template_gives_the_renderers_own_ids(
    folder, tokenizer, messages, tools, thinking, prompt
):
    """T1, T2, T20: Jinja and token-level rendering agree to the token, separators included."""
    renderer = load_renderer(folder, RendererSettings(enable_thinking=thinking))
    templated = tokenizer.apply_chat_template(
        [to_openai(message) for message in messages],
        tools=tools or None,
        add_generation_prompt=prompt,
        enable_thinking=thinking,
        return_dict=False,
    )
    assert renderer._render(messages, tools, add_generation_prompt=prompt) == templated


def test_appending_gives_what_a_full_render_gives(tokenizer, renderer):
    """T1: the separator that the engine never samples is not lost."""
    history = [QUESTION, assistant(tool_calls=[CALL]), tool_message("9", CALL)]
    log = renderer.start(history[:1], TOOLS).ids
    turn = renderer.completion(history[1])
    log = log + turn + renderer.extend(turn, history[2:], TOOLS).ids
    assert log == renderer.start(history, TOOLS).ids


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_log_built_turn_by_turn_equals_the_full_render(plain, data):
    """T5: random conversations without reasoning, any number of turns."""
    words = st.text("ab 12\n<>+(", min_size=1, max_size=8).map(lambda t: f"x{t}x")
    history = [user(data.draw(words))]
    log = plain.start(history, TOOLS).ids
    for _ in range(data.draw(st.integers(1, 4))):
        calls = [CALL] * data.draw(st.integers(0, 2))
        said = assistant(data.draw(words), tool_calls=calls)
        came = [tool_message(data.draw(words), call) for call in calls]
        came += [user(data.draw(words))] * (data.draw(st.booleans()) or not calls)
        turn = plain.completion(said)
        log += turn + plain.extend(turn, came, TOOLS).ids
        history += [said, *came]
    assert log == plain.start(history, TOOLS).ids


def test_all_messages_of_a_tail_are_appended(tokenizer, renderer):
    """T14: tool, tool, user."""
    said = assistant(tool_calls=[CALL, CALL])
    tail = [tool_message("one", CALL), tool_message("two", CALL), user("three")]
    turn = renderer.completion(said)
    text = tokenizer.decode(renderer.extend(turn, tail, TOOLS).ids)
    assert [text.count(word) for word in ("one", "two", "three")] == [1, 1, 1]
    assert text.index("one") < text.index("two") < text.index("three")


def test_a_turn_that_the_length_limit_cut_is_closed_first(tokenizer, renderer):
    """T13: the stop token is among the appended ids, so its mask is 0."""
    cut = ids_of(tokenizer, "I was just going to")
    appended = renderer.extend(cut, [user("go on")], TOOLS).ids
    assert appended[0] == renderer.stop_token_ids[0]
    whole = [*cut, renderer.stop_token_ids[0]]
    assert appended[1:] == renderer.extend(whole, [user("go on")], TOOLS).ids


def test_a_turn_cut_in_mid_thought_is_closed_first(tokenizer, plain):
    """T13: reasoning that never ended is ended by appended ids."""
    cut = ids_of(tokenizer, "<think>\nhm")
    text = tokenizer.decode(plain.extend(cut, [user("go on")], TOOLS).ids)
    assert text.startswith("</think><|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n")


def test_a_turn_that_stopped_in_mid_thought_stays_as_it_was_sampled(tokenizer, plain):
    turn = ids_of(tokenizer, "<think>\nhm<|im_end|>")
    ordinary = ids_of(tokenizer, "hm<|im_end|>")
    new = [user("go on")]
    assert plain.extend(turn, new, TOOLS).ids == plain.extend(ordinary, new, TOOLS).ids


def test_an_empty_turn_can_be_appended_to(plain):
    assert plain.extend([], [user("hello?")], TOOLS).ids[0] == plain.stop_token_ids[0]


def test_ids_that_decode_and_encode_to_fewer_are_never_re_encoded(tokenizer, plain):
    """T17: a model may sample a text in other tokens than the tokenizer would choose."""
    natural = ids_of(tokenizer, "What is 1")
    odd = [i for c in "What is 1" for i in ids_of(tokenizer, c)]
    assert len(odd) > len(natural)
    stop = plain.stop_token_ids[:1]
    new = [user("go on")]
    assert plain.extend(odd + stop, new, TOOLS).ids == plain.extend(natural + stop, new, TOOLS).ids
    assert plain.parse(odd + stop, TOOLS).text == "What is 1"


def test_schemas_in_both_shapes_render_to_the_same_ids(plain):
    """T16: a bare schema and one in OpenAI's envelope."""
    bare = TOOL["function"]
    reordered = {"function": dict(reversed(bare.items())), "type": "function"}
    assert plain.start([QUESTION], [bare]).ids == plain.start([QUESTION], TOOLS).ids
    assert plain.start([QUESTION], [reordered]).ids == plain.start([QUESTION], TOOLS).ids
    assert normalise_tools([{"type": "function", **bare}]) == TOOLS


def test_a_schema_without_a_name_is_refused(plain):
    with pytest.raises(RenderError, match="no name"):
        plain.start([QUESTION], [{"type": "function", "function": {}}])


@pytest.mark.parametrize(
    "message",
    [
        assistant("9"),
        assistant("two\nlines"),
        assistant(tool_calls=[CALL]),
        assistant("I count.", tool_calls=[CALL, ToolCall("calculator", {}, "call_1")]),
        assistant(tool_calls=[ToolCall("f", {"é": [1, {"x": None}], "q": '"}}'}, "call_0")]),
    ],
)
def test_parsing_a_completion_gives_the_message_back(renderer, message):
    """T55, T56: nested arguments last, no arguments, two calls to one tool."""
    assert renderer.parse(renderer.completion(message), TOOLS) == message


def test_reasoning_comes_back_where_the_format_may_think(folder, plain):
    message = assistant("9", reasoning="one two", tool_calls=[CALL])
    assert plain.parse(plain.completion(message), TOOLS) == message
    unthinking = load_renderer(folder, RendererSettings(enable_thinking=False))
    with pytest.raises(RenderError, match="enable_thinking"):
        unthinking.completion(message)


def test_a_completion_holds_no_token_of_the_prompt_and_ends_with_one_stop(renderer):
    ids = renderer.completion(assistant("9"))
    assert ids.count(renderer.stop_token_ids[0]) == 1
    assert ids[-1] == renderer.stop_token_ids[0]
    assert renderer._tokenizer.decode(ids) == "9<|im_end|>"


BAD = {
    "<tool_call>\n{nonsense}\n</tool_call>": "JSON",
    '<tool_call>\n{"name": "calculator"': "closing",
    '<tool_call>\n{"arguments": {}}\n</tool_call>': "names no tool",
    '<tool_call>\n{"name": 7, "arguments": {}}\n</tool_call>': "names no tool",
    '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>': "object",
    '<tool_call>\n{"name": "f", "arguments": "{}"}\n</tool_call>': "object",
    '<tool_call>\n["f"]\n</tool_call>': "names no tool",
    '<tool_call>\n{"name": "f", "arguments": {"x": NaN}}\n</tool_call>': "NaN",
    '<tool_call>\n{"name": "f", "arguments": {"x": "\\ud800"}}\n</tool_call>': "Unicode",
    "<tool_call>\n" + "[" * 9_999 + "\n</tool_call>": "read",
    '<tool_call>\n{"name": "f", "arguments": {"x": ' + "9" * 5_000 + "}}\n</tool_call>": "read",
}


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_a_broken_call_carries_its_error(tokenizer, plain, text):
    """T52: never an exception, never a call with half its arguments."""
    message = plain.parse(ids_of(tokenizer, text + "<|im_end|>"), TOOLS)
    (call,) = message.tool_calls
    assert call.error is not None
    assert BAD[text] in call.error
    assert call.arguments == {}


def test_a_broken_call_does_not_lose_the_good_one_before_it(tokenizer, plain):
    """T52"""
    good = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    ids = ids_of(tokenizer, good + "\n<tool_call>\n{bad}\n</tool_call><|im_end|>")
    first, second = plain.parse(ids, TOOLS).tool_calls
    assert (first.name, first.arguments, first.error) == ("f", {"x": 1}, None)
    assert second.error is not None
    assert first.id != second.id


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 700), max_size=40))
def test_parsing_never_raises(folder_renderer, ids):
    message = folder_renderer.parse(ids, TOOLS)
    assert isinstance(message, AssistantMessage)
    json.dumps(to_openai(message)).encode()


@pytest.fixture(scope="module")
def folder_renderer(plain):
    return plain


def test_the_finish_reason_says_whether_the_model_stopped(tokenizer, plain):
    assert plain.parse(ids_of(tokenizer, "9<|im_end|>"), TOOLS).finish_reason == "stop"
    assert plain.parse(ids_of(tokenizer, "9"), TOOLS).finish_reason == "length"
    assert plain.parse([], []).finish_reason == "length"


def test_tags_that_a_person_typed_are_not_calls_of_the_model(tokenizer, plain):
    """T53: text is never executed; only the model's own tokens make a call."""
    assert plain.parse(ids_of(tokenizer, "__import__('os')<|im_end|>"), TOOLS).tool_calls == ()


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda r: r.start([], TOOLS), "nothing to render"),
        (lambda r: r.extend([5], [], TOOLS), "nothing to append"),
        (lambda r: r.extend([5], [assistant("x")], TOOLS), "assistant"),
        (lambda r: r.start([Message("user", parts(Image(b"x")))], TOOLS), "image"),
        (lambda r: r.extend([5], [user(Image(b"x"))], TOOLS), "image"),
    ],
)
def test_what_cannot_be_rendered_is_refused_in_words(plain, call, problem):
    """T65: media that the format would drop are refused, not dropped."""
    with pytest.raises(RenderError, match=problem):
        call(plain)


@pytest.mark.parametrize(
    "renderer_settings",
    [
        RendererSettings(name="qwen33"),
        RendererSettings(name="qwen3", options={"no_such_option": 1}),
        RendererSettings(name="gpt-oss", enable_thinking=True),
        RendererSettings(name="glm-5"),
    ],
    ids=lambda s: s.name,
)
def test_a_format_that_does_not_exist_or_fit_is_a_config_error(folder, renderer_settings):
    with pytest.raises(ConfigError, match="renderer"):
        load_renderer(folder, renderer_settings)


def test_a_folder_without_a_tokenizer_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="tokenizer"):
        load_renderer(tmp_path, RendererSettings())


def test_rendering_needs_no_torch(folder):
    program = (
        "import sys; from pathlib import Path;"
        "from relax_agent.rendering import load_renderer, RendererSettings;"
        "load_renderer(Path(sys.argv[1]), RendererSettings());"
        "print({'torch'} & set(sys.modules))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert shown.stdout.strip() == "set()"


def test_the_cost_of_appending_does_not_depend_on_the_history(plain, monkeypatch):
    """Only the last turn reaches the package, however long the episode is."""
    seen = []
    inner = plain._format.bridge_to_next_turn

    def spy(prompt, turn, new, *, tools):
        seen.append(len(prompt) + len(turn))
        return inner(prompt, turn, new, tools=tools)

    monkeypatch.setattr(plain._format, "bridge_to_next_turn", spy)
    log = plain.start([QUESTION], TOOLS).ids
    for _ in range(20):
        turn = plain.completion(assistant(tool_calls=[CALL]))
        log += turn + plain.extend(turn, [tool_message("9", CALL)], TOOLS).ids
    assert len(log) > 400
    assert set(seen) == {len(plain._opening) + len(turn)}


def test_threads_share_a_renderer(plain):
    """T25: 16 threads, 1,600 renders and parses, all equal."""
    from concurrent.futures import ThreadPoolExecutor

    def once(number):
        turn = plain.completion(assistant(str(number % 7)))
        return plain.start([user(str(number % 7))], TOOLS).ids, plain.parse(turn, TOOLS).text

    alone = [once(number) for number in range(7)]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(once, range(1600)))
    assert together == [alone[number % 7] for number in range(1600)]


def test_no_path_adds_a_begin_of_sequence_token(tokenizer, plain):
    """T19: prompts begin with the template's own first token, once."""
    ids = plain.start([QUESTION], TOOLS).ids
    assert tokenizer.bos_token is None
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert tokenizer.encode("x") == tokenizer.encode("x", add_special_tokens=False)


def test_limits_in_a_tokenizer_file_cut_and_pad_nothing(folder, plain, tmp_path):
    """T17, T25, T40: files often carry the truncation and padding of some earlier use."""
    from tokenizers import Tokenizer

    limited = Tokenizer.from_file(str(folder / "tokenizer.json"))
    limited.enable_truncation(8)
    limited.enable_padding(length=64)
    limited.save(str(tmp_path / "tokenizer.json"))
    renderer = load_renderer(tmp_path, RendererSettings(name="qwen3"))
    assert renderer.start([QUESTION], TOOLS).ids == plain.start([QUESTION], TOOLS).ids


def test_text_that_is_no_unicode_is_rendered_all_the_same(plain):
    """T52: half a surrogate pair, from whoever, ends no episode."""
    broken = [user("a\ud800b"), tool_message("\udfff", CALL)]
    whole = [user("a?b"), tool_message("?", CALL)]
    turn = plain.completion(assistant("\ud83d"))
    assert turn == plain.completion(assistant("?"))
    assert plain.extend(turn, broken, TOOLS).ids == plain.extend(turn, whole, TOOLS).ids


def test_the_history_as_the_model_said_it_renders_to_the_log(plain):
    """T4: structured calls read from sampled ids write the same ids again."""
    log = plain.start([QUESTION], TOOLS).ids
    history = [QUESTION]
    for answer in ("9", "10"):
        turn = plain.completion(assistant("So.", tool_calls=[CALL, CALL]))
        history += [plain.parse(turn, TOOLS), tool_message(answer, CALL)]
        log = log + turn + plain.extend(turn, history[-1:], TOOLS).ids
    assert plain.start(history, TOOLS).ids == log


def xml(*parameters, name="calculator", end="\n</function>\n</tool_call><|im_end|>"):
    body = "".join(f"\n<parameter={key}>\n{value}\n</parameter>" for key, value in parameters)
    return f"<tool_call>\n<function={name}>{body}{end}"


@pytest.mark.parametrize("tools", [TOOLS, []], ids=["tools", "bare"])
@pytest.mark.parametrize("chat_format", ["qwen3.5", "nemotron-3"])
def test_broken_xml_calls_are_soft_errors_and_take_no_good_call_with_them(
    folder, tokenizer, chat_format, tools
):
    """T52, T56: a header without its end, a bad parameter after a good one, twice one tool."""
    renderer = load_renderer(folder, RendererSettings(name=chat_format))

    def calls(text):
        return renderer.parse(ids_of(tokenizer, text), tools).tool_calls

    assert all(call.error for call in calls("<tool_call>\n<function=list"))
    good = xml(("expression", "1"))
    (call,) = calls(xml(("expression", "1"), end="\n<parameter=bad" + xml()[-33:]))
    assert (call.error, str(call.arguments["expression"])) == (None, "1")
    twice = calls(good.removesuffix("<|im_end|>") + "\n" + xml(("expression", "2")))
    assert [str(call.arguments["expression"]) for call in twice] == ["1", "2"]
    second = calls(xml().removesuffix("<|im_end|>") + "\n" + good)
    assert second[0].arguments == {}
    assert str(second[1].arguments["expression"]) == "1"


def test_a_format_that_cannot_be_built_is_an_error_of_the_recipe(folder):
    """T19: each format names the tokens that it misses; none gets away with wrong ones."""
    for name in ("llama-3", "glm-4.5", "deepseek-v3", "kimi-k2"):
        with pytest.raises(ConfigError, match=f"renderer {name}: .*token"):
            load_renderer(folder, RendererSettings(name=name))

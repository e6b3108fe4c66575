"""Chat templates: proved at start-up, appended to or forked by name, one begin of sequence."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rendering_support import SEVEN, TEMPLATES, core, tokens, toy

from relax_agent.episode import Episode
from relax_agent.errors import ConfigError, PromptTooLong, RenderError
from relax_agent.messages import (
    Image,
    Message,
    ToolCall,
    assistant,
    parts,
    system,
    tool_message,
    user,
)
from relax_agent.rendering import (
    ChatTemplate,
    RendererSettings,
    TemplateRenderer,
    load_renderer,
    load_template,
    truncate_messages,
)
from relax_agent.rendering.package import PackageRenderer
from relax_agent.rendering.tokens import stop_ids

IDS = tokens()
END = IDS.special["<|endoftext|>"]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
]
QUESTION = user("Where is it?")
CALL = ToolCall("look", {"where": "here"}, "call_0")
STABLE = ["i_newline", "iii_merges_tools", "v_next_role_stops", "vi_drops", "vii_no_separator"]


def ids_of(text):
    return IDS.encode(text)


def appended(renderer, turn, new):
    return IDS.decode(renderer.extend(ids_of(turn), new, TOOLS).ids)


# -- how a template is handled -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        ("i_newline", "stable", ""),
        ("ii_drops_thinking", "bridged", "drops earlier reasoning"),
        ("iii_merges_tools", "stable", ""),
        ("v_next_role_stops", "stable", ""),
        ("vi_drops", "stable", ""),
        ("vii_no_separator", "stable", ""),
        ("ix_parts", "bridged", "no stop token"),
    ],
)
def test_one_line_says_how_a_template_is_handled(name, kind, why):
    renderer = toy(name)
    assert renderer.handling.kind == kind
    assert kind in renderer.summary
    assert why in renderer.summary
    assert "\n" not in renderer.summary


def test_a_template_that_rewrites_what_was_said_is_refused_by_name():
    """T10: what was said is never cut at an old length."""
    with pytest.raises(ConfigError, match=r"viii_moves_tools.*beginning.*on_unstable: fork"):
        toy("viii")


def test_a_template_that_rewrites_what_was_said_forks_each_turn_by_name():
    """T4, T8, T10: the whole history is rendered, and the reason is told."""
    renderer = toy("viii", on_unstable="fork")
    history = [QUESTION, assistant("Here."), user("Sure?")]
    turn = renderer.completion(history[1])
    forked = renderer.extend(turn, history[2:], TOOLS, history[:2])
    assert "beginning" in forked.fork
    assert forked.ids == renderer.start(history, TOOLS).ids
    assert IDS.decode(forked.ids).count("Here.") == 1
    with pytest.raises(RenderError, match="history"):
        renderer.extend(turn, history[2:], TOOLS)


def test_a_template_that_takes_not_even_a_question_is_a_config_error():
    broken = ChatTemplate("broken.jinja", "{{ raise_exception('never') }}")
    with pytest.raises(ConfigError, match=r"broken\.jinja.*never"):
        TemplateRenderer(IDS, broken, stop_ids=[END])
    with pytest.raises(ConfigError, match="no token ends an answer"):
        TemplateRenderer(
            IDS, ChatTemplate("x", "{% for m in messages %}{{ m.content }}{% endfor %}")
        )


def test_what_a_template_refuses_is_told_at_the_start_and_in_its_words():
    renderer = toy("iv_bos")
    assert "several calls at once" in renderer.summary
    source = (TEMPLATES / "i_newline.jinja").read_text()
    source += "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    strict = TemplateRenderer(IDS, ChatTemplate("strict", source), stop_ids=[END])
    assert "refuses system messages" in strict.summary
    with pytest.raises(RenderError, match="no system"):
        strict.start([system("a"), QUESTION], [])


def test_what_a_template_leaves_out_or_moves_is_refused_and_not_lost():
    source = (TEMPLATES / "i_newline.jinja").read_text()
    silent = source.replace("in messages -%}", "in messages if message.role != 'tool' -%}", 1)
    renderer = TemplateRenderer(IDS, ChatTemplate("silent", silent), stop_ids=[END])
    assert "messages of role tool are refused" in renderer.summary
    with pytest.raises(RenderError, match="silent leaves out tool messages"):
        renderer.extend([END], [tool_message("x", CALL)], [])
    moves = "{%- for m in messages if m.role == 'system' -%}{{ m.content }}{%- endfor -%}"
    moves += source.replace("in messages -%}", "in messages if message.role != 'system' -%}", 1)
    renderer = TemplateRenderer(IDS, ChatTemplate("moves", moves), stop_ids=[END])
    assert renderer.handling.kind == "stable"
    assert "moves later system messages" in renderer.summary
    assert renderer.extend([END], [user("x")], []).fork is None
    with pytest.raises(RenderError, match=r"moves a system message.*Rewrite"):
        renderer.extend([END], [system("x")], [])
    forks = RendererSettings(on_unstable="fork")
    renderer = TemplateRenderer(IDS, ChatTemplate("moves", moves), forks, stop_ids=[END])
    history = [QUESTION, assistant("a")]
    assert "moves a system" in renderer.extend([END], [system("x")], [], history).fork


# -- what is appended ----------------------------------------------------------------------------


def test_what_follows_a_turn_in_every_toy_template():
    """T1, T2, T11, T14: separator or none, merged tools, a stop token that opens the next turn."""
    tools = [tool_message("one", CALL), tool_message("two", CALL), user("three")]
    prompt = "<|im_start|>assistant\n"
    chatml = "<|im_start|>tool\none<|im_end|>\n<|im_start|>tool\ntwo<|im_end|>\n"
    three = "<|im_start|>user\nthree<|im_end|>\n"
    for name in ("i_newline", "ii_drops", "vi_drops"):
        assert appended(toy(name), "x<|im_end|>", tools) == "\n" + chatml + three + prompt
    merged = (
        "\n<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n"
        "</tool_response><|im_end|>\n"
    )
    assert appended(toy("iii"), "x<|im_end|>", tools) == merged + three + prompt
    bare = (chatml + three).replace("<|im_end|>\n", "<|im_end|>")
    assert appended(toy("vii"), "x<|im_end|>", tools) == bare + prompt
    glm = "\none<|observation|>\ntwo<|user|>\nthree<|assistant|>\n"
    assert appended(toy("v_"), "x<|observation|>", tools) == glm


@pytest.mark.parametrize(
    ("name", "turn", "begin"),
    [
        ("i_newline", "x", "<|im_end|>\n<|im_start|>user"),
        ("i_newline", "", "<|im_end|>\n<|im_start|>user"),
        ("i_newline", "<think>\nhm", "</think><|im_end|>\n<|im_start|>user"),
        ("i_newline", "<think>\nhm<|im_end|>", "\n<|im_start|>user"),
        ("i_newline", "x<|endoftext|>", "\n<|im_start|>user"),
        ("iv_bos", "x", "<|eot_id|><|start_header_id|>user"),
        ("v_", "x", "<|user|>\n"),
        ("v_", "x<|user|>", "\ngo"),
        ("v_", "x<|observation|>", "<|user|>\ngo"),
        ("v_", "x<|endoftext|>", "<|user|>\ngo"),
        ("vii", "x", "<|im_end|><|im_start|>user"),
        ("ix", "x<|endoftext|>", "\nUSER: go\nASSISTANT: "),
    ],
)
def test_a_turn_is_closed_with_what_it_lacks_and_nothing_else(name, turn, begin):
    """T13: the stop token of a turn that was cut is appended, and so never trained."""
    assert appended(toy(name), turn, [user("go")]).startswith(begin)


@pytest.mark.parametrize("name", STABLE)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_the_log_of_a_stable_template_is_its_own_full_rendering(name, data):
    """T1, T4, T5, T20, T22: turn by turn and all at once, to the token."""
    renderer = toy(name)
    words = st.text("ab c\n12<|", max_size=6).map(lambda text: f"q{text}q")
    history = [user(data.draw(words))]
    log = renderer.start(history, TOOLS).ids
    for _ in range(data.draw(st.integers(1, 4))):
        calls = [
            ToolCall("look", {"n": i}, f"call_{i}") for i in range(data.draw(st.integers(0, 2)))
        ]
        said = assistant(data.draw(words), tool_calls=calls)
        came = [tool_message(data.draw(words), call) for call in calls]
        came += [user(data.draw(words))] * (data.draw(st.booleans()) or not calls)
        turn = renderer.completion(said)
        log += turn + renderer.extend(turn, came, TOOLS).ids
        history += [said, *came]
    assert IDS.decode(log) == IDS.decode(renderer.start(history, TOOLS).ids)


def test_ids_are_taken_as_sampled_even_where_they_would_encode_otherwise():
    """T17, T23: ``a`` + ``b`` sampled apart stays apart; the tokenizer would write one token."""
    odd = [core().token_to_id(letter) for letter in "abc"]
    assert ids_of(IDS.decode(odd)) != odd
    renderer = toy("i_newline")
    episode = Episode("toy", "t", "g", 0)
    episode.add_prompt(renderer.start([QUESTION], []).ids)
    sampled = [*odd, renderer.stop_token_ids[0]]
    episode.add_sampled(sampled, [0.0] * 4, [1] * 4, "stop", renderer.parse(sampled, []))
    episode.add_prompt(renderer.extend(sampled, [user("b")], []).ids)
    episode.validate()
    (row,) = episode.rows()
    assert list(row.token_ids[row.loss_mask.astype(bool)]) == sampled


def test_thinking_that_a_template_deletes_stays_in_the_log_once():
    """T8, T10: the assistant's text is there once, its thought too."""
    renderer = toy("ii_drops")
    log = renderer.start([QUESTION], TOOLS).ids
    for number in (1, 2):
        turn = renderer.completion(assistant(f"Answer {number}.", reasoning=f"Thought {number}."))
        log += turn + renderer.extend(turn, [user(f"Q{number}")], TOOLS).ids
    text = IDS.decode(log)
    for words in ("Answer 1.", "Thought 1.", "Answer 2.", "Thought 2.", "Q1", "Q2"):
        assert text.count(words) == 1


def test_a_template_may_demand_parts_short_ids_and_open_thoughts():
    source = (TEMPLATES / "ix_parts_and_short_ids.jinja").read_text()
    source = source.replace('"ASSISTANT: "', '"ASSISTANT: <think>\\n"')
    renderer = TemplateRenderer(IDS, ChatTemplate("ix", source), stop_ids=[END])
    assert "calls mistral, reasoning opened" in renderer.summary
    read = renderer.parse(ids_of("hm</think>Yes.<|endoftext|>"), [])
    assert (read.reasoning, read.text, read.finish_reason) == ("hm", "Yes.", "stop")
    assert "000call0" not in appended(renderer, "x<|endoftext|>", [tool_message("1", CALL)])


@pytest.mark.parametrize(
    ("changes", "said", "reasoning"),
    [
        ({}, "<think>a</think>b", "a"),
        ({"reasoning": "none"}, "<think>a</think>b", None),
        ({"reasoning_tags": ("[T]", "[/T]")}, "[T]a[/T]b", "a"),
    ],
)
def test_where_reasoning_is_can_be_said(changes, said, reasoning):
    read = toy("i_newline", **changes).parse(ids_of(said + "<|im_end|>"), [])
    assert read.reasoning == reasoning
    assert read.text == ("b" if reasoning else said)


# -- begin of sequence, stop tokens --------------------------------------------------------------

BOS = "<|begin_of_text|>"


@pytest.mark.parametrize("added", [None, BOS])
@pytest.mark.parametrize("name", SEVEN)
@pytest.mark.parametrize("first", [[QUESTION], [system(f"{BOS} Obey {BOS}"), user(BOS)]])
def test_a_prompt_begins_with_one_bos_whoever_adds_it(name, added, first):
    """T19: template, tokenizer, both or a person who types it."""
    ids = toy(name, bos=added).start(first, TOOLS).ids
    bos = core().token_to_id(BOS)
    wanted = int(added is not None or name == "iv_bos")
    assert ids.count(bos) == wanted
    assert (ids[0] == bos) == bool(wanted)


def test_a_template_that_writes_bos_twice_is_corrected():
    """T19"""
    source = "{{ bos_token }}" + (TEMPLATES / "iv_bos.jinja").read_text()
    template = ChatTemplate("twice", source, {"bos_token": BOS})
    for tokenizer in (tokens(), tokens(BOS)):
        ids = TemplateRenderer(tokenizer, template, stop_ids=[END]).start([QUESTION], []).ids
        assert ids.count(core().token_to_id(BOS)) == 1


def test_every_file_of_a_folder_may_name_stop_tokens(tmp_path):
    """T2: a number, a list, a nested configuration; ids that do not exist are left out."""
    core().save(str(tmp_path / "tokenizer.json"))
    files = {
        "generation_config.json": {"eos_token_id": [260, 99999]},
        "config.json": {"eos_token_id": 261, "text_config": {"eos_token_id": [262, 261]}},
        "tokenizer_config.json": {"eos_token": {"content": "<|endoftext|>"}},
    }
    for name, data in files.items():
        (tmp_path / name).write_text(json.dumps(data))
    first = core().token_to_id("<|endoftext|>")
    assert stop_ids(tmp_path, IDS) == list(dict.fromkeys([first, 260, 261, 262]))


# -- from a folder -------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    core().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [261]}')
    return tmp_path


def test_the_tokenizers_template_serves_where_the_processor_has_none(folder):
    """T89"""
    source = (TEMPLATES / "i_newline.jinja").read_text()
    (folder / "processor_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no chat template.*renderer\.template"):
        load_renderer(folder, RendererSettings())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    assert load_renderer(folder, RendererSettings()).start([QUESTION], []).ids
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "processor's"}))
    assert load_template(folder).source == "processor's"
    (folder / "chat_template.jinja").write_text("file's")
    assert load_template(folder).source == "file's"


def test_the_template_for_tools_is_taken_where_there_are_several(folder):
    named = [{"name": n, "template": n} for n in ("default", "tool_use")]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_template(folder).source == "tool_use"


def test_auto_takes_a_format_only_where_it_writes_what_the_template_writes(folder):
    from relax_agent.models.tokenizer import chat_template

    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "chat_template.jinja").write_text(chat_template())
    assert isinstance(load_renderer(folder, RendererSettings()), PackageRenderer)
    forced = load_renderer(folder, RendererSettings(name="template"))
    assert isinstance(forced, TemplateRenderer)
    changed = chat_template().replace("<|im_start|>system", "<|im_start|>developer")
    (folder / "chat_template.jinja").write_text(changed)
    assert isinstance(load_renderer(folder, RendererSettings()), TemplateRenderer)


def test_both_ways_to_render_a_family_give_equal_ids(folder):
    """T5: the package's format and the template behind the same interface."""
    from relax_agent.models.tokenizer import chat_template

    (folder / "chat_template.jinja").write_text(chat_template())
    ours = load_renderer(folder, RendererSettings(name="template"))
    theirs = load_renderer(folder, RendererSettings(name="qwen3"))
    new = [tool_message("<|im_end|>", CALL), user("</tool_response>\ufdd0")]
    assert ours.start([system("s"), QUESTION], TOOLS) == theirs.start(
        [system("s"), QUESTION], TOOLS
    )
    for turn in ("x<|im_end|>", "x", "<think>hm", ""):
        sampled = ids_of(turn)
        assert ours.extend(sampled, new, TOOLS) == theirs.extend(sampled, new, TOOLS), turn
    said = assistant("So.", tool_calls=[CALL, CALL])
    assert ours.completion(said) == theirs.completion(said)


def test_a_template_that_drops_pictures_in_tool_messages_is_refused_by_name():
    """T65"""
    with pytest.raises(ConfigError, match=r"vi_drops_tool_images\.jinja drops images in tool"):
        toy("vi_drops").require_tool_media()
    toy("i_newline").require_tool_media()
    with pytest.raises(RenderError, match="image"):
        toy("vi_drops").start([Message("tool", parts(Image(b"x")))], [])


def test_placeholders_are_tokens_in_content_alone():
    """T70: a schema or an argument that spells one puts no medium into the prompt."""
    source = (TEMPLATES / "i_newline.jinja").read_text()
    word = "<|image_pad|>"
    template = ChatTemplate("i", source)
    renderer = TemplateRenderer(IDS, template, stop_ids=[END], kept=[word])
    described = {"name": "look", "description": word, "parameters": {}}
    said = assistant("a", tool_calls=[ToolCall("look", {word: word}, word)])
    ids = renderer.start([user(f"x{word}"), said, user("y")], [described]).ids
    assert ids.count(IDS.special[word]) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "qwen3", "template": TEMPLATES / "i_newline.jinja"}, "renderer.template"),
        ({"template": TEMPLATES / "none.jinja"}, "cannot be read"),
        ({"template": TEMPLATES / "i_newline.jinja", "tool_parser": "hermse"}, "hermes"),
    ],
)
def test_settings_that_cannot_be_followed_are_config_errors(folder, changes, words):
    with pytest.raises(ConfigError, match=words):
        load_renderer(folder, RendererSettings(**changes))


def test_calls_that_no_parser_reads_are_an_error_once_there_are_tools():
    source = (TEMPLATES / "i_newline.jinja").read_text()
    strange = (
        source.replace("<tool_call>", "«").replace("</tool_call>", "»").replace('\\"name', "n")
    )
    unread = TemplateRenderer(IDS, ChatTemplate("strange", strange), stop_ids=[END])
    assert "read by no parser" in unread.summary
    assert unread.start([QUESTION], []).ids
    with pytest.raises(RenderError, match=r"no parser.*tool_parser: one of hermes"):
        unread.start([QUESTION], TOOLS)
    named = RendererSettings(tool_parser="hermes")
    renderer = TemplateRenderer(IDS, ChatTemplate("strange", strange), named, stop_ids=[END])
    assert renderer.start([QUESTION], TOOLS).ids


# -- what does not fit ---------------------------------------------------------------------------


def rounds(count):
    messages = [system("s"), user("task")]
    for number in range(count):
        call = ToolCall("look", {"n": number}, f"call_{number}")
        messages += [assistant(f"a{number}", tool_calls=[call]), tool_message(f"t{number}", call)]
    return messages


def size(messages):
    return sum(len(message.text) for message in messages)


@given(count=st.integers(0, 12), room=st.integers(0, 80))
def test_the_fewest_oldest_rounds_go_and_none_in_part(count, room):
    """No call loses its answer, no medium its placeholder: messages go whole."""
    whole = rounds(count)
    least = size(whole[:2] + (whole[-2:] if count else []))
    if room < least:
        with pytest.raises(PromptTooLong, match=f"{least} tokens of {room}"):
            truncate_messages(whole, room, size)
        return
    kept = truncate_messages(whole, room, size)
    assert size(kept) <= room
    dropped = (len(whole) - len(kept)) // 2
    assert kept == whole[:2] + whole[2 + 2 * dropped :]
    assert dropped == 0 or size(whole[:2] + whole[2 * dropped :]) > room


def test_a_long_conversation_is_counted_few_times():
    calls = []
    truncate_messages(rounds(1000), 500, lambda m: calls.append(1) or size(m))
    assert len(calls) <= 12

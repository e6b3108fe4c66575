"""Pages show everything of a conversation and execute nothing of it."""

import base64
import html.parser
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_agent.episode import Episode, EpisodeStatus
from relax_agent.messages import (
    AssistantMessage,
    Audio,
    Image,
    Message,
    Text,
    ToolCall,
    Video,
    assistant,
    system,
    tool_message,
    user,
)
from relax_agent.pages import (
    call_text,
    conversation_html,
    conversation_text,
    episode_html,
    episode_text,
    plain,
    table_page_head,
    table_row,
)

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;</p>"


class Elements(html.parser.HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def conversation() -> list[Message]:
    call = ToolCall("calculator", {"expression": "(17+5)*3"}, "call_0")
    return [
        system("Use the calculator."),
        user("17 plus 5, then times 3"),
        assistant("Let me see.", tool_calls=[call], reasoning="I should call the tool."),
        tool_message("66", call),
        assistant("66"),
    ]


def test_html_tells_all_of_a_conversation():
    page = Elements(conversation_html(conversation(), title="A title", facts={"reward": "1"}))
    for words in (
        "A title",
        "reward",
        "Use the calculator.",
        "17 plus 5, then times 3",
        "I should call the tool.",
        "Let me see.",
        'calculator(expression="(17+5)*3")',
        "tool · calculator",
        "66",
    ):
        assert words in page.text
    assert page.count("section") == 5


def test_text_tells_all_of_a_conversation_in_order():
    text = conversation_text(conversation(), title="A title", facts={"reward": "1"})
    places = [
        text.index(words)
        for words in (
            "A title",
            "reward: 1",
            "── system ──",
            "Use the calculator.",
            "17 plus 5, then times 3",
            "I should call the tool.",
            '→ calculator(expression="(17+5)*3")',
            "── tool · calculator ──",
            "\n  66",
        )
    ]
    assert places == sorted(places)


@pytest.mark.parametrize(
    "message",
    [
        user(EVIL),
        assistant(EVIL, reasoning=EVIL),
        assistant(tool_calls=[ToolCall(EVIL, {EVIL: EVIL})]),
        assistant(tool_calls=[ToolCall(EVIL, {EVIL: [EVIL] * 9})]),
        assistant(tool_calls=[ToolCall(EVIL, {}, error=EVIL)]),
        tool_message(EVIL, ToolCall(EVIL, {}, EVIL)),
        AssistantMessage(finish_reason=EVIL),
        Message(EVIL, (Text(EVIL),)),
        user(Image(b"x", EVIL)),
        user(Audio(b"x", f"audio/{EVIL}")),
    ],
)
def test_html_escapes_everything_that_came_from_outside(message):
    page = Elements(conversation_html([message], title=EVIL, facts={EVIL: EVIL}))
    assert page.count("script") == page.count("img") == 0
    assert {name for _, attributes in page.tags for name in attributes} <= {
        "charset",
        "class",
        "content",
        "http-equiv",
        "lang",
        "name",
    }


@given(st.text(max_size=200))
def test_any_text_survives_escaping_unchanged(text):
    page = Elements(conversation_html([user(text)], title="t"))
    assert plain(text) in page.text
    assert page.count("section") == page.count("h2") == 1


def test_a_page_forbids_scripts_and_the_network():
    page = Elements(conversation_html([], title="t"))
    policies = [a["content"] for tag, a in page.tags if a.get("http-equiv")]
    assert policies and policies[0].startswith("default-src 'none';")


@pytest.mark.parametrize(
    ("part", "tag"),
    [
        (Image(b"\x89PNG"), "img"),
        (Audio(b"RIFF"), "audio"),
        (Video(b"ftyp", "video/webm"), "video"),
    ],
)
def test_media_are_inline_and_whole(part, tag):
    page = Elements(conversation_html([user(["look:", part])], title="t"))
    (source,) = [attributes["src"] for name, attributes in page.tags if name == tag]
    head, _, body = source.partition(",")
    assert head == f"data:{part.mime};base64"
    assert base64.b64decode(body) == part.data


@pytest.mark.parametrize(
    "part", [Image(b"<svg/>", "text/html"), Image(b"x", "video/mp4"), Audio(b"x", "audio/")]
)
def test_media_of_a_false_type_are_only_named(part):
    page = Elements(conversation_html([user([part])], title="t"))
    assert not any("src" in attributes for _, attributes in page.tags)
    assert part.mime in page.text


@pytest.mark.parametrize(
    "code", ["\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "\r", "\x00", "\u202e", "\ud800"]
)
def test_control_characters_are_shown_not_obeyed(code):
    message = assistant(f"a{code}b", tool_calls=[ToolCall("t", {"x": code})])
    for text in (
        conversation_text([message], title=code),
        conversation_html([message], title=code),
    ):
        assert code not in text
        assert f"\\u{ord(code[0]):04x}" in text
        text.encode("utf-8")


def test_long_lines_are_wrapped_and_line_breaks_kept():
    text = conversation_text([user("one\n\n" + "word " * 40)], width=40)
    assert "  one\n\n  word" in text
    assert max(map(len, text.splitlines())) <= 40


def test_a_call_that_could_not_be_read_says_why():
    assert call_text(ToolCall("search", {}, error="no closing brace")) == (
        "search: could not be read: no closing brace"
    )
    assert call_text(ToolCall("", {})) == "(a call that could not be read)"


def test_a_call_shows_every_kind_of_argument():
    assert call_text(ToolCall("f", {"a": 1, "b": [True, None], "c": "ü"})) == (
        'f(a=1, b=[true, null], c="ü")'
    )


def test_an_episode_tells_its_reward_end_and_metrics():
    episode = Episode("relax/Calculator-v0", "train-17", "g", 3, messages=conversation())
    episode.add_prompt([1, 2])
    episode.add_sampled([3, 4, 5], [-0.1] * 3, [0] * 3, "stop").reward = 0.3
    episode.metrics["tool_calls"] = 1.0
    episode.finish(EpisodeStatus.TRUNCATED_TURNS, "after 4 turns")
    for page in (episode_text(episode), Elements(episode_html(episode)).text):
        for words in (
            "relax/Calculator-v0 · task train-17",
            "0.3",
            "truncated turns",
            "after 4 turns",
            "tool calls",
        ):
            assert words in page


def test_an_argument_that_json_cannot_hold_does_not_break_a_page():
    value = {"deep": object()}
    page = conversation_html([assistant(tool_calls=[ToolCall("f", value)])], title="t")
    assert "object at" in Elements(page).text
    with pytest.raises(TypeError):
        json.dumps(value)


# -- long episodes ---------------------------------------------------------------------------------


def test_long_texts_and_rows_of_calls_are_folded_and_still_whole():
    calls = [ToolCall("look", {"n": n}, f"c{n}") for n in range(6)]
    long = "\n".join(f"line {n}" for n in range(50))
    messages = [assistant(tool_calls=calls), tool_message(long, calls[0]), user("short")]
    page = Elements(conversation_html(messages, title="t"))
    assert page.count("details") == 2
    assert "6 tool calls: look × 6" in page.text
    assert "350 characters" not in page.text and "50 lines" in page.text
    assert long in page.text and "look(n=5)" in page.text


def test_a_program_in_a_call_is_shown_with_its_line_breaks():
    call = ToolCall("run", {"code": "for i in range(3):\n    print(i)" + " " * 80, "n": 1}, "c")
    text = Elements(conversation_html([assistant(tool_calls=[call])], title="t")).text
    assert "  for i in range(3):\n      print(i)" in text and "n: 1" in text


def test_rewards_stand_beside_the_messages_that_earned_them():
    messages = [user("q"), assistant("a"), assistant("b"), assistant("c")]
    text = Elements(conversation_html(messages, title="t", rewards={1: 0.5, 2: -1.0, 3: 0.0})).text
    assert "turn 1 reward +0.5" in text and "turn 2 reward -1" in text
    assert text.count("reward") == 2


def test_a_rewritten_history_is_folded_up_to_the_next_action():
    messages = [user("q"), assistant("a"), user("q"), assistant("a"), user("more"), assistant("b")]
    page = Elements(
        conversation_html(messages, title="t", actions=[1, 5], forks={2: f"too long {EVIL}"})
    )
    assert page.count("section") == 6 and page.count("script") == page.count("img") == 0
    assert "what the model sees from here on: 3 messages" in page.text
    assert "turn 1" in page.text and "turn 2" in page.text and "turn 3" not in page.text


def test_media_beside_the_page_are_linked_and_the_page_may_load_nothing_else():
    page = Elements(
        conversation_html(
            [user([Image(b"x"), Audio(b"y")])],
            title="t",
            media_url=lambda part: '../media/a"b.png' if isinstance(part, Image) else None,
        )
    )
    (image,) = [a["src"] for tag, a in page.tags if tag == "img"]
    (audio,) = [a["src"] for tag, a in page.tags if tag == "audio"]
    assert image == '../media/a"b.png' and audio.startswith("data:")
    (policy,) = [a["content"] for tag, a in page.tags if a.get("http-equiv")]
    assert "http" not in policy and "img-src data: 'self' file:;" in policy


def test_a_table_grows_row_by_row_and_escapes_everything():
    page = table_page_head(EVIL, ["name", EVIL])
    page += table_row([EVIL, "1"], link="pages/a b.html") + table_row(["x", EVIL])
    found = Elements(page)
    assert (found.count("tr"), found.count("td"), found.count("a")) == (3, 4, 1)
    assert found.count("script") == found.count("img") == 0
    assert [a["href"] for tag, a in found.tags if tag == "a"] == ["pages/a b.html"]


def test_a_page_of_thousands_of_messages_takes_a_moment_only():
    messages = [user("q"), assistant("a")] * 5000
    forks = dict.fromkeys(range(100, 10000, 100), "why")
    page = conversation_html(messages, title="t", actions=range(1, 10_000, 2), forks=forks)
    assert page.count("<section") == 10_000

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

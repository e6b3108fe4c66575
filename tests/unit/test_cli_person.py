"""A person as the policy."""

import asyncio

import pytest

from relax_agent.cli.person import Left, NotUnderstood, PersonPolicy, describe_tools, read_call
from relax_agent.messages import Image, Text, ToolCall, tool_message, user
from relax_agent.tools import Toolset, tool


@tool
def price(fruit: str) -> int:
    """Look up a price.

    Args:
        fruit: Its name.
    """
    return len(fruit)


@tool
def move(dx: int, dy: int = 0, fast: bool = False) -> str:
    """Move.

    Args:
        dx: Right.
        dy: Down.
        fast: Whether to run.
    """
    return f"{dx},{dy},{fast}"


TOOLS = Toolset([price, move]).schemas()


def person(*lines, media=None):
    """Return a policy that 'types' the lines, and what it was shown."""
    typed, shown = iter(lines), []

    def ask(prompt):
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    return PersonPolicy(ask=ask, show=shown.append, media=media), shown


def say(*lines, messages=()):
    policy, shown = person(*lines)
    return asyncio.run(policy.act(list(messages), TOOLS)), "\n".join(shown)


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("/price fig", ("price", {"fruit": "fig"})),
        ("/price fruit='a big fig'", ("price", {"fruit": "a big fig"})),
        ("/price 12", ("price", {"fruit": "12"})),
        ("/price two words", ("price", {"fruit": "two words"})),
        ("/move dx=1 dy=-2 fast=true", ("move", {"dx": 1, "dy": -2, "fast": True})),
        ("/move", ("move", {})),
        ("/move dz=1", ("move", {"dz": 1})),  # the tool itself says what is wrong
    ],
)
def test_a_line_with_a_slash_calls_a_tool(line, call):
    assert read_call(line, TOOLS) == call


@pytest.mark.parametrize("line", ["/prize fig", "/move 1 2", "/move dx='1", "/"])
def test_what_cannot_be_read_says_what_to_type(line):
    with pytest.raises(NotUnderstood, match=r"/price|write /move|cannot be read|tools: price"):
        read_call(line, TOOLS)


def test_mistakes_are_asked_again_and_commands_are_not_sent():
    said, shown = say("", "/help", "/tools", "/prize x", "/price fig")
    assert said.tool_calls == (ToolCall("price", {"fruit": "fig"}, "call_0"),)
    assert "several calls" in shown and "did you mean /price?" in shown
    assert "fruit (string)" in shown


def test_text_is_an_answer_and_two_slashes_begin_one_with_a_slash():
    assert say(" 42 ")[0].text == "42"
    assert say("//etc")[0].text == "/etc"


def test_several_calls_go_into_one_message_with_ids_of_their_own():
    policy, _ = person("/price a && /move dx=1", "/price b")
    first = asyncio.run(policy.act([], TOOLS))
    second = asyncio.run(policy.act([], TOOLS))
    ids = [call.id for call in (*first.tool_calls, *second.tool_calls)]
    assert [call.name for call in first.tool_calls] == ["price", "move"]
    assert len(set(ids)) == 3


@pytest.mark.parametrize("lines", [(), ("/quit",)])
def test_a_person_may_leave(lines):
    with pytest.raises(Left):
        say(*lines)


def test_only_what_is_new_is_shown_and_media_are_saved(tmp_path):
    policy, shown = person("a", "b", media=tmp_path)
    first = [user("What is it?")]
    asyncio.run(policy.act(first, TOOLS))
    picture = tool_message([Text("look"), Image(b"\x89PNG")], ToolCall("price", {}, "c"))
    asyncio.run(policy.act([*first, picture], TOOLS))
    assert sum("What is it?" in text for text in shown) == 1
    (saved,) = tmp_path.iterdir()
    assert saved.suffix == ".png" and saved.read_bytes() == b"\x89PNG"
    assert any(str(saved) in text for text in shown)


def test_a_rewritten_conversation_is_shown_anew():
    policy, shown = person("a", "b")
    asyncio.run(policy.act([user("one")], TOOLS))
    asyncio.run(policy.act([user("two")], TOOLS))
    assert any("rewritten" in text for text in shown) and any("two" in text for text in shown)


def test_tools_are_described_with_what_they_take():
    text = describe_tools(TOOLS)
    assert "/move  Move." in text and "dy (integer, may be left out)  Down." in text
    assert "no tools" in describe_tools([])

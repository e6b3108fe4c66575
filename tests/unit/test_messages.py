"""Messages: content has one form, however it was given."""

import pytest

from relax_agent.messages import AssistantMessage, Image, Message, Text, assistant, user

PICTURE = Image(b"png")


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("hello", (Text("hello"),)),
        ("", ()),
        (Text("hello"), (Text("hello"),)),
        (PICTURE, (PICTURE,)),
        ([PICTURE, "hello"], (PICTURE, Text("hello"))),
        ((Text("a"), PICTURE), (Text("a"), PICTURE)),
    ],
)
def test_content_may_be_given_as_text_or_parts(given, parts):
    assert Message("user", given).content == parts
    assert AssistantMessage(content=given).content == parts


def test_a_message_of_plain_text_equals_the_shorthand():
    assert Message("user", "hi") == user("hi")
    assert Message("user", "hi").text == "hi"
    assert AssistantMessage(content="hi") == assistant("hi")

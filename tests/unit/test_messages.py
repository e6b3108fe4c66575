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
        (("a", PICTURE), (Text("a"), PICTURE)),
    ],
)
def test_content_may_be_given_as_text_or_parts(given, parts):
    assert Message("user", given).content == parts
    assert AssistantMessage(content=given).content == parts


def test_a_message_of_plain_text_equals_the_shorthand():
    assert Message("user", "hi") == user("hi")
    assert Message("user", "hi").text == "hi"
    assert AssistantMessage(content="hi") == assistant("hi")


@pytest.mark.parametrize("given", [(5,), [5], (Text("a"), None), (b"png",), ({"type": "text"},)])
def test_what_is_no_part_is_named_where_the_message_is_made(given):
    with pytest.raises(TypeError, match="a message holds text, images, sound or film, not"):
        Message("user", given)

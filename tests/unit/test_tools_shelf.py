"""The shelf of media: names go in, names come out, one shelf for each episode."""

import asyncio
import dataclasses

import pytest

from relax_agent.envs import Task, ToolEnv
from relax_agent.errors import ConfigError, ToolErrorKind
from relax_agent.messages import Audio, Image, Text, ToolCall, assistant
from relax_agent.references import conversation
from relax_agent.tools import Toolset, tool
from relax_agent.tools.shelf import MediaShelf

PHOTO, OTHER, SOUND = Image(b"photo"), Image(b"other"), Audio(b"sound")


@tool
def mirror(image: Image, twice: bool = False) -> list[str | Image]:
    """Mirror a picture.

    Args:
        image: The picture.
        twice: Two of them.
    """
    return ["mirrored", *[Image(image.data[::-1])] * (1 + twice)]


@tool
def compare(first: Image, second: Image | None = None) -> str:
    """Compare pictures."""
    return f"{first.data!r} {second and second.data!r}"


@tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@tool
def beep() -> Audio:
    """Beep."""
    return SOUND


TOOLS = [mirror, compare, add, beep]


def call(shelf, name, **arguments):
    return asyncio.run(shelf.call(ToolCall(name, arguments, "c")))


def test_what_a_tool_gives_can_be_named_in_the_next_call():
    shelf = MediaShelf(TOOLS, {"photo": PHOTO})
    result = call(shelf, "mirror", image="photo")
    assert [p.text if isinstance(p, Text) else p.data for p in result.content] == [
        "mirrored", "\nimage-1:\n", b"otohp",
    ]  # fmt: skip
    assert call(shelf, "mirror", image=" image-1 ").content[-1].data == b"photo"
    assert list(shelf) == ["photo", "image-1", "image-2"]
    assert call(shelf, "beep").text == "audio-1:\n"
    assert shelf.listing() == "photo (image), image-1 (image), image-2 (image), audio-1 (audio)"


def test_several_media_of_one_result_have_a_name_each():
    shelf = MediaShelf(TOOLS, {"image-1": PHOTO})
    assert call(shelf, "mirror", image="image-1", twice=True).text.split() == [
        "mirrored", "image-2:", "image-3:",
    ]  # fmt: skip
    assert shelf["image-1"] is PHOTO


def test_a_medium_that_may_be_left_out_can_be_named_too():
    shelf = MediaShelf(TOOLS, {"a": PHOTO, "b": OTHER})
    assert call(shelf, "compare", first="a", second="b").text == "b'photo' b'other'"
    assert call(shelf, "compare", first="a").text == "b'photo' None"
    assert call(shelf, "compare", first="a", second=None).text == "b'photo' None"


@pytest.mark.parametrize("name", ["nothing", "", "x" * 9999, "../photo", "sound"])
def test_a_name_that_is_none_is_told_with_those_that_are(name):
    result = call(MediaShelf(TOOLS, {"photo": PHOTO, "sound": SOUND}), "mirror", image=name)
    assert result.error is ToolErrorKind.NOT_FOUND and "argument 'image'" in result.text
    words = "of kind audio, not image" if name == "sound" else "there is: photo"
    assert words in result.text and len(result.text) < 200


@pytest.mark.parametrize("value", [None, 3, ["photo"], {"a": 1}])
def test_an_argument_that_is_no_name_is_the_tools_to_refuse(value):
    result = call(MediaShelf(TOOLS), "mirror", image=value)
    assert result.error is ToolErrorKind.INVALID_ARGUMENTS


def test_pictures_of_the_conversation_and_data_urls_still_work():
    shelf = MediaShelf(TOOLS)
    assert call(shelf, "mirror", image=PHOTO.data_url()).ok
    assert call(shelf, "mirror", image=PHOTO).ok
    with conversation([assistant([OTHER])]):
        assert call(shelf, "mirror", image="image:1").content[-1].data == b"rehto"
    assert not call(shelf, "mirror", image="image:1").ok


def test_failures_and_tools_without_media_pass_through():
    shelf = MediaShelf(TOOLS)
    assert call(shelf, "add", a=1, b=2).text == "3"
    assert call(shelf, "add", a=1).error is ToolErrorKind.INVALID_ARGUMENTS
    assert call(shelf, "ad", a=1).error is ToolErrorKind.NOT_FOUND
    broken = ToolCall("mirror", {}, "c", error="not JSON")
    assert "not JSON" in asyncio.run(shelf.call(broken)).text
    assert not asyncio.run(shelf.call(ToolCall("mirror", ["photo"], "c"))).ok


def test_the_schemas_ask_for_names_and_stay_the_tools_own():
    shelf = MediaShelf(TOOLS)
    image = shelf.schemas()[0]["function"]["parameters"]["properties"]["image"]
    assert image["description"] == (
        "The picture. The name of an image, as it was told, such as image-1."
    )
    second = shelf.schemas()[1]["function"]["parameters"]["properties"]["second"]
    assert "image-1" in second["description"]
    assert shelf.schemas()[2] == add.schema()
    assert "conversation" in str(Toolset(TOOLS).schemas()) and "conversation" not in str(
        shelf.schemas()
    )
    assert shelf.names == ("mirror", "compare", "add", "beep")


def test_each_session_has_its_own_shelf():
    shelf = MediaShelf(TOOLS, {"photo": PHOTO})
    one, other = shelf.session(), shelf.session()
    one.put("mine", OTHER)
    call(one, "beep")
    assert "mine" not in other and "mine" not in shelf and "photo" in other
    asyncio.run(one.close())
    assert len(one) == 0 and len(shelf) == 1
    assert call(other, "beep").text == "audio-1:\n"


def test_the_end_of_a_session_closes_no_tools_that_others_use():
    closed = []

    class Remote(Toolset):
        async def close(self):
            closed.append(self)

    class WithState:
        @tool
        def count(self) -> int:
            """Count."""
            return 1

        def close(self):
            closed.append(self)

    async def main():
        shelf = MediaShelf(Remote(TOOLS))
        await shelf.session().close()
        assert closed == []
        await shelf.close()
        assert len(closed) == 1
        session = MediaShelf([*TOOLS, WithState]).session()
        assert (await session.call(ToolCall("count", {}, "c"))).text == "1"
        await session.close()
        assert len(closed) == 2

    asyncio.run(main())


def test_a_shelf_that_is_full_says_so_and_keeps_what_it_has():
    shelf = MediaShelf(TOOLS, {"photo": PHOTO}, max_items=2)
    assert call(shelf, "mirror", image="photo").ok
    result = call(shelf, "mirror", image="photo")
    assert result.error is ToolErrorKind.TOO_LARGE and "room for 2 media" in result.text
    assert len(shelf) == 2
    assert call(MediaShelf(TOOLS, max_bytes=3), "beep").error is ToolErrorKind.TOO_LARGE
    shelf.put("photo", OTHER)  # in the place of the old one
    with pytest.raises(ConfigError, match="room"):
        shelf.put("more", OTHER)


@pytest.mark.parametrize("name", ["", "1", "-a", "a b", "image:1", "data:x", "a/b", "x" * 65])
def test_names_that_could_mean_something_else_are_refused(name):
    with pytest.raises(ConfigError, match="cannot name a medium"):
        MediaShelf(TOOLS, {name: PHOTO})


def test_only_media_can_lie_on_it():
    with pytest.raises(ConfigError, match="load_media"):
        MediaShelf(TOOLS, {"photo": b"bytes"})


class Gallery(ToolEnv):
    tools = MediaShelf(TOOLS)

    def setup(self, task):
        self.session.put("photo", Image(task.id.encode()))

    def score(self, task, transcript):
        return float(transcript.calls[-1][1].content[-1].data == task.id.encode()[::-1])


def test_an_environment_fills_the_shelf_of_each_episode():
    async def play(task):
        env = Gallery(tasks=[Task(id="abc", prompt="?"), Task(id="xyz", prompt="?")])
        await env.reset(options={"task": task})
        action = assistant(tool_calls=[ToolCall("mirror", {"image": "photo"}, "c")])
        ((message,), *_) = await env.step(action)
        assert message.media[0].data == task.encode()[::-1]
        _, reward, *_ = await env.step(assistant("done"))
        await env.close()
        return reward

    async def both():
        return await asyncio.gather(play("abc"), play("xyz"))

    assert asyncio.run(both()) == [1.0, 1.0]


@dataclasses.dataclass
class Slide:
    title: str
    picture: Image
    sound: Audio | None = None


@tool
def collage(
    pictures: list[Image], by_name: dict[str, Image] | None = None, slide: Slide | None = None
) -> str:
    """Put pictures together.

    Args:
        pictures: Those in a row.
    """
    named = {key: each.data for key, each in (by_name or {}).items()}
    return f"{[each.data for each in pictures]} {named} {slide and slide.picture.data}"


def test_names_are_understood_in_lists_and_objects_too():
    shelf = MediaShelf([collage], {"photo": PHOTO, "other": OTHER, "sound": SOUND})
    slide = {"title": "photo", "picture": "other", "sound": "sound"}
    result = call(
        shelf, "collage", pictures=["photo", "other"], by_name={"a": "other"}, slide=slide
    )
    assert result.text == "[b'photo', b'other'] {'a': b'other'} b'other'"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"pictures": ["photo", "gone"]}, "pictures"),
        ({"pictures": [], "by_name": {"a": "gone"}}, "by_name"),
        ({"pictures": [], "slide": {"title": "x", "picture": "gone"}}, "slide"),
        ({"pictures": [], "slide": {"title": "x", "picture": "photo", "sound": "photo"}}, "slide"),
    ],
)
def test_a_wrong_name_within_an_argument_is_told_with_the_argument(arguments, name):
    result = call(MediaShelf([collage], {"photo": PHOTO}), "collage", **arguments)
    assert result.error is ToolErrorKind.NOT_FOUND and f"argument '{name}'" in result.text


def test_the_schema_asks_for_names_within_lists_and_objects():
    parameters = MediaShelf([collage]).schemas()[0]["function"]["parameters"]
    assert "such as image-1" in parameters["properties"]["pictures"]["items"]["description"]
    slide = parameters["$defs"]["Slide"]["properties"]
    assert "such as image-1" in slide["picture"]["description"]
    assert ":-1" not in str(parameters)

"""From a signature and a docstring to the schema that a model, pydantic and OpenAPI agree on."""

import asyncio
import collections.abc
import dataclasses
import enum
import json
import math
import re
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pytest
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, create_model
from typing_extensions import TypedDict

from relax_agent import tool
from relax_agent.errors import ToolDeclarationError, ToolErrorKind
from relax_agent.messages import Audio, Image, ToolCall, user
from relax_agent.references import conversation
from relax_agent.tools import Tool, Toolset, create_tool_app


def run(declared, **arguments):
    return asyncio.run(Toolset([declared]).call(ToolCall(declared.name, arguments)))


def google(a: int, b: str = "x") -> int:
    """Do a thing.

    In two paragraphs.

    Args:
        a: The first,
            on two lines.
        b: The second.

    Returns:
        Nothing that matters.
    """


def numpy(a: int, b: str = "x") -> int:
    """Do a thing.

    In two paragraphs.

    Parameters
    ----------
    a : int
        The first,
        on two lines.
    b : str, optional
        The second.

    Returns
    -------
    int
        Nothing that matters.
    """


def rest(a: int, b: str = "x") -> int:
    """Do a thing.

    In two paragraphs.

    :param int a: The first,
        on two lines.
    :param b: The second.
    :returns: Nothing that matters.
    """


@pytest.mark.parametrize("function", [google, numpy, rest])
def test_docstrings_of_every_style_say_the_same(function):
    declared = Tool(function)
    assert declared.description == "Do a thing.\n\nIn two paragraphs."
    properties = declared.parameters["properties"]
    assert properties["a"] == {"description": "The first, on two lines.", "type": "integer"}
    assert properties["b"]["description"] == "The second."


def test_several_parameters_on_one_line_of_numpy_style():
    def add(a: int, b: int) -> int:
        """Add.

        Parameters
        ----------
        a, b : int
            What is added.
        """

    words = [item["description"] for item in Tool(add).parameters["properties"].values()]
    assert words == ["What is added."] * 2


@pytest.mark.parametrize("line", ["    c: It is gone.", "    *a: Not that one.\n    d: No."])
def test_a_docstring_that_is_out_of_date_is_refused(line):
    def stale(a: int) -> int: ...

    stale.__doc__ = f"Do.\n\nArgs:\n{line}\n"
    with pytest.raises(ToolDeclarationError, match="which is no parameter → its parameters are: a"):
        Tool(stale)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    """A place."""

    x: float = Field(description="To the right.")
    y: float = 0.0


@dataclasses.dataclass
class Size:
    width: int
    height: int = 1


class Label(TypedDict):
    text: str
    bold: typing.NotRequired[bool]


class Node(BaseModel):
    value: int
    children: list["Node"] = []


def everything(
    colour: Colour,
    mode: Literal["a", "b", 3],
    at: Point | None,
    sizes: list[Size],
    label: Label,
    tree: Node,
    ratio: Annotated[float, Field(ge=0, le=1, description="How much.")] = 0.5,
    count: int | str = 1,
    tags: dict[str, list[int]] | None = None,
    extra: Any = None,
) -> str:
    """Take everything.

    Args:
        colour: Which one.
    """


SNAPSHOT = {
    "type": "object",
    "properties": {
        "colour": {"$ref": "#/$defs/Colour", "description": "Which one."},
        "mode": {"enum": ["a", "b", 3]},
        "at": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
        "sizes": {"items": {"$ref": "#/$defs/Size"}, "type": "array"},
        "label": {"$ref": "#/$defs/Label"},
        "tree": {"$ref": "#/$defs/Node"},
        "ratio": {
            "description": "How much.",
            "maximum": 1,
            "minimum": 0,
            "type": "number",
            "default": 0.5,
        },
        "count": {"anyOf": [{"type": "integer"}, {"type": "string"}], "default": 1},
        "tags": {
            "anyOf": [
                {
                    "additionalProperties": {"items": {"type": "integer"}, "type": "array"},
                    "type": "object",
                },
                {"type": "null"},
            ],
            "default": None,
        },
        "extra": {"default": None},
    },
    "required": ["colour", "mode", "at", "sizes", "label", "tree"],
}


def without_titles(schema):
    if isinstance(schema, list):
        return [without_titles(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: without_titles(value)
        for key, value in schema.items()
        if key != "title" or isinstance(value, dict)
    }


def test_the_schema_is_what_it_was():
    schema = dict(Tool(everything).parameters)
    definitions = without_titles(schema.pop("$defs"))
    assert schema == SNAPSHOT
    assert sorted(definitions) == ["Colour", "Label", "Node", "Point", "Size"]
    assert definitions["Point"]["properties"]["x"]["description"] == "To the right."
    assert definitions["Node"]["properties"]["children"]["items"] == {"$ref": "#/$defs/Node"}


def resolved(schema, document, depth=4):
    """A schema with its references replaced, as far as they go."""
    if isinstance(schema, list):
        return [resolved(each, document, depth) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        if not depth:
            return "…"
        target = document
        for step in schema["$ref"].removeprefix("#/").split("/"):
            target = target[step]
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return resolved({**target, **rest}, document, depth - 1)
    return {key: resolved(value, document, depth) for key, value in schema.items()}


def body_schema(app, path):
    document = app.openapi()
    content = document["paths"][path]["post"]["requestBody"]["content"]
    schema = content["application/json"]["schema"]
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return without_titles(resolved(schema, document))


def test_the_schema_is_the_one_that_fastapi_publishes_for_the_same_types():
    declared = Tool(everything)
    hints = typing.get_type_hints(everything, include_extras=True)
    del hints["return"]
    defaults = {"ratio": 0.5, "count": 1, "tags": None, "extra": None}
    fields = {name: (kind, defaults.get(name, ...)) for name, kind in hints.items()}
    fields["colour"] = (Annotated[Colour, Field(description="Which one.")], ...)
    model = create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)
    hand_written = FastAPI()

    @hand_written.post("/tools/everything")
    async def route(arguments: model) -> None: ...

    ours = create_tool_app(Toolset([declared]))
    published = body_schema(ours, "/tools/everything")
    expected = body_schema(hand_written, "/tools/everything")
    assert expected.pop("additionalProperties") is False  # goes without saying in a prompt
    assert published == expected
    document = ours.openapi()
    content = document["paths"]["/tools/everything"]["post"]["requestBody"]["content"]
    raw = json.dumps(content["application/json"]["schema"])
    raw = raw.replace("#/components/schemas/everything.", "#/$defs/")
    own = {key: value for key, value in declared.parameters.items() if key != "$defs"}
    for name in ("tags", "extra"):  # FastAPI leaves out a default that is null
        own["properties"][name].pop("default")
    assert json.loads(raw) == own


def test_rich_arguments_arrive_as_their_types():
    seen = {}

    @tool
    async def take(sizes: list[Size], label: Label, tree: Node, colour: Colour) -> str:
        """Take."""
        seen.update(sizes=sizes, label=label, tree=tree, colour=colour)
        return "ok"

    arguments = {
        "sizes": [{"width": "3"}],
        "label": {"text": "x"},
        "tree": {"value": 1, "children": [{"value": 2}]},
        "colour": "red",
    }
    assert run(take, **arguments).text == "ok"
    assert seen["sizes"] == [Size(3, 1)]
    assert seen["tree"].children[0].value == 2
    assert (seen["label"], seen["colour"]) == ({"text": "x"}, Colour.RED)


def test_a_field_as_default_is_a_default():
    @tool
    async def search(
        query: str = Field(description="Words."), count: int = Field(3, ge=1, le=9)
    ) -> str:
        """Search."""
        return f"{query} {count}"

    assert search.parameters["required"] == ["query"]
    assert search.parameters["properties"]["count"] == {
        "maximum": 9,
        "minimum": 1,
        "type": "integer",
        "default": 3,
    }
    assert search.parameters["properties"]["query"]["description"] == "Words."
    assert run(search, query="x").text == "x 3"
    assert run(search, query="x", count=10).error is ToolErrorKind.INVALID_ARGUMENTS
    assert "argument 'query' is missing" in run(search).text


T = TypeVar("T")


class Anything:
    pass


class Loose(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    thing: Anything


class HoldsBytes(BaseModel):
    data: bytes


@pytest.mark.parametrize(
    "annotation",
    [
        bytes,
        list[bytes],
        HoldsBytes,
        complex,
        object,
        T,
        list[T],
        type,
        type[int],
        Anything,
        Loose,
        typing.Callable[[int], int],
        typing.Iterable[int],
        collections.abc.Iterator[int],
        typing.Hashable,
        dict[tuple[int, int], str],
    ],
)
def test_what_json_cannot_say_is_refused_and_never_a_string(annotation):
    def take(value: int) -> int:
        """Take."""

    take.__annotations__["value"] = annotation
    with pytest.raises(ToolDeclarationError, match="take"):
        Tool(take)


@pytest.mark.parametrize(
    ("annotation", "default"), [(int, None), (str, 3), (Literal["a"], "b"), (Image, "no")]
)
def test_a_default_must_be_a_value_that_the_model_could_give(annotation, default):
    def take(value=default) -> int:
        """Take."""

    take.__annotations__["value"] = annotation
    with pytest.raises(ToolDeclarationError, match="default of 'value'"):
        Tool(take)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ratio": math.nan}, "argument 'ratio'"),
        ({"ratio": math.inf}, "argument 'ratio'"),
        ({"deep": {"a": [{"b": math.nan}]}}, "argument 'deep' holds NaN"),
        ({"text": "\ud800"}, "argument 'text'"),
        ({"count": "seven"}, "argument 'count'"),
        ({"count": "x" * 50_000_000}, "argument 'count'"),
        ({"x" * 1_000_000: 1}, "does not exist"),
        ({"count": True, "ratio": [1]}, "argument 'ratio'"),
    ],
)
def test_odd_values_are_a_short_soft_error_that_names_the_argument(arguments, words):
    """T61: numbers as words, and what else models write."""

    @tool(inline=True)
    def take(count: int = 1, ratio: float = 1.0, text: str = "", deep: Any = None) -> str:
        """Take."""
        return "ok"

    result = run(take, **arguments)
    assert result.error is ToolErrorKind.INVALID_ARGUMENTS
    assert words in result.text
    assert len(result.text) < 400


# -- media as arguments ---------------------------------------------------------------------------

PICTURE, OTHER, SOUND = Image(b"one"), Image(b"other", "image/gif"), Audio(b"wave")


@tool
async def look(image: Image, others: list[Image] | None = None, sound: Audio | None = None) -> list:
    """Look.

    Args:
        image: What to look at.
    """
    return [image, *(others or []), *([sound] if sound else [])]


def test_a_program_passes_media_as_objects():
    assert run(look, image=PICTURE, others=[OTHER], sound=SOUND).content == (PICTURE, OTHER, SOUND)


def test_a_model_names_media_of_its_conversation_or_writes_a_data_url():
    with conversation([user([PICTURE, "?", SOUND]), user([OTHER])]):
        assert run(look, image="image:1").content == (PICTURE,)
        assert run(look, image="image:-1", others=["image:2"]).content == (OTHER, OTHER)
        assert run(look, image=OTHER.data_url(), sound="audio:1").content == (OTHER, SOUND)


@pytest.mark.parametrize(
    "value",
    [
        *("image:3", "image:0", "image:-3", "audio:1", "", 3, None, SOUND),
        *("/etc/passwd", "file:///etc/passwd", "https://example.com/x.png"),
        *("data:image/png;base64,@@", "data:audio/wav;base64,AAAA"),
    ],
)
def test_nothing_else_is_read(value):
    with conversation([user([PICTURE, OTHER])]):
        result = run(look, image=value)
    assert result.error is ToolErrorKind.INVALID_ARGUMENTS
    assert result.text.startswith("Error: look: argument 'image': ")


def test_the_schema_tells_a_model_how_to_name_media():
    schema = look.parameters["properties"]["image"]
    assert (schema["type"], schema["format"]) == ("string", "image")
    assert schema["description"].startswith('What to look at. "image:1" is the first image')
    assert look.arguments.takes_media


def test_the_page_about_tools_shows_code_that_runs():
    text = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()
    shown: dict[str, Any] = {"__name__": "page"}
    for code in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(compile(code, "tools.md", "exec"), shown)

    async def main():
        async with shown["toolset"].session() as session:
            calls = [ToolCall("write", {"line": "a"}), ToolCall("search", {"query": "owls"})]
            return [(await session.call(each)).text for each in calls]

    assert asyncio.run(main()) == ["1", '["owls in a text"]']


def test_a_union_keeps_its_order_whatever_was_declared_before():
    def first(a: str | int = 1, b: str | float | None = None) -> str:
        """Do."""

    def second(a: int | str = 1, b: float | str | None = None) -> str:
        """Do."""

    def third(a: int | str = 1, b: str | float | None = None) -> str:
        """Do.

        Args:
            a: A thing.
        """

    orders = [
        [[each["type"] for each in Tool(f).parameters["properties"][p]["anyOf"]] for p in "ab"]
        for f in (first, second, third, first)
    ]
    assert orders[0] == orders[3] == [["string", "integer"], ["string", "number", "null"]]
    assert orders[1] == [["integer", "string"], ["number", "string", "null"]]
    assert orders[2] == [["integer", "string"], ["string", "number", "null"]]


def test_a_wrong_choice_is_told_with_the_right_ones_as_they_are_written():
    def weigh(unit: Literal["Kg", "LB"], colour: Colour = Colour.RED) -> str:
        """Weigh."""

    result = asyncio.run(Tool(weigh).invoke({"unit": "kg", "colour": "RED"}))
    assert "input should be 'Kg' or 'LB', got 'kg'" in result.text
    assert "input should be 'red' or 'blue', got 'RED'" in result.text

"""Declaring tools and calling them in process: schemas, validation, limits, failures as values."""

import asyncio
import sys
import threading
from enum import StrEnum
from typing import Annotated, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from relax_agent.errors import ToolDeclarationError, ToolError, ToolErrorKind
from relax_agent.messages import Image, Text, ToolCall
from relax_agent.tools import Tool, ToolResult, Toolset, tool


def call(toolset: Toolset, name: str, **arguments) -> ToolResult:
    return asyncio.run(toolset.call(ToolCall(name, arguments, "c1")))


def deep_list():
    value = []
    for _ in range(5000):
        value = [value]
    return value


class Unit(StrEnum):
    METRE = "m"
    FOOT = "ft"


class Point(BaseModel):
    x: int
    y: int = 0


@tool
def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    They may be negative.

    Args:
        a: The first.
        b: The second,
            one by default.
    """
    return a + b


def test_schema_comes_from_types_and_docstring():
    assert add.schema() == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.\n\nThey may be negative.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"description": "The first.", "type": "integer"},
                    "b": {
                        "description": "The second, one by default.",
                        "type": "integer",
                        "default": 1,
                    },
                },
                "required": ["a"],
            },
        },
    }


def test_rich_types_have_schemas_and_arrive_converted():
    seen = {}

    @tool
    def rich(
        unit: Unit,
        point: Point,
        mode: Literal["a", "b"],
        count: Annotated[int, Field(ge=0, le=9)],
        tags: list[str] | None = None,
        schema: str = "names that a model class would reserve are fine",
    ) -> str:
        """Take many things."""
        seen.update(locals())
        return "ok"

    properties = rich.parameters["properties"]
    assert properties["count"] == {"maximum": 9, "minimum": 0, "type": "integer"}
    assert properties["mode"]["enum"] == ["a", "b"]
    assert "title" not in properties["unit"]
    result = call(Toolset([rich]), "rich", unit="ft", point={"x": "3"}, mode="a", count=2)
    assert result.text == "ok"
    assert seen["unit"] is Unit.FOOT
    assert seen["point"] == Point(x=3)
    assert seen["tags"] is None


def test_a_declared_tool_is_still_the_function():
    assert add(2, b=3) == 5
    assert add.__doc__.startswith("Add two numbers.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "argument 'a' is missing"),
        ({"a": 1, "b": 2, "c": 3}, "argument 'c' does not exist (arguments: a, b)"),
        ({"a": "seventeen"}, "argument 'a': input should be a valid integer"),
        ({"a": "x" * 10**6}, "got 'xxx"),
        ({"a": deep_list()}, "got [[["),
        ({"a": 1, "b": [10**6000]}, "got a very large list"),
        ([1, 2], "arguments must be one JSON object, not list"),
        (None, "arguments must be one JSON object, not NoneType"),
    ],
)
def test_wrong_arguments_are_a_soft_error_that_names_the_argument(arguments, words):
    """T61: a missing required argument is a soft error."""
    result = asyncio.run(Toolset([add]).call(ToolCall("add", arguments)))
    assert result.error is ToolErrorKind.INVALID_ARGUMENTS
    assert result.text.startswith("Error: add: ")
    assert words in result.text
    assert len(result.text) < 300


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b", "c", "self", ""]), json_values) | json_values)
def test_no_argument_at_all_makes_a_call_raise(arguments):
    result = asyncio.run(Toolset([add]).call(ToolCall("add", arguments)))
    if result.ok:
        assert result.text == str(int(arguments["a"]) + int(arguments.get("b", 1)))
    else:
        assert result.error is ToolErrorKind.INVALID_ARGUMENTS


def test_model_text_is_never_executed():
    """T53: a Python expression with a side effect, as an argument, has no side effect."""
    touched = []

    @tool
    def sum_up(numbers: list[int], label: str = "") -> int:
        """Sum numbers."""
        return sum(numbers)

    bomb = "__import__('builtins').touched.append(1) or [1]"
    toolset = Toolset([sum_up])
    for arguments in ({"numbers": bomb}, {"numbers": [bomb]}, {"numbers": [1], "label": bomb}):
        call(toolset, "sum_up", **arguments)
    assert touched == []


def test_unknown_names_and_unreadable_calls_are_soft_errors():
    """T58: an unknown tool is an error that the model reads; it never ends the episode."""
    toolset = Toolset([add])
    unknown = asyncio.run(toolset.call(ToolCall("ad", {})))
    assert unknown.error is ToolErrorKind.NOT_FOUND
    assert "did you mean 'add'?" in unknown.text
    assert "tools: none" in asyncio.run(Toolset([]).call(ToolCall("x", {}))).text
    unread = asyncio.run(toolset.call(ToolCall("add", {}, error="no closing brace")))
    assert unread.error is ToolErrorKind.INVALID_ARGUMENTS
    assert "no closing brace" in unread.text


def test_a_crash_is_a_result_with_one_line():
    @tool
    def crash() -> str:
        """Crash."""
        raise ValueError("first\nsecond")

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    @tool
    def mute() -> str:
        """Fail without words."""
        raise Mute

    @tool
    async def leave() -> str:
        """Leave."""
        raise SystemExit(3)

    result = call(Toolset([crash, leave]), "crash")
    assert result.error is ToolErrorKind.CRASHED
    assert result.text == "Error: crash: failed with ValueError: first second"
    assert call(Toolset([mute]), "mute").text == "Error: mute: failed with Mute: (no message)"
    assert call(Toolset([leave]), "leave").error is ToolErrorKind.CRASHED


def test_a_tool_may_choose_kind_and_words_itself():
    @tool
    def deny() -> str:
        """Deny."""
        raise ToolError("not on Sundays", kind=ToolErrorKind.DENIED, hint="come back tomorrow")

    result = call(Toolset([deny]), "deny")
    assert result.error is ToolErrorKind.DENIED
    assert result.text == "Error: deny: not on Sundays → come back tomorrow"


def test_a_hanging_async_tool_times_out():
    @tool(timeout=0.05)
    async def hang() -> str:
        """Hang."""
        await asyncio.Event().wait()
        return "never"

    result = call(Toolset([hang]), "hang")
    assert result.error is ToolErrorKind.TIMEOUT
    assert result.text == "Error: hang: timed out after 0.05 s"


def test_a_hanging_sync_tool_times_out_and_keeps_its_place_until_it_ends():
    release = threading.Event()

    @tool(timeout=0.05, queue_timeout=0.05, max_concurrency=1)
    def hang() -> str:
        """Hang."""
        release.wait(30)
        return "late"

    async def main():
        toolset = Toolset([hang])
        first = await toolset.call(ToolCall("hang", {}))
        second = await toolset.call(ToolCall("hang", {}))
        release.set()
        third = await toolset.call(ToolCall("hang", {}))
        while not third.ok:  # the abandoned thread needs a moment to give its place back
            third = await toolset.call(ToolCall("hang", {}))
        return first, second, third

    first, second, third = asyncio.run(main())
    assert first.error is ToolErrorKind.TIMEOUT
    assert second.error is ToolErrorKind.UNAVAILABLE
    assert "all 1 places were busy" in second.text
    assert third.text == "late"


def test_a_timeout_that_the_tool_itself_raises_is_a_crash():
    @tool
    async def inner() -> str:
        """Time out inside."""
        raise TimeoutError("database")

    assert (
        call(Toolset([inner]), "inner").text == "Error: inner: failed with TimeoutError: database"
    )


def test_cancelling_the_caller_cancels_the_tool():
    ended = []

    @tool
    async def hang() -> str:
        """Hang."""
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        return ""

    async def main():
        task = asyncio.ensure_future(Toolset([hang]).call(ToolCall("hang", {})))
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ended == [True]


def test_a_tool_that_cancels_itself_fails_alone():
    @tool
    async def odd() -> str:
        """Cancel from inside."""
        raise asyncio.CancelledError

    assert call(Toolset([odd]), "odd").error is ToolErrorKind.CRASHED


def test_sync_tools_run_in_threads_and_overlap():
    barrier = threading.Barrier(3, timeout=20)

    @tool
    def meet() -> str:
        """Meet the others."""
        barrier.wait()
        return threading.current_thread().name

    async def main():
        toolset = Toolset([meet])
        return await asyncio.gather(*(toolset.call(ToolCall("meet", {})) for _ in range(3)))

    names = {result.text for result in asyncio.run(main())}
    assert names == {"relax-thread"}


def test_max_concurrency_bounds_calls_that_run():
    running, most = 0, 0

    @tool(max_concurrency=2)
    async def work() -> str:
        """Work."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(3):
            await asyncio.sleep(0)
        running -= 1
        return ""

    async def main():
        toolset = Toolset([work])
        await asyncio.gather(*(toolset.call(ToolCall("work", {})) for _ in range(9)))

    asyncio.run(main())
    assert most == 2
    asyncio.run(main())  # another event loop has places of its own
    assert most == 2


def test_only_idempotent_tools_are_tried_again():
    tries = []

    @tool(idempotent=True, retries=2)
    async def flaky() -> str:
        """Fail twice."""
        tries.append(1)
        if len(tries) < 3:
            raise OSError("gone")
        return "here"

    assert call(Toolset([flaky]), "flaky").text == "here"
    assert len(tries) == 3
    with pytest.raises(ToolDeclarationError, match="idempotent"):
        tool(retries=1)(add.function)


def test_wrong_arguments_are_never_tried_again():
    tries = []

    @tool(idempotent=True, retries=3)
    async def picky(a: int) -> str:
        """Be picky."""
        tries.append(a)
        raise ToolError("no", kind=ToolErrorKind.INVALID_ARGUMENTS)

    call(Toolset([picky]), "picky", a=1)
    call(Toolset([picky]), "picky", a="x")
    assert tries == [1]


def test_results_larger_than_the_limit_are_refused():
    @tool(max_output_bytes=10)
    def speak(text: str) -> str:
        """Speak."""
        return text

    toolset = Toolset([speak])
    assert call(toolset, "speak", text="ä" * 5).ok
    refused = call(toolset, "speak", text="ä" * 6)
    assert refused.error is ToolErrorKind.TOO_LARGE
    assert "12 of at most 10 bytes" in refused.text


@pytest.mark.parametrize(
    ("value", "content"),
    [
        ("text", (Text("text"),)),
        ("", ()),
        (None, (Text("done"),)),
        ({"a": [1, True]}, (Text('{"a": [1, true]}'),)),
        (["x", "y"], (Text('["x", "y"]'),)),
        ([Text("see"), Image(b"png")], (Text("see"), Image(b"png"))),
        (["see", Image(b"png")], (Text("see"), Image(b"png"))),
        (Point(x=1), (Text('{"x": 1, "y": 0}'),)),
    ],
)
def test_what_a_function_returns_becomes_content(value, content):
    assert ToolResult.of(value).content == content


def test_a_result_that_is_not_json_is_a_crash_that_names_its_type():
    @tool
    def strange() -> object:
        """Return a strange thing."""
        return object()

    result = call(Toolset([strange]), "strange")
    assert result.error is ToolErrorKind.CRASHED
    assert "its result of type object is not JSON" in result.text


parts_lists = st.lists(
    st.builds(Text, st.text(max_size=20)) | st.builds(Image, st.binary(max_size=20)), max_size=4
)


@given(parts_lists, st.none() | st.sampled_from(ToolErrorKind))
def test_results_survive_json(content, error):
    result = ToolResult(tuple(content), error, 0.25)
    assert ToolResult.from_json(result.to_json()) == result


@pytest.mark.parametrize(
    "data",
    [{}, {"content": None}, {"content": [{"type": "film"}]}, {"content": [], "error": "odd"}, []],
)
def test_anything_else_is_not_a_result(data):
    with pytest.raises(ValueError):
        ToolResult.from_json(data)


def test_the_message_answers_its_call():
    """T56: two calls of one tool are told apart by their ids."""
    message = ToolResult.of("4").to_message(ToolCall("add", {}, "c7"))
    assert (message.role, message.name, message.tool_call_id) == ("tool", "add", "c7")


def no_type(a):
    """Lack a type."""


def no_docstring(a: int) -> int:
    return a


def variadic(*items: int) -> int:
    """Take any number."""
    return sum(items)


def positional(a: int, /) -> int:
    """Take a by position."""
    return a


def generator() -> int:
    """Yield."""
    yield 1


def odd_type(a: threading.Lock) -> int:
    """Take a lock."""
    return 1


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (no_type, "parameter 'a' has no type"),
        (no_docstring, "no docstring"),
        (variadic, "cannot be passed by name"),
        (positional, "cannot be passed by name"),
        (generator, "is a generator"),
        (odd_type, "no JSON form"),
        (lambda: 1, "cannot be a tool's name"),
    ],
)
def test_what_cannot_be_a_tool_says_why(function, words):
    with pytest.raises(ToolDeclarationError, match=words):
        tool(function)


def test_a_toolset_refuses_two_tools_of_one_name():
    with pytest.raises(ToolDeclarationError, match="two tools are called 'add'"):
        Toolset([add, add])


def test_methods_are_tools_of_their_instance():
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        @tool
        def step(self, by: int) -> int:
            """Count on."""
            self.count += by
            return self.count

    one, two = Counter(), Counter()
    assert call(Toolset([one.step]), "step", by=2).text == "2"
    assert call(Toolset([one.step]), "step", by=3).text == "5"
    assert two.count == 0
    assert list(Counter.step.parameters["properties"]) == ["by"]
    assert one.step(by=1) == 6
    with pytest.raises(ToolDeclarationError, match="without its instance"):
        Toolset([Counter.step])


def test_plain_functions_become_tools_with_default_limits():
    toolset = Toolset([add.function])
    assert isinstance(toolset["add"], Tool)
    assert toolset.names == ("add",)


def test_a_tool_that_cancels_its_task_ends_itself_and_not_its_caller():
    """T160: the caller gets an error, and the calls beside it go on."""

    @tool
    async def cancelling() -> str:
        """Cancel whatever task this is."""
        asyncio.current_task().cancel()
        await asyncio.sleep(30)
        return "never"

    @tool
    async def exiting() -> str:
        """Leave the program."""
        sys.exit(3)

    async def main():
        result = await cancelling.invoke({})
        return result, await exiting.invoke({}), asyncio.current_task().cancelling()

    cancelled, exited, pending = asyncio.run(main())
    assert cancelled.error is exited.error is ToolErrorKind.CRASHED
    assert "cancelled from inside" in cancelled.text
    assert "SystemExit: 3" in exited.text
    assert pending == 0


def test_a_caller_that_is_cancelled_takes_its_call_with_it():
    """T160: the tool's own task is never left behind."""
    ended = []

    @tool
    async def patient() -> str:
        """Wait."""
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(True)
        return "never"

    async def main():
        call = asyncio.ensure_future(patient.invoke({}))
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert (asyncio.run(main()), ended) == (set(), [True])


@pytest.mark.parametrize("arguments", [{"a": "two", "b": "three"}, {"a": 2}, {"a": 2, "b": None}])
def test_numbers_in_words_are_a_soft_error_never_a_missing_argument(arguments):
    """T61"""

    @tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    result = asyncio.run(add.invoke(arguments))
    assert result.error is ToolErrorKind.INVALID_ARGUMENTS
    assert "b" in result.text

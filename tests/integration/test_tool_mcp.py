"""MCP both ways: our tools for the SDK's client, and any MCP server's tools as a toolset."""

import asyncio
import base64
import sys

import pytest

pytest.importorskip("mcp")

from mcp import Client

from relax_agent import Toolset, tool
from relax_agent.errors import ConfigError, ToolErrorKind
from relax_agent.messages import Audio, Image, Text, ToolCall, Video
from relax_agent.tools import McpToolset, call_context, open_server, trace_calls
from relax_agent.tools.calculator import calculator

LIMIT_S = 60


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(LIMIT_S):
            return await coroutine

    return asyncio.run(bounded())


class Counter:
    """Counts."""

    live = 0

    def __init__(self):
        self.value = 0
        Counter.live += 1

    def close(self):
        Counter.live -= 1

    @tool
    def count(self, by: int = 1) -> int:
        """Count on."""
        self.value += by
        return self.value


@tool
async def show(image: Image) -> list:
    """Show everything."""
    return [image, "text", Audio(b"wave"), Video(b"film")]


@tool
async def hang() -> str:
    """Hang."""
    try:
        await asyncio.Event().wait()
    finally:
        hang.ended = True


ALL = Toolset([calculator, show, Counter, hang])


def test_the_sdks_own_client_sees_our_tools_and_their_media():
    async def main():
        async with open_server(ALL) as url, Client(f"{url}/mcp") as client:
            tools = {each.name: each for each in (await client.list_tools()).tools}
            good = await client.call_tool("calculator", {"expression": "6*7"})
            bad = await client.call_tool("calculator", {"expression": 3, "x": 1})
            unknown = await client.call_tool("abacus", {})
            shown = await client.call_tool("show", {"image": Image(b"png").data_url()})
            return tools, good, bad, unknown, shown.content

    tools, good, bad, unknown, shown = run(main())
    assert tools["calculator"].input_schema == calculator.parameters
    assert tools["calculator"].description == calculator.description
    assert (good.is_error, good.content[0].text) == (False, "42")
    assert bad.is_error
    assert "argument 'expression'" in bad.content[0].text
    assert unknown.is_error
    assert "there is no tool 'abacus'" in unknown.content[0].text
    assert base64.b64decode(shown[0].data) == b"png"
    assert [each.type for each in shown] == ["image", "text", "audio", "resource"]
    assert shown[3].resource.mime_type == "video/mp4"


def test_tools_with_state_take_a_handle():
    async def main():
        async with open_server(ALL) as url, Client(f"{url}/mcp") as client:
            tools = {each.name: each.input_schema for each in (await client.list_tools()).tools}

            async def call(name, **arguments):
                return (await client.call_tool(name, arguments)).content[0].text

            one, other = await call("open_tool_session"), await call("open_tool_session")
            told = [await call("count", by=2, tool_session=one) for _ in range(2)]
            told.append(await call("count", tool_session=other))
            told.append(await call("count"))
            live = Counter.live
            told += [await call("close_tool_session", tool_session=one) for _ in range(2)]
            return tools, told, live, Counter.live

    tools, told, live, after = run(main())
    assert tools["count"]["required"] == ["tool_session"]
    assert told[:3] == ["2", "4", "1"]
    assert "needs a session" in told[3]
    assert told[4] == "closed"
    assert "there is no session" in told[5]
    assert (live, after) == (2, 1)
    assert Counter.live == 0  # the server has ended, and its sessions with it


def test_a_toolset_behind_mcp_is_what_it_is_here():
    media = (Image(b"png"), Text("text"), Audio(b"wave"), Video(b"film"))

    async def main():
        events = []
        async with (
            open_server(ALL, token="secret") as url,
            await McpToolset.connect(f"{url}/mcp", token="secret") as toolset,
        ):
            with trace_calls(events.append):
                results = [
                    await toolset.call(ToolCall("calculator", {"expression": "1/8"})),
                    await toolset.call(ToolCall("show", {"image": Image(b"png")})),
                    await toolset.call(ToolCall("calculator", {})),
                    await toolset.call(ToolCall("calculater", {})),
                ]
            hang.ended = False
            with call_context(timeout_s=0.2):
                results.append(await toolset.call(ToolCall("hang", {})))
            while not hang.ended:  # noqa: ASYNC110  a caller that hangs up ends its call
                await asyncio.sleep(0.01)
            with pytest.raises(ConfigError, match="token="):
                await McpToolset.connect(f"{url}/mcp")
            schemas = toolset.schemas()
        return schemas, results, events

    schemas, results, events = run(main())
    assert schemas[0] == calculator.schema()
    good, shown, missing, unknown, late = results
    assert (good.text, shown.content) == ("0.125", media)
    assert missing.error is ToolErrorKind.INVALID_ARGUMENTS
    assert missing.text == "Error: calculator: argument 'expression' is missing"
    assert "did you mean 'calculator'?" in unknown.text
    assert late.error is ToolErrorKind.TIMEOUT
    assert [each.outcome for each in events if each.place == "client"] == [
        *("ok", "ok", "invalid_arguments", "not_found"),
    ]


SERVER = """
import os
from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("test", log_level="ERROR")

@server.tool()
def add(a: int, b: int = 1) -> int:
    "Add."
    return a + b

@server.tool()
def picture() -> Image:
    "Draw."
    return Image(data=b"png", format="png")

@server.tool()
def fail() -> str:
    "Fail."
    raise OSError("disk full")

@server.tool()
def die() -> str:
    "Die."
    os._exit(3)

server.run()
"""


def test_a_command_that_speaks_mcp_is_a_toolset(tmp_path):
    (tmp_path / "server.py").write_text(SERVER)

    async def main():
        command = [sys.executable, str(tmp_path / "server.py")]
        async with await McpToolset.connect(command) as toolset:
            names = toolset.names
            calls = [
                *(
                    ToolCall("add", {"a": 2}),
                    ToolCall("add", {"a": "two"}),
                    ToolCall("picture", {}),
                ),
                *(ToolCall("fail", {}), ToolCall("add", [1]), ToolCall("die", {})),
                ToolCall("add", {"a": 2}),
            ]
            return names, [await toolset.call(each) for each in calls]

    names, results = run(main())
    added, wrong, picture, failed, no_object, died, gone = results
    assert names == ("add", "picture", "fail", "die")
    assert (added.text, picture.content) == ("3", (Image(b"png"),))
    assert wrong.error is no_object.error is ToolErrorKind.INVALID_ARGUMENTS
    assert failed.error is ToolErrorKind.CRASHED
    assert "fail" in failed.text
    assert died.error is gone.error is ToolErrorKind.UNAVAILABLE  # T158: not a wait for ever


@pytest.mark.parametrize(
    "target", [["/no/such/program"], [sys.executable, "-c", "pass"], "http://127.0.0.1:1/mcp", ""]
)
def test_what_is_no_mcp_server_is_a_config_error(target):
    with pytest.raises(ConfigError):
        run(McpToolset.connect(target, start_timeout_s=20))


def test_a_command_that_says_nothing_is_given_up_in_time():
    with pytest.raises(ConfigError, match="did not tell its tools"):
        run(
            McpToolset.connect(
                [sys.executable, "-c", "import sys; sys.stdin.read()"], start_timeout_s=0.5
            )
        )

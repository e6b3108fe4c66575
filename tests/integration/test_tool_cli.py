"""``relax-agent tools`` with classes, files, servers of either kind; and tools in the sandbox."""

import asyncio
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relax_agent import Toolset, tool
from relax_agent.cli.tools import app
from relax_agent.errors import ConfigError, ToolDeclarationError, ToolErrorKind
from relax_agent.messages import Image, ToolCall
from relax_agent.tools.loading import load_toolset

PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)
MODULE = '''
"""Tools of a test."""
from relax_agent import Image, tool
from relax_agent.envs import Task, TaskSet, ToolEnv
from relax_agent.tools.python import PythonSession  # another module's: not served from here

class Counter:
    """Counts."""
    def __init__(self, start: int = 0): self.value = start

    @tool
    def count(self, by: int = 1) -> int:
        """Count on."""
        self.value += by
        return self.value

class NeedsMore:
    def __init__(self, folder): ...

    @tool
    def look(self) -> str:
        """Look."""

class Env(ToolEnv):
    @tool
    def move(self) -> str:
        """An environment's own: not served."""

@tool
def same(picture: Image) -> Image:
    """Return a picture."""
    return picture

LIST = [Counter, same]
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "cli_tools.py").write_text(MODULE)
    (tmp_path / "photo.png").write_bytes(PNG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("cli_tools", None)


def run(*args):
    done = CliRunner().invoke(app, list(args), standalone_mode=False)
    assert done.exception is None, done.exception
    return done.stdout


def test_a_modules_functions_and_its_own_classes_are_its_tools(folder):
    assert load_toolset("cli_tools").names == ("same", "count")
    assert load_toolset("cli_tools:Counter").names == ("count",)
    assert load_toolset("cli_tools:LIST").names == ("count", "same")
    assert run("list", "cli_tools") == "same(picture)  Return a picture.\ncount(by)  Count on.\n"


@pytest.mark.parametrize("target", ["cli_tools:NeedsMore", "cli_tools:Task", "cli_tools:nothing"])
def test_what_holds_no_tools_is_a_config_error(folder, target):
    with pytest.raises(ConfigError):
        load_toolset(target)


def test_a_tool_with_state_and_a_picture_can_be_called_from_the_shell(folder):
    assert run("call", "cli_tools", "count", "by=3") == "3\n"
    told = run("call", "cli_tools", "same", "picture=@photo.png", "--save", "out")
    assert told == f"[image/png, 16 bytes] {Path('out/1.png')}\n"
    assert (folder / "out" / "1.png").read_bytes() == PNG


def test_a_command_that_speaks_mcp_can_be_listed(folder):
    pytest.importorskip("mcp")
    (folder / "mcp_tools.py").write_text(
        "from mcp.server.mcpserver import MCPServer\n"
        "server = MCPServer('x', log_level='ERROR')\n"
        "@server.tool()\ndef add(a: int) -> int:\n    'Add.'\n    return a\n"
        "server.run()\n"
    )
    assert run("list", f"mcp:{sys.executable} mcp_tools.py") == "add(a)  Add.\n"


@tool(sandbox=True, timeout=20)
def digits(text: str, factor: int = 2) -> dict:
    """Count digits.

    Args:
        text: Where they are.
        factor: Times what.
    """
    import re

    if not text:
        raise ValueError("nothing to count")
    return {"digits": len(re.findall(r"\d", text)) * factor}


@tool(sandbox=True, timeout=1)
def endless() -> str:
    """Never end."""
    while True:
        pass


def test_a_tool_in_the_sandbox_is_a_tool_like_any_other():
    async def main():
        toolset = Toolset([digits, endless])
        calls = [
            ToolCall("digits", {"text": "a1b22"}),
            ToolCall("digits", {"text": 7}),
            ToolCall("digits", {"text": ""}),
            ToolCall("endless", {}),
        ]
        return [await toolset.call(each) for each in calls]

    good, wrong, failed, late = asyncio.run(main())
    assert good.text == '{"digits": 6}'
    assert wrong.error is ToolErrorKind.INVALID_ARGUMENTS
    assert failed.text == "Error: digits: ValueError: nothing to count"
    assert late.error is ToolErrorKind.TIMEOUT
    assert digits.parameters["properties"]["factor"]["default"] == 2


def uses_its_module(a: int) -> int:
    """Use it."""
    return asyncio.run(a)


async def is_async(a: int) -> int:
    """Wait."""


def closes_over(text):
    def inner(a: int) -> str:
        """Use what is around it."""
        return text * a

    return inner


@pytest.mark.parametrize("function", [uses_its_module, is_async, closes_over("x")])
def test_what_is_not_self_contained_cannot_go_into_the_sandbox(function):
    with pytest.raises(ToolDeclarationError):
        tool(sandbox=True)(function)


def test_an_instance_is_no_tool_and_says_what_to_write():
    with pytest.raises(ToolDeclarationError, match="of type Image is no tool"):
        Toolset([Image(b"")])

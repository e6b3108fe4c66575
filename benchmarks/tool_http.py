"""Calls of one tool over HTTP: our server and client, a bare FastAPI route, the official MCP SDK.

The servers run in processes of their own, one worker each. They are asked by the same bare aiohttp
client over the same number of connections; only ``RemoteToolset`` is a client of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp

from relax_agent import ToolCall
from relax_agent.tools import RemoteToolset

CONNECTIONS = 64
_BARE = """
import socket, sys
from pathlib import Path
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

class Arguments(BaseModel):
    a: int
    b: int = 1

app = FastAPI()

@app.post("/tools/add")
async def add(arguments: Arguments) -> int:
    return arguments.a + arguments.b
"""
_MCP = """
import socket, sys
from pathlib import Path
import uvicorn
from mcp.server.mcpserver import MCPServer

server = MCPServer("benchmark", log_level="ERROR")

@server.tool()
async def add(a: int, b: int = 1) -> int:
    "Add two numbers."
    return a + b

app = server.streamable_http_app(json_response=True, stateless_http=True)
"""
_RUN = """
listener = socket.create_server(("127.0.0.1", 0))
Path(sys.argv[1]).write_text(str(listener.getsockname()[1]))
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listener])
"""
_MCP_BODY = json.dumps(
    {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": "add", "arguments": {"a": 2, "b": 3}},
    }
).encode()
_BODY = json.dumps({"a": 2, "b": 3}).encode()
_JSON = {"Content-Type": "application/json"}
_MCP_HEADERS = {**_JSON, "Accept": "application/json, text/event-stream"}
_START_S = 60.0


@contextlib.contextmanager
def servers() -> Iterator[dict[str, str]]:
    """Run all three; give their addresses."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        commands = {
            "ours": [*("-m", "relax_agent.tools.server", "benchmarks.tool_samples"),
                     *("--port", "0", "--port-file", str(folder / "ours"))],
            "bare": ["-c", _BARE + _RUN, str(folder / "bare")],
            "mcp": ["-c", _MCP + _RUN, str(folder / "mcp")],
        }  # fmt: skip
        for words in commands.values():
            process = subprocess.Popen([sys.executable, *words], env=os.environ)
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield {each: f"http://127.0.0.1:{_port(folder / each)}" for each in commands}


def _port(file: Path) -> int:
    deadline = time.monotonic() + _START_S
    while not file.exists() or not file.read_text().strip():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{file.name} did not start")
        time.sleep(0.05)
    return int(file.read_text())


async def _rate(call: Callable[[], Awaitable[None]], calls: int) -> float:
    async def one() -> None:
        for _ in range(calls // CONNECTIONS):
            await call()

    await asyncio.gather(*(call() for _ in range(CONNECTIONS)))  # connections are open
    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(CONNECTIONS)))
    return calls / (time.perf_counter() - started)


def aiohttp_rate(url: str, calls: int) -> float:
    """Return calls per second of a bare aiohttp session at a tool's route."""
    return asyncio.run(_aiohttp(f"{url}/tools/add", _BODY, _JSON, calls))


def mcp_rate(url: str, calls: int) -> float:
    """Return calls per second of a bare aiohttp session at the SDK's endpoint."""
    return asyncio.run(_aiohttp(f"{url}/mcp", _MCP_BODY, _MCP_HEADERS, calls))


async def _aiohttp(url: str, body: bytes, headers: dict[str, str], calls: int) -> float:
    connector = aiohttp.TCPConnector(limit=CONNECTIONS)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def call() -> None:
            async with session.post(url, data=body, headers=headers) as response:
                answer = json.loads(await response.read())
                assert response.status == 200, answer

        return await _rate(call, calls)


def toolset_rate(url: str, calls: int) -> float:
    """Return calls per second of a RemoteToolset."""
    return asyncio.run(_toolset(url, calls))


async def _toolset(url: str, calls: int) -> float:
    async with await RemoteToolset.connect(url, max_connections=CONNECTIONS) as toolset:

        async def call() -> None:
            result = await toolset.call(ToolCall("add", {"a": 2, "b": 3}, "call_0"))
            assert result.text == "5", result

        return await _rate(call, calls)

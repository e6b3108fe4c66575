"""A served environment over loopback WebSocket, beside a bare FastAPI echo of the same message.

Both servers run in processes of their own; this one is the client, with 16 connections of the same
library. For the environment it is the whole client (``make("ws://…")``: messages out, step results
in), for the echo a socket that sends a ready text and does not even look at the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp

from relax_agent.envs import make_async
from relax_agent.messages import assistant

CONNECTIONS = 16
TEXT = "x" * 100
_ECHO = """
import socket, sys
from pathlib import Path
import uvicorn
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from pydantic import BaseModel
from relax_agent.envs.serving.protocol import WireMessage

class Message(BaseModel):
    id: int
    op: str
    action: WireMessage

app = FastAPI()

@app.websocket("/ws")
async def echo(connection: WebSocket):
    await connection.accept()
    try:
        while True:
            message = Message.model_validate_json(await connection.receive_text())
            await connection.send_text(message.model_dump_json())
    except WebSocketDisconnect:
        pass

listener = socket.create_server(("127.0.0.1", 0))
Path(sys.argv[1]).write_text(str(listener.getsockname()[1]))
config = uvicorn.Config(app, log_level="warning", ws_per_message_deflate=False)
uvicorn.Server(config).run([listener])
"""
_ENV = """
from relax_agent.envs import Env, register
from relax_agent.messages import user

@register("benchmarks/Echo-v0")
class Echo(Env):
    async def reset(self, *, seed=None, options=None):
        return [user("go")], {}

    async def step(self, action):
        return [user(action.text)], 0.0, False, False, {}
"""
_CLI = "from relax_agent.cli import main; main()"


@contextlib.contextmanager
def servers() -> Iterator[tuple[str, str]]:
    """Run both servers; give the addresses of the environment and of the echo."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "benchmark_echo.py").write_text(_ENV)
        served = [
            *("-c", _CLI, "envs", "serve", "benchmark_echo:benchmarks/Echo-v0", "--port", "0"),
            *("--port-file", str(folder / "env"), "--slots", str(2 * CONNECTIONS)),
        ]
        for argv in (served, ["-c", _ECHO, str(folder / "echo")]):
            process = subprocess.Popen(
                [sys.executable, *argv],
                cwd=folder,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(process.wait, 20)
            stack.callback(process.terminate)
        yield tuple(f"127.0.0.1:{_port(folder / part)}" for part in ("env", "echo"))  # type: ignore[misc]


def _port(path: Path) -> str:
    for _ in range(600):
        with contextlib.suppress(OSError):
            if text := path.read_text().strip():
                return text
        time.sleep(0.05)
    raise SystemExit(f"no server came up for {path.name}")


def echo_rate(address: str, messages: int) -> float:
    """Return messages per second of the echo, sent and answered."""
    return asyncio.run(_echo(f"http://{address}/ws", messages // CONNECTIONS))


async def _echo(url: str, count: int) -> float:
    action = {"role": "assistant", "content": TEXT}
    frame = json.dumps({"id": 1, "op": "step", "action": action})
    async with aiohttp.ClientSession() as session:
        sockets = [await session.ws_connect(url) for _ in range(CONNECTIONS)]

        async def one(connection: aiohttp.ClientWebSocketResponse) -> None:
            for _ in range(count):
                await connection.send_str(frame)
                await connection.receive()

        started = time.perf_counter()
        await asyncio.gather(*map(one, sockets))
        seconds = time.perf_counter() - started
        for connection in sockets:
            await connection.close()
    return count * CONNECTIONS / seconds


def env_rate(address: str, messages: int) -> float:
    """Return steps per second of the served environment."""
    return asyncio.run(_steps(f"ws://{address}", messages // CONNECTIONS))


async def _steps(url: str, count: int) -> float:
    async with contextlib.AsyncExitStack() as stack:
        envs = [await stack.enter_async_context(await make_async(url)) for _ in range(CONNECTIONS)]
        for env in envs:
            await env.reset()

        async def one(number: int) -> None:
            for _ in range(count):
                await envs[number].step(assistant(TEXT))

        started = time.perf_counter()
        await asyncio.gather(*map(one, range(CONNECTIONS)))
        return count * CONNECTIONS / (time.perf_counter() - started)

"""The client of tool calls: ``RemoteToolset`` beside httpx with the aiohttp transport.

    python -m benchmarks.tool_client [--quick]

Both call the calculator on one tool server in a process of its own, over the same number of
connections, in turns. CPU seconds of the client are what counts: the client shares its core with
the rollout. The last line is JSON: client CPU of httpx over that of ``RemoteToolset``, by
connections.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
from httpx_aiohttp import AiohttpTransport

from relax_agent import ToolCall
from relax_agent.tools import RemoteToolset

CONNECTIONS = (1, 16, 64)
CALL = ToolCall("calculator", {"expression": "(17+5)*3"}, "call_0")


async def spread(call: Callable[[], Awaitable[None]], connections: int, calls: int) -> float:
    """Make ``calls`` calls from so many tasks and return the client's CPU seconds."""

    async def one() -> None:
        for _ in range(calls // connections):
            await call()

    started = time.process_time()
    await asyncio.gather(*(one() for _ in range(connections)))
    return time.process_time() - started


async def compare(url: str, connections: int, calls: int, repeats: int) -> float:
    """Return the median ratio of client CPU, httpx over RemoteToolset."""
    async with (
        await RemoteToolset.connect(url) as toolset,
        httpx.AsyncClient(transport=AiohttpTransport(), base_url=url) as client,
    ):

        async def ours() -> None:
            result = await toolset.call(CALL)
            assert result.text == "66", result

        async def plain_httpx() -> None:
            answer = await client.post("/tools/calculator", json=CALL.arguments)
            assert "66" in answer.text, answer

        ratios = []
        for _ in range(repeats + 1):
            base = await spread(ours, connections, calls)
            ratios.append(await spread(plain_httpx, connections, calls) / base)
    return statistics.median(ratios[1:])  # the first warms both up


def main() -> None:
    """Start a server, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer calls and repeats")
    calls, repeats = (320, 2) if parser.parse_args().quick else (3200, 5)
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder) / "port"
        argv = [sys.executable, "-m", "relax_agent.tools.server", "relax_agent.tools.calculator"]
        server = subprocess.Popen([*argv, "--port", "0", "--port-file", str(port_file)])
        try:
            while not port_file.exists():
                time.sleep(0.05)
            url = f"http://127.0.0.1:{port_file.read_text().strip()}"
            figures = {}
            for connections in CONNECTIONS:
                ratio = asyncio.run(compare(url, connections, calls, repeats))
                figures[str(connections)] = round(ratio, 2)
                print(f"{connections:3} connections: httpx takes {ratio:.2f} x the client CPU")
        finally:
            server.terminate()
            server.wait(10)
    print(json.dumps({"httpx_vs_remote_toolset_cpu": figures}))


if __name__ == "__main__":
    main()

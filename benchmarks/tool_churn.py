"""Churn: hundreds of sessions at once, for minutes, with clients killed at random.

Each session at the server holds a folder and a socket pair, some a process. Clients are processes
of their own that open sessions, call, and close them; every few seconds one is killed with SIGKILL
and another takes its place. Then the leases run out, and whatever is still there has leaked:
sessions, child processes, folders, file descriptors. The server's memory is read all the while.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.tool_http import _port
from benchmarks.tool_samples import FOLDER
from relax_agent import ToolCall
from relax_agent.tools import RemoteToolset

CLIENTS, SESSIONS = 8, 64
"""512 at once."""
LEASE_S = 5.0
_KILL_EVERY_S = 3.0


def churn(minutes: float) -> dict[str, Any]:
    """Run it and tell what has leaked."""
    with tempfile.TemporaryDirectory() as name:
        folder, port_file = Path(name) / "sessions", Path(name) / "port"
        folder.mkdir()
        argv = [sys.executable, "-m", "relax_agent.tools.server", "benchmarks.tool_samples"]
        argv += ["--port", "0", "--port-file", str(port_file), "--lease", str(LEASE_S)]
        server = subprocess.Popen(argv, env={**os.environ, FOLDER: str(folder)})
        try:
            url = f"http://127.0.0.1:{_port(port_file)}"
            return _run(server.pid, url, folder, minutes * 60)
        finally:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(20)
            server.kill()


def _run(pid: int, url: str, folder: Path, seconds: float) -> dict[str, Any]:
    _ask(url)  # a first connection, so that what every one costs is there already
    before, clients, killed = _descriptors(pid), [_client(url) for _ in range(CLIENTS)], 0
    began = time.monotonic()
    deadline, memory, most = began + seconds, [], 0
    while time.monotonic() < deadline:
        time.sleep(min(_KILL_EVERY_S, seconds / 4))
        memory.append((time.monotonic() - began, _memory_mb(pid)))
        most = max(most, int(_ask(url)["sessions"]))
        victim = random.randrange(CLIENTS)
        clients[victim].kill()
        clients[victim].wait()
        clients[victim] = _client(url)
        killed += 1
    for each in clients:
        each.kill()
        each.wait()
    found = _settled(pid, url, folder, before)
    settled = [value for at, value in memory if at > seconds / 3] or [0.0]
    print(f"  {found['opened']:,} sessions, {most} at once, {killed} clients killed")
    print(f"  server: {settled[0]:.1f} MB after a third, {settled[-1]:.1f} MB at the end")
    leaks = sum(found[each] for each in ("sessions", "processes", "folders", "descriptors"))
    print(f"  left: {found}")
    return {
        "leaks": leaks + found["left_behind"],
        "churned_sessions": found["opened"],
        "rss_growth": round(settled[-1] / max(settled[0], 1e-9), 3),
    }


def _settled(pid: int, url: str, folder: Path, before: int) -> dict[str, int]:
    """Wait for the leases to run out, and count what is left."""
    deadline = time.monotonic() + 4 * LEASE_S + 20
    while True:
        numbers = _ask(url)
        found = {
            "sessions": int(numbers["sessions"] + numbers["sessions_closing"]),
            "processes": len(_children(pid)),
            "folders": len(list(folder.iterdir())),
            "descriptors": max(0, _descriptors(pid) - before),
            "left_behind": int(numbers["sessions_left_behind_total"]),
            "opened": int(numbers["sessions_opened_total"]),
        }
        names = ("sessions", "processes", "folders", "descriptors")
        if not any(found[name] for name in names) or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def _ask(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/sessions", timeout=30) as answer:
        numbers: dict[str, float] = json.load(answer)
        return numbers


def _descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _memory_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _client(url: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "benchmarks.tool_churn", url])


async def _play(url: str) -> None:
    async with await RemoteToolset.connect(url) as toolset:

        async def one() -> None:
            while True:
                async with toolset.session() as session:
                    for number in range(1, random.randint(2, 12)):
                        result = await session.call(ToolCall("count", {}))
                        assert result.text == str(number), result
                        await asyncio.sleep(random.expovariate(1.0))

        await asyncio.gather(*(one() for _ in range(SESSIONS)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="One client of the churn.")
    parser.add_argument("url")
    asyncio.run(_play(parser.parse_args().url))

"""Tools beside their peers, and beside the least that could do the same.

    python -m benchmarks.tools [--quick] [--minutes M] [--only inproc http churn]

Inproc  a call through a toolset (validation, limits, result) less the bare function
Http    our server beside a hand-written FastAPI route with the same pydantic model, and beside the
        official MCP SDK's server; our client beside a bare aiohttp session at the same server
Churn   512 sessions of a stateful tool for M minutes, with clients killed at random: what is left

What is compared runs in turns, in one run; medians and their spread are printed. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks import tool_churn, tool_http
from benchmarks.envs import in_turns, ratio, show
from benchmarks.tool_samples import add
from relax_agent import ToolCall, Toolset

Result = dict[str, Any]


async def _microseconds(calls: int, *, guarded: bool) -> float:
    toolset, call = Toolset([add]), ToolCall("add", {"a": 2, "b": 3})
    found = []
    for _ in range(calls):
        started = time.perf_counter()
        await (toolset.call(call) if guarded else add(a=2, b=3))
        found.append(time.perf_counter() - started)
    return statistics.median(found) * 1e6


def inproc(quick: bool, minutes: float) -> Result:
    """Measure what a call in this process costs."""
    calls = 1_000 if quick else 10_000
    values = in_turns(
        {
            "the bare function": lambda: asyncio.run(_microseconds(calls, guarded=False)),
            "ours": lambda: asyncio.run(_microseconds(calls, guarded=True)),
        },
        3 if quick else 9,
    )
    show(values, "µs")
    more = [a - b for a, b in zip(values["ours"], values["the bare function"], strict=True)]
    return {"inproc_overhead_us": round(statistics.median(more), 1)}


def http(quick: bool, minutes: float) -> Result:
    """Measure calls over HTTP."""
    calls, rounds = (640, 2) if quick else (6_400, 7)
    with tool_http.servers() as urls:
        values = in_turns(
            {
                "ours": lambda: tool_http.aiohttp_rate(urls["ours"], calls),
                "a bare FastAPI route": lambda: tool_http.aiohttp_rate(urls["bare"], calls),
                "the MCP SDK's server": lambda: tool_http.mcp_rate(urls["mcp"], calls // 4),
                "ours, RemoteToolset": lambda: tool_http.toolset_rate(urls["ours"], calls),
            },
            rounds,
        )
    show(values, "calls/s")
    return {
        "http_vs_bare_fastapi": ratio(values["ours"], values["a bare FastAPI route"]),
        "http_vs_mcp_sdk": ratio(values["ours"], values["the MCP SDK's server"]),
        "client_vs_aiohttp": ratio(values["ours, RemoteToolset"], values["ours"]),
    }


def churn(quick: bool, minutes: float) -> Result:
    """Look for leaks."""
    return tool_churn.churn(0.2 if quick else minutes)


PARTS: dict[str, Callable[[bool, float], Result]] = {
    "inproc": inproc,
    "http": http,
    "churn": churn,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer calls and rounds")
    parser.add_argument("--minutes", type=float, default=10.0, help="of churn")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    results: Result = {}
    for name in arguments.only:
        print(name)
        results |= PARTS[name](arguments.quick, arguments.minutes)
    print(json.dumps(results))


if __name__ == "__main__":
    main()

"""Environments beside their peers, and beside the least that could do the same.

    python -m benchmarks.envs [--quick] [--only stepping tools concurrent websocket]

Stepping   an environment that does nothing, through ``make``, beside ``gymnasium.make`` and beside
           a bare hop into a thread and back (for plain ``def`` environments)
Tools      steps with one validated tool call, beside a plain class (regex, JSON, no validation),
           verifiers (whole rollouts), GEM and SkyRL-Gym (neither validates)
Concurrent a thousand episodes of eight turns with slow tools, beside bare sleeps
Websocket  a served environment, beside a bare FastAPI echo of the same messages

What is compared runs in turns, in one run; medians and their spread are printed. The last line is
JSON. Peers run in venvs of their own: ``make peers``.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
from collections.abc import Callable, Mapping

from benchmarks import env_stepping, env_tools, env_websocket

Result = dict[str, float]


def in_turns(
    contestants: Mapping[str, Callable[[], float]], repeats: int
) -> dict[str, list[float]]:
    """Run every contestant once a round and return what each gave; a first round warms up."""
    values: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(repeats + 1):
        for name, run in contestants.items():
            gc.collect()
            gc.freeze()  # what earlier rounds left is nobody's cost
            value = run()
            if number:
                values[name].append(value)
    return values


def show(values: Mapping[str, list[float]], unit: str) -> None:
    """Print medians and spreads."""
    for name, found in values.items():
        low, middle, high = min(found), statistics.median(found), max(found)
        print(f"  {name:34} {middle:>14,.3f} {unit:10} ({low:,.3f} to {high:,.3f})")


def ratio(over: list[float], under: list[float]) -> float:
    """Return the median of the rounds' ratios."""
    return round(statistics.median(a / b for a, b in zip(over, under, strict=True)), 3)


def run_parts(doc: str, parts: Mapping[str, Callable[[bool], Result]]) -> None:
    """Run the parts that the command line names, and print what they found as JSON."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    arguments = parser.parse_args()
    results: Result = {}
    for name in arguments.only:
        print(name)
        results |= parts[name](arguments.quick)
    print(json.dumps(results))


def stepping(quick: bool) -> Result:
    """Measure what ``make`` costs."""
    fast, hops = (20_000, 2_000) if quick else (200_000, 20_000)
    values = in_turns(
        {
            "gymnasium.make": lambda: env_stepping.gymnasium_rate(fast),
            "ours, async def": lambda: env_stepping.async_rate(fast),
            "a bare hop into a thread": lambda: env_stepping.hop_rate(hops),
            "ours, def": lambda: env_stepping.def_rate(hops),
        },
        3 if quick else 9,
    )
    show(values, "steps/s")
    return {
        "async_vs_gymnasium": ratio(values["ours, async def"], values["gymnasium.make"]),
        "def_vs_thread_hop": ratio(values["ours, def"], values["a bare hop into a thread"]),
    }


def tools(quick: bool) -> Result:
    """Measure steps with a tool call."""
    steps, rounds = (2_000, 2) if quick else (20_000, 5)
    verifiers = "verifiers-0.1.14", "verifiers_steps.py", env_tools.TURNS

    def peer(name: str, key: str = "tool_steps_per_s") -> Callable[[], float]:
        script = f"{name.replace('-', '_')}_steps.py"
        return lambda: float(env_tools.contestant(name, script, steps)[key])

    values = in_turns(
        {
            "a plain class, unvalidated": lambda: env_tools.floor_rate(steps),
            "ours, env.step": lambda: env_tools.tool_step_rate(steps),
            "GEM, unvalidated": peer("gem"),
            "SkyRL-Gym, unvalidated": peer("skyrl-gym"),
            "ours, whole episodes, 64": lambda: env_tools.episode_rate(64),
            "verifiers, whole rollouts, 64": lambda: env_tools.contestant(*verifiers, 64)[
                "steps_per_s"
            ],
        },
        rounds,
    )
    show(values, "steps/s")
    return {
        # verifiers has no step of its own: its steps are those of whole rollouts.
        "tool_step_vs_verifiers": ratio(
            values["ours, env.step"], values["verifiers, whole rollouts, 64"]
        ),
        "episodes_vs_verifiers": ratio(
            values["ours, whole episodes, 64"], values["verifiers, whole rollouts, 64"]
        ),
        "tool_step_vs_floor": ratio(values["a plain class, unvalidated"], values["ours, env.step"]),
    }


def concurrent(quick: bool) -> Result:
    """Measure a thousand episodes at once."""
    count = 100 if quick else 1000
    values = in_turns(
        {
            "bare sleeps of 50 ms": lambda: asyncio.run(env_tools.sleeps(0.05, count)),
            "ours, tool of 50 ms": lambda: asyncio.run(
                env_tools.episodes(env_tools.waiting(0.05), count)
            ),
        },
        2 if quick else 5,
    )
    long = in_turns(
        {"ours, tool of 1 s": lambda: asyncio.run(env_tools.episodes(env_tools.waiting(1), count))},
        0 if quick else 2,
    )
    show(values, "s")
    result = {
        "concurrent_50ms": ratio(values["ours, tool of 50 ms"], values["bare sleeps of 50 ms"])
    }
    if not quick:
        show(long, "s")
        critical = float(env_tools.TURNS)
        result["concurrent_1s"] = round(statistics.median(long["ours, tool of 1 s"]) / critical, 3)
    return result


def websocket(quick: bool) -> Result:
    """Measure a served environment."""
    messages, rounds = (500, 2) if quick else (4_000, 5)
    with env_websocket.servers() as (served, echo):
        values = in_turns(
            {
                "a bare FastAPI echo, 16": lambda: env_websocket.echo_rate(echo, messages),
                "ours, served, 16": lambda: env_websocket.env_rate(served, messages),
            },
            rounds,
        )
    show(values, "messages/s")
    return {"ws_vs_bare_echo": ratio(values["ours, served, 16"], values["a bare FastAPI echo, 16"])}


PARTS: dict[str, Callable[[bool], Result]] = {
    "stepping": stepping,
    "tools": tools,
    "concurrent": concurrent,
    "websocket": websocket,
}


if __name__ == "__main__":
    run_parts(__doc__, PARTS)

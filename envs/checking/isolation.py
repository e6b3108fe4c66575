"""Checks that episodes do not disturb each other, nor outlive what held them."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from relax_agent.envs.checking.contract import UNSTEADY, difference
from relax_agent.envs.checking.lab import Lab, Trace, breathe
from relax_agent.envs.checking.places import place_of, place_of_method
from relax_agent.envs.checking.report import Findings
from relax_agent.envs.checking.running import Check
from relax_agent.envs.checking.subject import authors_class
from relax_agent.envs.core import Env, SyncEnv
from relax_agent.envs.tool_env import ToolEnv

_CYCLES = 3
_SETTLE_S = 1.5
_ONE = "there is only this one environment; give its class or a function that makes one"


async def _interleaved(lab: Lab, tell: Findings) -> None:
    """T161: two environments, step by step in turns, give what each gives alone."""
    if lab.single:
        tell.skip(_ONE)
        return
    if lab.notes.get("unsteady"):
        tell.skip(UNSTEADY)
        return
    env = await lab.main()
    alone = [lab.sound(await lab.play(env, seed=lab.seed + n)) for n in range(2)]
    for seeds in ((0, 0), (0, 1)):
        async with lab.fresh() as one, lab.fresh() as other:
            turn = _Turns()
            traces = await _both(
                lab.replay(one, alone[seeds[0]], seed=lab.seed + seeds[0], after=turn.take),
                lab.replay(other, alone[seeds[1]], seed=lab.seed + seeds[1], after=turn.take),
            )
        for seed, trace in zip(seeds, traces, strict=True):
            what = difference(alone[seed], lab.sound(trace))
            if what:
                words = f"two environments at a time give other episodes than alone: {what}"
                hint = "keep all state in self, set in __init__ or reset(); a class attribute"
                tell.fail(
                    f"{words}; {hint} or a module's variable is shared by all",
                    place_of(authors_class(env)),
                )
                return


class _Turns:
    """Lets the other one go first after every turn."""

    async def take(self, turn: Any) -> None:
        await breathe(3)


async def _both(one: Any, other: Any) -> list[Trace]:
    async with asyncio.TaskGroup() as group:
        jobs = [group.create_task(each) for each in (one, other)]
    return [job.result() for job in jobs]


async def _shared(lab: Lab, tell: Findings) -> None:
    """No list, dict or set that belongs to a class or to several instances is changed."""
    if lab.single:
        tell.skip(_ONE)
        return
    env = await lab.main()
    inner = env.unwrapped
    async with lab.fresh() as other:
        shared = {
            name: "two instances share the very same"
            for name, value in vars(inner).items()
            if _changeable(value) and value is getattr(other.unwrapped, name, None)
        }
    shared |= dict.fromkeys(_class_attributes(type(inner)), "the class holds")
    changed = [name for name in shared if await _changes(lab, env, name)]
    for name in changed:
        words = f"{shared[name]} {name!r}, and an episode changes it"
        tell.fail(f"{words}; make a new one in __init__ or reset()", place_of(type(inner)))


def _changeable(value: Any) -> bool:
    return isinstance(value, (dict, list, set, bytearray))


def _class_attributes(kind: type) -> list[str]:
    """Return the changeable attributes of the author's classes."""
    return [
        name
        for base in kind.__mro__
        if base not in (object, Env, SyncEnv, ToolEnv)
        for name, value in vars(base).items()
        if _changeable(value) and not name.startswith("__")
    ]


async def _changes(lab: Lab, env: Any, name: str) -> bool:
    before = repr(getattr(env.unwrapped, name, None))
    lab.sound(await lab.play(env, seed=lab.seed + 5, max_turns=3))
    return repr(getattr(env.unwrapped, name, None)) != before


async def _released(lab: Lab, tell: Findings) -> None:
    """What an environment opened is closed when it is."""
    if lab.single:
        tell.skip(_ONE)
        return
    kind = authors_class(await lab.main())
    where = place_of_method(kind, "close")
    await _cycle(lab)  # what is made once, such as a pool or a cache, is no leak
    before = await _settled(None)
    for _ in range(_CYCLES):
        await _cycle(lab)
    after = await _settled(before)
    words = {
        "threads": "threads are left running",
        "files": "files or sockets are left open",
        "processes": "child processes are left running",
        "tasks": "asyncio tasks are left running",
    }
    for what, said in words.items():
        more = after[what] - before[what]
        if more >= _CYCLES:
            named = (
                f" ({', '.join(sorted(_new_threads(before, after)))})" if what == "threads" else ""
            )
            tell.fail(f"after close(), {said}{named}; end them in close()", where)


async def _cycle(lab: Lab) -> None:
    async with lab.fresh() as env:
        lab.sound(await lab.play(env))


async def _settled(before: dict[str, Any] | None) -> dict[str, Any]:
    """Count what is held; wait a little for what is about to end."""
    end = asyncio.get_running_loop().time() + _SETTLE_S
    while True:
        gc.collect()
        now = _held()
        if before is None or all(now[k] <= before[k] for k in now if k != "names"):
            return now
        if asyncio.get_running_loop().time() > end:
            return now
        await asyncio.sleep(0.05)


def _held() -> dict[str, Any]:
    names = Counter(
        thread.name
        for thread in threading.enumerate()
        if not thread.name.startswith("relax-thread")  # kept for the next job, and few
    )
    return {
        "threads": names.total(),
        "files": len(list(Path("/proc/self/fd").iterdir()))
        if Path("/proc/self/fd").exists()
        else 0,
        "processes": len(_children()),
        "tasks": len(asyncio.all_tasks()),
        "names": names,
    }


def _children() -> list[str]:
    found = []
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            found += task.read_text().split()
        except OSError:  # the thread has ended
            continue
    return found


def _new_threads(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return set(after["names"] - before["names"])


ISOLATION_CHECKS = [
    Check("isolation", "two environments at a time give what each gives alone", _interleaved),
    Check("shared state", "instances share nothing that episodes change", _shared),
]
RELEASE_CHECKS = [
    Check("release", "close() leaves no thread, file, process or task behind", _released),
]

"""What is done a thousand times leaves nothing behind: no handle, task, thread or memory."""

import ast
import asyncio
import gc
import os
import threading
import tracemalloc
from pathlib import Path

import numpy as np
from rollout_support import FakeEngine, FakeEnv, make_group, runner
from safetensors.numpy import save_file

from relax_agent.engines.client import EngineClient
from relax_agent.engines.scripted import ScriptedEngine
from relax_agent.engines.scripted_server import ScriptedServer
from relax_agent.queue import LocalQueue, QueueSettings
from relax_agent.rollout.fleet import Fleet
from relax_agent.weights import WeightsSettings, publish

ROOT = Path(__file__).parents[2]
SLACK_BYTES = 64 * 1024


def footprint():
    """Open files, tasks, threads (asyncio's own bounded pool left out) and traced bytes."""
    gc.collect()
    threads = [t for t in threading.enumerate() if not t.name.startswith("asyncio_")]
    counts = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks()), len(threads)
    return counts, tracemalloc.get_traced_memory()[0]


async def assert_flat(cycle, *, warm_up, cycles):
    """Run ``cycle(number)`` and compare what is held after the warm-up and at the end."""
    tracemalloc.start()
    try:
        for number in range(warm_up):
            await cycle(number)
        counts, held = footprint()
        for number in range(warm_up, warm_up + cycles):
            await cycle(number)
        counts_now, held_now = footprint()
    finally:
        tracemalloc.stop()
    assert counts_now == counts
    assert held_now - held < SLACK_BYTES


def weights(folder):
    save_file({"a": np.zeros(4, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def test_a_thousand_publications_hold_nothing(tmp_path):
    """U17"""
    folder = weights(tmp_path)
    settings = WeightsSettings(kind="disk")

    async def main():
        engines = [ScriptedEngine(), ScriptedEngine()]

        async def cycle(number):
            await publish(engines, folder, number + 1, settings)

        await assert_flat(cycle, warm_up=50, cycles=1000)

    asyncio.run(main())


def test_publications_over_http_hold_no_socket(tmp_path):
    """U17"""
    folder = weights(tmp_path)

    async def main():
        async with ScriptedServer(ScriptedEngine()) as server, EngineClient(server.url) as client:

            async def cycle(number):
                await publish([client], folder, number + 1, WeightsSettings(kind="disk"))

            await assert_flat(cycle, warm_up=20, cycles=60)

    asyncio.run(main())


def test_steps_of_the_queue_hold_no_group(tmp_path):
    """U17, U19"""

    async def main():
        queue = LocalQueue(tmp_path, QueueSettings(max_staleness=0), groups_per_step=1)

        async def cycle(number):
            name, step = f"g{number}", number + 1
            await queue.reserve(name, "t", timeout=60)
            await queue.put(make_group(name))
            lease = await queue.lease(1, step=step, timeout=60)
            queue.published(step)
            await queue.ack(lease, step)
            await queue.commit(step)

        await assert_flat(cycle, warm_up=20, cycles=100)
        await queue.close()
        assert list((tmp_path / "groups").iterdir()) == []

    asyncio.run(main())


def test_episodes_leave_nothing_in_the_fleet():
    """U17, U19: no sticky place, no load, no environment."""

    async def main():
        engines = [FakeEngine(name="a"), FakeEngine(name="b")]
        fleet = Fleet(engines)
        episodes = runner(fleet, FakeEnv, pool=2)

        async def cycle(number):
            await episodes.run("t", f"g{number}", number)
            for engine in engines:
                engine.requests.clear()

        await assert_flat(cycle, warm_up=50, cycles=500)
        assert [(load.requests, load.episodes) for load in fleet.loads()] == [(0, 0), (0, 0)]

    asyncio.run(main())


def test_nothing_forks_a_process_that_has_threads():
    """U20: children are executed anew; nothing of this process runs between fork and exec."""
    for folder in ("relax_agent", "envs", "tools", "trainers"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [
                    alias.name for alias in getattr(node, "names", []) if hasattr(alias, "name")
                ]
                names += [getattr(node, "module", None) or "", getattr(node, "attr", "")]
                names += [word.arg or "" for word in getattr(node, "keywords", [])]
                forbidden = {"multiprocessing", "preexec_fn", "forkpty"} & set(names)
                assert not forbidden, f"{path}: {forbidden}"
                is_os_fork = (
                    isinstance(node, ast.Attribute)
                    and node.attr == "fork"
                    and isinstance(node.value, ast.Name)
                    and node.value.id == "os"
                )
                assert not is_os_fork, f"{path}: os.fork"

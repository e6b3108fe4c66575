"""Warm-up hooks run once in a process, before anybody waits for an answer."""

import asyncio
import threading

import pytest

from relax_agent.envs import Task, ToolEnv
from relax_agent.errors import ToolError
from relax_agent.tools import Toolset, tool
from relax_agent.tools.shelf import MediaShelf
from relax_agent.tools.warming import is_warm, warm_once


def tool_with(hook):
    @tool(warm_up=hook)
    def look() -> str:
        """Look."""
        return "seen"

    return look


def counted(hold=None):
    """A plain hook that counts its runs, and the list of them."""
    runs = []

    def hook():
        runs.append(threading.current_thread())
        if hold is not None:
            assert hold.wait(10)

    return hook, runs


def test_many_that_begin_at_once_share_one_run_and_all_wait_for_it():
    hold = threading.Event()
    hook, runs = counted(hold)

    async def main():
        toolset = Toolset([tool_with(hook)])
        waiting = [asyncio.create_task(toolset.warm_up()) for _ in range(50)]
        while not runs:  # noqa: ASYNC110 (it runs in a thread)
            await asyncio.sleep(0)
        assert not any(each.done() for each in waiting) and not is_warm(hook)
        hold.set()
        await asyncio.gather(*waiting)

    asyncio.run(main())
    asyncio.run(Toolset([tool_with(hook)]).warm_up())  # another loop, another toolset
    assert len(runs) == 1 and is_warm(hook)
    assert runs[0] is not threading.current_thread()


def test_whoever_waits_can_be_cancelled_alone():
    hold = threading.Event()
    hook, runs = counted(hold)

    async def main():
        first = asyncio.create_task(warm_once(hook, "look"))
        second = asyncio.create_task(warm_once(hook, "look"))
        while not runs:  # noqa: ASYNC110 (it runs in a thread)
            await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait([second])
        assert second.cancelled() and not first.done()
        hold.set()
        await first

    asyncio.run(main())
    assert len(runs) == 1


def test_after_a_cancelled_run_the_next_one_who_waits_runs_it():
    runs = []

    async def hook():
        runs.append(1)
        if len(runs) == 1:
            await asyncio.Event().wait()

    async def main():
        first = asyncio.create_task(warm_once(hook, "look"))
        await asyncio.sleep(0)
        second = asyncio.create_task(warm_once(hook, "look"))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait_for(second, 10)
        assert first.cancelled()

    asyncio.run(main())
    assert len(runs) == 2 and is_warm(hook)


def test_a_failed_run_is_told_to_all_who_waited_and_tried_again_later():
    runs = []

    def hook():
        runs.append(1)
        if len(runs) == 1:
            raise OSError("no such file")

    async def main():
        toolset = Toolset([tool_with(hook)])
        found = await asyncio.gather(toolset.warm_up(), toolset.warm_up(), return_exceptions=True)
        assert [str(each) for each in found] == [
            "the warm-up of look failed with OSError: no such file"
        ] * 2
        await toolset.warm_up()

    asyncio.run(main())
    assert len(runs) == 2


@pytest.mark.parametrize("around", [Toolset, MediaShelf])
def test_an_environment_is_warm_before_its_first_episode(around):
    hook, runs = counted()

    class Looking(ToolEnv):
        tools = around([tool_with(hook)])
        tasks = (Task("look", "Look."),)

        def setup(self, task):
            assert runs

        def score(self, task, transcript):
            return 1.0

    async def main():
        for _ in range(3):
            async with Looking() as env:
                await env.reset(seed=0)

    asyncio.run(main())
    assert len(runs) == 1


def test_an_environment_whose_tools_cannot_be_warmed_up_says_so():
    def hook():
        raise RuntimeError("no model")

    class Looking(ToolEnv):
        tools = (tool_with(hook),)
        tasks = (Task("look", "Look."),)

        def score(self, task, transcript):
            return 1.0

    async def main():
        async with Looking() as env:
            await env.reset(seed=0)

    with pytest.raises(ToolError, match="the warm-up of look failed with RuntimeError: no model"):
        asyncio.run(main())

"""Warm-up hooks, each run once in a process, whoever asks first.

The first call of some libraries compiles for seconds. A hook makes that call before anybody waits
for an answer. Servers run the hooks before they are ready, environments before their first episode;
of many environments that begin at the same time one runs a hook and the others wait for it. A hook
that failed, or whose runner was cancelled, is run again by the next one who asks.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from concurrent.futures import Future
from typing import Any

from relax_agent.errors import ToolError, one_line
from relax_agent.threads import THREADS
from relax_agent.tools.declaration import WarmUp

_RUNS: dict[WarmUp, Future[None]] = {}
"""By hook: its run, while it goes on and after it went well."""
_LOCK = threading.Lock()


def is_warm(hook: WarmUp) -> bool:
    """Tell whether a hook has run to its end in this process."""
    run = _RUNS.get(hook)
    return run is not None and run.done() and not run.cancelled() and run.exception() is None


async def warm_once(hook: WarmUp, name: str) -> None:
    """Run a hook unless that was done before, or wait for whoever does it right now.

    Args:
        hook: Plain (it runs in a thread) or async.
        name: The tool that messages name.

    Raises:
        ToolError: It failed.
    """
    while not is_warm(hook):
        with _LOCK:
            other = _RUNS.get(hook)
            mine: Future[None] = Future()
            if other is None:
                _RUNS[hook] = mine
        if other is None:
            await _run(hook, name, mine)
        elif not await _succeeded(other):
            await asyncio.sleep(0)


async def _succeeded(run: Future[None]) -> bool:
    """Wait for another one's run, without a hold on it; return whether it went to its end.

    Raises:
        ToolError: It failed.
    """
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def wake(_: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(done.set)

    run.add_done_callback(wake)
    await done.wait()
    if run.cancelled():
        return False
    run.result()
    return True


async def _run(hook: WarmUp, name: str, run: Future[None]) -> None:
    try:
        value: Any = hook() if inspect.iscoroutinefunction(hook) else await THREADS.run(hook)
        if inspect.isawaitable(value):
            await value
    except BaseException as error:
        del _RUNS[hook]
        if not isinstance(error, Exception):
            run.cancel()
            raise
        failure = ToolError(f"the warm-up of {name} failed with {one_line(error)}")
        run.set_exception(failure)
        raise failure from error
    run.set_result(None)

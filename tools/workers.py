"""A tool server of several processes on one port.

This process takes the port and looks after the workers, each of which is a whole tool server that
listens there too (:mod:`relax_agent.tools.worker`); the kernel spreads connections. Sessions stay
with the worker that opened them; the others pass requests on (:mod:`relax_agent.tools.peers`). A
worker that dies is told of and started again, and its sessions are lost; one that dies again and
again ends the server. Workers are linked processes: whatever becomes of this one, none of them is
left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relax_agent.errors import ChildDied, RelaxError, ToolError
from relax_agent.links import LinkedProcess
from relax_agent.tools.service import ServiceLimits
from relax_agent.tools.serving import bind, serve_process, url_of, write_port

logger = logging.getLogger(__name__)

TOKEN = "RELAX_AGENT_TOOLS_TOKEN"
"""The variable through which a worker learns the bearer token."""
_START_S = 600.0
"""Seconds for imports and the tools' warm-up."""
_LIVED_S, _DEATHS = 10.0, 5
"""A worker that so many times in a row lives for less than that is not started again."""
_END_S = 15.0


@dataclass(frozen=True)
class WorkerPlan:
    """What a worker is told; plain data."""

    module: str
    host: str
    port: int
    folder: str
    """Where the workers' own sockets are."""
    number: int
    count: int
    drain_s: float
    log_level: str
    trace: str | None
    limits: dict[str, Any]


def serve_workers(
    module: str,
    *,
    workers: int,
    host: str = "127.0.0.1",
    port: int = 8100,
    token: str | None = None,
    port_file: Path | None = None,
    parent_pid: int | None = None,
    limits: ServiceLimits | None = None,
    drain_s: float = 10.0,
    trace: Path | None = None,
    log_level: str = "warning",
    announce: Callable[[str], None] | None = None,
) -> None:
    """Serve a module of tools from several processes until the end.

    Args:
        module: ``module`` or ``module:attribute``; each worker imports it.
        workers: How many.
        host: Where to listen; anything but the loopback needs a token.
        port: 0 takes a free one.
        token: The bearer token that callers must send.
        port_file: Gets the real port once all workers take calls.
        parent_pid: The process with which this one ends.
        limits: Sizes, sessions and times, of each worker.
        drain_s: Seconds that running calls get at the end.
        trace: A file that gets one line of JSON for each call.
        log_level: From which level on workers log.
        announce: Called with the URL once all workers take calls.

    Raises:
        ConfigError: The port is in use, the module cannot be loaded, or the token is missing.
        ToolError: A tool's warm-up failed, or a worker does not stay alive.
    """
    listener = bind(host, port, token, shared=True)

    def ready() -> None:
        if port_file is not None:
            write_port(port_file, listener.getsockname()[1])
        if announce is not None:
            announce(url_of(host, listener))

    folder = tempfile.mkdtemp(prefix="relax-tools-")
    plan = WorkerPlan(
        module,
        host,
        listener.getsockname()[1],
        folder,
        0,
        workers,
        drain_s,
        log_level,
        None if trace is None else str(trace.absolute()),
        asdict(limits or ServiceLimits()),
    )
    try:
        serve_process(_Front(plan, token, ready), listener, parent_pid=parent_pid)  # type: ignore[arg-type]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Front:
    """Starts the workers, starts dead ones again, and ends them all."""

    def __init__(self, plan: WorkerPlan, token: str | None, on_ready: Callable[[], None]) -> None:
        self._plan = plan
        self._env = {TOKEN: token} if token else {}
        self._on_ready = on_ready
        self._links: dict[int, LinkedProcess] = {}
        self._signals = 0
        self._ending: asyncio.Event

    def end(self) -> None:
        """Let running calls end, then all workers."""
        self._ending.set()

    def _signalled(self) -> None:
        self._signals += 1
        self.end()
        if self._signals > 1:
            for link in self._links.values():
                link.kill("it was told to end at once")

    async def serve(self, sockets: list[socket.socket]) -> None:
        """Run until the end. The sockets hold the port, and accept nothing."""
        self._ending = asyncio.Event()
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, self._signalled)
        try:
            async with asyncio.TaskGroup() as group:
                started = [asyncio.Event() for _ in range(self._plan.count)]
                for number, event in enumerate(started):
                    group.create_task(self._keep(number, event))
                group.create_task(self._tell_ready(started))
        except BaseExceptionGroup as failures:
            raise _first(failures) from None
        finally:
            for link in self._links.values():
                link.abandon()

    async def _tell_ready(self, started: list[asyncio.Event]) -> None:
        waits = [asyncio.ensure_future(each.wait()) for each in started]
        everyone: asyncio.Future[Any] = asyncio.gather(*waits)
        ending: asyncio.Future[Any] = asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait({everyone, ending}, return_when=asyncio.FIRST_COMPLETED)
            if everyone.done():
                self._on_ready()
        finally:
            everyone.cancel()
            ending.cancel()
            await asyncio.gather(everyone, ending, return_exceptions=True)

    async def _keep(self, number: int, started: asyncio.Event) -> None:
        """Have one worker at all times until the end."""
        deaths, loop = 0, asyncio.get_running_loop()
        while not self._ending.is_set():
            link = await self._start(number)
            began = loop.time()
            started.set()
            try:
                await self._watch(link)
                return
            except ChildDied as death:
                if self._ending.is_set():
                    return
                logger.error("%s; its sessions are lost, it is started again", death)
                deaths = deaths + 1 if loop.time() - began < _LIVED_S else 1
                if deaths >= _DEATHS:
                    words = f"a tool worker died {deaths} times in a row: {death}"
                    raise ToolError(words) from death
                await asyncio.sleep(0.1 * 2**deaths)
            finally:
                link.abandon()

    async def _start(self, number: int) -> LinkedProcess:
        plan = WorkerPlan(**{**asdict(self._plan), "number": number})
        link = self._links[number] = await LinkedProcess.start_async(
            f"tool-worker-{number}",
            [sys.executable, "-m", "relax_agent.tools.worker", json.dumps(asdict(plan))],
            start_timeout_s=_START_S,
            env=self._env,
            failure=ToolError,
            on_output=_pass_on,
        )
        return link

    async def _watch(self, link: LinkedProcess) -> None:
        """Wait until a worker has ended, and tell it when it is to end."""
        waiting = asyncio.ensure_future(link.request({"do": "wait"}))
        ending = asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait({waiting, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                limit = self._plan.drain_s + _END_S
                with contextlib.suppress(RelaxError):  # killed meanwhile, or too slow
                    await link.request({"do": "end"}, timeout_s=limit)
                    await waiting
            else:
                waiting.result()
        finally:
            for task in (waiting, ending):
                task.cancel()
            await asyncio.gather(waiting, ending, return_exceptions=True)
        await link.close()


def _pass_on(data: bytes) -> None:
    """Let a worker's output be this process's."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.buffer.write(data)
        sys.stderr.flush()


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    for each in failures.exceptions:
        if isinstance(each, BaseExceptionGroup):
            return _first(each)
        if isinstance(each, RelaxError):
            return each
    return failures.exceptions[0]

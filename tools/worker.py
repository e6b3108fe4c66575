"""One worker of a tool server: a whole server on the shared port, and on a socket of its own.

Started by :mod:`relax_agent.tools.workers` at the other end of a link.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax_agent.link_server import serve_link
from relax_agent.tools.app import create_tool_app
from relax_agent.tools.loading import load_toolset
from relax_agent.tools.logs import log_as_json
from relax_agent.tools.peers import Peers
from relax_agent.tools.server import ToolServer
from relax_agent.tools.service import ServiceLimits
from relax_agent.tools.serving import bind
from relax_agent.tools.trace import trace_to
from relax_agent.tools.workers import TOKEN, WorkerPlan


class _Worker:
    def __init__(self, plan: WorkerPlan) -> None:
        self._plan = plan
        self._stack = contextlib.ExitStack()
        self._server: ToolServer
        self._task: asyncio.Task[None]

    async def begin(self) -> dict[str, Any]:
        """Start to serve; ready when the tools are warm."""
        plan = self._plan
        log_as_json(plan.log_level)
        token = os.environ.pop(TOKEN, None)
        folder = Path(plan.folder)
        peers = Peers(folder, plan.number, plan.count, token)
        app = create_tool_app(
            load_toolset(plan.module),
            token=token,
            limits=ServiceLimits(**plan.limits),
            worker=plan.number,
            peers=peers,
        )
        self._stack.enter_context(trace_to(Path(plan.trace) if plan.trace else None))
        listener = bind(plan.host, plan.port, token, shared=True)
        own = _unix_socket(folder / f"{plan.number}.sock")
        ready = asyncio.Event()
        self._server = ToolServer(app, ready.set, plan.drain_s)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._server.end)  # also when the parent was killed
        self._task = loop.create_task(self._server._serve([listener, own]))
        self._task.add_done_callback(lambda _: ready.set())
        await ready.wait()
        if self._task.done():
            self._task.result()
        return {"worker": plan.number}

    async def answer(
        self, request: dict[str, Any], blobs: list[bytes]
    ) -> tuple[dict[str, Any], Sequence[bytes]]:
        """Answer the parent: ``end`` begins the end, ``wait`` is answered when it is reached."""
        if request["do"] == "end":
            self._server.end()
        await asyncio.wait({self._task})
        self._task.result()
        return {}, []

    async def end(self) -> None:
        """Stop, if the parent is gone without a word."""
        self._server.end()
        await asyncio.wait({self._task})
        self._stack.close()
        folder = Path(self._plan.folder)
        (folder / f"{self._plan.number}.sock").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the last one takes the folder along
            folder.rmdir()


def _unix_socket(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    own.bind(str(path))
    return own


def main() -> None:
    """Serve the parent's plan."""
    worker = _Worker(WorkerPlan(**json.loads(sys.argv[1])))
    serve_link(worker.answer, setup=worker.begin, teardown=worker.end)


if __name__ == "__main__":
    main()

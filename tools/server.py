"""A tool server as a process: ``python -m relax_agent.tools.server MODULE --port 0``.

The listening socket is bound before anything else, so a port in use is one clear line and exit
status 2. The real port goes to ``--port-file`` once calls are taken, which is after the tools'
warm-up hooks. The process ends by itself when whoever started it is gone: when its standard input
is a pipe and the pipe closes, or when ``--parent-pid`` no longer lives. SIGTERM begins nothing new,
gives running calls ``--drain`` seconds, closes every session, and ends with status 0; a second
one ends it at once. With ``--workers N`` this process only looks after N others
(:mod:`relax_agent.tools.workers`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from relax_agent.errors import ConfigError, RelaxError
from relax_agent.tools.app import create_tool_app
from relax_agent.tools.leases import LEASE_S, MAX_SESSIONS
from relax_agent.tools.loading import load_toolset
from relax_agent.tools.logs import log_as_json
from relax_agent.tools.service import ServiceLimits, ToolService
from relax_agent.tools.serving import (
    Server,
    bind,
    config_of,
    running,
    serve_process,
    token_from,
    url_of,
    write_port,
)
from relax_agent.tools.toolset import Toolset
from relax_agent.tools.trace import trace_to

__all__ = ["ToolServer", "create_tool_app", "open_server", "serve", "token_from"]

logger = logging.getLogger(__name__)

DRAIN_S = 10.0
"""Seconds that running calls get after SIGTERM."""


class ToolServer(Server):
    """A server that is ready when its tools are warm, and lets running calls end before it does."""

    def __init__(
        self, app: FastAPI, on_ready: Callable[[], None], drain_s: float = DRAIN_S
    ) -> None:
        super().__init__(config_of(app, lifespan="on", log_config=None), on_ready)
        self._service: ToolService = app.state.service
        self._drain_s = drain_s
        self._draining: asyncio.Task[None] | None = None

    async def opened(self) -> None:
        """Wait until the tools are warm.

        Raises:
            ToolError: A warm-up hook failed.
        """
        warming = self._service.start()
        while not warming.done() and not self.should_exit:
            await asyncio.wait({warming}, timeout=0.1)
        if self._service.failure is not None:
            raise self._service.failure

    def stop(self) -> None:
        """Begin nothing new, and stop when no call runs; asked twice, stop at once."""
        if self._draining is None and self.started:
            self._draining = asyncio.ensure_future(self._drain())
        else:
            super().stop()

    async def _drain(self) -> None:
        running = self._service.metrics.in_flight
        logger.info("told to stop", extra={"facts": {"calls": running, "grace_s": self._drain_s}})
        await self._service.drain(self._drain_s)
        if not self.should_exit:
            super().stop()


def serve(
    toolset: Toolset,
    *,
    host: str = "127.0.0.1",
    port: int = 8100,
    token: str | None = None,
    port_file: Path | None = None,
    parent_pid: int | None = None,
    limits: ServiceLimits | None = None,
    drain_s: float = DRAIN_S,
    trace: Path | None = None,
    announce: Callable[[str], None] | None = None,
) -> None:
    """Serve a toolset until a signal, a closed standard input or the parent's end.

    Args:
        toolset: The tools.
        host: Where to listen; anything but the loopback needs a token.
        port: 0 takes a free one.
        token: The bearer token that callers must send.
        port_file: Gets the real port once calls are taken.
        parent_pid: The process with which this one ends.
        limits: Sizes, sessions and times.
        drain_s: Seconds that running calls get at the end.
        trace: A file that gets one line of JSON for each call.
        announce: Called with the URL once calls are taken.

    Raises:
        ConfigError: The port is in use, the host is not ours, or the token is missing.
        ToolError: A tool's warm-up failed.
    """
    listener = bind(host, port, token)
    app = create_tool_app(toolset, token=token, limits=limits)

    def ready() -> None:
        if port_file is not None:
            write_port(port_file, listener.getsockname()[1])
        if announce is not None:
            announce(url_of(host, listener))

    with trace_to(trace):
        serve_process(ToolServer(app, ready, drain_s), listener, parent_pid=parent_pid)


@contextlib.asynccontextmanager
async def open_server(
    toolset: Toolset,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    limits: ServiceLimits | None = None,
    drain_s: float = 0.0,
) -> AsyncIterator[str]:
    """Serve a toolset inside this event loop; yields the URL.

    For tests, notebooks and programs that are tool server and something else at once.
    """
    app = create_tool_app(toolset, token=token, limits=limits)
    listener = bind(host, port, token)

    def server(ready: Callable[[], None]) -> Server:
        return ToolServer(app, ready, drain_s)

    async with running(server, host, listener) as url:
        yield url


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server as a program and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m relax_agent.tools.server", description="Serve a module of tools over HTTP."
    )
    parser.add_argument("module", help="module or module:attribute")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100, help="0 takes a free one")
    parser.add_argument("--port-file", type=Path, help="gets the real port when ready")
    parser.add_argument("--token-env", metavar="NAME", help="the variable with the bearer token")
    parser.add_argument("--parent-pid", type=int, help="end when this process does")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the port")
    parser.add_argument("--drain", type=float, default=DRAIN_S, help="seconds for running calls")
    parser.add_argument("--lease", type=float, default=LEASE_S, help="seconds of an idle session")
    parser.add_argument("--max-sessions", type=int, default=MAX_SESSIONS, help="in each process")
    parser.add_argument("--trace", type=Path, help="a file that gets one line for each call")
    parser.add_argument("--log-level", default="warning", choices=LOG_LEVELS)
    options = parser.parse_args(argv)
    try:
        return run(options)
    except RelaxError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


LOG_LEVELS = ("debug", "info", "warning", "error")


def run(options: Any, announce: Callable[[str], None] | None = None) -> int:
    """Serve what the options say until the end.

    Args:
        options: What the parser in :func:`main` gives.
        announce: Called with the URL once calls are taken.
    """
    log_as_json(options.log_level)
    token = getattr(options, "token", None) or token_from(getattr(options, "token_env", None))
    if options.workers < 1:
        raise ConfigError(f"--workers must be at least 1, not {options.workers}")
    common: dict[str, Any] = {
        "host": options.host,
        "port": options.port,
        "token": token,
        "port_file": options.port_file,
        "parent_pid": options.parent_pid,
        "drain_s": options.drain,
        "limits": ServiceLimits(lease_s=options.lease, max_sessions=options.max_sessions),
        "announce": announce,
    }
    if options.workers == 1:
        serve(load_toolset(options.module), trace=options.trace, **common)
    else:
        from relax_agent.tools.workers import serve_workers

        serve_workers(
            options.module,
            workers=options.workers,
            trace=options.trace,
            log_level=options.log_level,
            **common,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

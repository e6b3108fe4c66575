"""A tool server as a process: ``python -m relax_agent.tools.server MODULE --port 0``.

The listening socket is bound before anything else, so a port in use is one clear line and exit
status 2. The real port goes to ``--port-file`` once calls are taken. The process ends by itself
when whoever started it is gone: when its standard input is a pipe and the pipe closes, or when
``--parent-pid`` no longer lives. SIGTERM stops new connections and gives running calls a few
seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from relax_agent.errors import RelaxError
from relax_agent.tools.app import MAX_REQUEST_BYTES, create_tool_app
from relax_agent.tools.loading import load_toolset
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

__all__ = ["create_tool_app", "open_server", "serve", "token_from"]


def serve(
    toolset: Toolset,
    *,
    host: str = "127.0.0.1",
    port: int = 8100,
    token: str | None = None,
    port_file: Path | None = None,
    parent_pid: int | None = None,
    max_request_bytes: int = MAX_REQUEST_BYTES,
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
        max_request_bytes: Size limit of one call's arguments.
        announce: Called with the URL once calls are taken.

    Raises:
        ConfigError: The port is in use, the host is not ours, or the token is missing.
    """
    listener = bind(host, port, token)
    app = create_tool_app(toolset, token=token, max_request_bytes=max_request_bytes)

    def ready() -> None:
        if port_file is not None:
            write_port(port_file, listener.getsockname()[1])
        if announce is not None:
            announce(url_of(host, listener))

    serve_process(Server(config_of(app), ready), listener, parent_pid=parent_pid)


@contextlib.asynccontextmanager
async def open_server(
    toolset: Toolset, *, host: str = "127.0.0.1", port: int = 0, token: str | None = None
) -> AsyncIterator[str]:
    """Serve a toolset inside this event loop; yields the URL.

    For tests, notebooks and programs that are tool server and something else at once.
    """
    app = create_tool_app(toolset, token=token)
    listener = bind(host, port, token)
    async with running(lambda ready: Server(config_of(app), ready), host, listener) as url:
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
    options = parser.parse_args(argv)
    try:
        serve(
            load_toolset(options.module),
            host=options.host,
            port=options.port,
            token=token_from(options.token_env),
            port_file=options.port_file,
            parent_pid=options.parent_pid,
        )
    except RelaxError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A tool server as a process: ``python -m relax_agent.tools.server MODULE --port 0``.

The listening socket is bound before anything else, so a port in use is one clear line and exit
status 2. The real port goes to ``--port-file`` once calls are taken. The process ends by itself
when whoever started it is gone: when its standard input is a pipe and the pipe closes, or when
``--parent-pid`` no longer lives. SIGTERM stops new connections and gives running calls a few
seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import uvicorn

from relax_agent.errors import ConfigError, RelaxError
from relax_agent.tools.app import MAX_REQUEST_BYTES, create_tool_app
from relax_agent.tools.loading import load_toolset
from relax_agent.tools.toolset import Toolset

__all__ = ["create_tool_app", "open_server", "serve"]

_DRAIN_S = 3
"""Seconds that running calls get after SIGTERM."""
_KEEP_ALIVE_S = 75
"""Idle connections live longer here than in the client, which therefore never finds one dead."""
_PARENT_POLL_S = 0.5


class _Server(uvicorn.Server):
    """Uvicorn with an orderly end: a signal is a request to stop, and the exit status is 0."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, then say so."""
        await super().startup(sockets)
        self._on_ready()

    def stop(self) -> None:
        """Stop; asked twice, at once."""
        self.force_exit = self.should_exit
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Turn SIGINT and SIGTERM into :meth:`stop`."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


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
    listener = _bind(host, port, token)
    app = create_tool_app(toolset, token=token, max_request_bytes=max_request_bytes)

    def ready() -> None:
        if port_file is not None:
            _write_port(port_file, listener.getsockname()[1])
        if announce is not None:
            announce(_url(host, listener))

    with listener:
        asyncio.run(_serve(_Server(_config(app), ready), listener, parent_pid))


@contextlib.asynccontextmanager
async def open_server(
    toolset: Toolset, *, host: str = "127.0.0.1", port: int = 0, token: str | None = None
) -> AsyncIterator[str]:
    """Serve a toolset inside this event loop; yields the URL.

    For tests, notebooks and programs that are tool server and something else at once.
    """
    listener = _bind(host, port, token)
    ready = asyncio.Event()
    server = _Server(_config(create_tool_app(toolset, token=token)), ready.set)
    with listener:
        task = asyncio.ensure_future(server._serve([listener]))
        task.add_done_callback(lambda _: ready.set())
        try:
            await ready.wait()
            if task.done():
                task.result()
            yield _url(host, listener)
        finally:
            server.stop()
            await asyncio.shield(task)


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


def token_from(variable: str | None) -> str | None:
    """Return the token that an environment variable holds; None if none is named."""
    if variable is None:
        return None
    token = os.environ.get(variable, "")
    if not token:
        raise ConfigError(f"the variable {variable} holds no token", hint=f"export {variable}=…")
    return token


def _config(app: object) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_DRAIN_S,
    )


def _bind(host: str, port: int, token: str | None) -> socket.socket:
    """Bind the listening socket, or raise ConfigError in plain words."""
    if token is None and not _is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from outside, and there is no token",
            hint="name a token with --token-env, or listen on 127.0.0.1",
        )
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}",
            hint="choose another --port; 0 takes a free one",
        ) from error
    return listener


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _url(host: str, listener: socket.socket) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"


def _write_port(path: Path, port: int) -> None:
    """Write the port so that a reader sees all of it or nothing."""
    try:
        part = path.with_name(f"{path.name}.part")
        part.write_text(f"{port}\n")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


async def _serve(server: _Server, listener: socket.socket, parent_pid: int | None) -> None:
    loop = asyncio.get_running_loop()
    _watch_stdin(lambda: loop.call_soon_threadsafe(server.stop))
    parent = asyncio.ensure_future(_watch_parent(server, parent_pid))
    try:
        await server.serve([listener])
    finally:
        parent.cancel()
        await asyncio.gather(parent, return_exceptions=True)


def _watch_stdin(stop: Callable[[], object]) -> None:
    """Call ``stop`` when standard input is a pipe whose other end closes."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return

    def read() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            stop()

    threading.Thread(target=read, name="relax-stdin", daemon=True).start()


async def _watch_parent(server: _Server, pid: int | None) -> None:
    if pid is None:
        return
    is_parent = os.getppid() == pid
    # Another process's end is nothing that this loop could be told of.
    while (os.getppid() == pid) if is_parent else _lives(pid):  # noqa: ASYNC110
        await asyncio.sleep(_PARENT_POLL_S)
    server.stop()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    sys.exit(main())

"""A server as a process: its listening socket, its signals, and the end of whoever started it.

Tool servers and environment servers share this. The listening socket is bound before anything else,
so a port in use is one clear line. The process ends by itself when whoever started it is gone: when
its standard input is a pipe and the pipe closes, or when the parent no longer lives. SIGTERM asks
the server to stop; asked twice, it stops at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
import stat
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from relax_agent.errors import ConfigError
from relax_agent.tools.one_write import http_class

DRAIN_S = 3
"""Seconds that running calls get after the server was told to stop."""
KEEP_ALIVE_S = 75
"""Idle connections live longer here than in the client, which therefore never finds one dead."""
_PARENT_POLL_S = 0.5
_FORCED_END_S = 2.0
"""Seconds for giving things back where the server was told to end at once."""
_KEEP_IDLE_S, _KEEP_EVERY_S, _KEEP_TRIES = 30, 10, 3


class Server(uvicorn.Server):
    """Uvicorn with an orderly end: a signal is a request to stop, and the exit status is 0."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._ending = False
        self._signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, then say so."""
        await super().startup(sockets)
        if self.started:
            try:
                await self.opened()
            except BaseException:
                await self.shutdown(sockets)
                raise
            self._on_ready()

    async def opened(self) -> None:
        """Do what must be done before the server is ready; it listens already."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop to listen, let connections end, and let the application give back what it holds."""
        await super().shutdown(sockets)
        if self.force_exit:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FORCED_END_S):
                    await self.lifespan.shutdown()

    def end(self) -> None:
        """Stop, because nobody needs this server any more; said again it changes nothing."""
        if not self._ending:
            self._ending = True
            self.stop()

    def _signalled(self) -> None:
        """Stop; a second signal means at once."""
        self._signals += 1
        if self._signals > 1:
            self.stop()
        else:
            self.end()

    def stop(self) -> None:
        """Stop; asked twice, at once."""
        self.force_exit = self.should_exit
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Turn SIGINT and SIGTERM into :meth:`end`, and a second one into :meth:`stop`."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self._signalled)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


def serve_process(
    server: Server,
    listener: socket.socket,
    *,
    parent_pid: int | None = None,
) -> None:
    """Run a server until a signal, a closed standard input or the parent's end."""
    with listener:
        asyncio.run(_serve(server, listener, parent_pid))


@contextlib.asynccontextmanager
async def running(
    make_server: Callable[[Callable[[], None]], Server], host: str, listener: socket.socket
) -> AsyncIterator[str]:
    """Run a server inside this event loop; yields its URL.

    Args:
        make_server: Builds the server, given what it calls once it takes calls.
        host: What the URL names.
        listener: Closed at the end.
    """
    ready = asyncio.Event()
    server = make_server(ready.set)
    with listener:
        task = asyncio.ensure_future(server._serve([listener]))
        task.add_done_callback(lambda _: ready.set())
        try:
            await ready.wait()
            if task.done():
                task.result()
            yield url_of(host, listener)
        finally:
            server.end()
            await asyncio.shield(task)


def token_from(variable: str | None) -> str | None:
    """Return the token that an environment variable holds; None if none is named."""
    if variable is None:
        return None
    token = os.environ.get(variable, "")
    if not token:
        raise ConfigError(f"the variable {variable} holds no token", hint=f"export {variable}=…")
    return token


def config_of(app: object, **options: Any) -> uvicorn.Config:
    """Return uvicorn's settings for an application of this project."""
    settings: dict[str, Any] = {
        "http": http_class(),
        "log_level": "warning",
        "access_log": False,
        "lifespan": "off",
        "timeout_keep_alive": KEEP_ALIVE_S,
        "timeout_graceful_shutdown": DRAIN_S,
    }
    return uvicorn.Config(app, **{**settings, **options})  # type: ignore[arg-type]


def bind(host: str, port: int, token: str | None, *, shared: bool = False) -> socket.socket:
    """Bind the listening socket, or raise ConfigError in plain words.

    Args:
        host: Where to listen; anything but the loopback needs a token.
        port: 0 takes a free one.
        token: The bearer token that callers must send.
        shared: Whether other processes of this user may listen there as well; the kernel then
            spreads connections over them.
    """
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
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _keep_alive(listener)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}",
            hint="choose another --port; 0 takes a free one",
        ) from error
    return listener


def _keep_alive(listener: socket.socket) -> None:
    """Let the kernel find out which peers have vanished; accepted sockets inherit this."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _KEEP_IDLE_S),
        ("TCP_KEEPINTVL", _KEEP_EVERY_S),
        ("TCP_KEEPCNT", _KEEP_TRIES),
    ):
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def url_of(host: str, listener: socket.socket) -> str:
    """Return the URL under which a bound listener is reached."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"


def write_port(path: Path, port: int) -> None:
    """Write the port so that a reader sees all of it or nothing."""
    try:
        part = path.with_name(f"{path.name}.part")
        part.write_text(f"{port}\n")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


async def _serve(server: Server, listener: socket.socket, parent_pid: int | None) -> None:
    loop = asyncio.get_running_loop()
    _watch_stdin(lambda: loop.call_soon_threadsafe(server.end))
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


async def _watch_parent(server: Server, pid: int | None) -> None:
    if pid is None:
        return
    is_parent = os.getppid() == pid
    # Another process's end is nothing that this loop could be told of.
    while (os.getppid() == pid) if is_parent else _lives(pid):  # noqa: ASYNC110
        await asyncio.sleep(_PARENT_POLL_S)
    server.end()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

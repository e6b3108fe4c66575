"""An environment as a service: WebSocket and HTTP from one FastAPI application.

    WS   /ws       one environment for each connection (:mod:`relax_agent.envs.serving.websocket`)
    POST /reset …  the same for ``curl`` (:mod:`relax_agent.envs.serving.routes`)
    GET  /env      the manifest: id, tools, ids of tasks; never an answer
    GET  /healthz  the process lives;  GET /readyz  a slot is free;  GET /metrics  counters

:func:`serve` runs it as a process: SIGTERM lets running episodes end for a while and begins no
new ones, a second one ends it. With a token everything but the two probes needs it; without one,
web pages from elsewhere are refused, and only the loopback is listened on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from starlette.routing import WebSocketRoute

from relax_agent.envs.registration import spec as find_spec
from relax_agent.envs.serving.leases import Leases, ServingLimits
from relax_agent.envs.serving.routes import HttpSessions, add_routes
from relax_agent.envs.serving.transport import websocket_class
from relax_agent.envs.serving.websocket import WebSocketEndpoint
from relax_agent.envs.specs import EnvSpec
from relax_agent.tools.serving import (
    Server,
    bind,
    config_of,
    running,
    serve_process,
    url_of,
    write_port,
)
from relax_agent.tools.web import json_response, protect

logger = logging.getLogger(__name__)

_PING_S = 20.0
"""Keeps a quiet connection alive through proxies. Nobody is cut off for a late answer: a client
whose loop is busy with a model for a minute cannot give one.
"""
_DRAIN_S = 30.0


def create_env_app(
    env: str | EnvSpec, *, token: str | None = None, limits: ServingLimits | None = None
) -> FastAPI:
    """Return the FastAPI application that serves an environment.

    Args:
        env: Its id or spec.
        token: What callers must send as a bearer token; None lets everyone call.
        limits: Slots, times and sizes.
    """
    leases = Leases(find_spec(env) if isinstance(env, str) else env, limits or ServingLimits())
    sessions = HttpSessions(leases)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await leases.prepare()
        try:
            yield
        finally:
            await sessions.close()
            await leases.close()

    app = FastAPI(title=f"Relax Agent: {leases.spec.id}", redoc_url=None, lifespan=lifespan)
    app.state.leases = leases
    _add_probes(app, leases)
    add_routes(app, leases, sessions)
    app.router.routes.append(WebSocketRoute("/ws", WebSocketEndpoint(leases)))
    protect(app, token)
    return app


def _add_probes(app: FastAPI, leases: Leases) -> None:
    @app.get("/env")
    async def env() -> Response:
        """The manifest."""
        return Response(leases.manifest_json, media_type="application/json")

    @app.get("/healthz")
    async def healthz() -> dict[str, bool]:
        """The process lives."""
        return {"ok": True}

    @app.get("/readyz")
    async def readyz() -> Response:
        """A slot is free."""
        free = 0 if leases.draining else leases.limits.slots - leases.taken
        return json_response({"ready": free > 0, "free": free}, 200 if free > 0 else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Counters, in Prometheus' text format."""
        return Response(_metrics(leases), media_type="text/plain; version=0.0.4")


def _metrics(leases: Leases) -> str:
    lines = ["# TYPE relax_env_requests_total counter"]
    lines += [
        f'relax_env_requests_total{{op="{op}"}} {count}'
        for op, count in sorted(leases.requests.items())
    ]
    for name, kind, value in (
        ("episodes_total", "counter", leases.episodes),
        ("failures_total", "counter", leases.failures),
        ("refused_total", "counter", leases.refused),
        ("left_behind_total", "counter", leases.left_behind),
        ("slots", "gauge", leases.limits.slots),
        ("slots_taken", "gauge", leases.taken),
    ):
        lines += [f"# TYPE relax_env_{name} {kind}", f"relax_env_{name} {value}"]
    return "\n".join(lines) + "\n"


class _EnvServer(Server):
    """A server that lets running episodes end before it does."""

    def __init__(self, app: FastAPI, on_ready: Callable[[], None], drain_s: float) -> None:
        leases: Leases = app.state.leases
        super().__init__(_config(app, leases.limits), on_ready)
        self._leases = leases
        self._drain_s = drain_s
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: Any = None) -> None:
        """Build the first environment, then start to listen."""
        await self._leases.prepare()
        await super().startup(sockets)

    def stop(self) -> None:
        """Begin no new episode, and stop when none runs; asked twice, stop at once."""
        if self._draining is None and self.started:
            self._draining = asyncio.ensure_future(self._drain())
        else:
            super().stop()

    async def _drain(self) -> None:
        running = self._leases.running
        if running and self._drain_s > 0:
            logger.warning(
                "told to stop: %d running episodes get %g s; told again, it stops at once",
                running,
                self._drain_s,
            )
        await self._leases.drain(self._drain_s)
        if not self.should_exit:
            super().stop()


def _config(app: FastAPI, limits: ServingLimits) -> Any:
    return config_of(
        app,
        lifespan="on",
        ws=websocket_class(),
        ws_max_size=limits.max_request_bytes,
        ws_ping_interval=_PING_S,
        ws_ping_timeout=None,
        ws_per_message_deflate=False,
    )


def serve(
    env: str | EnvSpec,
    *,
    host: str = "127.0.0.1",
    port: int = 8200,
    token: str | None = None,
    limits: ServingLimits | None = None,
    drain_s: float = _DRAIN_S,
    port_file: Path | None = None,
    parent_pid: int | None = None,
    announce: Callable[[str], None] | None = None,
) -> None:
    """Serve an environment until a signal, a closed standard input or the parent's end.

    Args:
        env: Its id or spec.
        host: Where to listen; anything but the loopback needs a token.
        port: 0 takes a free one.
        token: The bearer token that callers must send.
        limits: Slots, times and sizes.
        drain_s: Seconds that running episodes get after SIGTERM.
        port_file: Gets the real port once environments can be had.
        parent_pid: The process with which this one ends.
        announce: Called with the ``ws://`` URL once environments can be had.

    Raises:
        ConfigError: The port is in use, the host is not ours, or the token is missing.
        RelaxError: The environment cannot be built.
    """
    listener = bind(host, port, token)
    app = create_env_app(env, token=token, limits=limits)

    def ready() -> None:
        if port_file is not None:
            write_port(port_file, listener.getsockname()[1])
        if announce is not None:
            announce(_ws_url(host, listener))

    serve_process(_EnvServer(app, ready, drain_s), listener, parent_pid=parent_pid)


@contextlib.asynccontextmanager
async def open_env_server(
    env: str | EnvSpec,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    limits: ServingLimits | None = None,
    drain_s: float = 0.0,
) -> AsyncIterator[str]:
    """Serve an environment inside this event loop; yields the ``ws://`` URL.

    For tests, notebooks and programs that are server and something else at once. Whoever connects
    from the same loop uses ``make_async``.
    """
    app = create_env_app(env, token=token, limits=limits)
    listener = bind(host, port, token)

    def server(ready: Callable[[], None]) -> Server:
        return _EnvServer(app, ready, drain_s)

    async with running(server, host, listener) as url:
        yield url.replace("http", "ws", 1)


def _ws_url(host: str, listener: Any) -> str:
    return url_of(host, listener).replace("http", "ws", 1)

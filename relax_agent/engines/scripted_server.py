"""A :class:`~relax_agent.engines.scripted.ScriptedEngine` behind SGLang's HTTP protocol.

Tests put it where real SGLang would be, so that the client, the fleet and the publication of
weights are tested over real sockets. A death closes every connection without an answer. The traps
of the real server are there too: ``/update_weight_version`` aborts all requests unless told not
to, unknown top-level fields are ignored, unknown sampling keys are refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import fields
from types import TracebackType
from typing import Any

from aiohttp import web

from relax_agent.engines.protocol import GenerateRequest, SamplingParams
from relax_agent.engines.scripted import ScriptedEngine
from relax_agent.errors import EngineRejected, EngineUnavailable

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_SAMPLING_NAMES = {"sampling_seed": "seed"}
_BODY_LIMIT = 2**30


class ScriptedServer:
    """Serves an engine on a free port of this machine for the length of an ``async with``."""

    def __init__(self, engine: ScriptedEngine, *, token: str | None = None) -> None:
        self.engine = engine
        self._token = token
        self._runner: web.AppRunner | None = None
        self.url = ""
        """Address, once it serves."""

    async def __aenter__(self) -> ScriptedServer:
        app = web.Application(middlewares=[self._answer_errors], client_max_size=_BODY_LIMIT)
        app.add_routes(self._routes())
        # A short limit: requests that a test left unanswered must not delay its end.
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def _routes(self) -> list[web.RouteDef]:
        posts: dict[str, Handler] = {
            "/generate": self._generate,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/abort_request": self._abort,
            "/flush_cache": self._flush,
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
            "/update_weights_from_disk": self._from_disk,
            "/update_weights_from_tensor": self._from_tensor,
            "/update_weight_version": self._set_version,
        }
        gets: dict[str, Handler] = {
            "/health": self._health,
            "/model_info": self._model_info,
            "/server_info": self._server_info,
        }
        return [web.post(path, handler) for path, handler in posts.items()] + [
            web.get(path, handler) for path, handler in gets.items()
        ]

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn errors of the tree into what SGLang answers; a dead engine answers nothing."""
        if self._token and request.headers.get("Authorization") != f"Bearer {self._token}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        try:
            return await handler(request)
        except EngineRejected as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        except EngineUnavailable as error:
            if not await self.engine.health() and request.transport is not None:
                request.transport.abort()
            return web.json_response({"error": {"message": str(error)}}, status=500)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response(
            await self.engine.answer(_read_request(body), body.get("extra_key") or "")
        )

    async def _pause(self, request: web.Request) -> web.Response:
        await self.engine.pause((await request.json()).get("mode", "abort"))
        return _ok()

    async def _continue(self, request: web.Request) -> web.Response:
        await self.engine.resume()
        return _ok()

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("abort_all") or body.get("rid"):
            await self.engine.abort(None if body.get("abort_all") else _plain_rid(body["rid"]))
        return web.Response()

    async def _flush(self, request: web.Request) -> web.Response:
        await self.engine.flush_cache()
        return web.Response(text="Cache flushed.")

    async def _begin(self, request: web.Request) -> web.Response:
        await self.engine.begin_weight_update()
        return _ok()

    async def _end(self, request: web.Request) -> web.Response:
        await self.engine.end_weight_update()
        return _ok()

    async def _from_disk(self, request: web.Request) -> web.Response:
        body = await request.json()
        await self.engine.update_weights_from_disk(body["model_path"], int(body["weight_version"]))
        if body.get("flush_cache", True):
            await self.engine.flush_cache()
        return _ok()

    async def _from_tensor(self, request: web.Request) -> web.Response:
        version = int(request.query["weight_version"])
        await self.engine.update_weights_from_tensor(await request.read(), version)
        return _ok()

    async def _set_version(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("abort_all_requests", True):
            await self.engine.abort()
        self.engine.version = int(body["new_version"])
        return _ok()

    async def _health(self, request: web.Request) -> web.Response:
        if not await self.engine.health():
            raise EngineUnavailable("it has ended")
        return web.Response()

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response(await self.engine.model_info())

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response(await self.engine.server_info())


def _plain_rid(rid: str) -> str:
    """Undo :func:`~relax_agent.engines.wire.wire_rid`, so that tests see the ids they chose."""
    return rid.removesuffix(";")


def _ok() -> web.Response:
    return web.json_response({"success": True, "message": "ok"})


def _read_request(body: dict[str, Any]) -> GenerateRequest:
    params = {
        _SAMPLING_NAMES.get(name, name): value for name, value in body["sampling_params"].items()
    }
    known = {field.name for field in fields(SamplingParams)}
    unknown = sorted(params.keys() - known)
    if unknown:
        raise EngineRejected(f"unknown field `{unknown[0]}`, expected one of {sorted(known)}")
    params["logit_bias"] = {
        int(token): bias for token, bias in params.get("logit_bias", {}).items()
    }
    return GenerateRequest(
        body["input_ids"],
        SamplingParams(**params),
        _plain_rid(body["rid"]),
        body.get("return_routed_experts", False),
        body.get("routed_experts_start_len", 0),
    )

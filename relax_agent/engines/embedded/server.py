"""The HTTP endpoints, in SGLang's words.

The event loop only parses, waits and answers; all work is done by the scheduler's thread. A
request whose client hangs up is cancelled by aiohttp, and its row is freed. Refusals are 400
with ``{"error": {"message"}}`` (as SGLang's ``/generate``) or ``{"success": false, "message"}``
(as its control endpoints).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from relax_agent.engines.embedded.media import prepare_prompt
from relax_agent.engines.embedded.requests import Job, Limits, parse_generate
from relax_agent.engines.embedded.scheduler import Scheduler
from relax_agent.engines.embedded.settings import EmbeddedSettings
from relax_agent.errors import EngineError, EngineRejected, EngineUnavailable
from relax_agent.media import in_thread

_MAX_BODY = 1 << 36
_HEALTH_S = 5.0
_DECODE_S = 120.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EngineServer:
    """The endpoints over one scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        limits: Limits,
        settings: EmbeddedSettings,
        *,
        token: str | None = None,
    ) -> None:
        """Take what the endpoints speak for; ``token`` is what clients must send."""
        self.scheduler = scheduler
        self.limits = limits
        self.settings = settings
        self._token = token
        self._seeds = random.Random(settings.random_seed)
        self._started = time.time()

    def app(self) -> web.Application:
        """Build the application."""
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[self._guard])
        for path, handler in self._routes().items():
            app.router.add_route("*", path, handler)
        return app

    def _routes(self) -> dict[str, Handler]:
        return {
            "/generate": self.generate,
            "/pause_generation": self.pause_generation,
            "/continue_generation": self.continue_generation,
            "/abort_request": self.abort_request,
            "/flush_cache": self.flush_cache,
            "/begin_weight_update": self.begin_weight_update,
            "/update_weights_from_disk": self.update_weights_from_disk,
            "/update_weights_from_tensor": self.update_weights_from_tensor,
            "/end_weight_update": self.end_weight_update,
            "/update_weight_version": self.update_weight_version,
            "/health": self.health,
            "/health_generate": self.health_generate,
            "/model_info": self.model_info,
            "/get_model_info": self.model_info,
            "/server_info": self.server_info,
            "/get_server_info": self.server_info,
            "/metrics": self.metrics,
        }

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Ask for the token, and turn errors of the tree into SGLang's answers."""
        if not self._allowed(request):
            return _error(401, "missing or wrong bearer token")
        try:
            return await handler(request)
        except EngineRejected as error:
            return _refusal(request.path, str(error))
        except EngineUnavailable as error:
            return _error(503, str(error))
        except EngineError as error:
            return _error(500, str(error))

    def _allowed(self, request: web.Request) -> bool:
        if self._token is None or request.path == "/health":
            return True
        sent = request.headers.get("Authorization", "")
        return hmac.compare_digest(sent.encode(), f"Bearer {self._token}".encode())

    async def generate(self, request: web.Request) -> web.Response:
        """Sample one answer."""
        body = await _json(request)
        job = parse_generate(body, self.limits, self._seeds.getrandbits(63))
        if not self.scheduler.alive:
            raise EngineUnavailable("the engine's scheduler has ended")
        sequence = self.scheduler.submit(await self._with_media(job))
        try:
            outcome = await asyncio.wrap_future(sequence.done)
        except asyncio.CancelledError:
            self.scheduler.cancel(sequence)
            raise
        return _answer(outcome.to_json())

    async def _with_media(self, job: Job) -> Job:
        """Decode the media of a request in a thread, and check them against its placeholders."""
        media = self.scheduler.batch.runner.media
        if media is None:
            if job.media:
                raise EngineRejected(f"this model takes no {' and no '.join(job.media)}")
            return job
        if not job.media:
            return replace(job, prompt=prepare_prompt(media.processor, job.input_ids, {}))
        prepare = partial(prepare_prompt, media.processor, job.input_ids, job.media)
        return replace(job, prompt=await in_thread(prepare, timeout_s=_DECODE_S))

    async def pause_generation(self, request: web.Request) -> web.Response:
        """Stop decoding; ``mode`` says what becomes of running requests."""
        mode = (await _json(request)).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise EngineRejected(f"mode must be abort, retract or in_place, not {mode!r}")
        await asyncio.wrap_future(self.scheduler.pause(mode))
        return _answer({"status": "ok", "message": f"Generation paused ({mode})."})

    async def continue_generation(self, request: web.Request) -> web.Response:
        """Go on decoding."""
        await asyncio.wrap_future(self.scheduler.resume())
        return _answer({"status": "ok", "message": "Generation continued."})

    async def abort_request(self, request: web.Request) -> web.Response:
        """End one request by its exact id, or all."""
        body = await _json(request)
        if body.get("abort_all"):
            await asyncio.wrap_future(self.scheduler.abort(None))
        elif body.get("rid"):
            await asyncio.wrap_future(self.scheduler.abort(str(body["rid"])))
        return web.Response()

    async def flush_cache(self, request: web.Request) -> web.Response:
        """Forget cached prefixes; with ``?timeout=SECONDS`` waits for requests to end."""
        end = time.monotonic() + _seconds(request.query.get("timeout", "0"))
        while not await asyncio.wrap_future(self.scheduler.flush_cache()):
            if time.monotonic() >= end:
                return web.Response(status=400, text="Flush cache failed.\n")
            await asyncio.sleep(0.02)
        return web.Response(text="Cache flushed.\n")

    async def begin_weight_update(self, request: web.Request) -> web.Response:
        """Open a session of weight updates."""
        await asyncio.wrap_future(self.scheduler.begin_update())
        return _success()

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        """Take all tensors of a folder."""
        body = await _json(request)
        folder = body.get("model_path")
        if not isinstance(folder, str) or not Path(folder).is_dir():
            raise EngineRejected(f"model_path {folder!r} is not a folder that this engine can read")
        future = self.scheduler.load_folder(
            Path(folder), _version(body), abort_all=bool(body.get("abort_all_requests"))
        )
        await asyncio.wrap_future(future)
        return _success("Succeeded to update model weights.", num_paused_requests=0)

    async def update_weights_from_tensor(self, request: web.Request) -> web.Response:
        """Take some tensors: the body is one safetensors file."""
        if request.content_type != "application/octet-stream":
            raise EngineRejected(
                "send one safetensors file as application/octet-stream; this engine takes no pickle"
            )
        version = request.query.get("weight_version") or request.headers.get("X-Weight-Version")
        bucket = await request.read()
        await asyncio.wrap_future(self.scheduler.add_bucket(bucket, version))
        return _success()

    async def end_weight_update(self, request: web.Request) -> web.Response:
        """Put the session's weights in force, or refuse them and keep the old ones."""
        await asyncio.wrap_future(self.scheduler.end_update())
        return _success(weight_version=self.scheduler.version)

    async def update_weight_version(self, request: web.Request) -> web.Response:
        """Rename the weights in force; aborts nothing unless told to."""
        body = await _json(request)
        if body.get("new_version") is None:
            raise EngineRejected("new_version is missing")
        future = self.scheduler.set_version(
            str(body["new_version"]), abort_all=bool(body.get("abort_all_requests"))
        )
        await asyncio.wrap_future(future)
        return _success(new_version=self.scheduler.version)

    async def health(self, request: web.Request) -> web.Response:
        """Answer whether the scheduler's thread lives."""
        return web.Response(status=200 if self.scheduler.alive else 503)

    async def health_generate(self, request: web.Request) -> web.Response:
        """Sample one token; under a pause, only ask the scheduler's thread for a sign of life."""
        if self.scheduler.paused or not self.scheduler.alive:
            probe: asyncio.Future[Any] = asyncio.wrap_future(self.scheduler.call(lambda: None))
        else:
            body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}
            sequence = self.scheduler.submit(parse_generate(body, self.limits, 0))
            probe = asyncio.wrap_future(sequence.done)
        done, _ = await asyncio.wait({probe}, timeout=_HEALTH_S)
        return web.Response(status=200 if done and probe.exception() is None else 503)

    async def model_info(self, request: web.Request) -> web.Response:
        """Tell what is served."""
        runner = self.scheduler.batch.runner
        kinds = () if runner.media is None else runner.media.processor.placeholder_ids
        return _answer(
            {
                "model_path": str(self.settings.model_path),
                "is_generation": True,
                "weight_version": self.scheduler.version,
                "model_type": runner.config.model_type,
                "architectures": runner.model.config.architectures,
                "has_image_understanding": "image" in kinds,
                "has_audio_understanding": "audio" in kinds,
            }
        )

    async def server_info(self, request: web.Request) -> web.Response:
        """Tell settings and load."""
        scheduler, batch = self.scheduler, self.scheduler.batch
        return _answer(
            {
                **self.settings.model_dump(mode="json", exclude={"token_env"}),
                "engine": "embedded",
                "weight_version": scheduler.version,
                "context_length": self.limits.context_length,
                "max_total_tokens": self.limits.max_total_tokens,
                "startup_time": self._started,
                "paused": scheduler.paused,
                "running_requests": len(batch.running),
                "waiting_requests": len(batch.waiting),
                "cached_tokens": len(batch.tree),
                "counters": batch.counters,
            }
        )

    async def metrics(self, request: web.Request) -> web.Response:
        """Give counters and gauges in Prometheus' text form."""
        scheduler, batch = self.scheduler, self.scheduler.batch
        gauges = {
            "num_running_reqs": len(batch.running),
            "num_queue_reqs": len(batch.waiting),
            "cached_tokens": len(batch.tree),
            "paused": int(scheduler.paused),
            "last_weight_update_seconds": scheduler.last_update_s,
            "process_cpu_seconds_total": time.process_time(),
        }
        lines = [f"sglang:{name} {value:g}" for name, value in gauges.items()]
        lines += [f"sglang:{name}_total {value}" for name, value in batch.counters.items()]
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")


async def _json(request: web.Request) -> dict[str, Any]:
    raw = await request.read()
    try:
        body = json.loads(raw) if raw else {}
    except ValueError as error:
        raise EngineRejected(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise EngineRejected("the body must be a JSON object")
    return body


def _version(body: dict[str, Any]) -> str | None:
    version = body.get("weight_version")
    return None if version is None else str(version)


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise EngineRejected(f"timeout must be a number of seconds, not {text!r}") from error


def _answer(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(
        body=json.dumps(body, separators=(",", ":")).encode(),
        status=status,
        content_type="application/json",
    )


def _success(message: str = "Success", **more: Any) -> web.Response:
    return _answer({"success": True, "message": message, **more})


def _error(status: int, message: str) -> web.Response:
    return _answer({"error": {"message": message}}, status)


def _refusal(path: str, message: str) -> web.Response:
    if "weight" in path:
        return _answer({"success": False, "message": message}, 400)
    return _error(400, message)

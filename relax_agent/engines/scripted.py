"""An engine without a model: scripted answers, faults on demand, the rules of the real ones.

Tests use it in two forms: in-process (:class:`ScriptedEngine`) and behind HTTP
(:mod:`relax_agent.engines.scripted_server`). A *script* says what to answer::

    engine = ScriptedEngine([Reply([5, 6, 7])])                     # one reply after the other
    engine = ScriptedEngine(lambda request: Reply([len(request.input_ids)]))
    engine = ScriptedEngine()                                       # pseudo-random, repeatable

Everything around the answer behaves as in a real engine: tokens come one by one and stop while
paused, limits and stop tokens end an answer, ``abort`` returns the part that is there, prefixes
are cached per weight version, weights change between ``begin`` and ``end`` and only if names and
shapes fit. Time is the caller's: ``step`` is awaited before every token, and a test that passes
the ``acquire`` of a semaphore decides to the token how far the engine gets.

Answers are built as the JSON of SGLang and read back by the client's own decoder, so a fault such
as a missing log-prob takes the path that it would take in production.
"""

from __future__ import annotations

import asyncio
import io
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_agent.engines.folder import Manifest, manifest_difference, read_header, read_manifest
from relax_agent.engines.protocol import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    PauseMode,
    Routes,
)
from relax_agent.engines.script import (
    Fault,
    Reply,
    Script,
    as_script,
    logprob_entries,
    made_up_routes,
)
from relax_agent.engines.wire import RouteShape, decode_result, encode_routes, version_spans
from relax_agent.errors import EngineRejected, EngineUnavailable, StorageError


@dataclass(slots=True)
class _Running:
    """One request that is being answered."""

    request: GenerateRequest
    cache_key: str
    output_ids: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cached: int = 0
    aborted: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedEngine:
    """An :class:`~relax_agent.engines.protocol.Engine` that follows a script."""

    def __init__(
        self,
        script: Script | Sequence[Reply] | None = None,
        *,
        name: str = "scripted",
        model_path: Path | None = None,
        version: int = 0,
        vocab_size: int = 512,
        context_length: int = 2048,
        route_shape: RouteShape | None = None,
        cache_by_version: bool = True,
        step: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """Prepare an engine that is ready to serve.

        Args:
            script: Replies in order of arrival, or a function; None answers pseudo-random tokens
                that depend on prompt, seed, temperature and weight version.
            name: What errors call it.
            model_path: Folder whose tensor names and shapes updates must have; None takes any.
            version: First weight version.
            vocab_size: Token ids lie below.
            context_length: Most tokens of a prompt and its answer together.
            route_shape: Shape of made-up routes; None plays a dense model.
            cache_by_version: Whether cached prefixes are found only by the version that made
                them; False plays the engines that serve stale prefixes.
            step: Awaited before every token.
        """
        self._name = name
        self._script = as_script(script)
        self.model_path = model_path
        self.version = version
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.route_shape = route_shape
        self._cache_by_version = cache_by_version
        self._step = step or _yield_once
        self._running: dict[str, _Running] = {}
        self._go = asyncio.Event()
        self._go.set()
        self._pause_mode: PauseMode | None = None
        self._dead = asyncio.Event()
        self._cache: list[tuple[str, tuple[int, ...]]] = []
        self._session: dict[str, tuple[int, ...]] | None = None
        self._next_version: int | None = None
        self.requests: list[GenerateRequest] = []
        """Every request that arrived, in order."""
        self.aborted = 0
        """How many requests an abort has ended."""

    @property
    def name(self) -> str:
        """What errors and logs call this engine."""
        return self._name

    @property
    def running(self) -> int:
        """How many requests are being answered."""
        return len(self._running)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Answer by the script."""
        body = await self.answer(request)
        return decode_result(body, request, self.route_shape, self._name)

    async def answer(self, request: GenerateRequest, cache_key: str = "") -> dict[str, Any]:
        """Answer by the script, as the JSON that goes over the wire."""
        self._require_life()
        self.requests.append(request)
        self._check(request)
        reply = self._script(request)
        if reply.fault is Fault.REJECT:
            raise EngineRejected(f"{self._name} refused request {request.rid}: scripted")
        if reply.fault is Fault.ERROR:
            raise EngineUnavailable(f"{self._name} failed at request {request.rid}: scripted")
        running = _Running(request, cache_key)
        self._running[request.rid] = running
        try:
            reason = await self._sample(running, reply)
        finally:
            del self._running[request.rid]
        self._remember([*request.input_ids, *running.output_ids], cache_key)
        return self._body(running, reply, reason)

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop sampling."""
        self._require_life()
        self._pause_mode = mode
        self._go.clear()
        if mode == "abort":
            await self.abort()

    async def resume(self) -> None:
        """Go on sampling."""
        self._require_life()
        self._pause_mode = None
        self._go.set()

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all of them with None."""
        self._require_life()
        for running in list(self._running.values()):
            if rid in (None, running.request.rid):
                running.aborted = True
                running.wake.set()

    async def flush_cache(self) -> None:
        """Forget all cached prefixes; refused while requests hold them."""
        self._require_life()
        if self._running and self._pause_mode != "retract":
            raise EngineRejected(f"{self._name} refused to flush: requests hold the cache")
        self._cache.clear()

    async def begin_weight_update(self) -> None:
        """Open a session of weight updates."""
        self._require_life()
        if self._session is not None:
            raise EngineRejected(f"{self._name} has a weight update open already")
        self._session = {}

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        """Take the names and shapes in a folder as the new weights."""
        self._require_life()
        try:
            manifest = await asyncio.to_thread(read_manifest, path)
        except StorageError as error:
            raise EngineRejected(f"{self._name} refused weights: {error}") from error
        self._fit(manifest)
        self.version = version

    async def update_weights_from_tensor(self, bucket: bytes, version: int) -> None:
        """Take one safetensors file as part of the new weights."""
        self._require_life()
        if self._session is None:
            raise EngineRejected(f"{self._name} has no weight update open")
        try:
            self._session.update(read_header(io.BytesIO(bucket)))
        except ValueError as error:
            raise EngineRejected(f"{self._name} refused weights: {error}") from error
        self._next_version = version

    async def end_weight_update(self) -> None:
        """Put the session's weights in force."""
        self._require_life()
        if self._session is None:
            raise EngineRejected(f"{self._name} has no weight update open")
        manifest, version = self._session, self._next_version
        self._session = self._next_version = None
        if version is not None:
            self._fit(manifest)
            self.version = version

    async def health(self) -> bool:
        """Return whether :meth:`die` was not called."""
        return not self._dead.is_set()

    async def model_info(self) -> dict[str, Any]:
        """Return path and version of the model."""
        self._require_life()
        path = str(self.model_path) if self.model_path else ""
        return {"model_path": path, "weight_version": str(self.version)}

    async def server_info(self) -> dict[str, Any]:
        """Return the load."""
        self._require_life()
        return {"running": self.running, "paused": self._pause_mode}

    async def close(self) -> None:
        """Do nothing: there is no connection."""

    def die(self) -> None:
        """End as a killed process does: running requests fail, later ones find nobody."""
        self._dead.set()
        for running in self._running.values():
            running.wake.set()

    def _require_life(self) -> None:
        if self._dead.is_set():
            raise EngineUnavailable(f"{self._name} gave no answer: it has ended")

    def _check(self, request: GenerateRequest) -> None:
        ids, wanted = request.input_ids, request.sampling.max_new_tokens
        if not ids or min(ids) < 0 or max(ids) >= self.vocab_size:
            raise EngineRejected(f"{self._name} cannot take request {request.rid}: bad token ids")
        if len(ids) + wanted > self.context_length:
            raise EngineRejected(
                f"{self._name} refused /generate: a prompt of {len(ids)} tokens and an answer of "
                f"{wanted} do not fit the context of {self.context_length}"
            )
        if request.rid in self._running:
            raise EngineRejected(f"{self._name} refused /generate: duplicate request {request.rid}")

    async def _sample(self, running: _Running, reply: Reply) -> FinishReason:
        sampling = running.request.sampling
        if reply.fault is Fault.SILENCE:
            await self._dead.wait()
        for token in itertools.islice(reply.output_ids, sampling.max_new_tokens):
            if reply.fault is Fault.DEATH and len(running.output_ids) == len(reply.output_ids) // 2:
                self.die()
            if len(running.output_ids) == reply.abort_after:
                running.aborted = True
                running.wake.set()
            await self._until_next_token(running)
            self._require_life()
            if running.aborted:
                self.aborted += 1
                return "abort"
            running.output_ids.append(token)
            running.versions.append(self.version)
            if len(running.output_ids) == 1:  # the prompt was read with the weights of now
                running.cached = self._cached_tokens(running)
            if token in sampling.stop_token_ids:
                return "stop"
        self._require_life()
        return "length" if len(running.output_ids) >= sampling.max_new_tokens else "stop"

    async def _until_next_token(self, running: _Running) -> None:
        """Wait for the step and for the end of a pause; an abort or the end of life cuts it."""
        if running.wake.is_set():
            return
        step = asyncio.ensure_future(self._one_step())
        wake = asyncio.ensure_future(running.wake.wait())
        try:
            await asyncio.wait({step, wake}, return_when=asyncio.FIRST_COMPLETED)
            if step.done():
                step.result()
        finally:
            step.cancel()
            wake.cancel()
            await asyncio.gather(step, wake, return_exceptions=True)

    async def _one_step(self) -> None:
        await self._step()
        await self._go.wait()

    def _cached_tokens(self, running: _Running) -> int:
        best, ids = 0, running.request.input_ids
        for made_by, known in self._cache:
            if made_by == self._cache_name(running.cache_key):
                pairs = zip(ids, known, strict=False)
                same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
                best = max(best, sum(1 for _ in same))
        return min(best, len(ids) - 1)

    def _cache_name(self, key: str) -> str:
        return f"{key}/{self.version}" if self._cache_by_version else key

    def _remember(self, ids: Sequence[int], key: str) -> None:
        self._cache.append((self._cache_name(key), tuple(ids)))

    def _fit(self, manifest: Manifest) -> None:
        if self.model_path is not None:
            difference = manifest_difference(manifest, read_manifest(self.model_path))
            if difference is not None:
                raise EngineRejected(f"{self._name} refused weights: {difference}")

    def _body(self, running: _Running, reply: Reply, reason: FinishReason) -> dict[str, Any]:
        output_ids = running.output_ids
        meta: dict[str, Any] = {
            "id": running.request.rid,
            "finish_reason": {"type": reason},
            "prompt_tokens": len(running.request.input_ids),
            "completion_tokens": len(output_ids),
            "cached_tokens": running.cached,
            "weight_version": str(self.version),
            "weight_versions": version_spans(running.versions),
            "output_token_logprobs": logprob_entries(output_ids, reply, self.vocab_size),
        }
        if running.request.return_routes and self.route_shape is not None:
            meta["routed_experts"] = encode_routes(self._routes(running, reply))
        return {"output_ids": list(output_ids), "meta_info": meta}

    def _routes(self, running: _Running, reply: Reply) -> Routes:
        start = running.request.routes_start
        ids = [*running.request.input_ids, *running.output_ids][:-1]
        if reply.routes is not None:
            return reply.routes[start : len(ids)]
        assert self.route_shape is not None
        return made_up_routes(ids, self.route_shape)[start:]


async def _yield_once() -> None:
    await asyncio.sleep(0)

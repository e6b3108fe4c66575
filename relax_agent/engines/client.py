"""The client of SGLang's native HTTP protocol, for real SGLang and for engines that speak it.

One pooled session serves one engine. Every call has a time limit. The budget of ``generate``
stands still while this client has paused the engine: a weight update must not eat the time of
the requests that wait for it. Errors come out as those of :mod:`relax_agent.errors`, with the
engine's address and its own words: a refusal is ``EngineRejected``, no usable answer is
``EngineUnavailable``. A pooled socket that the server closed while idle is retried once.

What would end real SGLang or spoil it silently is refused here, before it is sent: a token id
outside the vocabulary and a tensor of wrong shape end the process, a tensor that is missing keeps
its old values without a word. For that the client reads the folder of the served model (only
``config.json`` and the headers of the weight files).

After a pause each request names that pause as the key of its cached prefixes. New weights only
come in a pause, so no answer to a later request builds on a prefix of older weights, even where
the cache could not be flushed, and even if the request arrives before the weights do.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import aiohttp

from relax_agent.closing import Closing
from relax_agent.engines.folder import (
    Manifest,
    ModelFacts,
    manifest_difference,
    read_manifest,
    read_model_facts,
)
from relax_agent.engines.protocol import GenerateRequest, GenerateResult, PauseMode
from relax_agent.engines.wire import decode_result, encode_request, parse_version, wire_rid
from relax_agent.errors import EngineError, EngineRejected, EngineUnavailable, StorageError

_T = TypeVar("_T")

_CONNECT_S = 10.0
_KEEPALIVE_S = 3.0
"""Shorter than the 5 s of uvicorn, so the server rarely closes a socket that we reuse."""


class _RunningClock:
    """Seconds that pass while the engine is not paused."""

    def __init__(self) -> None:
        self._paused_at: float | None = None
        self._paused_s = 0.0

    def now(self) -> float:
        """Return running seconds since an arbitrary start."""
        at = time.monotonic() if self._paused_at is None else self._paused_at
        return at - self._paused_s

    def stop(self) -> None:
        """Stand still."""
        if self._paused_at is None:
            self._paused_at = time.monotonic()

    def start(self) -> None:
        """Go on."""
        if self._paused_at is not None:
            self._paused_s += time.monotonic() - self._paused_at
            self._paused_at = None


class EngineClient(Closing):
    """An :class:`~relax_agent.engines.protocol.Engine` behind an HTTP address."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        name: str | None = None,
        model_path: str | None = None,
        facts: ModelFacts | None = None,
        generate_timeout_s: float = 600.0,
        control_timeout_s: float = 60.0,
        connections: int = 256,
    ) -> None:
        """Remember the address; nothing is sent yet.

        Args:
            url: Address such as ``http://127.0.0.1:30000``.
            token: Sent as bearer token.
            name: What errors call this engine; its address if None.
            model_path: Folder of the served model; asked from the engine if None.
            facts: What to know of the model; read from that folder if None.
            generate_timeout_s: Running time of one request; paused time does not count.
            control_timeout_s: Time of every other call.
            connections: Upper limit of sockets at a time.
        """
        self.url = url.rstrip("/")
        self._name = name or self.url
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._model_path = model_path
        self._facts = facts
        self._served: Manifest | None = None
        self._pauses = 0
        self._generate_timeout_s = generate_timeout_s
        self._control_timeout_s = control_timeout_s
        self._connections = connections
        self._clock = _RunningClock()
        self._session: aiohttp.ClientSession | None = None

    @property
    def name(self) -> str:
        """What errors and logs call this engine."""
        return self._name

    async def close(self) -> None:
        """Close all sockets; the engine itself goes on. May be called again."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one answer.

        Raises:
            EngineRejected: if the request is wrong, for example longer than the context.
            EngineUnavailable: if no answer came within the time limit, or none at all.
            MissingLogprobs: if the answer lacks log-probs.
        """
        facts = await self._model_facts()
        if facts is not None:
            _check_ids(request, facts, self._name)
        cache_key = f"p{self._pauses}" if self._pauses else None
        payload = encode_request(request, cache_key)
        body = await self._within_budget(
            self._call("POST", "/generate", payload=payload, timeout_s=None), request.rid
        )
        return decode_result(body, request, facts.routes if facts else None, self._name)

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop sampling; the time budget of running requests stands still."""
        await self._post("/pause_generation", {"mode": mode})
        self._pauses += 1
        self._clock.stop()

    async def resume(self) -> None:
        """Go on sampling."""
        await self._post("/continue_generation", {})
        self._clock.start()

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all of them with None."""
        which = {"abort_all": True} if rid is None else {"rid": wire_rid(rid)}
        await self._post("/abort_request", which)

    async def flush_cache(self) -> None:
        """Forget all cached prefixes; refused while requests hold them."""
        await self._post("/flush_cache", {})

    async def begin_weight_update(self) -> None:
        """Open a session of weight updates."""
        await self._post("/begin_weight_update", {})

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        """Load all weights from a folder that this process and the engine can read.

        Raises:
            EngineRejected: if names or shapes are not those of the served model.
        """
        await self._check_weights(path)
        # Flushing is a call of its own: with live requests under an in_place pause SGLang would
        # load the weights and still answer that it failed.
        payload = {"model_path": path, "weight_version": str(version), "flush_cache": False}
        await self._post("/update_weights_from_disk", payload)

    async def update_weights_from_tensor(self, bucket: bytes, version: int) -> None:
        """Send some weights as one safetensors file (embedded engine only)."""
        path = f"/update_weights_from_tensor?weight_version={version}"
        await self._call("POST", path, data=bucket, timeout_s=self._control_timeout_s)

    async def end_weight_update(self) -> None:
        """Close the session of weight updates."""
        await self._post("/end_weight_update", {})

    async def health(self) -> bool:
        """Return whether the engine answers and can serve."""
        try:
            await self._call("GET", "/health", timeout_s=min(10.0, self._control_timeout_s))
        except EngineError:
            return False
        return True

    async def serves(self) -> bool:
        """Return whether the engine answers and serves the expected model.

        Another program that has taken the port must not be mistaken for the engine.
        """
        try:
            info = await self.model_info()
        except EngineError:
            return False
        return self._model_path in (None, info.get("model_path"))

    async def model_info(self) -> dict[str, Any]:
        """Return what is served."""
        return await self._call("GET", "/model_info", timeout_s=self._control_timeout_s)

    async def server_info(self) -> dict[str, Any]:
        """Return the engine's own settings and load."""
        return await self._call("GET", "/server_info", timeout_s=self._control_timeout_s)

    async def weight_version(self) -> int:
        """Return the version of the weights that the engine serves."""
        return parse_version((await self.model_info()).get("weight_version"))

    async def _folder(self) -> str:
        """Find the folder that the engine started from, empty for an engine without a model.

        It is asked for once: updates change what the engine reports.
        """
        if self._model_path is None:
            self._model_path = str((await self.model_info())["model_path"])
        return self._model_path

    async def _model_facts(self) -> ModelFacts | None:
        if self._facts is None and (folder := await self._folder()):
            self._facts = await asyncio.to_thread(read_model_facts, folder)
        return self._facts

    async def _served_manifest(self) -> Manifest | None:
        if self._served is None and (folder := await self._folder()):
            self._served = await asyncio.to_thread(read_manifest, folder)
        return self._served

    async def _check_weights(self, path: str) -> None:
        served = await self._served_manifest()
        try:
            manifest = await asyncio.to_thread(read_manifest, path)
        except StorageError as error:
            raise EngineRejected(f"{self._name} cannot take weights: {error}") from error
        difference = None if served is None else manifest_difference(manifest, served)
        if difference is not None:
            raise EngineRejected(f"the weights in {path} do not fit {self._name}: {difference}")

    async def _within_budget(self, call: Coroutine[Any, Any, _T], rid: str) -> _T:
        """Await ``call``, counting only the time during which the engine is not paused."""
        end = self._clock.now() + self._generate_timeout_s
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                left = end - self._clock.now()
                if left <= 0:
                    raise EngineUnavailable(
                        f"{self._name} did not answer request {rid} "
                        f"within {self._generate_timeout_s:g} s"
                    )
                await asyncio.wait({task}, timeout=left + 0.001)
        finally:
            if not task.done():  # closing the socket makes the engine drop the request
                task.cancel()
                await asyncio.wait({task})
        return task.result()

    async def _post(self, path: str, payload: dict[str, Any]) -> dict[str, Any]:
        return await self._call("POST", path, payload=payload, timeout_s=self._control_timeout_s)

    async def _call(
        self,
        method: str,
        path: str,
        *,
        timeout_s: float | None,
        payload: dict[str, Any] | None = None,
        data: bytes | None = None,
    ) -> dict[str, Any]:
        options: dict[str, Any] = {
            "headers": self._headers,
            "timeout": aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S),
        }
        if data is not None:
            options["data"] = data
        elif payload is not None:
            options["json"] = payload
        try:
            try:
                return await self._send(method, path, options)
            except (aiohttp.ServerDisconnectedError, ConnectionResetError):
                return await self._send(method, path, options)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            detail = str(error) or type(error).__name__
            where = path.split("?")[0]
            raise EngineUnavailable(f"{self._name} gave no answer to {where}: {detail}") from error

    async def _send(self, method: str, path: str, options: dict[str, Any]) -> dict[str, Any]:
        async with self._open().request(method, self.url + path, **options) as response:
            return self._read(path, response.status, await response.read())

    def _read(self, path: str, status: int, raw: bytes) -> dict[str, Any]:
        """Turn a response into its JSON object (empty for plain text) or an error of the tree."""
        try:
            body = json.loads(raw) if raw else {}
        except ValueError:
            body = {"message": raw.decode(errors="replace").strip()}
        body = body if isinstance(body, dict) else {}
        where = path.split("?")[0]
        if status >= 500:
            raise EngineUnavailable(
                f"{self._name} failed at {where} with HTTP {status}: {_reason(body, raw)}"
            )
        if status >= 400 or body.get("success") is False:
            raise EngineRejected(f"{self._name} refused {where}: {_reason(body, raw)}")
        return body

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=self._connections, keepalive_timeout=_KEEPALIVE_S
            )
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session


def _check_ids(request: GenerateRequest, facts: ModelFacts, engine: str) -> None:
    ids = request.input_ids
    if not ids or min(ids) < 0 or max(ids) >= facts.vocab_size:
        found = f"ids from {min(ids)} to {max(ids)}" if ids else "no token"
        raise EngineRejected(
            f"{engine} cannot take request {request.rid}: {found}, "
            f"the vocabulary has {facts.vocab_size}"
        )


def _reason(body: dict[str, Any], raw: bytes) -> str:
    """Find the engine's own words in any of the shapes that SGLang uses for errors."""
    error = body.get("error", body.get("message", body.get("detail")))
    if isinstance(error, dict):
        error = error.get("message", error)
    return str(error) if error else raw.decode(errors="replace").strip()[:500] or "no reason given"

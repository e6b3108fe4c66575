"""The gateway's server: one key for each episode, and the routes that a program calls.

Errors have the shape of the dialect. What no repetition can mend (a used-up budget, an episode that
is over) is a 4xx that the official SDKs do not try again; an engine that does not answer is a 503,
which they do. A program that hangs up ends its request, and nothing of it is written into the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, cast

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from relax_agent.episode import Episode
from relax_agent.errors import EngineError, EpisodeError, PromptTooLong, RenderError
from relax_agent.gateway import anthropic, chat, responses
from relax_agent.gateway.dialect import BadRequest, Call, Dialect
from relax_agent.gateway.session import Answer, GatewaySession
from relax_agent.limits import Overrun
from relax_agent.rendering import Renderer
from relax_agent.rollout.episode_loop import EpisodeOptions
from relax_agent.rollout.sampling import PolicySource
from relax_agent.tools.serving import Server, bind, config_of, running
from relax_agent.tools.web import json_response, read_body, unless_gone

MAX_BODY_BYTES = 64 << 20
"""Most bytes of one request; pictures and sounds travel in it."""
_ALIVE_S = 10.0
"""Seconds between two signs of life in a stream that waits for its answer."""


class Gateway:
    """Hands out keys, and answers whoever has one.

    gateway = Gateway()
    async with gateway.serve() as url:
        key = gateway.open(GatewaySession(episode, fleet, renderer, options))
        …                               # a program with base_url=f"{url}/v1" and api_key=key
        episode = gateway.close(key)
    """

    def __init__(self) -> None:
        self._sessions: dict[bytes, GatewaySession] = {}
        self.app = FastAPI(title="Relax Agent gateway", docs_url=None, openapi_url=None)
        self.app.add_api_route("/v1/models", self._models, methods=["GET"])
        for dialect in (chat, responses, anthropic):
            self._add(dialect.PATH, cast("Dialect", dialect), _answer)
        self._add(anthropic.COUNT_PATH, cast("Dialect", anthropic), _count)

    def _add(self, path: str, dialect: Dialect, answer: Answering) -> None:
        route = self._route(dialect, answer)
        self.app.add_api_route(path, route, methods=["POST"], response_model=None)

    def open(self, session: GatewaySession) -> str:
        """Take in a session and return its key."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._sessions[_digest(key)] = session
        return key

    def start(
        self, episode: Episode, source: PolicySource, renderer: Renderer, options: EpisodeOptions
    ) -> str:
        """Open a session for an episode and return its key."""
        return self.open(GatewaySession(episode, source, renderer, options))

    def close(self, key: str) -> Episode:
        """Take the key back: it opens nothing, and the episode grows no more. Returns it as it is.

        Raises:
            KeyError: There is no such key.
        """
        session = self._sessions.pop(_digest(key))
        session.end()
        return session.episode

    @contextlib.asynccontextmanager
    async def serve(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """Serve inside this event loop; yields the URL.

        OpenAI's SDK wants it with ``/v1`` behind it, Anthropic's as it is.
        """
        listener = bind(host, port, "every episode has a key")
        async with running(
            lambda ready: _Server(config_of(self.app), ready), host, listener
        ) as url:
            yield url

    # -- routes ------------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        if self._session(request) is None:
            return _no_key(cast("Dialect", chat))
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "relax-agent"}
        return json_response({"object": "list", "data": [model]})

    def _route(
        self, dialect: Dialect, answer: Answering
    ) -> Callable[[Request], Awaitable[Response]]:
        async def route(request: Request) -> Response:
            session = self._session(request)
            if session is None:
                return _no_key(dialect)
            body = await read_body(request, MAX_BODY_BYTES)
            if body is None:
                words = f"the body has more than {MAX_BODY_BYTES:,} bytes"
                return _error(dialect, 413, words, "too_large")
            try:
                call = dialect.read(_loads(body))
            except BadRequest as error:
                return _error(dialect, 400, str(error), "invalid_request", error.param)
            except (ValueError, RecursionError):
                return _error(dialect, 400, "the body is not JSON", "invalid_request")
            return await answer(request, dialect, session, call)

        return route

    def _session(self, request: Request) -> GatewaySession | None:
        """Find whose key it is. What is looked up is a digest, whose timing tells nothing."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = request.headers.get("x-api-key", "")
        return self._sessions.get(_digest(key))


async def _answer(
    request: Request, dialect: Dialect, session: GatewaySession, call: Call
) -> Response:
    completion = f"{dialect.PREFIX}{secrets.token_hex(12)}"
    again = request.headers.get("x-stainless-retry-count", "0") != "0"
    call = replace(call, request=replace(call.request, answer_id=completion, again=again))
    headers = {"x-relax-ignored": ", ".join(call.ignored)} if call.ignored else {}
    if call.stream:
        stream = _stream(dialect, session, call, completion)
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)
    try:
        answer = await unless_gone(request, lambda: session.respond(call.request))
    except Exception as error:
        return _error(dialect, *_explained(error))
    if answer is None:  # nobody is there to read it
        return Response(status_code=499)
    return json_response(dialect.body_of(call, answer, completion), headers=headers)


async def _count(
    request: Request, dialect: Dialect, session: GatewaySession, call: Call
) -> Response:
    try:
        return json_response({"input_tokens": await session.count(call.request)})
    except Exception as error:
        return _error(dialect, *_explained(error))


Answering = Callable[[Request, Dialect, GatewaySession, Call], Awaitable[Response]]


class _Server(Server):
    """A server inside a program that looks after signals itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def _loads(body: bytes) -> Any:
    """Return what a JSON text says, or raise ValueError, also where half a character is in it."""
    data = json.loads(body)
    if b"\\u" in body:
        json.dumps(data, ensure_ascii=False).encode()
    return data


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


async def _stream(
    dialect: Dialect, session: GatewaySession, call: Call, completion: str
) -> AsyncIterator[bytes]:
    """Yield server-sent events; signs of life while the answer is sampled."""
    task = asyncio.ensure_future(session.respond(call.request))
    try:
        async for _ in _until_done(task):
            yield dialect.ALIVE
        try:
            answer: Answer = task.result()
        except Exception as error:
            status, message, code = _explained(error)
            yield dialect.error_event(dialect.error_body(status, message, code, None))
            return
        for event in dialect.events(call, answer, completion):
            yield event
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _until_done(task: asyncio.Future[Any]) -> AsyncIterator[None]:
    """Yield now and then until a task is done."""
    while not (await asyncio.wait({task}, timeout=_ALIVE_S))[0]:
        yield None


def _explained(error: Exception) -> tuple[int, str, str]:
    """Return status, words and code of what went wrong; a fault of ours is raised again."""
    if isinstance(error, PromptTooLong):
        return 400, str(error), "context_length_exceeded"
    if isinstance(error, RenderError | LookupError):
        return 400, " ".join(map(str, error.args)), "invalid_request"
    if isinstance(error, Overrun):
        return 403, "the time of this episode is over", "episode_over"
    if isinstance(error, EpisodeError):
        return 403, str(error), "episode_over"
    if isinstance(error, EngineError):
        return 503, str(error), "engine_failure"
    raise error


def _no_key(dialect: Dialect) -> Response:
    words = "a key of this gateway is required; each episode has its own"
    return _error(dialect, 401, words, "invalid_api_key")


def _error(
    dialect: Dialect, status: int, message: str, code: str, param: str | None = None
) -> Response:
    return json_response(dialect.error_body(status, message, code, param), status)

"""A served environment over plain HTTP: for ``curl``, and for languages without WebSockets.

    POST /reset    {"seed": 7, "options": {"task": "…"}}   → observation, info; takes an environment
    POST /step     {"action": {"role": "assistant", "content": "42"}}
    POST /close    gives the environment back
    POST /call_tool, /score_group

``reset`` answers with a header ``X-Env-Session``; all that follows carries it, the next ``reset``
too. An environment that nobody asks anything for a while is taken back.

Bodies are JSON. A body with media is one frame (:mod:`relax_agent.frames`) of the type
``application/x-relax-frame``: four bytes with the length of the JSON (big-endian), the JSON, the
media one after the other. Their sizes stand in its ``blobs``; its ``id`` is any number.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response

from relax_agent.envs.serving.leases import Lease, Leases, NoSlot
from relax_agent.envs.serving.protocol import REQUESTS
from relax_agent.envs.serving.session import Answer
from relax_agent.envs.serving.wire import Blobs, Json, WireError, dumps, loads
from relax_agent.errors import EnvBusy, EnvError, InvalidAction, RelaxError, ResetNeeded
from relax_agent.frames import FrameError, Frames, error_to_json, pack
from relax_agent.limits import Overrun, TimeBudget, bounded
from relax_agent.tools.web import unless_gone

SESSION = "X-Env-Session"
FRAME_TYPE = "application/x-relax-frame"
_ID = re.compile(r"[A-Za-z0-9_-]{16,64}")


class UnknownSession(EnvError):
    """The session does not exist, or has ended."""


class TooLarge(EnvError):
    """The request is too large."""


class TooSlow(EnvError):
    """The environment did not answer in time."""


_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (UnknownSession, 404),
    (TooLarge, 413),
    (TooSlow, 504),
    (InvalidAction, 422),
    (WireError, 422),
    (ResetNeeded, 409),
    (EnvBusy, 409),
    (NoSlot, 503),
)


class HttpSessions:
    """Environments that are used over HTTP, by the id of their lease."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._open: dict[str, _Session] = {}

    async def ask(self, session_id: str | None, request: Json, blobs: Blobs) -> tuple[Answer, str]:
        """Answer one request; all but ``step`` and ``close`` begin a session where there is none.

        A client may choose the id, so that it can give back what it began even if it never read
        the answer.
        """
        op = request["op"]
        session = None if session_id is None else self._open.get(session_id)
        if session is None and op not in ("step", "close"):
            return await self._begin(session_id, request, blobs)
        if session is None:
            what = (
                f"there is no session {session_id!r:.80}" if session_id else "there is no session"
            )
            raise UnknownSession(
                what, hint=f"POST /reset begins one; send its {SESSION} header with the rest"
            )
        answer = await session.ask(request, blobs)
        if op == "close":
            await session.end()
        return answer, session.id

    async def _begin(
        self, session_id: str | None, request: Json, blobs: Blobs
    ) -> tuple[Answer, str]:
        if session_id is not None and not _ID.fullmatch(session_id):
            raise WireError(f"{SESSION} must be 16 to 64 letters and digits that nobody can guess")
        session = _Session(self._leases.take(), self, session_id)
        self._open[session.id] = session
        try:
            return await session.ask(request, blobs), session.id
        except Exception:  # nobody uses what did not begin
            await session.end()
            raise

    def forget(self, session: _Session) -> None:
        """Strike a session off the list."""
        self._open.pop(session.id, None)

    async def close(self) -> None:
        """End all sessions."""
        async with asyncio.TaskGroup() as group:
            for session in list(self._open.values()):
                group.create_task(session.end())


class _Session:
    """A lease whose requests come one by one, each on a connection of its own."""

    def __init__(self, lease: Lease, sessions: HttpSessions, session_id: str | None) -> None:
        self.id = session_id or secrets.token_urlsafe(18)
        """Whoever knows it may use the environment."""
        self._lease = lease
        self._sessions = sessions
        self._limits = sessions._leases.limits
        self._busy = False
        self._expiry: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    async def ask(self, request: Json, blobs: Blobs) -> Answer:
        """Answer one request; one that is cut short or takes too long ends the session."""
        if self._busy:
            raise EnvBusy("a request of this session still runs", hint="wait for its answer")
        self._busy = True
        self._stop_expiry()
        limit = self._limits.step_timeout_s
        try:
            answer = await bounded(self._lease.answer(request, blobs), TimeBudget(limit).left)
        except Overrun:
            await self.end()
            raise TooSlow(f"no answer within {limit:g} s; the session has ended") from None
        except asyncio.CancelledError:
            self._end_soon()
            raise
        finally:
            self._busy = False
        self._expiry = asyncio.get_running_loop().call_later(
            self._limits.idle_timeout_s, self._end_soon
        )
        return answer

    def _stop_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _end_soon(self) -> None:
        self._ending = asyncio.ensure_future(self.end())

    async def end(self) -> None:
        """Give the environment back."""
        self._stop_expiry()
        self._sessions.forget(self)
        await self._lease.end()


def add_routes(app: FastAPI, leases: Leases, sessions: HttpSessions) -> None:
    """Add the HTTP form of an environment to an application."""
    for op in REQUESTS:
        app.add_api_route(
            f"/{op}",
            _endpoint(op, leases, sessions),
            methods=["POST"],
            name=op,
            summary=op,
            openapi_extra=_documentation(op),
        )


_EXAMPLES: dict[str, Json] = {
    "reset": {"seed": 7, "options": None},
    "step": {"action": {"role": "assistant", "content": "42"}},
    "call_tool": {"call": {"name": "calculator", "arguments": {"expression": "6*7"}}},
    "score_group": {"task_id": "train-1", "members": []},
    "close": {},
}


def _documentation(op: str) -> Json:
    content = {"schema": {"type": "object"}, "example": _EXAMPLES[op]}
    return {"requestBody": {"required": False, "content": {"application/json": content}}}


def _endpoint(
    op: str, leases: Leases, sessions: HttpSessions
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            body, blobs = await _read(request, leases.limits.max_request_bytes)
            body = {**body, "op": op}
            session = request.headers.get(SESSION)
            done = await unless_gone(request, lambda: sessions.ask(session, body, blobs))
        except Exception as error:
            if not isinstance(error, RelaxError):
                error = EnvError(f"{type(error).__name__}: {error}")
            return _failure(error)
        if done is None:
            return Response(status_code=499)  # nobody reads it: the caller is gone
        (reply, media), session_id = done
        return _success(reply, media, session_id)

    return endpoint


async def _read(request: Request, max_bytes: int) -> tuple[Json, Blobs]:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise TooLarge(f"the request is larger than {max_bytes:,} bytes")
    if request.headers.get("content-type", "").split(";")[0].strip() == FRAME_TYPE:
        header, blobs = unpack(bytes(body))
        header.pop("id", None)
        return header, blobs
    return (loads(bytes(body)) if body else {}), []


def unpack(data: bytes) -> tuple[Json, Blobs]:
    """Return the one frame that a body is, or raise WireError."""
    with contextlib.suppress(FrameError):
        found = list(Frames().feed(data))
        if len(found) == 1:
            return found[0]
    raise WireError("the body is not one frame")


def _success(reply: Json, media: Blobs, session_id: str) -> Response:
    headers = {SESSION: session_id}
    if media:
        return Response(pack({"id": 0, **reply}, media), headers=headers, media_type=FRAME_TYPE)
    return Response(dumps(reply), headers=headers, media_type="application/json")


def _failure(error: RelaxError) -> Response:
    status = next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
    headers = {"Retry-After": "1"} if status == 503 else {}
    body = dumps({"error": error_to_json(error)})
    return Response(body, status, headers, media_type="application/json")

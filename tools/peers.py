"""The other workers of a tool server, and how a request reaches the one that has its session.

All workers accept connections on one port, so a request may land anywhere. A session lives in one
process; its id begins with that worker's number. Who gets a request for a session of another's
passes it on, over a Unix socket in a folder that only this user can enter, and the answer back.
Nothing is decided on the way: the other worker checks the token as if it had been asked directly.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
from fastapi import Request, Response
from starlette._utils import get_route_path
from starlette.types import ASGIApp, Receive, Scope, Send
from yarl import URL

from relax_agent.errors import ToolErrorKind
from relax_agent.messages import ToolCall
from relax_agent.tools.leases import NoSession
from relax_agent.tools.result import ToolResult
from relax_agent.tools.web import CallerWaits, json_response, read_body
from relax_agent.tools.wire import (
    FRAME_TYPE,
    NO_SESSION,
    REFUSED,
    SESSION,
    dump_arguments,
    load_result,
)

LOCAL = "X-Tool-Local"
"""Marks what one worker asks another: an answer for itself alone."""
_HOP = {b"connection", b"transfer-encoding", b"keep-alive", b"host", b"content-length"}
_HEADER = SESSION.lower().encode()
_LIMIT = aiohttp.ClientTimeout(total=3600, sock_connect=5)
_ASK_S = 5.0


class Peers:
    """All workers of a server, as one of them sees them."""

    def __init__(self, folder: Path, worker: int, count: int, token: str | None) -> None:
        self.worker = worker
        self.count = count
        self._folder = folder
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._sessions: dict[int, aiohttp.ClientSession] = {}

    def home(self, session_id: str) -> int | None:
        """Return the worker that has a session, if it is another one."""
        number = session_id.partition(".")[0]
        ours = number.isascii() and number.isdigit() and len(number) < 6
        found = int(number) if ours else self.worker
        return found if found != self.worker and found < self.count else None

    @property
    def others(self) -> list[int]:
        """Their numbers."""
        return [each for each in range(self.count) if each != self.worker]

    async def request(
        self, worker: int, method: str, path: str, headers: Any = None, body: bytes = b""
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Ask another worker and return status, headers and body.

        Raises:
            OSError: It is not there.
        """
        session = self._session(worker)
        try:
            url = URL(f"http://worker{quote(path)}", encoded=True)  # as it came, dots and all
            async with session.request(
                method, url, headers=headers, data=body, timeout=_LIMIT
            ) as response:
                kept = [item for item in response.raw_headers if item[0].lower() not in _HOP]
                return response.status, kept, await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise OSError(f"worker {worker} cannot be reached: {error}") from error

    def _session(self, worker: int) -> aiohttp.ClientSession:
        session = self._sessions.get(worker)
        if session is None or session.closed:
            connector = aiohttp.UnixConnector(path=str(self._folder / f"{worker}.sock"), limit=0)
            session = self._sessions[worker] = aiohttp.ClientSession(
                connector=connector, auto_decompress=False
            )
        return session

    async def ask_all(self, method: str, path: str, body: Any = None) -> list[bytes]:
        """Ask every other worker for its own part; who does not answer is left out."""
        return [each for each in await self.ask(self.others, method, path, body) if each]

    async def ask(
        self, workers: Sequence[int], method: str, path: str, body: Any = None
    ) -> list[bytes]:
        """Ask some workers; an empty answer stands for none."""
        data = b"" if body is None else json.dumps(body).encode()
        headers = {**self._headers, LOCAL: "1", "Content-Type": "application/json"}

        async def one(worker: int) -> bytes:
            try:
                async with asyncio.timeout(_ASK_S):
                    status, _, answer = await self.request(worker, method, path, headers, data)
                    return answer if status == 200 else b""
            except OSError:
                return b""

        return list(await asyncio.gather(*(one(each) for each in workers)))

    async def call(self, worker: int, call: ToolCall, session_id: str) -> ToolResult:
        """Make a call in a session of another worker's."""
        body, content_type = dump_arguments(call.arguments)
        headers = {
            **self._headers,
            SESSION: session_id,
            "Content-Type": content_type,
            "Accept": FRAME_TYPE,
        }
        try:
            _, kept, answer = await self.request(
                worker, "POST", f"/tools/{call.name}", headers, body
            )
            told = {name.lower(): value for name, value in kept}
            return load_result(told.get(b"content-type", b"").decode(), answer)
        except (OSError, ValueError):
            words = f"{call.name}: the process that had this session has ended"
            return ToolResult.failure(ToolErrorKind.UNAVAILABLE, words)

    async def renew(self, ids: Iterable[str]) -> list[str]:
        """Renew sessions of other workers and return those that have ended."""
        by_worker: dict[int, list[str]] = {}
        for each in ids:
            by_worker.setdefault(self.home(each) or 0, []).append(each)
        lost: list[str] = []
        for worker, ids_there in by_worker.items():
            body = {"sessions": ids_there}
            (answer,) = await self.ask([worker], "POST", "/sessions/renew", body)
            # A worker that does not answer now may well do so at the next renewal.
            lost += json.loads(answer)["lost"] if answer else []
        return lost

    async def close_session(self, worker: int, session_id: str) -> list[str]:
        """Close a session of another worker's.

        Raises:
            NoSession: It has ended already.
        """
        (answer,) = await self.ask([worker], "DELETE", f"/sessions/{session_id}")
        if not answer:
            raise NoSession("there is no such session, or it has ended")
        failures: list[str] = json.loads(answer)["failures"]
        return failures

    async def close(self) -> None:
        """Close the connections."""
        for session in self._sessions.values():
            await session.close()


class Forwarding:
    """ASGI middleware: a request for another worker's session goes there."""

    def __init__(self, app: ASGIApp, peers: Peers, most_bytes: int) -> None:
        self._app = app
        self._peers = peers
        self._most_bytes = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer here, or have it answered."""
        worker = self._home(scope) if scope["type"] == "http" else None
        if worker is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        body = await read_body(request, self._most_bytes)
        if body is None:
            await json_response({"detail": "the request is too large"}, 413)(scope, receive, send)
            return
        response = Response(status_code=499)
        with CallerWaits(request):
            response = await self._forward(worker, scope, body)
        await response(scope, receive, send)

    def _home(self, scope: Scope) -> int | None:
        path = get_route_path(scope)
        if path.startswith("/sessions/"):
            session_id = path.split("/")[2]
        else:
            session_id = dict(scope["headers"]).get(_HEADER, b"").decode("latin-1")
        return self._peers.home(session_id) if session_id else None

    async def _forward(self, worker: int, scope: Scope, body: bytes) -> Response:
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in _HOP
        ]
        path = get_route_path(scope)
        try:
            status, kept, answer = await self._peers.request(
                worker, scope["method"], path, headers, body
            )
        except OSError:
            words = "the process that had this session has ended"
            return json_response({"detail": words}, 404, {REFUSED: NO_SESSION})
        response = Response(answer, status)
        response.raw_headers += [item for item in kept if item[0].lower() != b"content-length"]
        return response

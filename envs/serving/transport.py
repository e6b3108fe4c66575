"""Uvicorn's connections, which here also end when the peer does not play its part.

A transport that is closed first writes what it holds. A peer that never reads would keep it, with
its descriptor and its buffer, for as long as it likes; so a while after the application is done
with a WebSocket it is cut. And a peer that never finishes its request, or never begins one, would
keep its connection for ever; so every HTTP connection is looked at now and then, and cut if the
same request was unfinished the last time.
"""

from __future__ import annotations

import asyncio
from typing import Any

_LINGER_S = 10.0
LOOK_S = 60.0
"""Seconds between two looks at an HTTP connection: half of what a request may take to arrive."""
_FEW = 8
_SMALL_BYTES = 1 << 16


def websocket_class() -> Any:
    """Return what ``uvicorn.Config(ws=…)`` takes: the class below, or uvicorn's own choice."""
    try:
        from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
    except ImportError:  # an older uvicorn
        return "auto"

    class Connection(WebSocketsSansIOProtocol):
        def send_receive_event_to_app(self) -> None:
            goes_on = (
                not self.read_paused
                and self.queue.qsize() < _FEW
                and sum(map(len, self.frames)) < _SMALL_BYTES
            )
            if goes_on:  # it stops reading only if it believes that it reads
                self.read_paused = True
            super().send_receive_event_to_app()
            if goes_on:
                self.read_paused = False

        async def send(self, message: Any) -> None:
            await super().send(message)
            kind, more = message["type"], message.get("more_body", False)
            if kind == "websocket.http.response.body" and not more:
                # A refusal is an answer; uvicorn would log each of them as a fault.
                self.handshake_complete = True

        async def run_asgi(self) -> None:
            try:
                await super().run_asgi()
            finally:
                self.loop.call_later(_LINGER_S, self.transport.abort)

    return Connection


def http_class() -> Any:
    """Return what ``uvicorn.Config(http=…)`` takes: uvicorn's own choice, with a limit."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _look: asyncio.TimerHandle
        _unfinished: object = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._look = self.loop.call_later(LOOK_S, self._look_at_it)

        def connection_lost(self, exc: Exception | None) -> None:
            self._look.cancel()
            super().connection_lost(exc)

        def _look_at_it(self) -> None:
            if self.transport.get_protocol() is not self:  # a WebSocket by now
                return
            before, self._unfinished = self._unfinished, self._waits_for()
            if self._unfinished is not None and self._unfinished is before:
                self.transport.abort()
                return
            self._look = self.loop.call_later(LOOK_S, self._look_at_it)

        def _waits_for(self) -> object:
            """Return what tells an unfinished request from the next one; None if there is none."""
            cycle = self.cycle
            if cycle is None:
                return self
            if cycle.response_complete:  # between two requests, uvicorn's own timer runs
                return None if self.timeout_keep_alive_task is not None else cycle
            return cycle if cycle.more_body else None

    return Connection

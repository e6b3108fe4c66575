"""Uvicorn's WebSockets, which here also end when the peer does not play its part.

A transport that is closed first writes what it holds. A peer that never reads would keep it, with
its descriptor and its buffer, for as long as it likes; so a while after the application is done
with a WebSocket it is cut. HTTP connections are looked after by all servers of this project
(:mod:`relax_agent.tools.one_write`).
"""

from __future__ import annotations

from typing import Any

_LINGER_S = 10.0
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

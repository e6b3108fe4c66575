"""Uvicorn's WebSocket connection, which here also ends when the peer does not take its end.

A transport that is closed first writes what it holds. A peer that never reads would keep it, with
its descriptor and its buffer, for as long as it likes; so a while after the application is done
with a connection it is cut.
"""

from __future__ import annotations

from typing import Any

_LINGER_S = 10.0


def websocket_class() -> Any:
    """Return what ``uvicorn.Config(ws=…)`` takes: the class below, or uvicorn's own choice."""
    try:
        from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
    except ImportError:  # an older uvicorn
        return "auto"

    class Connection(WebSocketsSansIOProtocol):
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

"""Uvicorn's HTTP connection: answers in one write, and an end for peers that leave it waiting.

Uvicorn writes head and body one after the other, each with a system call that wakes the client: for
small answers that is half of what a request costs. Here what is written in one turn of the event
loop goes out together.

A peer that never finishes its request, or never begins one, or never reads its answer, would keep
its connection, with its descriptor and its buffers, for ever. So every connection is looked at now
and then, and cut if it waited for the same thing the last time.
"""

from __future__ import annotations

import asyncio
from typing import Any

_LARGE = 1 << 16
"""Bytes that are not worth copying to save a write."""
LOOK_S = 60.0
"""Seconds between two looks at a connection: half of what a peer may keep it waiting."""


class _OneWrite:
    """A transport that gathers what is written until the event loop's next turn."""

    __slots__ = ("_loop", "_parts", "_transport")

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Write soon, together with what comes next."""
        if not data:
            return
        if len(data) > _LARGE:
            self._flush()
            self._transport.write(data)
            return
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def _flush(self) -> None:
        if self._parts:
            parts, self._parts = self._parts, []
            if not self._transport.is_closing():
                self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def is_closing(self) -> bool:
        """Whether it closes."""
        return bool(self._transport.is_closing())

    def close(self) -> None:
        """Write what waits, then close."""
        self._flush()
        self._transport.close()

    def set_protocol(self, protocol: Any) -> None:
        """Write what waits; another protocol takes over."""
        self._flush()
        self._transport.set_protocol(protocol)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def http_class() -> Any:
    """Return what ``uvicorn.Config(http=…)`` takes: uvicorn's own choice, as said above."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class Connection(AutoHTTPProtocol):  # type: ignore[valid-type,misc]
        _look: asyncio.TimerHandle
        _waited: tuple[object, int] | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(_OneWrite(transport))
            self._look = self.loop.call_later(LOOK_S, self._look_at_it)

        def connection_lost(self, exc: Exception | None) -> None:
            self._look.cancel()
            super().connection_lost(exc)

        def _look_at_it(self) -> None:
            if self.transport.get_protocol() is not self:  # a WebSocket by now
                return
            before, self._waited = self._waited, self._waits_for()
            if self._waited is not None and self._waited == before:
                self.transport.abort()
                return
            self._look = self.loop.call_later(LOOK_S, self._look_at_it)

        def _waits_for(self) -> tuple[object, int] | None:
            """Return the request, and the bytes of its answer, that the peer keeps waiting."""
            unread = self.transport.get_write_buffer_size()
            cycle = self.cycle
            if unread:
                return cycle, unread
            if cycle is None:
                return self, 0
            if cycle.response_complete:  # between two requests, uvicorn's own timer runs
                return None if self.timeout_keep_alive_task is not None else (cycle, 0)
            return (cycle, 0) if cycle.more_body else None

    return Connection

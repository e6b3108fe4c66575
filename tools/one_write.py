"""Uvicorn's HTTP connection, with the head and the body of an answer in one write.

Uvicorn writes them one after the other, each with a system call that wakes the client: for small
answers that is half of what a request costs. Here what is written in one turn of the event loop
goes out together.
"""

from __future__ import annotations

import asyncio
from typing import Any

_LARGE = 1 << 16
"""Bytes that are not worth copying to save a write."""


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
    """Return what ``uvicorn.Config(http=…)`` takes."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class Connection(AutoHTTPProtocol):  # type: ignore[valid-type,misc]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(_OneWrite(transport))

    return Connection

"""``async with thing:`` for whatever has a ``close`` that is to be awaited.

class Pool(Closing):
async def close(self) -> None: …

async with Pool() as pool: …              # closed at the end, whatever happened
"""

from __future__ import annotations

from collections.abc import Awaitable
from types import TracebackType
from typing import Protocol, Self


class _HasClose(Protocol):
    def close(self) -> Awaitable[object]: ...


class Closing:
    """Base class: the end of ``async with`` awaits ``self.close()``; errors go on."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self: _HasClose,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

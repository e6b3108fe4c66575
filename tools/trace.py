"""The trace: every tool call is one event, for whoever listens.

    with trace_calls(JsonlTrace("calls.jsonl")):
        …                                              # episodes, a server, anything

An event tells whose call it was (:mod:`relax_agent.tools.context`), what it was given, how long it
waited and ran, what came of it and how large it was. Toolsets in this process, clients and servers
all tell of their calls, each with its ``place``. While nobody listens nothing is built.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

from relax_agent.errors import StorageError
from relax_agent.messages import ToolCall
from relax_agent.tools.context import current_call
from relax_agent.tools.result import ToolResult

logger = logging.getLogger(__name__)

Place: TypeAlias = Literal["process", "client", "server"]
MAX_ARGUMENTS = 2000
"""Characters of a call's arguments that an event keeps."""
_MAX_ERROR = 500


@dataclass(frozen=True, slots=True)
class ToolEvent:
    """One tool call that has ended."""

    tool: str
    arguments: str
    """As JSON, cut off after :data:`MAX_ARGUMENTS` characters."""
    arguments_size: int
    """Characters of all of it."""
    outcome: str
    """``ok``, or the kind of the failure."""
    error: str | None
    """What the model was told, if it failed."""
    started_at: float
    """Seconds since 1970."""
    duration_s: float
    queued_s: float
    """Seconds of the duration before anything ran."""
    result_bytes: int
    media: int
    """Pictures, sounds and videos in the result."""
    place: Place
    """``process``: a toolset of this process; ``client``: a call of a server; ``server``: its end.
    """
    call_id: str
    episode: str | None
    session: str | None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return asdict(self)


Sink: TypeAlias = Callable[[ToolEvent], object]
SINKS: list[Sink] = []
"""Who listens. Change it through :func:`trace_calls`."""


@contextlib.contextmanager
def trace_calls(sink: Sink) -> Iterator[None]:
    """Hand every call of this process that ends within to ``sink``, which must not block."""
    SINKS.append(sink)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # one that failed is gone already
            SINKS.remove(sink)


def tell(call: ToolCall, result: ToolResult, place: Place) -> None:
    """Tell all sinks of a call. One that fails is told no more."""
    event = _event(call, result, place)
    for sink in list(SINKS):
        try:
            sink(event)
        except Exception:
            logger.exception("a trace of tool calls failed and is told no more")
            with contextlib.suppress(ValueError):
                SINKS.remove(sink)


def _event(call: ToolCall, result: ToolResult, place: Place) -> ToolEvent:
    context = current_call()
    arguments = _brief_json(call.arguments)
    return ToolEvent(
        tool=call.name[:100],
        arguments=arguments[:MAX_ARGUMENTS],
        arguments_size=len(arguments),
        outcome="ok" if result.error is None else result.error.value,
        error=None if result.error is None else result.text[:_MAX_ERROR],
        started_at=time.time() - result.duration_s,
        duration_s=result.duration_s,
        queued_s=result.queued_s,
        result_bytes=result.size(),
        media=sum(not hasattr(part, "text") for part in result.content),
        place=place,
        call_id=call.id,
        episode=context.episode,
        session=context.session,
    )


def _brief_json(arguments: Any) -> str:
    try:
        return json.dumps(arguments, ensure_ascii=False, default=_described)
    except (ValueError, TypeError, RecursionError):
        return json.dumps(f"(a {type(arguments).__name__} that is no JSON)")


def _described(value: Any) -> str:
    data = getattr(value, "data", None)
    size = f", {len(data):,} bytes" if isinstance(data, bytes) else ""
    return f"({type(value).__name__}{size})"


class JsonlTrace:
    """A sink that writes one line of JSON for each call."""

    def __init__(self, path: Path | str) -> None:
        """Append to a file; its folder is made.

        Raises:
            StorageError: It cannot be written.
        """
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8", errors="replace", buffering=1)
        except OSError as error:
            raise StorageError(f"cannot write {self.path}: {error.strerror}") from error

    def __call__(self, event: ToolEvent) -> None:
        """Write one event."""
        self._file.write(json.dumps(event.to_json(), ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@contextlib.contextmanager
def trace_to(path: Path | None) -> Iterator[None]:
    """Write every call of this process that ends within to a file, if one is named.

    Raises:
        StorageError: It cannot be written.
    """
    if path is None:
        yield
        return
    with JsonlTrace(path) as sink, trace_calls(sink):
        yield

"""What a tool call belongs to: its episode, its session, and the time that is left.

Whoever runs an episode names it once, around all of its calls; the tools, the trace, the client and
the server behind it read it from there. A deadline travels the same way: a tool that calls another
server passes on what is left, and the server ends what nobody waits for any more.

    with call_context(episode=record.id, timeout_s=60):
        await toolset.call(call)
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallContext:
    """What a call belongs to."""

    episode: str | None = None
    """The episode's id."""
    session: str | None = None
    """The id of the session that the call is made in."""
    deadline: float | None = None
    """When the caller stops waiting, on the clock ``time.monotonic``."""


_NONE = CallContext()
CALL: ContextVar[CallContext] = ContextVar("tool_call", default=_NONE)


def current_call() -> CallContext:
    """Return what the running call belongs to; for tools that want to know."""
    return CALL.get()


@contextlib.contextmanager
def call_context(
    *, episode: str | None = None, session: str | None = None, timeout_s: float | None = None
) -> Iterator[CallContext]:
    """Say what the calls made within belong to; what is not given stays as it is.

    Args:
        episode: The episode's id.
        session: The session's id.
        timeout_s: Seconds from now that the caller waits; an earlier deadline around it stays.
    """
    outer = CALL.get()
    deadline = outer.deadline
    if timeout_s is not None:
        deadline = min(time.monotonic() + timeout_s, deadline or float("inf"))
    context = CallContext(episode or outer.episode, session or outer.session, deadline)
    token = CALL.set(context)
    try:
        yield context
    finally:
        CALL.reset(token)


def seconds_left() -> float | None:
    """Return the time until the caller stops waiting; None if it does not say."""
    deadline = CALL.get().deadline
    return None if deadline is None else deadline - time.monotonic()

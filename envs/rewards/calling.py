"""Calling an author's function so that it can neither block nor hold up the event loop.

Plain functions run in a daemon thread (:mod:`relax_agent.threads`), coroutines in a task of their
own. What passes its time limit is given up: a task is cancelled, and left behind if it does not
react; a thread cannot be killed, it is left behind and counted (``THREADS.running``). What must be
killed runs in a process (:mod:`relax_agent.envs.rewards.workers`).
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from relax_agent.errors import ConfigError, EnvError, MissingExtraError, one_line
from relax_agent.limits import STOPS
from relax_agent.threads import THREADS

T = TypeVar("T")

GRACE_S = 1.0
"""Seconds that a cancelled task has to end before it is left behind."""
FATAL = (ConfigError, EnvError, MissingExtraError)
"""Errors that say that the episode cannot be judged at all; never scored, always raised."""
MAX_WORDS = 300
"""Characters of a failure's reason."""


class Late(Exception):
    """A function took longer than it may."""


def is_async(function: Callable[..., Any]) -> bool:
    """Tell whether calling ``function`` gives a coroutine; also for objects with ``__call__``."""
    if inspect.iscoroutinefunction(function):
        return True
    return inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


async def call_within(limit_s: float | None, function: Callable[..., Any], *args: Any) -> Any:
    """Call a plain or async function and return its value.

    Args:
        limit_s: Seconds that it may take; None if it keeps a limit of its own.
        function: What to call.
        *args: Its arguments.

    Raises:
        Late: The time is over.
    """
    deadline = None if limit_s is None else time.monotonic() + limit_s
    if is_async(function):
        return await _outcome(_contained(function(*args)), deadline)
    value = await _outcome(THREADS.submit(partial(function, *args)), deadline)
    if inspect.isawaitable(value):  # a plain function that returned a coroutine
        return await _outcome(_contained(value), deadline)
    return value


async def _outcome(call: Awaitable[T], deadline: float | None) -> T:
    task = asyncio.ensure_future(call)
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    try:
        await asyncio.wait({task}, timeout=left)
        if not task.done():
            raise Late
    finally:
        await _give_up(task)
    try:
        return task.result()
    except asyncio.CancelledError:  # raised by the function: nobody has cancelled this wait
        raise RuntimeError("was cancelled from inside") from None
    except (Exception, *STOPS):
        raise
    except BaseException as error:
        raise RuntimeError(one_line(error, MAX_WORDS)) from error


async def _give_up(task: asyncio.Future[Any]) -> None:
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen
    if not task.done() and task.cancel() and isinstance(task, asyncio.Task):
        await asyncio.wait({task}, timeout=GRACE_S)


async def _contained(call: Awaitable[T]) -> T:
    """Keep ``sys.exit`` in an author's code from ending the event loop."""
    try:
        return await call
    except SystemExit as error:
        raise RuntimeError(f"sys.exit({error.code!r}) was called") from error


def number(value: Any) -> float:
    """Return ``value`` as a finite float, or raise ValueError that says what it is instead."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise ValueError(f"it returned {_brief(value)}, which is no number")
    try:
        plain = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ValueError(f"it returned {_brief(value)}, which is no number") from None
    if not math.isfinite(plain):
        raise ValueError(f"it returned {plain}")
    return plain


def _brief(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"a {type(value).__name__}"

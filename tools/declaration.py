"""``@tool``: a typed function with a docstring becomes a tool.

From that one declaration come the JSON schema in the prompt, the validation of arguments, the
HTTP route and the limits. A declared tool is still called like the function it was. As a method
(``def move(self, …)``) it is bound to its instance, so an environment's own state can be a tool's
state.

    @tool(timeout=5, idempotent=True, retries=1)
    async def search(query: str, count: int = 3) -> list[str]:
        '''Search the encyclopedia.

Args:
            query: A few key words.
            count: How many titles to return.
        '''

Sync functions run in a daemon thread, unless ``inline=True`` says that they never block.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import time
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar, overload

from relax_agent.errors import ToolDeclarationError, ToolError, ToolErrorKind
from relax_agent.threads import THREADS
from relax_agent.tools.result import ToolResult
from relax_agent.tools.schema import Arguments, arguments_of, describe

P = ParamSpec("P")
R = TypeVar("R")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_RETRIED = {ToolErrorKind.CRASHED, ToolErrorKind.TIMEOUT, ToolErrorKind.UNAVAILABLE}
_MAX_REASON = 500
"""Characters of a crash's reason that the model gets to see."""


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """What a tool may take, declared beside the function and enforced by every caller."""

    timeout_s: float = 30.0
    """Seconds that one attempt may run, its start-up included."""
    queue_timeout_s: float = 60.0
    """Seconds that a call may wait for one of the ``max_concurrency`` places."""
    max_concurrency: int | None = None
    """Calls that may run at once in one process; None: no limit (threads: 256)."""
    max_output_bytes: int = 1 << 20
    """Size of the content of one result."""
    idempotent: bool = False
    """Whether a second call does no harm; only then is anything ever retried."""
    retries: int = 0
    """Attempts after the first; needs ``idempotent``."""

    def check(self, name: str) -> None:
        """Raise ToolDeclarationError if a limit makes no sense."""
        if self.retries and not self.idempotent:
            raise ToolDeclarationError(
                f"tool {name}: retries need idempotent=True",
                hint="a call that timed out may have had its effect already",
            )
        if self.timeout_s <= 0 or self.queue_timeout_s <= 0 or self.retries < 0:
            raise ToolDeclarationError(f"tool {name}: time-outs must be positive, retries ≥ 0")
        if self.max_output_bytes < 1 or (self.max_concurrency or 1) < 1:
            raise ToolDeclarationError(f"tool {name}: size and concurrency limits must be ≥ 1")


class _Slots:
    """The places of one tool: a semaphore for each event loop that calls it."""

    def __init__(self, count: int | None) -> None:
        self._count = count
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    async def take(self, timeout_s: float) -> Callable[[], None]:
        """Wait for a place and return the function that gives it back."""
        if self._count is None:
            return _nothing
        loop = asyncio.get_running_loop()
        places = self._by_loop.setdefault(loop, asyncio.Semaphore(self._count))
        if places.locked():
            try:
                async with asyncio.timeout(timeout_s):
                    await places.acquire()
            except TimeoutError:
                raise ToolError(
                    f"all {self._count} places were busy for {timeout_s:g} s",
                    kind=ToolErrorKind.UNAVAILABLE,
                ) from None
        else:
            await places.acquire()
        return places.release


def _nothing() -> None:
    """Give nothing back."""


class Tool(Generic[P, R]):
    """A declared tool. Calling it calls the function; :meth:`invoke` is the guarded way."""

    def __init__(
        self,
        function: Callable[P, R],
        *,
        name: str | None = None,
        description: str | None = None,
        limits: ToolLimits | None = None,
        inline: bool = False,
    ) -> None:
        self.function = function
        self.limits = limits or ToolLimits()
        self.name: str = name or function.__name__
        self.is_method = next(iter(inspect.signature(function).parameters), "") == "self"
        self.inline = inline
        self._async = inspect.iscoroutinefunction(function)
        self._check()
        text, docs = describe(function)
        self.description: str = description or text
        if not self.description:
            raise ToolDeclarationError(
                f"tool {self.name} has no docstring", hint="say in one line what it does"
            )
        self.arguments: Arguments = arguments_of(
            function, self.name, skip=int(self.is_method), docs=docs
        )
        threads = None if self._async or inline else 256
        self._slots = _Slots(self.limits.max_concurrency or threads)
        self.__doc__ = function.__doc__
        self.__name__ = self.name
        self.__module__ = function.__module__

    def _check(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ToolDeclarationError(
                f"{self.name!r} cannot be a tool's name",
                hint="letters, digits, '_' and '-', at most 64, not beginning with a digit",
            )
        if inspect.isgeneratorfunction(self.function) or inspect.isasyncgenfunction(self.function):
            raise ToolDeclarationError(f"tool {self.name} is a generator", hint="return a list")
        if self.inline and self._async:
            raise ToolDeclarationError(f"tool {self.name}: inline is for plain functions")
        self.limits.check(self.name)

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        return self.arguments.schema

    def schema(self) -> dict[str, Any]:
        """Return the tool as chat templates and SDKs want it."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": self.parameters,
            },
        }

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function itself, without validation or limits."""
        return self.function(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Tool[..., R]:
        if instance is None or not self.is_method:
            return self
        return self.bind(instance)

    def __repr__(self) -> str:
        return f"<Tool {self.name}({', '.join(self.parameters['properties'])})>"

    def bind(self, instance: Any) -> Tool[..., R]:
        """Return the same tool as a method of ``instance``; places are shared."""
        bound: Tool[..., R] = object.__new__(Tool)
        bound.__dict__.update(self.__dict__)
        bound.function = partial(self.function, instance)  # type: ignore[call-arg]
        bound.is_method = False
        return bound

    async def invoke(self, arguments: Any) -> ToolResult:
        """Validate, run within the limits, and return the outcome. Only cancellation raises."""
        started = time.perf_counter()
        try:
            values = self.arguments.validate(arguments)
        except ToolError as error:
            return self._failed(error, started)
        for attempt in range(self.limits.retries + 1):
            try:
                result = self._sized(ToolResult.of(await self._attempt(values)))
                return result.timed(time.perf_counter() - started)
            except ToolError as error:
                last = error
            if last.kind not in _RETRIED or attempt == self.limits.retries:
                break
        return self._failed(last, started)

    def _failed(self, error: ToolError, started: float) -> ToolResult:
        message = f"{self.name}: {error}"
        return ToolResult.failure(error.kind, message, time.perf_counter() - started)

    def _sized(self, result: ToolResult) -> ToolResult:
        size, limit = result.size(), self.limits.max_output_bytes
        if size > limit:
            raise ToolError(
                f"the result is too large ({size:,} of at most {limit:,} bytes); ask for less",
                kind=ToolErrorKind.TOO_LARGE,
            )
        return result

    async def _attempt(self, values: dict[str, Any]) -> Any:
        """Run once; every failure becomes a ToolError."""
        give_back = await self._slots.take(self.limits.queue_timeout_s)
        limit = asyncio.timeout(self.limits.timeout_s)
        try:
            async with limit:
                return await self._start(values, give_back)
        except ToolError:
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise ToolError("was cancelled from inside") from None
        except (Exception, SystemExit) as error:
            if limit.expired():
                raise ToolError(
                    f"timed out after {self.limits.timeout_s:g} s", kind=ToolErrorKind.TIMEOUT
                ) from error
            raise ToolError(f"failed with {_reason(error)}") from error

    async def _start(self, values: dict[str, Any], give_back: Callable[[], None]) -> Any:
        if not self._async and not self.inline:
            # The place is given back when the thread has really ended, not when we stop waiting.
            try:
                job = THREADS.submit(partial(self.function, **values), give_back)
            except RuntimeError:  # the system has no more threads
                give_back()
                raise
            return await job
        value: Any = None
        try:
            value = self.function(**values)  # type: ignore[call-arg]
            if not isinstance(value, Awaitable):
                return value
            # In a task of its own: a tool that cancels its task ends itself, not its caller.
            return await asyncio.create_task(_contained(value))
        finally:
            give_back()
            if inspect.iscoroutine(value) and inspect.getcoroutinestate(value) == "CORO_CREATED":
                value.close()  # cancelled before it began: nobody will ever await it


async def _contained(call: Awaitable[R]) -> R:
    """Await ``call``; ``sys.exit`` in it must not end the event loop."""
    try:
        return await call
    except SystemExit as error:
        raise ToolError(f"failed with {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """Tell an exception in one line, even if it cannot tell itself."""
    try:
        words = " ".join(str(error).split())
    except Exception:
        words = "(no message)"
    return f"{type(error).__name__}: {words[:_MAX_REASON]}"


@overload
def tool(function: Callable[P, R], /) -> Tool[P, R]: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float = 30.0,
    queue_timeout: float = 60.0,
    max_concurrency: int | None = None,
    max_output_bytes: int = 1 << 20,
    idempotent: bool = False,
    retries: int = 0,
    inline: bool = False,
) -> Callable[[Callable[P, R]], Tool[P, R]]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float = 30.0,
    queue_timeout: float = 60.0,
    max_concurrency: int | None = None,
    max_output_bytes: int = 1 << 20,
    idempotent: bool = False,
    retries: int = 0,
    inline: bool = False,
) -> Any:
    """Declare a typed function with a docstring as a tool.

    Args:
        function: The function, when used as a bare ``@tool``.
        name: The name that the model sees; the function's own by default.
        description: What the model reads; the docstring by default.
        timeout: Seconds that one attempt may run, start-up included.
        queue_timeout: Seconds that a call may wait for a free place.
        max_concurrency: Calls that may run at once in this process.
        max_output_bytes: Size limit of one result.
        idempotent: Whether a second call does no harm; allows retries.
        retries: Attempts after the first.
        inline: Run a sync function in the event loop itself: only for microseconds of pure
            computing, because no time limit can interrupt it.
    """
    limits = ToolLimits(
        timeout, queue_timeout, max_concurrency, max_output_bytes, idempotent, retries
    )

    def declare(target: Callable[..., Any]) -> Tool[..., Any]:
        return Tool(target, name=name, description=description, limits=limits, inline=inline)

    return declare if function is None else declare(function)

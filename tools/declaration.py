"""``@tool``: a typed function with a docstring becomes a tool.

From that one declaration come the JSON schema in the prompt, the validation of arguments, the
HTTP route and the limits. A declared tool is still called like the function it was.

    @tool(timeout=5, idempotent=True, retries=1)
    async def search(query: str, count: int = 3) -> list[str]:
        '''Search the encyclopedia: a few key words find titles.'''

As a method (``def move(self, …)``) it is bound to its instance: an environment's own state can be
a tool's state, and a class of such methods can be a session (:mod:`relax_agent.tools.sessions`).
Plain functions run in a daemon thread, unless ``inline=True`` says that they never block.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, overload

from relax_agent.errors import MediaError, ToolDeclarationError, ToolError, ToolErrorKind, one_line
from relax_agent.limits import STOPS
from relax_agent.threads import THREADS
from relax_agent.tools.context import seconds_left
from relax_agent.tools.docstrings import describe
from relax_agent.tools.limits import MAX_THREADS, Places, ToolLimits
from relax_agent.tools.result import ToolResult
from relax_agent.tools.running import Late, run_within, start, within
from relax_agent.tools.schema import Arguments, arguments_of

__all__ = ["Owner", "Tool", "ToolLimits", "tool"]

P = ParamSpec("P")
R = TypeVar("R")
WarmUp = Callable[[], Any]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_RETRIED = {ToolErrorKind.CRASHED, ToolErrorKind.TIMEOUT, ToolErrorKind.UNAVAILABLE}


class Owner(Protocol):
    """Whose method a tool is: one instance, opened when it is first needed."""

    async def take(self, timeout_s: float) -> Callable[[], None]:
        """Wait until no other call uses it, and return the function that lets the next one in."""

    async def instance(self) -> Any:
        """Return the instance; open it if that has not been done."""

    def running(self, future: asyncio.Future[Any]) -> None:
        """Hear of a call that has begun, so that it can be ended."""

    @property
    def closed(self) -> bool:
        """Whether it has been closed, which ends its calls."""


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
        requires_session: bool | None = None,
        warm_up: WarmUp | None = None,
    ) -> None:
        self.function = function
        self.limits = limits or ToolLimits()
        self.name: str = name or str(getattr(function, "__name__", ""))
        self.is_method = next(iter(inspect.signature(function).parameters), "") == "self"
        self.inline = inline
        self.requires_session = self.is_method if requires_session is None else requires_session
        self.warm_up = warm_up
        self._async = inspect.iscoroutinefunction(function)
        self._check()
        text, docs = describe(function, self.name)
        self.description: str = description or text
        if not self.description:
            raise ToolDeclarationError(
                f"tool {self.name} has no docstring", hint="say in one line what it does"
            )
        self.arguments: Arguments = arguments_of(
            function, self.name, skip=int(self.is_method), docs=docs
        )
        threads = None if self._async or inline else MAX_THREADS
        self._places = Places(self.limits.max_concurrency or threads)
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
        bound.is_method = bound.requires_session = False
        return bound

    async def invoke(self, arguments: Any, owner: Owner | None = None) -> ToolResult:
        """Validate, run within the limits, and return the outcome. Only cancellation raises.

        Args:
            arguments: What the model wrote; anything at all.
            owner: Whose method this is, if it is one that is not bound.
        """
        started = time.perf_counter()
        waits = [0.0]
        try:
            values = self.arguments.validate(arguments)
        except ToolError as error:
            return self._failed(error, started, waits)
        for _ in range(self.limits.retries + 1):
            try:
                value = await self._attempt(values, owner, waits)
                result = self._sized(ToolResult.of(value))
                return result.timed(time.perf_counter() - started, waits[0])
            except ToolError as error:
                last = error
            left = seconds_left()
            if last.kind not in _RETRIED or (left is not None and left <= 0):
                break
        return self._failed(last, started, waits)

    def _failed(self, error: ToolError, started: float, waits: list[float]) -> ToolResult:
        message = f"{self.name}: {error}"
        result = ToolResult.failure(error.kind, message)
        return result.timed(time.perf_counter() - started, waits[0])

    def _sized(self, result: ToolResult) -> ToolResult:
        size, limit = result.size(), self.limits.max_output_bytes
        if size > limit:
            raise ToolError(
                f"the result is too large ({size:,} of at most {limit:,} bytes); ask for less",
                kind=ToolErrorKind.TOO_LARGE,
            )
        return result

    async def _attempt(
        self, values: dict[str, Any], owner: Owner | None, waits: list[float]
    ) -> Any:
        """Run once; every failure becomes a ToolError."""
        began = time.perf_counter()
        try:
            give_back = await self._take(owner)
        finally:
            waits[0] += time.perf_counter() - began
        seconds, left = self.limits.timeout_s, seconds_left()
        if left is not None and left < seconds:
            seconds = max(0.0, left)
        try:
            return await self._start(values, owner, give_back, seconds)
        except ToolError as error:
            if owner is not None and owner.closed:
                words = "the session was closed meanwhile"
                raise ToolError(words, kind=ToolErrorKind.UNAVAILABLE) from error
            raise
        except Late:
            words = f"timed out after {round(seconds, 3):g} s"
            raise ToolError(words, kind=ToolErrorKind.TIMEOUT) from None
        except MediaError as error:
            raise ToolError(str(error), kind=ToolErrorKind.INVALID_ARGUMENTS) from error
        except STOPS:
            raise
        except BaseException as error:  # also what is no Exception, as libraries in Rust raise it
            raise ToolError(f"failed with {one_line(error)}") from error

    async def _take(self, owner: Owner | None) -> Callable[[], None]:
        """Wait for the owner, then for a place; the time for both is one."""
        limit, left = self.limits.queue_timeout_s, seconds_left()
        if left is not None:
            limit = min(limit, max(0.0, left))
        if owner is None:
            return await self._places.take(limit)
        began = time.perf_counter()
        let_in = await owner.take(limit)
        try:
            release = await self._places.take(max(0.0, limit - (time.perf_counter() - began)))
        except BaseException:
            let_in()
            raise

        def give_back() -> None:
            release()
            let_in()

        return give_back

    async def _start(
        self,
        values: dict[str, Any],
        owner: Owner | None,
        give_back: Callable[[], None],
        seconds: float,
    ) -> Any:
        if owner is not None:
            return await within(self._owned(values, owner, give_back), seconds)
        if self._async:
            call = partial(self.function, **values)
            return await run_within(call, seconds, give_back)  # type: ignore[arg-type]
        if not self.inline:
            # The place is given back when the thread has really ended, not when we stop waiting.
            try:
                job = THREADS.submit(partial(self.function, **values), give_back)
            except RuntimeError:  # the system has no more threads
                give_back()
                raise
            began = time.monotonic()
            value: Any = await within(job, seconds)
            seconds -= time.monotonic() - began
        else:
            try:
                value = self.function(**values)  # type: ignore[call-arg]
            finally:
                give_back()
        if isinstance(value, Awaitable):  # a plain function that returned a coroutine
            coroutine = value
            return await within(start(lambda: coroutine), max(0.0, seconds))
        return value

    def _owned(
        self, values: dict[str, Any], owner: Owner, give_back: Callable[[], None]
    ) -> asyncio.Future[Any]:
        """Run a method of ``owner``, which is opened first if need be: within the same limit."""
        jobs: list[asyncio.Future[Any]] = []

        async def run() -> Any:
            call = partial(self.function, await owner.instance(), **values)  # type: ignore[call-arg]
            if self._async:
                return await call()  # type: ignore[misc,call-arg]
            jobs.append(THREADS.submit(call, give_back))
            value = await jobs[0]
            return await value if isinstance(value, Awaitable) else value

        task = start(run)
        task.add_done_callback(lambda _: None if jobs else give_back())
        owner.running(task)
        return task


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
    requires_session: bool | None = None,
    sandbox: bool = False,
    warm_up: WarmUp | None = None,
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
    requires_session: bool | None = None,
    sandbox: bool = False,
    warm_up: WarmUp | None = None,
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
        requires_session: Refuse calls outside a session (``denied``). True for methods; a method
            with False gets a session of its own for each call outside one.
        sandbox: Run the function in the sandbox for untrusted code, in a fresh interpreter for
            each call. It must be self-contained: imports inside, arguments plain data.
        warm_up: Called once before a server says that it is ready; plain or async.
    """
    limits = ToolLimits(
        timeout, queue_timeout, max_concurrency, max_output_bytes, idempotent, retries
    )

    def declare(target: Callable[..., Any]) -> Tool[..., Any]:
        body = target
        if sandbox:
            from relax_agent.tools.sandboxed import in_sandbox

            body = in_sandbox(target, name or target.__name__, timeout)
        return Tool(
            body,
            name=name,
            description=description,
            limits=limits,
            inline=inline,
            requires_session=requires_session,
            warm_up=warm_up,
        )

    return declare if function is None else declare(function)

"""Tools with state: a class whose methods are tools is opened once for each session.

    class Notebook:
        def __init__(self, folder: str = "/tmp") -> None: …      # cheap; may take arguments
        async def open(self) -> None: …                          # optional: what takes time
        async def close(self) -> None: …                         # optional: gives all of it back

        @tool
        async def write(self, text: str) -> str: …

    toolset = Toolset([search, Notebook])                  # or partial(Notebook, folder="/data")
    async with toolset.session() as session:               # one for each episode
        await session.call(ToolCall("write", {"text": "…"}))

The instance is made and opened at the first call that needs it, within that call's time limit; a
start that fails or is too slow is undone, and the next call tries again. Calls of one instance run
one after the other, in the order in which they came: they share its state. Closing ends the calls
that run, and is itself bounded: an instance that does not close in time is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from relax_agent.closing import Closing
from relax_agent.errors import ToolDeclarationError, ToolError, ToolErrorKind, one_line
from relax_agent.limits import Overrun, TimeBudget, bounded
from relax_agent.messages import ToolCall
from relax_agent.threads import THREADS
from relax_agent.tools.context import call_context
from relax_agent.tools.declaration import Tool
from relax_agent.tools.limits import acquire
from relax_agent.tools.result import ToolResult
from relax_agent.tools.running import GRACE_S, give_up

if TYPE_CHECKING:
    from relax_agent.tools.toolset import Toolset

logger = logging.getLogger(__name__)

CLOSE_S = 10.0
"""Seconds that an instance may take to close before it is left behind."""


class SessionClass:
    """A class whose methods are tools, and how to make one of it."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        """Take a class, or ``functools.partial`` of one.

        Raises:
            ToolDeclarationError: It has no tools, or cannot be made without more arguments.
        """
        self.factory = factory
        cls = factory.func if isinstance(factory, partial) else factory
        assert isinstance(cls, type)
        self.cls: type[Any] = cls
        self.tools = tools_of(cls)
        if not self.tools:
            raise ToolDeclarationError(
                f"{cls.__name__} has no tools", hint="put @tool before its methods"
            )
        try:
            inspect.signature(factory).bind()
        except TypeError as error:
            raise ToolDeclarationError(
                f"{cls.__name__} cannot be made for each session: {error}",
                hint=f"name its arguments: functools.partial({cls.__name__}, …)",
            ) from None

    async def make(self) -> Any:
        """Make and open an instance; what fails on the way is closed again."""
        made = await self._build()
        try:
            await _call_hook(made, "open")
        except BaseException:
            await self.unmake(made)
            raise
        return made

    async def _build(self) -> Any:
        """Call the class in a thread; what it makes after nobody waits any more is closed."""
        loop, built = asyncio.get_running_loop(), list[Any]()

        def build() -> Any:
            built.append(self.factory())

        def close_unwanted() -> None:
            if job.cancelled() and built:
                _CLOSING.add(task := loop.create_task(self.unmake(built[0])))
                task.add_done_callback(_CLOSING.discard)

        job = THREADS.submit(build, close_unwanted)
        await job
        return built[0]

    async def unmake(self, instance: Any) -> str | None:
        """Close an instance; the reason if that fails or takes too long."""
        try:
            await bounded(_call_hook(instance, "close"), TimeBudget(CLOSE_S).left)
        except Overrun:
            return f"{self.cls.__name__}.close() took over {CLOSE_S:g} s"
        except Exception as error:
            return f"{self.cls.__name__}.close(): {one_line(error)}"
        return None


_CLOSING: set[asyncio.Task[Any]] = set()
"""Closings that nobody waits for; a task that nobody holds may vanish."""


def tools_of(cls: type[Any]) -> dict[str, Tool[..., Any]]:
    """Return the tools among a class's methods, its base classes' first."""
    members: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        members |= vars(base)
    found = [each for each in members.values() if isinstance(each, Tool) and each.is_method]
    return {each.name: each for each in found}


def is_session_class(value: Any) -> bool:
    """Tell whether ``value`` is such a class, or a partial of one."""
    cls = value.func if isinstance(value, partial) else value
    return isinstance(cls, type) and not isinstance(value, Tool)


async def _call_hook(instance: Any, name: str) -> None:
    hook = getattr(instance, name, None)
    if not callable(hook) or isinstance(hook, Tool):
        return
    if inspect.iscoroutinefunction(hook):
        await hook()
        return
    value = await THREADS.run(hook)
    if inspect.isawaitable(value):
        await value


class Instance:
    """One instance of a session class: opened when needed, used by one call at a time."""

    def __init__(self, home: SessionClass) -> None:
        self._home = home
        self._turn = asyncio.Lock()
        self._made: Any = None
        self._is_open = False
        self._calls: set[asyncio.Future[Any]] = set()
        self.closed = False

    @property
    def is_open(self) -> bool:
        """Whether there is something to close."""
        return self._is_open

    async def take(self, timeout_s: float) -> Callable[[], None]:
        """Wait until no other call uses it, and return the function that lets the next one in."""
        words = f"an earlier call of this session was still running after {timeout_s:g} s"
        await acquire(self._turn, timeout_s, words)
        if self.closed:
            self._turn.release()
            raise _over()
        return self._turn.release

    async def instance(self) -> Any:
        """Return the instance; make and open it if that has not been done."""
        if not self._is_open:
            try:
                made = await self._home.make()
            except ToolError:
                raise
            except Exception as error:
                name = self._home.cls.__name__
                raise ToolError(f"{name} could not be opened: {one_line(error)}") from error
            if self.closed:
                await self._home.unmake(made)
                raise _over()
            self._made, self._is_open = made, True
        return self._made

    def running(self, future: asyncio.Future[Any]) -> None:
        """Hear of a call that has begun, so that it can be ended."""
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)

    async def close(self) -> str | None:
        """End its calls, then close it; the reason if it could not be closed."""
        self.closed = True
        for each in list(self._calls):
            await give_up(each)
        if not self._is_open:
            return None
        with contextlib.suppress(TimeoutError):  # a plain method cannot be stopped: wait a little
            async with asyncio.timeout(GRACE_S):
                await self._turn.acquire()
        made, self._made, self._is_open = self._made, None, False
        return await self._home.unmake(made)


def _over() -> ToolError:
    return ToolError("the session is closed", kind=ToolErrorKind.UNAVAILABLE)


class ToolSession(Closing):
    """All tools of a toolset for one episode; made by :meth:`Toolset.session`."""

    def __init__(self, toolset: Toolset, homes: Mapping[str, SessionClass]) -> None:
        self.id = secrets.token_urlsafe(12)
        self._toolset = toolset
        self._homes = dict(homes)
        self._instances: dict[SessionClass, Instance] = {}
        self._closed = False

    @property
    def names(self) -> tuple[str, ...]:
        """The tools' names, in the order of their schemas."""
        return self._toolset.names

    def __iter__(self) -> Iterator[Tool[..., Any]]:
        return iter(self._toolset)

    def schemas(self) -> list[dict[str, Any]]:
        """Return every tool as chat templates and SDKs want it."""
        return self._toolset.schemas()

    async def open(self) -> None:
        """Open everything now instead of at the first call that needs it.

        Raises:
            ToolError: Something cannot be opened, or the session is closed.
        """
        for home in dict.fromkeys(self._homes.values()):
            instance = self.owner(home)
            let_in = await instance.take(CLOSE_S)
            try:
                await instance.instance()
            finally:
                let_in()

    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call. Failures are results; only cancellation raises."""
        with call_context(session=self.id):
            return await self._toolset.run(call, self)

    def owner(self, home: SessionClass) -> Instance:
        """Return the session's instance of a class, opened or not.

        Raises:
            ToolError: The session is closed.
        """
        if self._closed:
            raise _over()
        instance = self._instances.get(home)
        if instance is None:
            instance = self._instances[home] = Instance(home)
        return instance

    async def close(self) -> list[str]:
        """Close what was opened; returns what could not be closed. May be called twice."""
        self._closed = True
        instances, self._instances = list(self._instances.values()), {}
        async with asyncio.TaskGroup() as group:
            closing = [group.create_task(each.close()) for each in instances]
        failures = [reason for task in closing if (reason := task.result()) is not None]
        for reason in failures:
            logger.warning("a session's tools were left behind: %s", reason)
        return failures

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._instances)} in use"
        return f"<ToolSession {self.id}: {state}>"

"""Ready-made Python: a tool that runs code in the sandbox.

    async with PythonSession() as session:               # one for each episode
        env = MyEnv(tools=[session.python])

:class:`PythonSession` keeps variables, imports and files from call to call. It is a session class:
``Toolset([PythonSession])`` opens one for each of the toolset's sessions. ``run_python`` begins
afresh in each call and needs no session, so it can be served as it is: ``relax-agent tools serve
relax_agent.tools.python``. Both return what a terminal would show, and figures as images. How code
is held is told in :mod:`relax_agent.tools.sandbox`.
"""

from __future__ import annotations

from functools import lru_cache, partial

from relax_agent.closing import Closing
from relax_agent.errors import ToolError, ToolErrorKind
from relax_agent.threads import THREADS
from relax_agent.tools.declaration import tool
from relax_agent.tools.result import ToolResult
from relax_agent.tools.sandbox import Limits, Sandbox, SandboxSession

_TIMEOUT_S = 3600.0
"""The sandbox's own, shorter limits count; this one is for what even they cannot end."""
_MAX_OUTPUT_BYTES = 64 << 20


def shared_sandbox(limits: Limits | None = None) -> Sandbox:
    """Return this process's sandbox for untrusted code with these limits, or the usual ones.

    Everybody who asks for the same limits shares the warm interpreters, never a session.

    Raises:
        ConfigError: The strong level does not work here, or a limit makes no sense.
    """
    return _sandbox(limits or Limits())


@lru_cache(maxsize=32)
def _sandbox(limits: Limits) -> Sandbox:
    return Sandbox(limits=limits)


class PythonSession(Closing):
    """One session of Python for a model, with the tool that belongs to it."""

    def __init__(self, sandbox: Sandbox | None = None, *, limits: Limits | None = None) -> None:
        """Start nothing yet: the first call does.

        Args:
            sandbox: Where the code runs; by default the :func:`shared_sandbox` with ``limits``.
            limits: What the code may take, without a ``sandbox``.

        Raises:
            ConfigError: A limit makes no sense.
        """
        if limits is not None:
            limits.check()
        self._sandbox = sandbox
        self._limits = limits
        self._session: SandboxSession | None = None
        self._closed = False

    @tool(timeout=_TIMEOUT_S, max_output_bytes=_MAX_OUTPUT_BYTES)
    async def python(self, code: str) -> ToolResult:
        """Run Python code. Variables, imports and files stay for the next call.

        Returns what the code prints, the value of its last expression and its figures. There is no
        network and nobody to ask for input.

        Args:
            code: The code; several lines are fine.
        """
        return (await (await self.session()).run(code)).to_tool_result()

    async def session(self) -> SandboxSession:
        """Return the session of the sandbox, for instance to bring files in.

        Raises:
            ConfigError: The strong level does not work here.
            ToolError: It is closed.
        """
        if self._closed:
            raise ToolError("the Python session is closed", kind=ToolErrorKind.UNAVAILABLE)
        if self._session is None:
            sandbox = self._sandbox
            if sandbox is None:
                sandbox = await THREADS.run(partial(shared_sandbox, self._limits))
            # Another call may have been faster while this one waited.
            self._session = self._session or sandbox.session()
        return self._session

    async def restart(self) -> None:
        """Begin afresh: end the interpreter; the next call finds a new one. Opens a closed one."""
        await self.close()
        self._closed = False

    async def close(self) -> None:
        """End the interpreter and wait until nothing of it is left. May be called twice."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()


@tool(
    timeout=_TIMEOUT_S,
    max_output_bytes=_MAX_OUTPUT_BYTES,
    max_concurrency=64,
    idempotent=True,
    retries=1,
)
async def run_python(code: str) -> ToolResult:
    """Run Python code in a fresh interpreter: nothing stays for the next call.

    Returns what the code prints, the value of its last expression and its figures. There is no
    network and nobody to ask for input.

    Args:
        code: The code; several lines are fine.
    """
    sandbox = await THREADS.run(shared_sandbox)
    async with sandbox.session() as session:
        return (await session.run(code)).to_tool_result()

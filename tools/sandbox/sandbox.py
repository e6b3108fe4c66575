"""``Sandbox``: where code that a model wrote runs.

    sandbox = Sandbox(timeout_s=10, memory_mb=512)
    async with sandbox.session() as session:
        await session.run("x = 6 * 7")
        result = await session.run("x")          # result.value == "42"

The level is found out once, by starting an interpreter and looking at it from outside, and checked
again for each one that is started. Code of a model (``untrusted``, the default) runs at the strong
level or not at all.
"""

from __future__ import annotations

import difflib
import logging
import platform
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from relax_agent.closing import Closing
from relax_agent.errors import ConfigError, ToolError, UnknownKeyError
from relax_agent.tools.sandbox import seccomp
from relax_agent.tools.sandbox.cgroup import parent_group
from relax_agent.tools.sandbox.interpreter import Interpreter, start
from relax_agent.tools.sandbox.layout import Contents, Launch, basic, strong
from relax_agent.tools.sandbox.limits import Level, Limits
from relax_agent.tools.sandbox.pool import SandboxPool
from relax_agent.tools.sandbox.session import SandboxSession
from relax_agent.tools.temporary import new_folder

logger = logging.getLogger(__name__)

_INSTALL = "apt-get install -y bubblewrap (or dnf, apk, pacman: the package has the same name)"


@dataclass(frozen=True, slots=True)
class Probe:
    """What this machine can do."""

    level: Level
    why: str
    """Why not more, or what holds the code, in a sentence."""
    hint: str = ""
    """What to do for the strong level; empty if it is active."""


@lru_cache(maxsize=1)
def probe() -> Probe:
    """Say which level this machine can do and why, by trying it once (about 0.1 s)."""
    if sys.platform != "linux":
        return Probe(Level.BASIC, f"there are no namespaces on {sys.platform}", "use Linux")
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return Probe(Level.BASIC, "bubblewrap is not installed", _INSTALL)
    if not seccomp.supported(platform.machine()):
        why = f"there is no filter of system calls for {platform.machine()}"
        return Probe(Level.BASIC, why, "use x86_64 or aarch64")
    limits = Limits(start_timeout_s=20)
    try:
        start(_strong_launch(limits, Contents(packages=False)), Level.STRONG, limits).kill()
    except (ToolError, OSError) as error:
        hint = (
            "allow user namespaces: sysctl user.max_user_namespaces, a container's seccomp profile"
        )
        return Probe(Level.BASIC, f"bubblewrap does not work here: {error}", hint)
    memory = "by a control group" if parent_group() else "for each process, and watched"
    why = f"bubblewrap: namespaces and a filter of system calls; memory is limited {memory}"
    return Probe(Level.STRONG, why)


def _strong_launch(limits: Limits, contents: Contents) -> Launch:
    bwrap = shutil.which("bwrap")
    assert bwrap is not None
    return strong(bwrap, _filter(), limits, contents)


@lru_cache(maxsize=1)
def _filter() -> bytes:
    return seccomp.program(platform.machine())


class Sandbox(Closing):
    """A place for code, with a level and limits; makes sessions."""

    def __init__(
        self,
        *,
        untrusted: bool = True,
        level: Level | str | None = None,
        packages: bool = True,
        hidden_packages: Iterable[str] = (),
        preload: Iterable[str] = (),
        warm: int = 1,
        max_sessions: int | None = None,
        limits: Limits | None = None,
        **changes: Any,
    ) -> None:
        """Find out the level; nothing is started yet.

        Args:
            untrusted: Whether the code is somebody else's, a model's above all: it then runs at
                the strong level or not at all.
            level: The level to run trusted code at; by default the best that this machine can.
            packages: Whether the code may import the packages of this interpreter (numpy, …).
            hidden_packages: Packages that it may not: those that hold an environment's answers.
                (At the basic level nothing can be hidden.)
            preload: Modules that interpreters import before their first call, while they wait.
            warm: Interpreters kept ready for the next session.
            max_sessions: Sessions at once; more wait.
            limits: What one session may take.
            changes: Single limits by name, e.g. ``timeout_s=5, memory_mb=512``.

        Raises:
            ConfigError: The code is untrusted and the strong level does not work here or is not
                wanted, or a limit makes no sense.
        """
        self.limits = _limits(limits or Limits(), changes)
        self.level: Level = _level(untrusted, level)
        """How well it holds; told in the log as well."""
        hidden, preloaded = tuple(hidden_packages), tuple(preload)
        self._contents = Contents(packages, hidden, preloaded)
        for name in (*hidden, *preloaded):
            if not all(part.isidentifier() for part in name.split(".")):
                raise ConfigError(f"{name!r} is no module's name")
        self.pool = SandboxPool(self._start, warm=warm, max_sessions=max_sessions)
        """The warm interpreters."""
        logger.info("sandbox level: %s (%s)", self.level, probe().why)

    def session(self) -> SandboxSession:
        """Return a new session, to be used with ``async with`` or closed with ``close()``."""
        return SandboxSession(self.pool, self.limits)

    async def close(self) -> None:
        """End the warm interpreters; open sessions go on until they are closed."""
        await self.pool.close()

    def __repr__(self) -> str:
        return f"<Sandbox {self.level}>"

    def _start(self) -> Interpreter:
        if self.level is Level.STRONG:
            launch = _strong_launch(self.limits, self._contents)
        else:
            launch = basic(self.limits, self._contents, new_folder("sandbox"))
        return start(launch, self.level, self.limits)


def _level(untrusted: bool, wanted: Level | str | None) -> Level:
    found = probe()
    try:
        level = found.level if wanted is None else Level(wanted)
    except ValueError:
        raise ConfigError(f"no sandbox level {wanted!r}", hint="strong or basic") from None
    if level is Level.STRONG and found.level is not Level.STRONG:
        raise ConfigError(f"no strong sandbox here: {found.why}", hint=found.hint)
    if untrusted and level is not Level.STRONG:
        why = found.why if wanted is None else "the basic level holds nothing back"
        hint = found.hint or "leave out level='basic'"
        raise ConfigError(
            f"no sandbox for untrusted code here: {why}",
            hint=f"{hint}; for code that you trust: Sandbox(untrusted=False)",
        )
    return level


def _limits(limits: Limits, changes: dict[str, Any]) -> Limits:
    known = [each.name for each in fields(Limits)]
    for name in changes:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"limits: {', '.join(known)}"
            raise UnknownKeyError(f"a sandbox has no limit {name!r}", hint=hint)
    changed = replace(limits, **changes)
    changed.check()
    return changed

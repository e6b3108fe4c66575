"""A control group for each sandbox, where this process may make one (cgroup v2).

The kernel then counts all memory of a sandbox together, files and its own structures included, and
the number of its processes; what is over the limit is killed as a whole. Groups are made below the
one that ``RELAX_AGENT_CGROUP`` names (a folder that was handed over to this user), or else below
this process's own if ``memory`` and ``pids`` are handed down there: never beside it, where its own
limits would not count. Elsewhere, and with cgroup v1 (which has no safe way to hand over a part of
the tree), the kernel's limits for single processes and the parent's own watch hold alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from functools import lru_cache
from pathlib import Path

from relax_agent.errors import ConfigError
from relax_agent.tools.sandbox.limits import Limits

VARIABLE = "RELAX_AGENT_CGROUP"
PREFIX = "relax-sandbox-"
_SLACK_BYTES = 32 << 20
"""For the kernel's own structures, which the other ways to count do not see."""
_NEEDED = {"memory", "pids"}


class ControlGroup:
    """One group. The launcher puts itself into it; everything that it starts is born there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ran_out = False
        """Whether the kernel has killed something in it for want of memory."""

    @classmethod
    def make(cls, parent: Path, limits: Limits) -> ControlGroup:
        """Make a group with limits below ``parent``.

        Raises:
            OSError: It cannot be made.
        """
        group = cls(parent / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}")
        group.folder.mkdir()
        try:
            group._set("memory.max", (limits.memory_mb << 20) + _SLACK_BYTES)
            group._set("pids.max", limits.processes + 3)
            for name, value in (("memory.swap.max", 0), ("memory.oom.group", 1)):
                with contextlib.suppress(OSError):  # older kernels, no swap
                    group._set(name, value)
        except OSError:
            group.remove()
            raise
        return group

    def _set(self, name: str, value: int) -> None:
        file = self.folder / name
        file.write_text(str(value))

    def remove(self) -> None:
        """Note how it ended and remove it, if it is empty by now. May be called again."""
        with contextlib.suppress(OSError):
            words = (self.folder / "memory.events").read_text().split()
            self.ran_out |= int(dict(zip(words[::2], words[1::2], strict=True))["oom_kill"]) > 0
        with contextlib.suppress(OSError):
            self.folder.rmdir()


@lru_cache(maxsize=1)
def parent_group() -> Path | None:
    """Return the folder below which groups with limits can be made; None if there is none.

    Raises:
        ConfigError: The one that ``RELAX_AGENT_CGROUP`` names cannot be used.
    """
    named = os.environ.get(VARIABLE)
    folder = Path(named) if named else _own_group()
    if folder is None:
        return None
    if not (_hands_down(folder) and os.access(folder, os.W_OK)):
        if not named:
            return None
        raise ConfigError(
            f"{VARIABLE}={named}: sandboxes cannot be counted there",
            hint="a writable cgroup v2 folder without processes, with 'memory pids' in its "
            "cgroup.subtree_control",
        )
    _remove_left_over(folder)
    return folder


def _hands_down(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return set((folder / "cgroup.subtree_control").read_text().split()) >= _NEEDED
    return False


def _own_group() -> Path | None:
    """Return the folder of this process's own group in the v2 tree."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        path = next((line[3:] for line in lines if line.startswith("0::")), None)
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            root, mounted = before.split()[3:5]
            if after.startswith("cgroup2 ") and path is not None and path.startswith(root):
                return Path(mounted, path.removeprefix(root).lstrip("/"))
    return None


def _remove_left_over(parent: Path) -> None:
    """Remove the empty groups of processes that were killed."""
    for folder in parent.glob(f"{PREFIX}*"):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            with contextlib.suppress(OSError):  # one that is not empty cannot be removed
                folder.rmdir()

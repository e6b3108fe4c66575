"""The last line of defence against processes that outlive a run.

A parent that is killed with SIGKILL can clean nothing up. So a process that starts children first
starts a *guardian*: this file, run as a script in a session of its own. It reads from its standard
input which children there are, and the pipe doubles as a sign of life: when the parent ends, in
whatever way, the guardian reads end-of-file and ends every child that is still listed.

Each child is known by its process group and by a token in its environment. The token is inherited
by everything that the child starts, so descendants are found although they left the group.

    <token> 0        a child is about to start
    <token> <pgid>   it started, and leads this process group
    <token> -1       it has ended

Standard library only: the script starts in a few milliseconds and needs no installed package.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

COOKIE = "RELAX_AGENT_CHILD"
"""The environment variable that carries the tokens of a child and of all children around it."""

GRACE_S = 2.0
"""How long children may take over SIGTERM once their parent is gone."""

_PROC = Path("/proc")


def members(group: int, token: str) -> dict[int, int]:
    """Return ``{process id: its group}`` of everything alive that belongs to a child.

    Zombies are left out: they have ended and only wait to be noticed by their parent.
    """
    if not _PROC.is_dir():
        return {group: group} if _group_exists(group) else {}
    found = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                own_group = _living_group(entry)
                if own_group and (own_group == group or _carries(entry, token)):
                    found[int(entry.name)] = own_group
            except OSError:  # it ended meanwhile, or is not ours to look at
                continue
    return found


def send(signum: int, group: int, token: str) -> None:
    """Send a signal once to every process that belongs to a child."""
    strays = [pid for pid, own_group in members(group, token).items() if own_group != group]
    if group > 0:
        _quietly(os.killpg, group, signum)
    for pid in strays:
        _quietly(os.kill, pid, signum)


def _living_group(entry: Path) -> int:
    """Return the group of a process, 0 for a zombie (and for the kernel's own threads)."""
    # The command name stands in parentheses and may contain anything, even parentheses.
    state, _, group = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:3]
    return 0 if state in (b"Z", b"X") else int(group)


def _carries(entry: Path, token: str) -> bool:
    return token.encode() in (entry / "environ").read_bytes()


def _group_exists(group: int) -> bool:
    if group <= 0:
        return False
    try:
        os.killpg(group, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        return False
    return True


def _quietly(kill: Callable[[int, int], None], target: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        kill(target, signum)


def _any_alive(children: Iterable[tuple[str, int]]) -> bool:
    return any(members(group, token) for token, group in children)


def _end_all(children: list[tuple[str, int]]) -> None:
    for token, group in children:
        send(signal.SIGTERM, group, token)
    deadline = time.monotonic() + GRACE_S
    while _any_alive(children) and time.monotonic() < deadline:
        time.sleep(0.02)
    for _ in range(100):
        if not _any_alive(children):
            return
        for token, group in children:
            send(signal.SIGKILL, group, token)
        time.sleep(0.05)


def _main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    children: dict[str, int] = {}
    for line in sys.stdin:
        token, group = line.split()
        children[token] = int(group)
        if children[token] < 0:
            del children[token]
    _end_all(list(children.items()))


if __name__ == "__main__":
    _main()

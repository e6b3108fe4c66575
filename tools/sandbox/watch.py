"""What the processes of a sandbox are and take, seen from outside.

Nothing here asks the sandbox: the process tree, memory and namespaces are read from the host's
``/proc``, which the code inside cannot reach. Orphans of a process namespace fall to its first
process, so the tree below that one is complete.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from relax_agent.tools.sandbox.limits import Limits

_PERIOD_S = 0.1
_SHARE = 10
"""With very many sandboxes: look for a tenth of the time at most."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_NAMESPACES = ("user", "pid", "net", "ipc", "uts", "mnt")


def children(pid: int) -> list[int]:
    """Return the processes that the threads of ``pid`` have started, as far as they are alive."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - quick
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/task/{thread}/children").read_bytes()
                found += map(int, text.split())
    return found


def descendants(pid: int) -> list[int]:
    """Return everything below ``pid``, parents first."""
    found = children(pid)
    for each in found:  # grows while it is walked
        found += children(each)
    return found


def problem_of(worker: int) -> str | None:
    """Say why a process is not held as a strong sandbox should; None if all is as it must be."""
    try:
        for kind in _NAMESPACES:
            if os.readlink(f"/proc/{worker}/ns/{kind}") == os.readlink(f"/proc/self/ns/{kind}"):  # noqa: PTH115
                return f"it shares the {kind} namespace with its parent"
        facts = dict(
            line.split(":", 1)
            for line in Path(f"/proc/{worker}/status").read_text().splitlines()
            if ":" in line
        )
    except OSError as error:
        return f"it cannot be looked at: {error}"
    if facts["Seccomp"].strip() != "2":
        return "no filter of system calls is active"
    if facts["NoNewPrivs"].strip() != "1":
        return "it could gain privileges"
    if any(int(facts[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")):
        return "it has capabilities"
    if os.geteuid() == 0 and facts["Uid"].split()[0] == "0":
        return "it runs as root"
    return None


@dataclass(eq=False)
class Watched:
    """One sandbox whose call is under way."""

    first: int
    """The process below which everything belongs to the sandbox."""
    limits: Limits
    kill: Callable[[], None]
    files: Path | None
    """A path to its file system, as seen from outside."""
    verdict: str = ""
    """Why it was killed; empty if it was not."""

    def look(self) -> None:
        """Kill the sandbox if it takes too much."""
        pids = descendants(self.first)
        limit = self.limits.memory_mb << 20
        disk, inodes = self._files()
        disk += 0 if self.files is None else _in_sockets(self.first)
        if inodes > self.limits.files:
            self._end(f"made more than {self.limits.files:,} files")
        elif sum(map(_resident, pids)) + disk > limit and sum(map(_own, pids)) + disk > limit:
            self._end(f"used more than {self.limits.memory_mb:,} MB of memory")

    def _files(self) -> tuple[int, int]:
        """Return bytes and number of the files that were written."""
        if self.files is None:
            return 0, 0
        try:
            found = os.statvfs(self.files)
        except OSError:
            return 0, 0
        used = (found.f_blocks - found.f_bfree) * found.f_frsize
        return used, found.f_files - found.f_ffree

    def _end(self, verdict: str) -> None:
        self.verdict = verdict
        self.kill()


def _in_sockets(pid: int) -> int:
    """Bytes that the sockets of a process's own network namespace hold, or may hold.

    The kernel counts them for no process. Those of TCP grow as they are used, so their queues are
    looked at; every other one counts as full, which the filter keeps small (``seccomp``).
    """
    try:
        net = Path(f"/proc/{pid}/net")
        used = _number(net / "sockstat", b"sockets:", b"used")
        tcp = _number(net / "sockstat", b"TCP:", b"inuse")
        tcp6 = _number(net / "sockstat6", b"TCP6:", b"inuse")
        queued = _queued(net / "tcp") if tcp else 0
        queued += _queued(net / "tcp6") if tcp6 else 0
    except (OSError, ValueError, IndexError):
        return 0
    return max(0, used - tcp - tcp6) * _socket_bytes() + 2 * queued


def _number(file: Path, line: bytes, name: bytes) -> int:
    with contextlib.suppress(FileNotFoundError):  # no IPv6
        for words in map(bytes.split, file.read_bytes().splitlines()):
            if words[0] == line:
                return int(words[words.index(name) + 1])
    return 0


def _queued(file: Path) -> int:
    """Bytes that wait in the sockets of a table: sent and not yet taken, or come and not read."""
    pairs = [line.split()[4].split(b":") for line in file.read_bytes().splitlines()[1:]]
    return sum(int(sent, 16) + int(come, 16) for sent, come in pairs)


@lru_cache(maxsize=1)
def _socket_bytes() -> int:
    """How much a socket holds at most whose buffers nobody has enlarged."""
    found = [212_992]
    for name in ("rmem_default", "wmem_default"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(Path("/proc/sys/net/core", name).read_bytes()))
    return max(found)


def _resident(pid: int) -> int:
    """Bytes in memory, shared ones too: quick to read, and never too few."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def _own(pid: int) -> int:
    """Bytes in memory, shared ones in proportion."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_bytes().splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) << 10
    except (OSError, IndexError, ValueError):
        pass
    return 0


class Watch:
    """One daemon thread that looks at all sandboxes with a call under way, ten times a second."""

    def __init__(self) -> None:
        self._watched: set[Watched] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, watched: Watched) -> None:
        """Look at a sandbox from now on."""
        with self._changed:
            self._watched.add(watched)
            if self._thread is None or not self._thread.is_alive():  # also after a fork
                self._thread = threading.Thread(
                    target=self._run, name="relax-sandbox-watch", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def remove(self, watched: Watched) -> None:
        """Look at it no more."""
        with self._changed:
            self._watched.discard(watched)

    def _run(self) -> None:
        pause = _PERIOD_S
        while True:
            with self._changed:
                while not self._watched:
                    self._changed.wait()
            time.sleep(pause)  # first: most calls are over by then
            with self._changed:
                present = list(self._watched)
            started = time.perf_counter()
            for each in present:
                if not each.verdict:
                    each.look()
            pause = max(_PERIOD_S, _SHARE * (time.perf_counter() - started))


WATCH = Watch()
"""The process's watch over its sandboxes."""


def is_still(pid: int) -> bool:
    """Whether a process is stopped, with all of its threads, or has ended."""
    return _state(pid) in b"TtZX"


def end_others(first: int, worker: int) -> bool:
    """Kill everything of a sandbox beside its worker; return whether there was anything."""
    strays = [pid for pid in descendants(first) if pid != worker and _state(pid) not in b"ZX"]
    for pid in strays:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return bool(strays)


def _state(pid: int) -> bytes:
    """Return the letter of a process's state; X if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return b"X"

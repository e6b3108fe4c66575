"""The last trusted step before a sandbox: run as a script, it becomes ``bwrap`` (or the worker).

What must be done by the process itself, and as root where the parent is root: hand the files that
the sandbox may read to a user who cannot reach them (the interpreter may lie under ``/root``), give
up root, set the limits, and leave every variable and descriptor behind that is not wanted.

Root's files are handed over in a mount namespace of this process's own, in an empty file system
over ``/tmp``, so nothing of it is ever seen outside, and nothing is left to be cleaned up.
Standard library only; the one argument is a JSON object, see ``_main``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import sys
from typing import Any

_NEW_MOUNTS = 0x00020000
_BIND, _REC, _PRIVATE = 4096, 16384, 1 << 18
_NOSUID, _NODEV = 2, 4
_STAGE = "/tmp"

_LIBC = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    words = (each.encode() or None for each in (source, target, kind))
    _check(_LIBC.mount(*words, ctypes.c_ulong(flags), data.encode() or None), f"mount {target}")


def _stage(sources: dict[str, str]) -> None:
    """Put each source under ``/tmp/NAME`` where any user can reach it."""
    _check(_LIBC.unshare(_NEW_MOUNTS), "unshare")
    _mount("", "/", "", _REC | _PRIVATE)
    fds = {name: os.open(path, os.O_PATH) for name, path in sources.items()}
    _mount("tmpfs", _STAGE, "tmpfs", _NOSUID | _NODEV, "mode=0755,size=64k")
    for name, fd in fds.items():
        target = f"{_STAGE}/{name}"
        if os.path.isdir(f"/proc/self/fd/{fd}"):  # noqa: PTH112 - no pathlib: this must be quick
            os.mkdir(target, 0o755)  # noqa: PTH102
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        _mount(f"/proc/self/fd/{fd}", target, "", _BIND)
        os.close(fd)


def _give_up_root(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _limit(limits: dict[str, list[int]]) -> None:
    """Set (soft, hard) limits, as far as those that are in force allow."""
    for name, wanted in limits.items():
        kind = getattr(resource, name, None)
        if kind is None:
            continue
        most = resource.getrlimit(kind)[1]
        soft, hard = (v if most == resource.RLIM_INFINITY else min(v, most) for v in wanted)
        with contextlib.suppress(ValueError, OSError):  # macOS knows some but takes none
            resource.setrlimit(kind, (soft, hard))


def _die_first() -> None:
    """When memory runs out, the kernel shall take this process and no other."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
        file.write("1000")


def _file_of(data: bytes) -> int:
    fd = os.memfd_create("sandbox")
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    os.set_inheritable(fd, True)
    return fd


def _main() -> None:
    """Become ``argv``.

    The keys: ``stage`` (name → path, None if the paths can be reached as they are), ``user`` (None
    to stay who one is), ``group`` (the control group to join, or None), ``limits`` (soft and hard
    by name), ``files`` (texts in hex by name, whose descriptor's number replaces ``{name}`` in
    ``argv``), ``options`` (arguments that travel in a descriptor, ``{options}``), ``env`` and the
    names of variables to ``keep``, ``argv``.
    """
    job: dict[str, Any] = json.loads(sys.argv[1])
    if job["group"] is not None:
        with open(f"{job['group']}/cgroup.procs", "w") as file:  # noqa: PTH123
            file.write(str(os.getpid()))
    if job["stage"] is not None:
        _stage(job["stage"])
    _die_first()
    os.nice(5)
    _limit(job["limits"])
    if job["user"] is not None:
        _give_up_root(job["user"])
    os.chdir("/")
    fds = {name: _file_of(bytes.fromhex(text)) for name, text in job["files"].items()}
    if job["options"]:
        words = [_filled(word, fds) for word in job["options"]]
        fds["options"] = _file_of(b"\0".join(word.encode() for word in words) + b"\0")
    kept = {name: os.environ[name] for name in job["keep"] if name in os.environ}
    os.execve(job["argv"][0], [_filled(word, fds) for word in job["argv"]], job["env"] | kept)


def _filled(word: str, fds: dict[str, int]) -> str:
    for name, fd in fds.items():
        word = word.replace("{" + name + "}", str(fd))
    return word


if __name__ == "__main__":
    _main()

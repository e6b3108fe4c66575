"""What a sandbox gets to see, as the arguments of ``bwrap`` and of the launcher before it.

Inside there are only: the interpreter and its standard library (``/python``), the installed
packages (``/packages``), the system's shared libraries, an own ``/proc`` and ``/dev``, and one
small file system in memory (``/box``) with the home and the temp folder. Everything else is
read-only or not there. This project's own modules are hidden from the packages: an environment's
answers must not be one ``import`` away.
"""

from __future__ import annotations

import json
import os
import pwd
import random
import shutil
import sys
import sysconfig
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from relax_agent import guardian
from relax_agent.tools.sandbox.cgroup import ControlGroup, parent_group
from relax_agent.tools.sandbox.limits import Limits

HERE = Path(__file__).parent
HOME, TEMP = "/box/home", "/box/tmp"
_PYTHON = "/python/bin/python3"
_ISOLATED = ("-I", "-B")


@dataclass(frozen=True)
class Launch:
    """How one interpreter is started."""

    job: dict[str, Any]
    """The launcher's argument."""
    folder: Path | None = None
    """What to remove once it has ended."""
    group: ControlGroup | None = None
    """What it counts its memory in."""

    def argv(self) -> list[str]:
        """Return the command line; ``{link_fd}`` in it is still to be filled in."""
        return [sys.executable, "-I", "-S", str(HERE / "launcher.py"), json.dumps(self.job)]

    def clean_up(self) -> None:
        """Remove what the interpreter leaves behind."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self.group is not None:
            self.group.remove()


@dataclass(frozen=True)
class Contents:
    """What code finds inside."""

    packages: bool = True
    """Whether the installed packages are there."""
    hidden: tuple[str, ...] = ()
    """Packages and modules that are not; this project's own never are."""
    preload: tuple[str, ...] = ()
    """Modules that are imported before the first call."""


@dataclass
class _Mounts:
    """Options of ``bwrap``, and the sources that they name."""

    staged: bool
    sources: dict[str, str] = field(default_factory=dict)
    options: list[str] = field(default_factory=list)

    def show(self, source: Path, target: str) -> None:
        """Bind a file or folder read-only."""
        path = str(source)
        if self.staged:
            name = f"s{len(self.sources)}"
            self.sources[name] = path
            path = f"/tmp/{name}"
        self.options += ["--ro-bind", path, target]

    def hide(self, target: str) -> None:
        """Put an empty read-only folder over another one."""
        self.options += ["--size", "4096", "--tmpfs", target, "--remount-ro", target]


def strong(bwrap: str, machine_filter: bytes, limits: Limits, contents: Contents) -> Launch:
    """Return the launch of an interpreter inside namespaces, and a control group if possible."""
    parent = parent_group()
    group = None if parent is None else ControlGroup.make(parent, limits)
    mounts = _Mounts(staged=os.geteuid() == 0)
    _show_system(mounts)
    _show_python(mounts)
    path = _show_packages(mounts, contents.hidden) if contents.packages else []
    config = _worker_config(limits, contents, HOME, TEMP) | {"path": path}
    if not mounts.staged:  # inside its own user namespace only the sandbox's processes count
        config["limits"] = {"RLIMIT_NPROC": [limits.processes] * 2}
    text = json.dumps(config)
    return Launch(
        {
            "stage": mounts.sources if mounts.staged else None,
            "user": _unused_user() if mounts.staged else None,
            "limits": rlimits(limits, whole_user=not mounts.staged),
            "files": {"filter_fd": machine_filter.hex()},
            "options": [*_namespaces(), *mounts.options, *_writable(limits), *_variables()],
            "env": {},
            "keep": [guardian.COOKIE],
            "argv": [bwrap, "--args", "{options}", _PYTHON, *_ISOLATED, "/worker.py", text],
            "group": None if group is None else str(group.folder),
        },
        group=group,
    )


def basic(limits: Limits, contents: Contents, folder: Path) -> Launch:
    """Return the launch of an interpreter that has limits and a clean environment, no more."""
    home, temp = str(folder / "home"), str(folder / "tmp")
    path = [str(each) for each in package_folders()] if contents.packages else []
    config = _worker_config(limits, contents, home, temp) | {"path": path}
    script = str(HERE / "worker.py")
    return Launch(
        {
            "stage": None,
            "user": None,
            "limits": rlimits(limits, whole_user=True),
            "files": {},
            "options": [],
            "env": _environment(home, temp),
            "keep": [guardian.COOKIE],
            "argv": [sys.executable, *_ISOLATED, script, json.dumps(config)],
            "group": None,
        },
        folder,
    )


def rlimits(limits: Limits, *, whole_user: bool) -> dict[str, list[int]]:
    """Return the kernel's limits of each process, soft and hard.

    Args:
        limits: What the code may take.
        whole_user: Whether the user has other processes, so that theirs would count too; the
            worker then sets the limit inside its own user namespace.
    """
    found = {
        "RLIMIT_AS": limits.memory_mb << 20,
        "RLIMIT_FSIZE": limits.disk_mb << 20,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_CORE": 1,  # with 0 a program that the kernel pipes dumps to would still be run
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_SIGPENDING": 256,
    }
    if not whole_user:
        found["RLIMIT_NPROC"] = limits.processes + 3  # bwrap itself, and its two beginnings
    both = {name: [value, value] for name, value in found.items()}
    return both | {"RLIMIT_CPU": [limits.cpu_s, limits.cpu_s + 2]}  # SIGXCPU, then SIGKILL


def _worker_config(limits: Limits, contents: Contents, home: str, temp: str) -> dict[str, Any]:
    return {
        "link": "{link_fd}",
        "out": "{out_fd}",
        "err": "{err_fd}",
        "preload": contents.preload,
        "home": home,
        "folders": [home, temp],
        "output_chars": limits.output_chars,
        "images": limits.images,
        "image_bytes": limits.image_mb << 20,
        "file_bytes": limits.disk_mb << 20,
        "limits": {},
    }


def _namespaces() -> list[str]:
    kinds = ["user", "pid", "net", "ipc", "uts", "cgroup-try"]
    options = [f"--unshare-{kind}" for kind in kinds]
    options += ["--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--cap-drop", "ALL"]
    return [*options, "--seccomp", "{filter_fd}", "--die-with-parent"]


def _show_system(mounts: _Mounts) -> None:
    """Show the shared libraries, at the places where the loader looks for them."""
    multiarch = str(sysconfig.get_config_var("MULTIARCH") or "")
    for top in ("lib", "lib64"):
        below = Path("/usr", top)
        if below.is_dir() and not below.is_symlink():
            part = below / multiarch
            shown = part if multiarch and part.is_dir() else below
            mounts.show(shown, str(shown))
        link = Path("/", top)
        if link.is_symlink():
            mounts.options += ["--symlink", f"usr/{top}", f"/{top}"]
        elif link.is_dir():
            mounts.show(link, f"/{top}")
    for each in ("/etc/ld.so.cache", "/usr/share/zoneinfo"):
        if Path(each).exists():
            mounts.show(Path(each), each)


def _show_python(mounts: _Mounts) -> None:
    """Show the interpreter under a prefix of its own; it finds its library beside itself."""
    prefix = Path(sys.base_prefix)
    mounts.show(Path(getattr(sys, "_base_executable", sys.executable)).resolve(), _PYTHON)
    for name in dict.fromkeys(["lib", sys.platlibdir]):
        mounts.show(prefix / name, f"/python/{name}")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for name in (f"{version}/site-packages", f"{version}/dist-packages", "python3/dist-packages"):
        if (prefix / "lib" / name).is_dir():
            mounts.hide(f"/python/lib/{name}")
    mounts.show(HERE / "worker.py", "/worker.py")


def _show_packages(mounts: _Mounts, hidden: tuple[str, ...]) -> list[str]:
    paths = []
    for number, folder in enumerate(package_folders()):
        target = f"/packages/{number}"
        mounts.show(folder, target)
        for name in ("relax_agent", *hidden):
            if (folder / name).is_dir():
                mounts.hide(f"{target}/{name}")
            if (folder / f"{name}.py").is_file():
                mounts.show(Path(os.devnull), f"{target}/{name}.py")
        paths.append(target)
    return paths


def package_folders() -> list[Path]:
    """Return the folders with the packages of the running interpreter."""
    paths = sysconfig.get_paths()
    return [
        Path(p) for p in dict.fromkeys([paths["purelib"], paths["platlib"]]) if Path(p).is_dir()
    ]


def _writable(limits: Limits) -> list[str]:
    """One bounded file system for all that is written; the rest becomes read-only."""
    size = str(limits.disk_mb << 20)
    options = ["--proc", "/proc", "--dev", "/dev"]
    options += ["--size", str(16 << 20), "--tmpfs", "/dev/shm"]
    options += ["--tmpfs", "/dev/pts", "--remount-ro", "/dev/pts"]  # there are few, for all
    options += ["--remount-ro", "/dev"]
    options += ["--size", size, "--tmpfs", "/box", "--symlink", TEMP, "/tmp"]
    return [*options, "--remount-ro", "/", "--chdir", "/box"]


def _variables() -> list[str]:
    options = ["--clearenv"]
    inside = _environment(HOME, TEMP) | {"LD_LIBRARY_PATH": "/python/lib", "PATH": "/python/bin"}
    for name, value in inside.items():
        options += ["--setenv", name, value]
    return options


def _environment(home: str, temp: str) -> dict[str, str]:
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return {
        "HOME": home,
        "TMPDIR": temp,
        "USER": "sandbox",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "MALLOC_ARENA_MAX": "2",
        "MPLBACKEND": "agg",
        "MPLCONFIGDIR": f"{temp}/matplotlib",
        **dict.fromkeys(threads, "1"),
    }


def _unused_user() -> int:
    """Return the id of a user who exists nowhere, another one for each sandbox.

    The kernel counts processes by user, so two sandboxes must not share one.
    """
    low, high = _free_users()
    while True:
        user = random.SystemRandom().randrange(low, high)
        try:
            pwd.getpwuid(user)
        except KeyError:
            return user


@lru_cache
def _free_users() -> tuple[int, int]:
    """A range of ids that nothing uses: far up, or below 65534 where only those are mapped."""
    mapped = 0
    for line in Path("/proc/self/uid_map").read_text().split("\n"):
        if line:
            first, _, count = map(int, line.split())
            mapped = max(mapped, first + count)
    return (1_900_000_000, 2_100_000_000) if mapped > 2_100_000_000 else (61_200, 65_500)

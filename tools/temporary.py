"""Folders of a session, deleted for sure: with it, or by the next one if its process died."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path


def new_folder(kind: str) -> Path:
    """Make an empty folder for this process alone, and delete those that dead processes left.

    Args:
        kind: A word that begins its name.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_prefix(kind)}*"):
        owner = folder.name.removeprefix(_prefix(kind)).partition("-")[0]
        if owner.isdigit() and not _is_alive(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_prefix(kind)}{os.getpid()}-"))


def delete_folder(folder: Path) -> None:
    """Delete a folder and all that is in it, also where somebody took away the right to.

    Raises:
        OSError: Something could not be deleted.
    """
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError:
        for place, _, _ in os.walk(folder):  # a folder comes before what is in it
            with contextlib.suppress(OSError):
                Path(place).chmod(0o700)
        shutil.rmtree(folder)


@lru_cache
def _prefix(kind: str) -> str:
    """Begin names so that the process ids in them mean the same: containers may share a folder."""
    try:
        space = str(os.stat("/proc/self/ns/pid").st_ino)  # noqa: PTH116
    except OSError:
        space = "0"
    return f"relax-{kind}-{space}-"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True

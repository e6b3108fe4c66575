"""What code in a sandbox may take, and how well the sandbox holds it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum

from relax_agent.errors import ConfigError


class Level(StrEnum):
    """How well a sandbox holds code that wants out."""

    STRONG = "strong"
    """Namespaces, a filter of system calls, a user of its own: for code that a model wrote."""
    BASIC = "basic"
    """A process with limits, but with the files and the network of its user: for trusted code."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the code of one session may take. All are enforced from outside the code."""

    timeout_s: float = 10.0
    """Seconds that one call may take on the clock."""
    start_timeout_s: float = 30.0
    """Seconds that an interpreter may take to start."""
    cpu_s: int = 300
    """Seconds of processor time that each process of a session may use, all calls together."""
    memory_mb: int = 1024
    """Megabytes of memory: of address space for each process, of real memory for all together."""
    disk_mb: int = 64
    """Megabytes that may be written to files; they lie in memory and vanish with the session."""
    files: int = 20_000
    """Files and folders that may be made."""
    processes: int = 32
    """Processes and threads at once."""
    open_files: int = 128
    """Open files of each process."""
    output_chars: int = 20_000
    """Characters of standard output, and of standard error, that are kept: the first and last."""
    flood_mb: int = 32
    """Megabytes of output after which the call is ended."""
    images: int = 8
    """Images that one call may give back."""
    image_mb: int = 8
    """Megabytes of all images of one call together."""

    def check(self) -> None:
        """Raise ConfigError for a limit that lets nothing work."""
        for each in fields(self):
            value = getattr(self, each.name)
            seconds = each.name in ("timeout_s", "start_timeout_s")
            kinds = (int, float) if seconds else (int,)
            least = 0 if each.name in ("images", "image_mb") else 1e-3
            fits = isinstance(value, kinds) and not isinstance(value, bool)
            if not (fits and least <= value < math.inf):
                what = "seconds" if seconds else "whole"
                raise ConfigError(
                    f"sandbox limit {each.name} must be positive and {what}: {value!r}"
                )
        for name, least in (("memory_mb", 64), ("open_files", 16), ("disk_mb", 1)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"sandbox limit {name} is {getattr(self, name)}: no interpreter runs in that",
                    hint=f"give at least {least}",
                )

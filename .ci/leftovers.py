"""Fail if processes of this project run that did not run before.

``leftovers.py note FILE`` writes down which there are, ``leftovers.py check FILE`` compares. A
process counts if its command line names the project or SGLang, or if it carries the variable that
every child of a run inherits.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

WORDS = (b"relax_agent", b"relax-agent", b"sglang")
COOKIE = b"RELAX_AGENT_CHILD="
PATIENCE_S = 10.0


def ours() -> dict[str, str]:
    """Return ``{process id and start time: command line}``."""
    found = {}
    ancestors = _ancestors(os.getpid())
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in ancestors:
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            state, *rest = (entry / "stat").read_text().rpartition(")")[2].split()
            environment = (entry / "environ").read_bytes()
        except OSError:  # it ended meanwhile, or is not ours to look at
            continue
        if state != "Z" and (any(word in command for word in WORDS) or COOKIE in environment):
            found[f"{entry.name} {rest[18]}"] = command.replace(b"\0", b" ").decode(
                errors="replace"
            )
    return found


def _ancestors(pid: int) -> set[int]:
    """Return a process and all it comes from: a path may name the project without being it."""
    found = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found


def main(action: str, file: str) -> str | None:
    """Return which processes are left; None if there are none."""
    if action == "note":
        Path(file).write_text(json.dumps(ours()))
        return None
    before = json.loads(Path(file).read_text())
    deadline = time.monotonic() + PATIENCE_S
    while left := [f"{pid.split()[0]}: {cmd}" for pid, cmd in ours().items() if pid not in before]:
        if time.monotonic() > deadline:
            return "left behind:\n" + "\n".join(" ".join(each.split())[:200] for each in left)
        time.sleep(0.5)
    print("no process was left behind")
    return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Fail unless a run made at least so many optimizer steps: ``steps.py RUN_FOLDER COUNT``."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(folder: str, least: str) -> str | None:
    """Return what is wrong with the run's metrics; None if nothing is."""
    path = Path(folder) / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    made = [row for row in rows if not row.get("skipped") and row["grad_norm"] > 0]
    print(f"{path}: {len(made)} optimizer steps in {len(rows)} lines")
    if len(made) < int(least):
        return f"{path}: {len(made)} optimizer steps, wanted {least}"
    return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""How long the light packages take to import, beside a bare interpreter.

    python -m benchmarks.imports [--quick]

An author of environments or tools pays this at every start. Each import runs in a fresh process;
the table shows medians, and the last line is JSON: seconds by module, the bare interpreter taken
off.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

MODULES = ("relax_agent", "relax_agent.tools", "relax_agent.envs", "relax_agent.tools.server")


def seconds(statement: str, repeats: int) -> float:
    """Return the median wall time of ``python -c statement``."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", statement], check=True)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 repeats instead of 15")
    repeats = 3 if parser.parse_args().quick else 15
    bare = seconds("pass", repeats)
    print(f"{'bare interpreter':28} {bare:.3f} s")
    figures = {}
    for module in MODULES:
        spent = seconds(f"import {module}", repeats)
        figures[module] = round(spent - bare, 3)
        print(f"{module:28} {spent:.3f} s  ({spent - bare:+.3f})")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

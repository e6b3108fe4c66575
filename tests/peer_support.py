"""What the adapters' tests share: is the library the pinned one, is the page on neighbours true."""

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parent / "peers" / "requirements"
PAGE = Path(__file__).parents[1] / "docs" / "neighbours.md"


def pins(peer):
    """Return ``{package: version}`` of everything that a peer's requirements pin."""
    files = [
        path
        for path in FOLDER.glob(f"{peer}*.txt")
        if path.name.split(".txt")[0] in (peer, f"{peer}.no-deps")
    ]
    lines = "\n".join(path.read_text() for path in files)
    return dict(re.findall(r"^([\w.-]+)(?:\[[\w,-]+\])?==(\S+)", lines, re.M))


def assert_pinned(peer):
    """Fail unless every package that the peer's requirements pin is installed in that version."""
    wanted = pins(peer)
    assert wanted, f"{FOLDER / peer}.txt pins nothing"
    assert {name: version(name) for name in wanted} == wanted


def run_snippets(heading):
    """Run every piece of Python that stands under a heading of docs/neighbours.md."""
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S))
    snippets = re.findall(r"```python\n(.*?)```", sections[heading], re.S)
    assert snippets, heading
    for number, code in enumerate(snippets, 1):
        exec(compile(code, f"{PAGE.name}: {heading}, {number}", "exec"), {"__name__": "page"})


def run_contestant(script, *arguments):
    """Run the peer's side of a benchmark in this venv and return what it prints."""
    path = Path(__file__).parents[1] / "benchmarks" / "contestants" / script
    argv = [sys.executable, str(path), *map(str, arguments)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])

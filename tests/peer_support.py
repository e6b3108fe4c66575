"""What the tests of the adapters share: whether the library under test is the pinned one."""

import re
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parent / "peers" / "requirements"


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

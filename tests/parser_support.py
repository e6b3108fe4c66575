"""What the tests of tool-call parsers share: tools, golden files, and cutting text into pieces."""

import json
from pathlib import Path

from relax_agent import tool
from relax_agent.rendering.parsers import fold
from relax_agent.tools import Toolset

GOLDEN = Path(__file__).parent / "golden" / "tool_calls"
FILES = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(GOLDEN.glob("*.json"))}
CASES = [(name, case) for name, file in FILES.items() for case in file["cases"]]
IDS = [f"{name}: {case['name']}" for name, case in CASES]


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def now() -> str:
    """Tell the time."""
    return "noon"


@tool
def search(query: str, limit: int | None = None) -> str:
    """Search for words."""
    return f"{query} {limit}"


@tool
def write(path: str, content: str) -> str:
    """Write a file."""
    return f"{len(content)} characters in {path}"


@tool
def configure(
    options: dict | None = None,
    flags: list[str] | None = None,
    ratio: float = 1.0,
    verbose: bool = False,
) -> str:
    """Change settings."""
    return f"{options} {flags} {ratio} {verbose}"


TOOLSET = Toolset([add, now, search, write, configure])
TOOLS = TOOLSET.schemas()


def chunks(text, size):
    """Cut text into pieces of one size, or of the sizes of a list, over and over."""
    sizes = [size] if isinstance(size, int) else size
    pieces, at, turn = [], 0, 0
    while at < len(text):
        pieces.append(text[at : at + sizes[turn % len(sizes)]])
        at += sizes[turn % len(sizes)]
        turn += 1
    return pieces


def streamed(parser, pieces, tools=TOOLS):
    """Return the message that a parser makes of pieces, and its stream."""
    stream = parser.stream(tools)
    events = [event for piece in pieces for event in stream.feed(piece)]
    events += stream.finish()
    return fold(events), stream


def differs(case, peer, name):
    """Return why a peer reads a case otherwise; None if it must not."""
    told = case.get("differs", {})
    return told.get(f"{peer}:{name}", told.get(peer))


def good_calls(message):
    """Return the calls that can be run, as plain data."""
    return [[call.name, call.arguments] for call in message.tool_calls if call.error is None]


def xml(name, arguments):
    """Write a call as Qwen3-coder does."""

    def value(item):
        return item if isinstance(item, str) else json.dumps(item)

    body = "".join(f"<parameter={k}>\n{value(v)}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"

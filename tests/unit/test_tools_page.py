"""``docs/tools-ready-made.md`` is made from the tools themselves, and is up to date.

``python tests/unit/test_tools_page.py`` writes it anew.
"""

import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from pathlib import Path

import pytest

from relax_agent.tools import Tool
from relax_agent.tools.files import FileLimits, FileTools
from relax_agent.tools.http_get import HttpGet, HttpLimits
from relax_agent.tools.python import PythonSession
from relax_agent.tools.sandbox import Limits
from relax_agent.tools.search import SearchIndex, SearchLimits
from relax_agent.tools.sessions import tools_of
from relax_agent.tools.sql import SqlDatabase, SqlLimits

PAGE = Path(__file__).parents[2] / "docs" / "tools-ready-made.md"
COMMAND = "python tests/unit/test_tools_page.py"
MODULES = ("calculator", "python", "search", "sql", "files", "http_get", "image", "audio", "video")
CLASSES = {
    "python": (PythonSession, Limits),
    "search": (SearchIndex, SearchLimits),
    "sql": (SqlDatabase, SqlLimits),
    "files": (FileTools, FileLimits),
    "http_get": (HttpGet, HttpLimits),
}
"""Classes whose methods are tools, and their limits."""
CONSTANTS = {
    "calculator": ("MAX_LENGTH", "MAX_DEPTH"),
    "image": ("MAX_ZOOM", "MAX_LABEL_CHARS"),
    "audio": ("MAX_SECONDS", "MAX_OUTPUT_BYTES", "MAX_PITCH_SECONDS"),
    "video": ("MAX_TIMES", "MAX_TILES", "MAX_SIDE", "MAX_CUT_SECONDS", "MAX_SOUND_SECONDS"),
    "pictures": ("MAX_INPUT_PIXELS", "MAX_OUTPUT_PIXELS", "MAX_SIDE"),
}
INTRO = """\
# Ready-made tools

Each works in an environment (`tools=[…]`), on its own, and behind `relax-agent tools serve`. What a
model gets wrong comes back as a message that says what to write instead; time, size and memory are
limited. Nothing here executes what a model writes, but for `python`, which does so in the sandbox.

```python
import asyncio
from functools import partial

from relax_agent.messages import ToolCall
from relax_agent.tools import FileTools, Toolset
from relax_agent.tools.calculator import calculator

toolset = Toolset([calculator, partial(FileTools, {"notes.md": "An owl hunts at night."})])


async def main():
    async with toolset.session() as session:
        for name, arguments in (
            ("calculator", {"expression": "(17 + 5) * 3"}),
            ("search_files", {"text": "owl"}),
            ("read_file", {"path": "../secrets"}),
        ):
            print((await session.call(ToolCall(name, arguments))).text)


asyncio.run(main())
```

It prints:

```text
66
notes.md:1: An owl hunts at night.
Error: read_file: '../secrets' leads out of your folder; write a path inside it, such as 'a.txt'
```

## Pictures, sounds and videos

A model names the medium that a tool is to work on. `image:1` is the first picture of the
conversation and `image:-1` the latest, which every tool of `IMAGE_TOOLS`, `AUDIO_TOOLS` and
`VIDEO_TOOLS` understands in an environment; over HTTP a data URL works too. What a tool gives back
is a new medium, for the model to see and to name in its next call.

A `MediaShelf` around any such tools, ready-made or your own, adds names. What an episode puts on
its shelf need not have been shown: a film of ten minutes that would fill the context, of which the
model looks at a few frames. Whatever a tool gives back is put there as `image-1`, `image-2` and so
on, and told to the model under that name.

```python
import asyncio

import numpy as np

from relax_agent.media import encode_png
from relax_agent.messages import ToolCall
from relax_agent.tools import IMAGE_TOOLS, MediaShelf

photo = encode_png(np.zeros((60, 80, 3), np.uint8))


async def main():
    async def call(name, **arguments):
        print((await shelf.call(ToolCall(name, arguments))).text)

    shelf = MediaShelf(IMAGE_TOOLS, {"photo": photo})
    await call("crop_image", image="photo", left=10, top=10, right=50, bottom=99)
    await call("zoom_image", image="image-1", x=0.5, y=0.5, unit="fraction", factor=4)
    await call("rotate_image", image="old", degrees=90)


asyncio.run(main())
```

It prints:

```text
Pixels 10,10 to 50,60 (the box was cut off at the edge): 40×50 pixels
image-1:

Pixels 15,19 to 25,31, enlarged: 40×50 pixels
image-2:

Error: rotate_image: argument 'image': there is no image 'old'; there is: photo, image-1, image-2
```

In an environment each episode has a shelf of its own, as `self.session`:

```python
from relax_agent.envs import ToolEnv
from relax_agent.tools import IMAGE_TOOLS, VIDEO_TOOLS, MediaShelf


class Watch(ToolEnv):
    tools = MediaShelf([*VIDEO_TOOLS, *IMAGE_TOOLS])

    def setup(self, task):
        self.session.put("film", task.data["video"])
```
"""


def tools(name):
    """Return a module's tools, those of its class first."""
    module = importlib.import_module(f"relax_agent.tools.{name}")
    own = [each for each in vars(module).values() if isinstance(each, Tool)]
    return [*(tools_of(CLASSES[name][0]).values() if name in CLASSES else ()), *own]


def plain(text):
    """Turn a docstring's markup into Markdown's."""
    text = re.sub(r":mod:(`[^`]+`)", r"\1", text.replace("``", "`"))
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?([^`]+)`", r"`\1`", text)
    return re.sub(r"(?m)^((?:    .*\n?)+)", _block, text + "\n").strip()


def _block(found):
    return f"```text\n{textwrap.dedent(found[1]).strip()}\n```\n"


def arguments(tool):
    shown = []
    for name, facts in tool.parameters["properties"].items():
        default = facts.get("default", "…" if name in tool.parameters.get("required", ()) else None)
        shown.append(name if default == "…" else f"{name}={default!r}")
    return ", ".join(shown)


def table():
    rows = []
    for name in MODULES:
        for each in tools(name):
            first = " ".join(each.description.split("\n\n")[0].split())
            rows.append(f"| [`{each.name}`](#{name}) | {first} |")
    return "\n".join(["| Tool | What it does |", "|--|--|", *rows])


def limits(name):
    """Return a module's limits as a list."""
    if name in CLASSES:
        cls = CLASSES[name][1]
        values = {f.name: f.default for f in dataclasses.fields(cls)}
        shown = ", ".join(f"{each} {_number(value)}" for each, value in values.items())
        return f"**Limits** (`{cls.__name__}`): {shown}."
    found = [(each, name) for each in CONSTANTS[name]]
    if name == "image":
        found += [(each, "pictures") for each in CONSTANTS["pictures"]]
    values = {
        each: getattr(importlib.import_module(f"relax_agent.tools.{home}"), each)
        for each, home in found
    }
    told = ", ".join(f"{each.lower()} {_number(value)}" for each, value in values.items())
    return f"**Limits:** {told}."


def _number(value):
    return f"{value:,.12g}" if isinstance(value, (int, float)) else str(value)


def section(name):
    module = importlib.import_module(f"relax_agent.tools.{name}")
    calls = "\n".join(f"- `{each.name}({arguments(each)})`" for each in tools(name))
    parts = [f"## {name}", plain(inspect.getdoc(module)), f"**Calls:**\n\n{calls}", limits(name)]
    return "\n\n".join(parts)


def page():
    note = f"<!-- Written by `{COMMAND}`: change the docstrings in tools/, not this. -->"
    return (
        "\n\n".join([note, INTRO.strip(), "## All tools", table(), *map(section, MODULES)]) + "\n"
    )


@pytest.mark.parametrize("name", MODULES)
def test_the_page_shows_each_tool_as_it_is(name):
    assert section(name) in PAGE.read_text(), f"run `{COMMAND}`"


def test_the_page_lists_every_tool():
    assert table() in PAGE.read_text() and INTRO.strip() in PAGE.read_text(), f"run `{COMMAND}`"


def test_the_code_of_the_page_prints_what_it_says(capsys):
    printed = re.findall(r"It prints:\n\n```text\n(.*?)```", INTRO, re.S)
    codes = re.findall(r"```python\n(.*?)```", INTRO, re.S)
    for code, expected in zip(codes, [*printed, ""], strict=True):
        exec(compile(code, "tools-ready-made.md", "exec"), {"__name__": "page"})
        assert capsys.readouterr().out == expected


def test_every_ready_made_tool_is_bounded_and_says_what_it_does():
    for name in MODULES:
        for each in tools(name):
            described = each.parameters["properties"].values()
            assert all(facts.get("description") for facts in described), each.name
            assert each.limits.max_output_bytes <= 64 << 20
            changes = each.name in ("write_file", "delete_file", "python")
            assert each.limits.idempotent is not changes, each.name


def test_nothing_of_it_is_loaded_before_it_is_asked_for():
    import subprocess

    code = (
        "import sys, relax_agent.tools as t; found = [m for m in ('PIL', 'av', 'soundfile', 'soxr',"
        " 'numpy', 'aiohttp') if m in sys.modules]; assert not found, found;"
        " [getattr(t, n) for n in ('IMAGE_TOOLS', 'AUDIO_TOOLS', 'VIDEO_TOOLS', 'FileTools',"
        " 'HttpGet', 'MediaShelf')];"
        " found = [m for m in ('PIL', 'av', 'soundfile', 'soxr') if m in sys.modules];"
        " assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


if __name__ == "__main__":
    PAGE.write_text(page())

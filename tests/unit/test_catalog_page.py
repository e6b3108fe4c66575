"""``docs/environments.md`` is made from the environments themselves, and is up to date.

``python tests/unit/test_catalog_page.py`` writes it anew.
"""

import asyncio
import importlib
import inspect
import re
from pathlib import Path

import pytest

from relax_agent.envs import make, play, registry
from relax_agent.messages import AssistantMessage

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"
COMMAND = "python tests/unit/test_catalog_page.py"
EXAMPLES = {
    "relax/Calculator-v0": ("eval-00007", {}),
    "relax/Search-v0": ("eval-00449", {}),
    "relax/Sudoku-v0": ("eval-00000", {"blanks": 3}),
    "relax/TextGame-v0": ("eval-00002", {"rooms": 3, "doors": 1}),
    "relax/SQL-v0": ("eval-00000", {}),
    "relax/ShopOrder-v0": ("eval-00001", {}),
    "relax/Debate-v0": ("eval-00000", {}),
    "relax/PythonInterpreter-v0": ("eval-00003", {}),
}
"""The episodes that the page shows: a task, and arguments that keep it short."""
DEBATE_SEED = 2
"""A proposer that is wrong once, so that the critic has something to say."""
INTRO = """\
# Ready-made environments

Each is one short file in `envs/catalog/`, made to be read and copied as much as to be used. Tasks
are drawn from a seed, those to train on and those to evaluate on have nothing in common, and every
environment brings an `expert()`, a scripted policy that solves it without the gold answers: for a
warm start, as an upper bound, and to see what a good episode looks like.

```python
import asyncio

from relax_agent.envs import make, play


async def main():
    async with make("relax/Sudoku-v0", size=4, blanks=6) as env:
        record = await play(env, env.unwrapped.expert(), task="eval-00000")
        print(record.reward, record.turns, record.metrics["success"])


asyncio.run(main())
```

It prints `1.0 6 1.0`. Arguments are plain data; in a recipe they stand under the environment's
`args`. Each environment passes `relax-agent envs check`.

The tools of two of them serve your own environments as well. `SearchIndex` finds and opens
documents, or the texts of a folder (`SearchIndex.from_folder("handbook")`); `SqlDatabase` runs
queries that can read a database and nothing else (`SqlDatabase.open("shop.sqlite")`):

```python
from relax_agent.tools import SearchIndex, SqlDatabase

birds = SearchIndex([{"id": "owl", "title": "Owl", "text": "An owl hunts at night."}])
towns = SqlDatabase.build(lambda db: db.execute("CREATE TABLE towns (name TEXT)"))
print(*birds.toolset().names, *towns.toolset().names)
```

It prints `search open_page sql schema`. Hand such a toolset to an environment (`tools=…`), or serve
it with `relax-agent tools serve MODULE:NAME`.
"""


def catalog():
    """Return the ids of the ready-made environments, as they are registered."""
    return [id for id, spec in registry.items() if ".envs.catalog." in str(spec.entry_point)]


def docstring(id):
    """Return an environment's first line and its paragraphs by their first word."""
    module = importlib.import_module(registry[id].entry_point.partition(":")[0])
    text = re.sub(r":\w+:`[.~]?([^`]+)`", r"`\1`", inspect.getdoc(module).replace("``", "`"))
    first, *rest = text.split("\n\n")
    return first.partition(": ")[2], [re.sub(r"^(Task|Tools|Reward):", r"**\1:**", p) for p in rest]


def table():
    rows = [f"| [`{id}`](#{anchor(id)}) | {docstring(id)[0].rstrip('.')} |" for id in catalog()]
    return "\n".join(["| Environment | What it is |", "|--|--|", *rows])


def anchor(id):
    return re.sub(r"[^\w-]", "", id.lower())


def arguments(id):
    """Return the constructor's arguments as a list."""
    cls = type(make(id).unwrapped)
    docs = dict(re.findall(r"^    (\w+): (.+)$", inspect.getdoc(cls.__init__) or "", re.M))
    parameters = inspect.signature(cls.__init__).parameters.values()
    shown = [p for p in parameters if p.name in docs]
    return "\n".join(f"- `{p.name}` ({p.default!r}): {docs[p.name]}" for p in shown).replace(
        "``", "`"
    )


def example(id):
    """Return an expert's episode as text."""
    task, arguments = EXAMPLES[id]
    env = make(id, **arguments)
    policy = env.unwrapped.expert()
    if id == "relax/Debate-v0":
        policy = {"proposer": env.unwrapped.expert(noise=0.5, seed=DEBATE_SEED), "critic": policy}
    record = asyncio.run(play(env, policy, task=task, seed=0))
    rewrites = dict(record.rewrites)
    lines = []
    for place, message in enumerate(record.messages):
        lines += [f"— {rewrites[place]} —"] if place in rewrites else []
        lines += _told(message)
    return "\n".join([*lines, f"→ reward {record.reward:g}"])


def _told(message):
    if isinstance(message, AssistantMessage):
        for call in message.tool_calls:
            inside = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
            yield f"assistant  {call.name}({inside})"
    for number, line in enumerate(message.text.splitlines()):
        shown = line if len(line) <= 150 else f"{line[:149]}…"
        yield f"{'' if number else message.role:<9}  {shown}".rstrip()


def section(id):
    _, paragraphs = docstring(id)
    parts = [f"## {id}", *paragraphs, f"**Arguments:**\n\n{arguments(id)}"]
    if id in EXAMPLES:
        parts.append(f"```text\n{example(id)}\n```")
    return "\n\n".join(parts)


def page():
    note = f"<!-- Written by `{COMMAND}`: change the docstrings in envs/catalog, not this. -->"
    return "\n\n".join([note, INTRO.strip(), table(), *map(section, catalog())]) + "\n"


@pytest.mark.parametrize("id", catalog())
def test_the_page_shows_each_environment_as_it_is(id):
    text = PAGE.read_text()
    assert section(id) in text, f"run `{COMMAND}`"


def test_the_page_lists_every_environment():
    text = PAGE.read_text()
    assert table() in text and INTRO.strip() in text, f"run `{COMMAND}`"


def test_the_code_of_the_page_prints_what_it_says(capsys):
    for code in re.findall(r"```python\n(.*?)```", INTRO, re.S):
        exec(compile(code, "environments.md", "exec"), {})
    printed = re.findall(r"^It prints `([^`]+)`", INTRO, re.M)
    assert capsys.readouterr().out.splitlines() == printed and len(printed) == 2


if __name__ == "__main__":
    PAGE.write_text(page())

"""What the README says is true: its code runs, its commands and links exist."""

import asyncio
import re
from pathlib import Path

import pytest

from relax_agent.envs import make
from relax_agent.messages import ToolCall, assistant

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_readmes_environment_runs():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(code.splitlines()) <= 30
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})

    async def play() -> float:
        env = make("me/Letters-v0")
        await env.reset(options={"task": "strawberry"})
        call = ToolCall("count", {"text": "strawberry", "letter": "r"}, "c")
        messages, *_ = await env.step(assistant(tool_calls=[call]))
        _, reward, terminated, _, _ = await env.step(assistant(messages[0].text))
        await env.close()
        assert terminated
        return reward

    assert asyncio.run(play()) == 1.0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_and_recipes_that_are_named_exist(page):
    text, makefile = page.read_text(), (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target
    for recipe in re.findall(r"configs/[\w.-]+\.yaml", text):
        assert (ROOT / recipe).exists(), recipe


def test_every_error_that_the_docs_name_exists():
    from relax_agent import errors

    for name in re.findall(r"`([A-Z]\w+)`", (ROOT / "docs" / "errors.md").read_text()):
        if name not in ("RECIPE", "NAME"):
            assert issubclass(getattr(errors, name), errors.RelaxError), name


def test_the_docs_list_the_floors_that_the_layering_test_holds():
    from test_layering import FLOORS

    text = (ROOT / "docs" / "architecture.md").read_text()
    for number, names in re.findall(r"^\| (\d) \| (.*) \|$", text, re.M):
        told = set(re.findall(r"`(\w+)`", names))
        assert told <= set(FLOORS[int(number) - 1].split())
        missing = set(FLOORS[int(number) - 1].split()) - told
        folders = [ROOT / "relax_agent" / name for name in missing]
        assert not any(f.exists() or f.with_suffix(".py").exists() for f in folders), missing

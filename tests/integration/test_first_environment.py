"""The page for newcomers, executed as it stands: its code, its commands, its numbers."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from relax_agent import RandomPolicy, make, play, registry

PAGE = Path(__file__).parents[2] / "docs" / "first-environment.md"
BLOCKS = dict(enumerate(re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text("utf-8"), re.S)))
LIMIT_S = 60


@pytest.fixture
def shop(tmp_path):
    language, code = BLOCKS[0]
    assert language == "python"
    (tmp_path / "shop.py").write_text(code)
    return tmp_path


def relax_agent(folder, *args):
    command = Path(sys.executable).with_name("relax-agent")
    return subprocess.run(
        [command, *args], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=True
    ).stdout


def test_the_environment_is_complete_in_thirty_lines():
    lines = [line for line in BLOCKS[0][1].splitlines() if line.strip()]
    assert len(lines) <= 30


def test_it_is_played_as_the_page_says(shop):
    (shop / "play.py").write_text(BLOCKS[2][1])
    done = subprocess.run(
        [sys.executable, "play.py"], cwd=shop, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    tool_answer, last = done.stdout.splitlines()
    assert tool_answer == "12"
    assert last.startswith("1.0 True {'success': 1.0, ")


def test_policies_play_it_as_the_page_says(shop):
    (shop / "policies.py").write_text(BLOCKS[3][1])
    done = subprocess.run(
        [sys.executable, "policies.py"], cwd=shop, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    first, *others = done.stdout.splitlines()
    assert first == "completed 1.0 2"
    assert sorted(line.split()[0] for line in others) == ["2-apple", "2-fig", "3-pear"]


def test_the_commands_do_what_the_page_says(shop):
    commands = [line[2:].split()[1:] for line in BLOCKS[1][1].splitlines() if line[:2] == "$ "]
    shown, called = (relax_agent(shop, *command) for command in commands)
    assert "tasks: 6 to train on, 3 held out" in shown
    assert "tool: price(fruit)  Look up what one piece of a fruit costs." in shown
    assert "user:" in shown
    assert called == BLOCKS[1][1].splitlines()[-1] + "\n"


def test_random_play_of_it_never_fails(shop, monkeypatch):
    monkeypatch.syspath_prepend(shop)
    monkeypatch.delitem(sys.modules, "shop", raising=False)

    async def main():
        env = make("shop:shop/Fruit-v0")
        return [await play(env, RandomPolicy(seed), seed=seed) for seed in range(20)]

    try:
        records = asyncio.run(main())
    finally:
        registry.pop("shop/Fruit-v0", None)
        sys.modules.pop("shop", None)
    assert all(record.terminated or record.truncated for record in records)
    assert sum(record.metrics["tool_errors"] for record in records) > 0

"""``relax-agent envs list|show``: plain words, nothing of this project's own insides."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from relax_agent.envs import spec
from relax_agent.envs.listing import about, plain_words
from relax_agent.envs.serving.server import open_env_server

COMMAND = Path(sys.executable).with_name("relax-agent")
MINE = '''
from relax_agent.envs import Task, TaskSet, TimeLimit, ToolEnv, make, register
from relax_agent.tools import tool

@register("words/Sum-v0", wrappers=[(TimeLimit, {"max_turns": 3})])
@register("words/Alone-v0", isolation="process")
class Sum(ToolEnv):
    """Add ``two`` numbers.

    More of it.
    """

    tasks = TaskSet([Task("q", "1 + 7?", "8")])

    def __init__(self, size: int = 3) -> None:
        """Make it.

        Args:
            size: How ``large``.
        """
        super().__init__()

    @tool
    def add(self, a: int) -> int:
        """Add ``a``.

        Args:
            a: One.
        """
        return a

    def score(self, task, transcript):
        return 0.0
'''


def relax_agent(folder, *args):
    done = subprocess.run(
        [COMMAND, *map(str, args)], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def test_one_is_shown_in_plain_words_with_its_wrappers(mine):
    told = relax_agent(mine, "envs", "show", "mine:words/Sum-v0")
    assert "\n  Add two numbers.\n" in told and "More of it" not in told
    assert "wrapper: relax_agent.envs.wrappers.limits:TimeLimit(max_turns=3)" in told
    assert "argument: size=3  How large." in told


def test_one_in_a_process_of_its_own_is_shown_as_what_it_is(mine):
    told = relax_agent(mine, "envs", "show", "mine:words/Alone-v0")
    assert "(mine:Sum)" in told and "Add two numbers." in told and "size=3" in told


def test_one_that_is_served_is_shown_as_what_it_is(mine):
    async def main():
        async with open_env_server(spec("relax/Calculator-v0")) as url:
            return await asyncio.to_thread(relax_agent, mine, "envs", "show", url), url

    told, url = asyncio.run(main())
    assert told.startswith(f"relax/Calculator-v0  ({url})\n  Two operations, one calculator.\n")
    assert "argument:" not in told and "tool: calculator" in told


def test_a_list_has_no_column_that_is_empty_nearly_everywhere(mine):
    head, *lines = relax_agent(mine, "envs", "list").splitlines()
    assert head.split() == ["environment", "what", "it", "is"]
    assert not [line for line in lines if "docstring" in line or "`" in line]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Play ``chess`` with `me`.", "Play chess with me."),
        ("A :class:`~a.b.Env` and :func:`run`.", "A Env and run."),
        ("No markup.", "No markup."),
    ],
)
def test_markup_of_docstrings_is_taken_off(text, words):
    assert plain_words(text) == words


def test_where_more_is_to_be_read_is_left_out():
    made = type("Made", (), {"__doc__": "Two operations. See the module's docstring.\n\nMore."})
    assert about(made) == "Two operations."
    made = type("Made", (), {"__doc__": "Two operations; see the module's docstring."})
    assert about(made) == "Two operations."

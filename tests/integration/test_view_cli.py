"""``relax-agent view``: episodes as people read them, and token by token."""

import os
import subprocess
import sys

import pytest
from rollout_support import make_episode, make_group

from relax_agent.messages import Image, ToolCall, assistant, tool_message, user
from relax_agent.queue.payload import save_group
from relax_agent.run.episodes import EpisodeLog


def view(*arguments, columns=100):
    program = "import sys; from relax_agent.cli import main; sys.argv[0] = 'relax-agent'; main()"
    env = {**os.environ, "COLUMNS": str(columns), "TERM": "dumb"}
    argv = [sys.executable, "-c", program, "view", *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, env=env, timeout=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run's folder with seven episodes; the last one's words try to trick the terminal."""
    folder = tmp_path_factory.mktemp("run")
    log = EpisodeLog(folder / "episodes.jsonl")
    for step in (1, 2, 3):
        log.write(step, [make_group(f"g{step}")])
    last = make_episode("g4", reward=0.5)
    last.id = "feed" + last.id[4:]
    call = ToolCall("look", {"at": "\x1b[2J sky"}, "c")
    last.messages += [
        user(["see\u2028", Image(b"12345")]),
        assistant("[bold]so[/bold]", reasoning="hm", tool_calls=[call]),
        tool_message("blue\x07", call),
    ]
    group = make_group("g4", size=1)
    group.episodes[:] = [last]
    log.write(4, [group])
    save_group(folder / "group.safetensors", group)
    return folder


def test_without_a_choice_all_episodes_are_listed(folder):
    found = view(folder)
    rows = found.stdout.splitlines()
    assert found.returncode == 0 and len(rows) == 8
    assert rows[0].split() == ["no.", "step", "id", "task", "ended", "reward", "turns", "tokens"]
    assert rows[7].split() == [
        "7",
        "4",
        "feed" + rows[7].split()[2][4:],
        "t",
        "completed",
        "0.5",
        "1",
        "3",
    ]
    assert len(view(folder, "--step", 2).stdout.splitlines()) == 3


@pytest.mark.parametrize("which", ["7", "-1", "feed"])
def test_one_episode_is_shown_as_a_conversation(folder, which):
    found = view(folder / "episodes.jsonl", "--episode", which)
    assert found.returncode == 0
    for words in ("episode 7 of toy", "reward: 0.5", "[bold]so[/bold]", "hm", "image/png, 5 bytes"):
        assert words in found.stdout
    assert "→" in found.stdout and "look(" in found.stdout and "blue" in found.stdout


def test_nothing_that_a_model_writes_reaches_the_terminal_as_a_command(folder):
    for more in ([], ["--tokens"]):
        found = view(folder, "--episode", "7", *more)
        assert found.returncode == 0
        assert not set(found.stdout) & {"\x1b", "\x07"}


@pytest.mark.parametrize("file", ["episodes.jsonl", "group.safetensors"])
def test_tokens_are_shown_with_log_prob_and_version(folder, file):
    which = "7" if file == "episodes.jsonl" else "1"
    found = view(folder / file, "--episode", which, "--tokens")
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == "5 6 " + "9 ⟨-0.50, v0⟩" * 3


def test_a_page_can_be_written_instead(folder, tmp_path):
    found = view(folder, "--episode", "feed", "--html", tmp_path / "page.html")
    assert found.returncode == 0 and "episode 7" in found.stdout
    assert "<!doctype html>" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.jsonl"], "cannot read nowhere.jsonl"),
        (["--episode", "8"], "has no such episode: 8"),
        (["--episode", "0"], "has no such episode: 0"),
        (["--episode", "-9"], "has no such episode: -9"),
        (["--episode", "xyz"], "has no such episode: xyz"),
        (["--status", "great"], "there is no status great"),
        (["--status", "cancelled"], "has no such episode"),
    ],
)
def test_what_is_not_there_is_one_line(folder, arguments, words):
    given = arguments if arguments[0] == "nowhere.jsonl" else [folder, *arguments]
    found = view(*given)
    assert found.returncode != 0 and words in found.stderr and "Traceback" not in found.stderr


def test_a_torn_last_line_is_left_out_and_a_damaged_one_is_told(folder, tmp_path):
    text = (folder / "episodes.jsonl").read_text()
    (tmp_path / "torn.jsonl").write_text(text[:-10])
    assert len(view(tmp_path / "torn.jsonl").stdout.splitlines()) == 7
    lines = text.split("\n")
    lines[1] = lines[1].replace('"columns"', '"column"')
    (tmp_path / "damaged.jsonl").write_text("\n".join(lines))
    found = view(tmp_path / "damaged.jsonl")
    assert found.returncode != 0 and "line 2: not an episode of a run" in found.stderr

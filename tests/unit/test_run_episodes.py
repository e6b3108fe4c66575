"""episodes.jsonl: one episode a line whatever it says, and only what was trained."""

import json

import pytest
from rollout_support import make_episode, make_group

from relax_agent.errors import StorageError
from relax_agent.messages import user
from relax_agent.run.episodes import EpisodeLog, episode_line, read_episodes

NASTY = 'line\u2028separator\u2029 next\x85line\r\n\x0b\x1c"quote" \\ 🙂'


def nasty_episode():
    episode = make_episode()
    episode.messages.append(user(NASTY))
    return episode


def test_no_reader_takes_text_for_the_end_of_a_line():
    line = episode_line(nasty_episode(), step=3)
    assert line.isascii()
    assert len(line.splitlines()) == len(line.split("\n")) - 1 == 1
    assert json.loads(line)["messages"][-1]["content"] == NASTY


def test_a_line_is_strict_json_whatever_the_environment_measures():
    episode = make_episode()
    episode.metrics |= {"odd": float("nan"), "huge": float("inf")}
    data = json.loads(episode_line(episode), parse_constant=pytest.fail)
    assert (data["metrics"]["odd"], data["metrics"]["huge"]) == (None, None)


def test_what_is_written_reads_back_as_people_see_it(tmp_path):
    log = EpisodeLog(tmp_path / "episodes.jsonl")
    log.write(1, [make_group("a"), make_group("b")])
    episode = nasty_episode()
    episode.metrics["odd"] = float("nan")
    (tmp_path / "one.jsonl").write_text(episode_line(episode, step=2))
    (read,) = read_episodes(tmp_path / "one.jsonl")
    assert [m.text for m in read.messages] == [m.text for m in episode.messages]
    assert (read.reward, read.status, read.metrics) == (
        episode.reward, episode.status, {"success": 1.0},
    )  # fmt: skip
    (row,), (written,) = read.rows(), episode.rows()
    for column in ("token_ids", "loss_mask", "logprobs", "weight_versions", "turn_index"):
        assert getattr(row, column).tolist() == getattr(written, column).tolist()
    groups = [episode.group_id for episode in read_episodes(log.path)]
    assert groups == ["a", "a", "b", "b"]
    assert read_episodes(tmp_path / "nothing") == []


def test_a_resumed_log_forgets_the_steps_beyond_the_checkpoint(tmp_path):
    path = tmp_path / "episodes.jsonl"
    log = EpisodeLog(path)
    for step in (1, 2, 3):
        log.write(step, [make_group(f"g{step}")])
    EpisodeLog(path, last_step=2).write(3, [make_group("again")])
    told = [(json.loads(line)["step"], json.loads(line)["group_id"]) for line in path.open()]
    assert told == [(1, "g1"), (1, "g1"), (2, "g2"), (2, "g2"), (3, "again"), (3, "again")]


def test_a_run_that_begins_again_keeps_nothing(tmp_path):
    path = tmp_path / "episodes.jsonl"
    EpisodeLog(path).write(1, [make_group("g")])
    EpisodeLog(path, last_step=0)
    assert path.read_text() == ""


def test_a_torn_last_line_is_left_out_and_cut_off_on_resume(tmp_path):
    path = tmp_path / "episodes.jsonl"
    line = episode_line(make_episode(), step=1)
    path.write_text(line + line[:50])
    assert len(read_episodes(path)) == 1
    EpisodeLog(path, last_step=1)
    assert path.read_text() == line


@pytest.mark.parametrize("broken", ["nonsense", "[1]"])
def test_a_broken_line_in_the_midst_is_an_error_that_names_it(broken, tmp_path):
    path = tmp_path / "episodes.jsonl"
    path.write_text(episode_line(make_episode()) + broken + "\n")
    with pytest.raises(StorageError, match=r"episodes.jsonl, line 2: not"):
        read_episodes(path)

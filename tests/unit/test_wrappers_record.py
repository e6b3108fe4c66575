"""Episodes on record: nothing is lost however they end, and recording never costs an episode."""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from relax_agent.envs import Env, EnvSpec, PlayLimits, RandomPolicy, make, play
from relax_agent.envs.wrappers import (
    Compaction,
    RecordEpisode,
    TokenLimit,
    read_episodes,
    recording,
)
from relax_agent.errors import ConfigError, EnvError, StorageError, ToolError
from relax_agent.messages import (
    Audio,
    Image,
    Rewrite,
    Text,
    ToolCall,
    Usage,
    Video,
    assistant,
    system,
    tool_message,
    user,
)

PNG = b"\x89PNG\r\n\x1a\n picture"


class Scripted(Env):
    """Says what it is told to say; ends with the last of it."""

    def __init__(self, *observations, fail=None, hang=False, fail_reset=None):
        self.observations, self.fail, self.hang = observations, fail, hang
        self.fail_reset = fail_reset
        self.closed = False

    async def reset(self, *, seed=None, options=None):
        if self.fail_reset is not None:
            raise self.fail_reset
        self.left = list(self.observations)
        return [system("s"), user("begin")], {"task": "t-1"}

    async def step(self, action):
        if self.fail is not None:
            raise self.fail
        if self.hang:
            await asyncio.sleep(3600)
        observation = self.left.pop(0) if self.left else []
        done = not self.left
        metrics = {"metrics": {"success": 1.0}} if done else {}
        return observation, 0.5, done, False, metrics

    async def close(self):
        self.closed = True


def episode(env, *actions, seed=7):
    async def main():
        await env.reset(seed=seed)
        out = None
        for action in actions:
            out = await env.step(action)
        return out

    return asyncio.run(main())


def lines(folder):
    return [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]


CALL = ToolCall("look", {"at": ["a", {"b": None}]}, "c1")
MIXED = [
    tool_message(["see", Image(PNG), "and", Audio(b"RIFFx")], CALL),
    user(["again", Image(PNG), Video(b"ftyp", "video/webm"), Image(b"odd", "image/x-odd")]),
]


def test_an_episode_reads_back_as_it_was(tmp_path):
    said = replace(
        assistant("Let me see.", tool_calls=[CALL, ToolCall("x", {}, "c2", "torn")], reasoning="r"),
        usage=Usage(10, 3, 87),
        finish_reason="length",
    )
    env = RecordEpisode(Scripted(MIXED, []), tmp_path)
    info = episode(env, said, assistant("done"))[4]
    (again,) = read_episodes(tmp_path)
    assert again.messages == [system("s"), user("begin"), said, *MIXED, assistant("done")]
    assert (again.rewards, again.reward, again.turns) == ([0.5, 0.5], 1.0, 2)
    assert (again.task_id, again.seed, again.env_id) == ("t-1", 7, "Scripted")
    assert (again.status, again.terminated, again.truncated) == ("completed", True, False)
    assert again.metrics == {"success": 1.0}
    assert again.actions == [2, 5]
    assert len(again.step_durations_s) == 2 and again.duration_s > 0
    assert info["recorded"] == again.id


def test_media_are_files_of_their_own_each_once(tmp_path):
    env = RecordEpisode(Scripted(MIXED, MIXED), tmp_path)
    for _ in range(2):
        episode(env, assistant("a"), assistant("b"))
    files = sorted((tmp_path / "media").iterdir())
    assert sorted(path.suffix for path in files) == [".bin", ".png", ".wav", ".webm"]
    assert PNG in [path.read_bytes() for path in files]
    assert "base64" not in (tmp_path / "episodes.jsonl").read_text()


def test_pages_link_to_the_media_and_the_index_to_the_pages(tmp_path):
    env = RecordEpisode(Scripted(MIXED, []), tmp_path)
    episode(env, assistant("<script>alert(1)</script>"), assistant("b"))
    (page,) = (tmp_path / "pages").glob("*.html")
    text = page.read_text()
    assert "<script" not in text and "&lt;script" in text
    links = re.findall(r'src="([^"]+)"', text)
    assert len(links) == 5 and all((page.parent / link).is_file() for link in links)
    index = (tmp_path / "index.html").read_text()
    assert f'<a href="pages/{page.name}">' in index and "completed" in index
    assert index.count("<tr>") == 2


def test_without_html_there_are_only_lines_and_media(tmp_path):
    episode(RecordEpisode(Scripted([]), tmp_path, html=False), assistant("a"))
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "episodes.jsonl", "media"}


def test_every_so_many_episodes_are_recorded_beginning_with_the_first(tmp_path):
    env = RecordEpisode(Scripted([]), tmp_path, every=3)
    for seed in range(7):
        episode(env, assistant("a"), seed=seed)
    assert [item.seed for item in read_episodes(tmp_path)] == [0, 3, 6]


# -- episodes that do not end in order -------------------------------------------------------------


def test_an_episode_cut_by_another_reset_or_by_close_is_written(tmp_path):
    env = RecordEpisode(Scripted([], [], []), tmp_path)

    async def main():
        await env.reset(seed=1)
        await env.step(assistant("a"))
        await env.reset(seed=2)
        await env.close()
        await env.close()

    asyncio.run(main())
    found = [(item.seed, item.status, item.detail, item.turns) for item in read_episodes(tmp_path)]
    assert found == [
        (1, "cancelled", "reset() before the episode's end", 1),
        (2, "cancelled", "close() before the episode's end", 0),
    ]
    assert env.unwrapped.closed


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (KeyError("oh"), "env_failure"),
        (ToolError("gone"), "tool_failure"),
        (SystemExit(3), "env_failure"),
        (KeyboardInterrupt(), "cancelled"),
    ],
)
def test_an_exception_in_step_is_passed_on_and_written(tmp_path, error, status):
    env = RecordEpisode(Scripted(fail=error), tmp_path)

    async def main():
        await env.reset()
        with pytest.raises(type(error)):
            await env.step(assistant("a"))

    asyncio.run(main())
    (item,) = read_episodes(tmp_path)
    assert (item.status, item.turns, item.rewards) == (status, 1, [])
    assert item.detail.startswith(f"step(): {type(error).__name__}")
    assert item.messages[-1] == assistant("a")


def test_an_exception_in_reset_is_written_with_its_task(tmp_path):
    env = RecordEpisode(Scripted(fail_reset=EnvError("no")), tmp_path)
    with pytest.raises(EnvError):
        asyncio.run(env.reset(seed=3, options={"task": "t-9"}))
    (item,) = read_episodes(tmp_path)
    assert (item.status, item.task_id, item.seed, item.messages) == ("env_failure", "t-9", 3, [])


def test_a_cancelled_step_is_written(tmp_path):
    env = RecordEpisode(Scripted(hang=True), tmp_path)

    async def main():
        await env.reset()
        task = asyncio.create_task(env.step(assistant("a")))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    (item,) = read_episodes(tmp_path)
    assert (item.status, item.detail) == ("cancelled", "step() was cancelled")


def test_a_play_that_times_out_leaves_its_trace(tmp_path):
    env = RecordEpisode(Scripted(hang=True), tmp_path)
    asyncio.run(play(env, RandomPolicy(1), limits=PlayLimits(step_timeout_s=0.05)))
    assert [item.status for item in read_episodes(tmp_path)] == ["cancelled"]


def test_the_limit_that_ended_an_episode_is_its_status(tmp_path):
    env = RecordEpisode(TokenLimit(Scripted([], [], []), 1), tmp_path)
    episode(env, assistant("a"))
    assert read_episodes(tmp_path)[0].status == "truncated_tokens"


def test_a_wrong_action_ends_no_recording(tmp_path):
    env = RecordEpisode(make("relax/Calculator-v0"), tmp_path)

    async def main():
        await env.reset(seed=1)
        with pytest.raises(EnvError):
            await env.step("not a message")
        await env.step(assistant("1"))

    asyncio.run(main())
    assert [item.status for item in read_episodes(tmp_path)] == ["completed"]


def test_a_rewritten_history_is_kept_with_what_it_replaced(tmp_path):
    rewrite = Rewrite((system("s"), user("short")), "too long")
    env = RecordEpisode(Scripted(rewrite, []), tmp_path)
    episode(env, assistant("a"), assistant("b"))
    (item,) = read_episodes(tmp_path)
    assert item.rewrites == [(3, "too long")]
    assert item.messages[3:5] == list(rewrite.messages)
    assert item.actions == [2, 5]
    (page,) = (tmp_path / "pages").glob("*.html")
    assert "History was rewritten: too long" in page.read_text()


# -- a folder that several share, and that a crash has torn ----------------------------------------


def record_many(folder, start):
    env = RecordEpisode(Scripted(MIXED, []), folder)
    for seed in range(start, start + 10):
        episode(env, assistant("a" * 5000), assistant("b"), seed=seed)


def test_threads_and_processes_share_a_folder(tmp_path):
    code = f"import pathlib, {__name__} as t; t.record_many(pathlib.Path({str(tmp_path)!r}), 100)"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent)
    threads = [threading.Thread(target=record_many, args=(tmp_path, n)) for n in (0, 50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert process.wait(60) == 0
    expected = {*range(10), *range(50, 60), *range(100, 110)}
    episodes = read_episodes(tmp_path)
    assert sorted(item.seed for item in episodes) == sorted(expected)
    assert len({item.id for item in episodes}) == 30
    assert (tmp_path / "index.html").read_text().count("</tr>") == 31
    assert list(tmp_path.rglob("*.part")) == []


def test_a_torn_last_line_is_passed_over_and_costs_the_next_one_nothing(tmp_path):
    env = RecordEpisode(Scripted([]), tmp_path)
    episode(env, assistant("a"), seed=1)
    path = tmp_path / "episodes.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    assert [item.seed for item in read_episodes(tmp_path)] == [1]
    episode(env, assistant("a"), seed=2)
    assert [item.seed for item in read_episodes(tmp_path)] == [1, 2]


def test_a_missing_media_file_does_not_hide_the_episode(tmp_path):
    episode(RecordEpisode(Scripted(MIXED, []), tmp_path), assistant("a"), assistant("b"))
    for path in (tmp_path / "media").glob("*.png"):
        path.unlink()
    (item,) = read_episodes(tmp_path)
    (part,) = [p for p in item.messages[3].content if isinstance(p, Text) and "missing" in p.text]
    assert part.text.startswith("[image: media/")


def test_a_file_outside_of_the_folder_is_never_read(tmp_path):
    episode(RecordEpisode(Scripted(MIXED, []), tmp_path), assistant("a"), assistant("b"))
    path = tmp_path / "episodes.jsonl"
    path.write_text(re.sub(r"media/[0-9a-f]+\.png", "media/../../../etc/passwd", path.read_text()))
    assert read_episodes(tmp_path) == []


def test_reading_a_folder_without_a_recording_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"episodes\.jsonl"):
        read_episodes(tmp_path / "nothing")


# -- a disk that takes no more ---------------------------------------------------------------------


@pytest.fixture
def full_disk(monkeypatch):
    """While ``full.on``, nothing is written."""

    class Full:
        on = True

    def guarded(function):
        def write(*args):
            if Full.on:
                raise OSError(28, os.strerror(28), str(args[0]))
            return function(*args)

        return write

    monkeypatch.setattr(recording, "append_to_file", guarded(recording.append_to_file))
    monkeypatch.setattr(Path, "write_bytes", guarded(Path.write_bytes))
    return Full


def test_a_full_disk_costs_no_reward_and_the_episode_is_written_later(tmp_path, full_disk):
    env = RecordEpisode(Scripted(MIXED, []), tmp_path)
    _, reward, terminated, _, info = episode(env, assistant("a"), assistant("b"), seed=1)
    assert (reward, terminated) == (0.5, True)
    assert "No space left on device" in info["recording_error"]
    assert info["metrics"] == {"success": 1.0}
    full_disk.on = False
    episode(env, assistant("a"), assistant("b"), seed=2)
    assert [item.seed for item in read_episodes(tmp_path)] == [1, 2]
    assert len(list((tmp_path / "pages").glob("*.html"))) == 2


def test_close_says_what_was_never_written(tmp_path, full_disk):
    env = RecordEpisode(Scripted([]), tmp_path)
    episode(env, assistant("a"))
    with pytest.raises(StorageError, match="No space left"):
        asyncio.run(env.close())
    assert env.unwrapped.closed


def test_what_waits_for_a_disk_is_bounded_and_what_is_lost_is_counted(
    tmp_path, full_disk, monkeypatch
):
    monkeypatch.setattr(recording, "_MAX_WAITING", 2)
    env = RecordEpisode(Scripted([]), tmp_path)
    for seed in range(5):
        episode(env, assistant("a"), seed=seed)
    full_disk.on = False
    with pytest.raises(StorageError, match="3 episodes are missing"):
        asyncio.run(env.close())
    assert [item.seed for item in read_episodes(tmp_path)] == [3, 4]


def test_a_folder_that_cannot_be_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        RecordEpisode(Scripted(), tmp_path / "file" / "folder")


def test_arguments_that_make_no_sense_are_refused(tmp_path):
    with pytest.raises(ConfigError):
        RecordEpisode(Scripted(), tmp_path, every=0)


# -- real environments -----------------------------------------------------------------------------


def test_it_round_trips_through_a_spec_and_the_spec_is_on_record(tmp_path):
    env = RecordEpisode(
        Compaction(make("relax/Calculator-v0"), max_messages=9), tmp_path, every=2, html=False
    )
    again = EnvSpec.from_json(env.spec.to_json()).make()
    assert again.spec.to_json() == env.spec.to_json()
    asyncio.run(play(again, RandomPolicy(3), seed=5))
    (item,) = read_episodes(tmp_path)
    assert item.env_id == "relax/Calculator-v0"
    assert item.tools == env.tools.schemas()
    rebuilt = EnvSpec.from_json(json.dumps(item.spec)).make()
    assert rebuilt.spec.to_json() == json.dumps(item.spec)


def test_a_played_episode_and_its_record_tell_the_same(tmp_path):
    env = RecordEpisode(make("relax/Calculator-v0"), tmp_path)
    played = [asyncio.run(play(env, RandomPolicy(seed), seed=seed)) for seed in range(6)]
    for one, other in zip(played, read_episodes(tmp_path), strict=True):
        assert other.messages == one.messages
        assert (other.reward, other.status, other.metrics) == (one.reward, one.status, one.metrics)


def test_text_that_no_file_takes_is_no_obstacle(tmp_path):
    call = ToolCall("f", {"x": "\ud800", "y": float("nan"), "z": object()}, "c")
    env = RecordEpisode(Scripted([]), tmp_path)
    info = episode(env, assistant("a", tool_calls=[call]))[4]
    assert "recorded" in info
    assert len(read_episodes(tmp_path)) == 1
    assert len(lines(tmp_path)) == 1


@pytest.mark.parametrize(
    "metrics",
    [[1], {"a": float("nan")}, {"a": 10**400}, {"a": None}, {"a": "long"}, {"a": {"b": 1}}],
)
def test_odd_metrics_cost_neither_the_step_nor_the_recording(metrics, tmp_path):
    """The line in the file stays JSON, which knows no NaN."""

    class Odd(Env):
        async def reset(self, *, seed=None, options=None):
            return [user("begin")], {}

        async def step(self, action):
            both = {"fine": np.float32(2)} | metrics if isinstance(metrics, dict) else metrics
            return [], 1.0, True, False, {"metrics": both}

    async def main():
        env = RecordEpisode(Odd(), tmp_path)
        await env.reset()
        assert (await env.step(assistant("x")))[1] == 1.0
        await env.close()

    asyncio.run(main())
    (episode,) = read_episodes(tmp_path)
    assert episode.status == "completed"
    assert episode.metrics == ({"fine": 2.0} if isinstance(metrics, dict) else {})
    assert "NaN" not in (tmp_path / "episodes.jsonl").read_text()


@pytest.mark.parametrize("task", [7, b"t", {"a": 1}, object(), "a/../b\n", "\ud800", ""])
def test_a_task_may_have_any_name(task, tmp_path):
    class Named(Scripted):
        async def reset(self, *, seed=None, options=None):
            return (await super().reset())[0], {"task": task}

    async def main():
        env = RecordEpisode(Named(), tmp_path)
        await env.reset()
        await env.step(assistant("x"))
        await env.close()

    asyncio.run(main())
    assert len(read_episodes(tmp_path)) == len(list((tmp_path / "pages").iterdir())) == 1


def test_what_cannot_be_written_down_costs_only_itself(tmp_path, monkeypatch):
    """No disk is at fault, so it is not tried again before all that come after it."""

    class Odd(Exception):
        pass

    def write(self, episode):
        if "odd" in episode.messages[-1].text:
            raise Odd("no form")
        whole(self, episode)

    whole = recording.Recorder._write_line
    monkeypatch.setattr(recording.Recorder, "_write_line", write)

    async def main():
        env = RecordEpisode(Scripted(), tmp_path, html=False)
        infos = []
        for word in ("odd", "fine", "fine"):
            await env.reset()
            infos.append((await env.step(assistant(word)))[4])
        with pytest.raises(StorageError, match="1 episodes are missing"):
            await env.close()
        return infos

    first, *others = asyncio.run(main())
    assert "no form" in first["recording_error"]
    assert all("recorded" in info for info in others)
    assert len(read_episodes(tmp_path)) == 2


@pytest.mark.parametrize("error", [SystemExit(0), type("Panic", (BaseException,), {})("p")])
def test_what_is_no_exception_is_recorded_as_a_failure_too(error, tmp_path):
    async def main():
        env = RecordEpisode(Scripted(fail=error), tmp_path, html=False)
        await env.reset()
        try:
            await env.step(assistant("x"))
        except BaseException as raised:
            assert raised is error
        await env.close()

    asyncio.run(main())
    assert read_episodes(tmp_path)[0].status == "env_failure"

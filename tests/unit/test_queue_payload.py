"""Group files: complete or absent, readable without torch."""

import errno
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_support import make_episode, make_group, run

from relax_agent.episode import Episode, EpisodeStatus, Group
from relax_agent.errors import StorageError
from relax_agent.messages import (
    AssistantMessage,
    Image,
    Message,
    Text,
    ToolCall,
    Usage,
    assistant,
)
from relax_agent.queue import LocalQueue, QueueSettings, load_group, payload, save_group


def same(left: Group, right: Group) -> bool:
    assert (left.id, left.env_id, left.task_id) == (right.id, right.env_id, right.task_id)
    for a, b in zip(left.episodes, right.episodes, strict=True):
        assert a.to_json() == b.to_json()
        arrays = a.to_arrays(), b.to_arrays()
        assert arrays[0].keys() == arrays[1].keys()
        for name in arrays[0]:
            assert arrays[0][name].dtype == arrays[1][name].dtype
            np.testing.assert_array_equal(arrays[0][name], arrays[1][name])
    return True


def rich_group() -> Group:
    """Forks, routes of both widths, failures, media, tool calls, and an empty segment."""
    forked = Episode("toy", "t", "g", 7)
    forked.messages += [Message("user", (Image(b"\x89PNG\0\xff"),))]
    forked.add_prompt([1, 2])
    call = ToolCall("add", {"a": 1, "b": "é"}, "c0", None)
    forked.add_sampled([3, 4], [-0.1, -0.2], [0, 1], "stop", assistant("x", tool_calls=[call]))
    forked.add_routes(0, np.full((3, 2, 2), 300, np.uint16))
    forked.fork(2, "compaction")
    forked.finish(EpisodeStatus.ENV_FAILURE, "it broke")
    running = Episode("toy", "t", "g", 7)
    return Group("g/with:odd\nname", "toy", "t", [forked, running, make_episode(routes=True)])


@pytest.mark.parametrize("group", [rich_group(), make_group(), Group("g", "e", "t")])
def test_a_group_is_read_back_as_it_was_written(tmp_path, group):
    path = tmp_path / "g.safetensors"
    save_group(path, group)
    assert same(load_group(path), group)
    assert [item.name for item in tmp_path.iterdir()] == ["g.safetensors"]


def test_large_json_goes_beside_the_arrays(tmp_path, monkeypatch):
    monkeypatch.setattr(payload, "_HEADER_LIMIT", 100)
    save_group(tmp_path / "g", rich_group())
    assert same(load_group(tmp_path / "g"), rich_group_like(tmp_path / "g"))


def rich_group_like(path):
    from safetensors.numpy import load_file

    assert "json" in load_file(path)
    return load_group(path)


def test_a_group_is_read_without_torch(tmp_path):
    path = tmp_path / "g.safetensors"
    save_group(path, make_group(routes=True))
    code = (
        "import sys; from relax_agent.queue import load_group; import pathlib;"
        f"g = load_group(pathlib.Path({str(path)!r}));"
        "assert len(g.episodes) == 2; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class FullDisk:
    """A file that takes some bytes and then finds the disk full."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.file.close()

    def write(self, data):
        self.file.write(data[: self.room])
        if len(data) > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self):
        self.file.flush()

    def fileno(self):
        return self.file.fileno()


@pytest.fixture
def full_disk(monkeypatch):
    from pathlib import Path

    original = Path.open

    def opened(self, mode="r", *args, **kwargs):
        file = original(self, mode, *args, **kwargs)
        return FullDisk(file, 100) if "w" in mode else file

    monkeypatch.setattr(Path, "open", opened)


def test_a_full_disk_names_the_file_and_leaves_nothing_half_written(tmp_path, full_disk):
    with pytest.raises(StorageError, match=r"g\.safetensors: No space left"):
        save_group(tmp_path / "g.safetensors", make_group())
    assert list(tmp_path.iterdir()) == []


def test_a_failed_flush_leaves_the_older_file(tmp_path, monkeypatch):
    path = tmp_path / "g.safetensors"
    save_group(path, make_group("old"))

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError):
            save_group(path, make_group("new"))
    assert load_group(path).id == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_at_put_keeps_the_reservation_and_stores_nothing(tmp_path, full_disk):
    async def main():
        queue = LocalQueue(tmp_path, QueueSettings(), groups_per_step=1)
        await queue.reserve("a", "t", timeout=1)
        with pytest.raises(StorageError, match="groups"):
            await queue.put(make_group("a"))
        assert (await queue.stats()).reserved == 1
        assert list((tmp_path / "groups").iterdir()) == []
        assert await queue.drop("a", "failed", "disk")
        await queue.close()

    run(main())


@pytest.mark.parametrize("keep", [0, 7, 40, -1])
def test_a_cut_file_is_a_storage_error(tmp_path, keep):
    path = tmp_path / "g.safetensors"
    save_group(path, make_group())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(StorageError, match=r"g\.safetensors"):
        load_group(path)


def test_a_missing_or_foreign_file_is_a_storage_error(tmp_path):
    from safetensors.numpy import save_file

    with pytest.raises(StorageError, match="nowhere"):
        load_group(tmp_path / "nowhere")
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "other")
    with pytest.raises(StorageError, match="other is not a group file"):
        load_group(tmp_path / "other")


WORDS = st.text(max_size=6)
MESSAGES = st.builds(
    AssistantMessage,
    content=st.lists(st.one_of(st.builds(Text, WORDS), st.builds(Image, st.binary()))).map(tuple),
    name=st.none() | WORDS,
    reasoning=st.none() | WORDS,
    tool_calls=st.lists(
        st.builds(
            ToolCall,
            WORDS,
            st.dictionaries(WORDS, st.none() | st.integers() | WORDS),
            WORDS,
            st.none() | WORDS,
        )
    ).map(tuple),
    usage=st.builds(Usage, st.integers(0, 9), st.integers(0, 9), st.none() | st.integers(0, 9)),
    finish_reason=st.sampled_from(["stop", "length", "abort"]),
)


@given(message=MESSAGES)
def test_every_field_of_a_message_survives_the_file(tmp_path_factory, message):
    """T50, T59: parsed actions, and every attempt at a call with what was wrong with it."""
    episode = make_episode()
    episode.messages.append(message)
    episode.turns[0] = replace(episode.turns[0], message=message)
    path = tmp_path_factory.getbasetemp() / "message"
    save_group(path, Group("g", "toy", "t", [episode]))
    (found,) = load_group(path).episodes
    assert found.messages == episode.messages
    assert found.turns == episode.turns

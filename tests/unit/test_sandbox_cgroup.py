"""Control groups of sandboxes, in a folder that stands for the kernel's."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_agent.errors import ConfigError
from relax_agent.tools.sandbox import Limits, cgroup
from relax_agent.tools.sandbox.cgroup import ControlGroup


@pytest.fixture
def group(tmp_path: Path) -> ControlGroup:
    return ControlGroup.make(tmp_path, Limits(memory_mb=100, processes=7))


def empty(folder: Path) -> None:
    """Remove the files, which the kernel's folders do not count."""
    for file in folder.iterdir():
        file.unlink()


def test_a_group_has_the_limits_of_its_sandbox(group: ControlGroup) -> None:
    told = {file.name: int(file.read_text()) for file in group.folder.iterdir()}
    assert told["memory.max"] == 132 << 20
    assert told["pids.max"] == 10
    assert (told["memory.swap.max"], told["memory.oom.group"]) == (0, 1)


def test_the_kernels_kill_is_noted_before_the_group_goes(group: ControlGroup) -> None:
    group.remove()
    assert not group.ran_out
    assert group.folder.exists()  # not empty yet
    (group.folder / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 1\noom_kill 2\n")
    group.remove()
    assert group.ran_out
    empty(group.folder)
    group.remove()
    group.remove()
    assert not group.folder.exists()
    assert group.ran_out


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that stands for this process's own group."""
    folder = tmp_path / "slice" / "own"
    folder.mkdir(parents=True)
    (folder.parent / "cgroup.subtree_control").write_text("memory pids")
    monkeypatch.setattr(cgroup, "_own_group", lambda: folder)
    monkeypatch.delenv(cgroup.VARIABLE, raising=False)
    cgroup.parent_group.cache_clear()
    yield folder
    cgroup.parent_group.cache_clear()


@pytest.mark.parametrize("handed_down", ["memory pids cpu", "cpu", "pids", "", None])
def test_groups_are_made_below_the_own_one_if_it_hands_down_both_controllers(
    own: Path, handed_down: str | None
) -> None:
    """Never beside it: there its limits would not count."""
    if handed_down is not None:
        (own / "cgroup.subtree_control").write_text(handed_down)
    expected = own if handed_down == "memory pids cpu" else None
    assert cgroup.parent_group() == expected


def test_a_group_that_was_handed_over_is_named_by_a_variable(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cgroup.VARIABLE, str(own.parent))
    assert cgroup.parent_group() == own.parent
    cgroup.parent_group.cache_clear()
    monkeypatch.setenv(cgroup.VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"RELAX_AGENT_CGROUP=.*nowhere.*cgroup.subtree_control"):
        cgroup.parent_group()


def test_groups_of_dead_processes_are_removed_and_no_others(tmp_path: Path) -> None:
    dead, alive = "relax-sandbox-999999999-aa", f"relax-sandbox-{os.getpid()}-bb"
    others = ["user.slice", "relax-sandbox-", "relax-sandbox-x-1"]
    for name in (dead, alive, *others):
        (tmp_path / name).mkdir()
    cgroup._remove_left_over(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([alive, *others])


def test_a_group_that_cannot_be_limited_is_not_kept(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(ControlGroup, "_set", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError, match="no"):
        ControlGroup.make(tmp_path, Limits())
    assert list(tmp_path.iterdir()) == []

"""Whatever dies, in whatever phase: one line says so, nothing stays running, files stay whole.

Each test interrupts a run, lets it go on, and interrupts it again in another way.
"""

import os
import resource
import signal

import pytest
from errors_table import told
from run_support import lines, read_until, train, trained_groups, wait_until, write_recipe

ENGINE, TRAINER, TOOLS = "engines.embedded", "trainers.worker", "tools.server"
NO_WARM_START = {"trainer": {"warm_start": {"steps": 0}}, "checkpoint": {"every": 2}}
LONG = ("--set", "steps=1000")


def check_files(folder):
    """Every file that a person or a script reads is whole, and tells of steps without gaps."""
    steps = [line["step"] for line in lines(folder / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    logged = {episode["step"] for episode in lines(folder / "episodes.jsonl")}
    assert logged >= set(steps)
    ids = [group_id for each in trained_groups(folder).values() for group_id in each]
    assert len(set(ids)) == len(ids)
    for path in (folder / "checkpoints").iterdir():
        assert (path / "conductor.json").exists(), "a half-written checkpoint"
    return steps


def wait_for_steps(process, folder, count):
    wait_until(lambda: len(lines(folder / "metrics.jsonl")) >= count, process)


def test_a_tool_server_is_killed_while_it_starts_and_a_trainer_while_it_trains(runs, tmp_path):
    path = write_recipe(tmp_path, runs, name="one", **NO_WARM_START)
    folder = runs / "one"
    with train(path) as process:
        read_until(process, "starting engines")
        wait_until(lambda: process.has_child(TOOLS), process)
        os.kill(process.child(TOOLS), signal.SIGKILL)
        process.finish()
        line = told("The trainer or the tool server dies", process.status, process.err)
        assert "tools ended by itself with exit code -9 (SIGKILL" in line
        assert process.left() == {}
    with train(path, "--resume", folder, *LONG) as process:
        wait_for_steps(process, folder, 3)
        os.kill(process.child(TRAINER), signal.SIGKILL)
        process.finish()
        line = told("The trainer or the tool server dies", process.status, process.err)
        assert "trainer-0 ended by itself with exit code -9" in line
        assert f"--resume {folder}" in process.err
        assert process.left() == {}
    assert len(check_files(folder)) >= 3


def limit_files(pid):
    """Let no file of a process grow: to a program that writes, this is a full disk."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, 1000))


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit")
def test_an_engine_is_killed_while_it_evaluates_and_the_disk_is_full_in_training(runs, tmp_path):
    slow = {"rollout": {"max_concurrent_episodes": 1}}
    path = write_recipe(tmp_path, runs, name="two", tools={"serve": None}, **slow, **NO_WARM_START)
    folder = runs / "two"
    with train(path) as process:
        read_until(process, "evaluating")
        os.kill(process.child(ENGINE), signal.SIGKILL)
        process.finish()
        line = told("An engine dies while it starts, or later", process.status, process.err)
        assert "engine-0 ended by itself" in line
        assert process.left() == {}
    with train(path, "--resume", folder, *LONG) as process:
        wait_for_steps(process, folder, 1)
        limit_files(process.popen.pid)
        process.finish()
        line = told("The disk is full", process.status, process.err)
        assert str(folder) in line
        assert process.left() == {}
    assert check_files(folder)


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit")
def test_the_disk_is_full_under_the_trainer(runs, tmp_path):
    path = write_recipe(tmp_path, runs, name="three", tools={"serve": None}, **NO_WARM_START)
    folder = runs / "three"
    with train(path, *LONG) as process:
        wait_for_steps(process, folder, 1)
        limit_files(process.child(TRAINER))
        process.finish()
        line = told("The disk is full", process.status, process.err)
        assert f"trainer-0: cannot write {folder}" in line and "File too large" in line
        assert process.left() == {}
    assert check_files(folder)

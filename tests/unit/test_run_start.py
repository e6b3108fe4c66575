"""How a run ends: one error to tell, found among all that one failure sets off."""

import asyncio
import errno
import json
import os
import signal

import pytest
from run_support import recipe

from relax_agent.errors import (
    ChildDied,
    ConfigError,
    Interrupted,
    MissingExtraError,
    NoData,
    ProducerFailed,
    QueueError,
    StorageError,
    TrainerError,
)
from relax_agent.run import start
from relax_agent.run.checkpoints import Progress
from relax_agent.run.folder import RunFolder
from relax_agent.run.goal import Outcome
from relax_agent.run.recipe import parse_recipe

DEATH = ChildDied("engine-0", -9)
FAULT = KeyError("a fault in the program")


def passed_on(cause):
    error = ProducerFailed("rollout has failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("failures", "told"),
    [
        ([TrainerError("t")], TrainerError),
        ([TrainerError("its connection broke"), DEATH], ChildDied),
        ([QueueError("the queue is closed"), TrainerError("t")], TrainerError),
        ([passed_on(StorageError("full"))], StorageError),
        ([passed_on(FAULT), FAULT], KeyError),
        ([TrainerError("t"), FAULT], KeyError),
        ([NoData("none")], NoData),
    ],
    ids=str,
)
def test_the_cause_is_told_and_not_what_followed_from_it(failures, told):
    for order in (failures, failures[::-1]):
        nested = BaseExceptionGroup("a", [BaseExceptionGroup("b", order)])
        assert type(start.cause_of(nested)) is told


def parsed(tmp_path, **changes):
    return parse_recipe(recipe(runs=str(tmp_path / "runs"), **changes), "recipe")


@pytest.fixture
def ending(monkeypatch):
    """Replace the run itself by something that ends in a given way."""

    def set_up(work):
        async def conduct(recipe, folder, monitor, checkpoint):
            monitor.phase("warm start")
            return await work()

        monkeypatch.setattr(start, "conduct", conduct)

    return set_up


def test_a_good_end_is_stored_printed_and_status_0(tmp_path, ending, capsys):
    async def work():
        return Outcome(steps=2)

    ending(work)
    assert start.run(parsed(tmp_path), quiet=True) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["steps"], result["step"]) == (2, 2)
    folder = RunFolder(tmp_path / "runs" / "run")
    assert folder.read_outcome()["missed"] == []
    assert start.run(parsed(tmp_path), resume=folder.path, quiet=True) == 0
    assert json.loads(capsys.readouterr().out) == result


def test_a_finished_run_goes_on_when_it_shall_make_more_steps(tmp_path, ending, capsys):
    steps = iter([2, 5])

    async def work():
        return Outcome(steps=next(steps))

    ending(work)
    start.run(parsed(tmp_path))
    start.run(parsed(tmp_path, steps=5), resume=tmp_path / "runs" / "run")
    assert RunFolder(tmp_path / "runs" / "run").read_outcome()["step"] == 5
    assert "the run begins again" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("signum", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")]
)
def test_a_signal_ends_the_run_in_order_and_names_the_phase(signum, name, tmp_path, ending, capsys):
    cleaned = []

    async def work():
        os.kill(os.getpid(), signum)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    ending(work)
    with pytest.raises(Interrupted) as caught:
        start.run(parsed(tmp_path))
    assert str(caught.value).startswith(f"{name} ended the run (phase: warm start) → ")
    assert caught.value.exit_code == 128 + signum
    assert cleaned == [True]
    assert f"--resume {tmp_path / 'runs' / 'run'}" in capsys.readouterr().err
    with RunFolder(tmp_path / "runs" / "run").locked():
        pass


def test_a_full_disk_is_a_storage_error_wherever_it_strikes(tmp_path, ending):
    async def work():
        raise OSError(errno.ENOSPC, "No space left on device", "/there/a-file")

    ending(work)
    with pytest.raises(
        StorageError, match="cannot write /there/a-file: No space left on device → free"
    ):
        start.run(parsed(tmp_path))


def test_a_fault_in_the_program_keeps_its_trace(tmp_path, ending):
    async def work():
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            await asyncio.sleep(60)

    async def fail():
        raise FAULT

    ending(work)
    with pytest.raises(KeyError) as caught:
        start.run(parsed(tmp_path))
    assert "fail" in [entry.name for entry in caught.traceback]


def test_fewer_steps_than_are_made_already_are_refused(tmp_path, ending):
    async def work():
        raise ConfigError("enough")

    ending(work)
    with pytest.raises(ConfigError):
        start.run(parsed(tmp_path, steps=9))
    folder = RunFolder(tmp_path / "runs" / "run")
    folder.checkpoints.path(7).mkdir()
    folder.checkpoints.complete(Progress(7, 7))
    with pytest.raises(ConfigError, match="has made 7 steps already, more than steps=3"):
        start.run(parsed(tmp_path, steps=3), resume=folder.path)


def test_a_port_beyond_the_last_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="there is no port 65536"):
        start.check(parsed(tmp_path, engine={"port": 65535, "count": 2}))


def test_an_unset_token_is_told_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.delenv("NO_SUCH_TOKEN", raising=False)
    tools = {"serve": None, "url": "http://127.0.0.1:1", "token_env": "NO_SUCH_TOKEN"}
    with pytest.raises(ConfigError, match="NO_SUCH_TOKEN is not set"):
        start.check(parsed(tmp_path, tools=tools))


def test_a_missing_package_is_told_before_anything_is_made(tmp_path, monkeypatch):
    real = start.importlib.util.find_spec
    monkeypatch.setattr(
        start.importlib.util, "find_spec", lambda name: None if name == "torch" else real(name)
    )
    settings = parse_recipe(recipe(runs=str(tmp_path / "runs")), "test")
    with pytest.raises(MissingExtraError, match=r"torch is not installed.*relax-agent\[train\]"):
        start.run(settings, quiet=True)
    assert not (tmp_path / "runs").exists()

"""A killed run goes on from its checkpoint as if nothing had been: exactly once, step by step."""

import json
import shutil
import signal
from types import SimpleNamespace

import pytest
import run_support
from run_support import lines, train, trained_groups, wait_until, write_recipe

from relax_agent.errors import ResumeError
from relax_agent.run.folder import RunFolder
from relax_agent.run.recipe import load_recipe
from relax_agent.run.start import run

EVERY, KILLED_AT, STEPS = 4, 6, 9
PACE = {"wall_s", "time_s", "trainer_time_s", "tokens_per_s"}


@pytest.fixture(scope="module")
def resumed(runs, tmp_path_factory):
    """A run that was killed with SIGKILL after step 6 or later, and went on to step 9."""
    scratch = tmp_path_factory.mktemp("resume")
    path = write_recipe(
        scratch,
        runs,
        name="resumed",
        steps=1000,
        checkpoint={"every": EVERY},
        tools={"serve": None},
    )
    folder = runs / "resumed"
    with train(path, "--quiet") as process:
        wait_until(lambda: len(lines(folder / "metrics.jsonl")) >= KILLED_AT, process)
        recipe = load_recipe(path)
        with pytest.raises(ResumeError, match="still goes on"), RunFolder(folder).locked():
            pass
        process.send(signal.SIGKILL)
        assert (process.finish().status, process.left()) == (-signal.SIGKILL, {})
    before = SimpleNamespace(
        metrics=lines(folder / "metrics.jsonl"),
        groups=trained_groups(folder),
        step=RunFolder(folder).checkpoints.newest().progress.step,
    )
    shutil.copytree(folder, scratch / "killed")
    with train(path, "--resume", folder, "--set", f"steps={STEPS}") as process:
        process.finish()
        assert (process.status, process.left()) == (0, {}), process.err
    return SimpleNamespace(
        folder=folder,
        killed=scratch / "killed",
        path=path,
        recipe=recipe.model_copy(update={"steps": STEPS}),
        out=process.out,
        before=before,
        metrics=lines(folder / "metrics.jsonl"),
        groups=trained_groups(folder),
    )


def test_the_run_says_where_it_goes_on(resumed):
    assert resumed.before.step == EVERY
    assert f"the run goes on after step {EVERY}" in resumed.out


def test_every_step_is_in_the_metrics_once(resumed):
    assert [line["step"] for line in resumed.metrics] == list(range(1, STEPS + 1))


def test_steps_that_are_done_again_give_exactly_the_same_figures(resumed):
    again = resumed.before.metrics[resumed.before.step :]
    assert again, "it was killed after steps beyond the checkpoint"
    for old, new in zip(resumed.before.metrics, resumed.metrics, strict=False):
        assert {k: v for k, v in old.items() if k not in PACE} == {
            k: v for k, v in new.items() if k not in PACE
        }


def test_no_group_is_trained_twice_or_left_out(resumed):
    per_step = resumed.recipe.rollout.groups_per_step
    assert {step: len(ids) for step, ids in resumed.groups.items()} == dict.fromkeys(
        range(1, STEPS + 1), per_step
    )
    ids = [group_id for each in resumed.groups.values() for group_id in each]
    assert len(set(ids)) == len(ids)
    for step, trained in resumed.before.groups.items():
        assert resumed.groups[step] == trained, "groups beyond the checkpoint come again, in order"


def test_episodes_and_events_tell_of_the_same_steps(resumed):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told = {}
    for episode in lines(resumed.folder / "episodes.jsonl"):
        told.setdefault(episode["step"], {})[episode["group_id"]] = None
    assert {step: list(ids) for step, ids in told.items()} == resumed.groups
    events = EventAccumulator(str(resumed.folder / "tensorboard"))
    events.Reload()
    assert [each.step for each in events.Scalars("loss")] == list(range(1, STEPS + 1))


def test_nothing_half_written_stays(resumed):
    assert [p.name for p in (resumed.folder / "weights").iterdir()] == [f"v{1 + STEPS:06d}"]
    assert {p.name for p in (resumed.folder / "checkpoints").iterdir()} == {
        "step-000008",
        "step-000009",
    }


def test_a_finished_run_says_so_and_does_nothing(resumed, capsys):
    before = (resumed.folder / "metrics.jsonl").read_bytes()
    assert run(resumed.recipe, resume=resumed.folder) == 0
    words, result = capsys.readouterr().out.splitlines()
    assert words.startswith(f"this run has made all its {STEPS} steps and is finished")
    assert json.loads(result)["step"] == STEPS
    assert (resumed.folder / "metrics.jsonl").read_bytes() == before


def test_without_its_newest_checkpoint_a_run_goes_on_from_the_one_before(resumed, tmp_path):
    """What came after is run again: its groups were sampled by weights that are gone."""
    folder = tmp_path / "killed"
    shutil.copytree(resumed.killed, folder)
    shutil.rmtree(RunFolder(folder).checkpoints.path(EVERY))
    options = ("--set", "steps=2", "--set", "trainer.timeout_s=100", "--quiet")
    with train(resumed.path, "--resume", folder, *options) as process:
        process.finish()
        assert (process.status, process.left()) == (0, {}), process.err
    assert [line["step"] for line in lines(folder / "metrics.jsonl")] == [1, 2]
    ids = [group_id for each in trained_groups(folder).values() for group_id in each]
    assert len(set(ids)) == len(ids) == 2 * resumed.recipe.rollout.groups_per_step
    assert json.loads(process.out)["steps"] == 2
    evaluated = [line["step"] for line in lines(folder / "evals.jsonl")]
    assert evaluated == [0, 2], "the evaluation before step 1 was on record and is not done again"


def test_a_run_that_was_interrupted_before_its_first_checkpoint_begins_again(runs, tmp_path):
    path = write_recipe(
        tmp_path, runs, name="early", tools={"serve": None}, trainer={"warm_start": {"steps": 60}}
    )
    folder = runs / "early"
    with train(path) as process:
        run_support.read_until(process, "warm start 1/")
        process.send(signal.SIGTERM)
        assert (process.finish().status, process.left()) == (128 + signal.SIGTERM, {})
        assert process.error.startswith("error: SIGTERM ended the run (phase: warm start)")
    assert (lines(folder / "metrics.jsonl"), trained_groups(folder)) == ([], {})
    with train(path, "--resume", folder, "--set", "steps=1000") as process:
        run_support.read_until(process, "the run begins again")
        wait_until(lambda: len(lines(folder / "metrics.jsonl")) >= 2, process)
        process.send(signal.SIGINT)
        assert (process.finish().status, process.left()) == (128 + signal.SIGINT, {})
        assert process.error.startswith("error: Ctrl-C ended the run (phase: training)")
    steps = [line["step"] for line in lines(folder / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    assert lines(folder / "episodes.jsonl")

"""Run folders and their checkpoints: nothing is overwritten, only whole things are found again."""

import json

import pytest
import yaml
from run_support import recipe

from relax_agent.errors import ResumeError, StorageError
from relax_agent.run.checkpoints import Checkpoints, Progress
from relax_agent.run.folder import RunFolder
from relax_agent.run.recipe import parse_recipe


def parsed(tmp_path, **changes):
    return parse_recipe(recipe(runs=str(tmp_path / "runs"), **changes), "recipe")


def finish(checkpoints, step, **extra):
    checkpoints.path(step).mkdir(parents=True)
    checkpoints.complete(Progress(step, step + 1, extra))


# -- folders -------------------------------------------------------------------------------------


def test_a_name_that_is_taken_gets_a_number(tmp_path):
    made = [RunFolder.create(parsed(tmp_path)).path.name for _ in range(3)]
    assert made == ["run", "run-2", "run-3"]


def test_the_folder_holds_the_recipe_that_it_was_made_from(tmp_path):
    one = parsed(tmp_path, seed=9)
    text = (RunFolder.create(one).path / "recipe.yaml").read_text()
    assert parse_recipe(yaml.safe_load(text), "stored") == one


def test_a_place_where_nothing_can_be_made_is_a_storage_error(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(StorageError, match=r"cannot make a run folder in .*runs"):
        RunFolder.create(parsed(tmp_path))


def test_a_run_is_found_again_by_what_its_checkpoints_depend_on(tmp_path):
    made = RunFolder.create(parsed(tmp_path))
    found = RunFolder.reopen(made.path, parsed(tmp_path, steps=99, engine={"count": 2}))
    assert found == made
    with pytest.raises(ResumeError, match=r"another run: rollout.group_size was 4, is 3"):
        RunFolder.reopen(made.path, parsed(tmp_path, rollout={"group_size": 3}))


def test_three_differences_are_named_and_the_rest_is_counted(tmp_path):
    made = RunFolder.create(parsed(tmp_path))
    other = parsed(tmp_path, seed=1, queue={"max_staleness": 2})  # seeds spread to two parts
    with pytest.raises(ResumeError) as caught:
        RunFolder.reopen(made.path, other)
    named = str(caught.value).partition("another run: ")[2].partition(" →")[0].split("; ")
    assert named == [
        "model.tiny.seed was 0, is 1",
        "queue.max_staleness was 1, is 2",
        "seed was 0, is 1",
        "and 1 more",
    ]


def test_a_recipe_that_cannot_be_read_any_more_is_said_so(tmp_path):
    made = RunFolder.create(parsed(tmp_path))
    (made.path / "recipe.yaml").write_text("{")
    with pytest.raises(ResumeError, match="its recipe cannot be read"):
        RunFolder.reopen(made.path, parsed(tmp_path, seed=1))


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_what_is_no_run_folder_is_refused(content, tmp_path):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(ResumeError, match=f"{tmp_path} is not a run folder"):
        RunFolder.reopen(tmp_path, parsed(tmp_path))


def test_a_run_belongs_to_one_process_at_a_time(tmp_path):
    folder = RunFolder.create(parsed(tmp_path))
    with folder.locked(), pytest.raises(ResumeError, match="still goes on"), folder.locked():
        pass
    with folder.locked():
        pass


def test_what_a_killed_process_left_is_swept_away(tmp_path):
    folder = RunFolder.create(parsed(tmp_path))
    finish(folder.checkpoints, 2)
    folder.checkpoints.path(4).mkdir()
    (folder.checkpoints.folder / ".step-000004.77.draft").mkdir()
    (folder.weights / "v000003").mkdir()
    (folder.weights / ".v000004.77.draft").mkdir()
    for step in (0, 2, 3):
        folder.eval_episodes(step).write_text("")
    folder.sweep(last_step=2)
    assert [path.name for path in folder.checkpoints.folder.iterdir()] == ["step-000002"]
    assert list(folder.weights.iterdir()) == []
    left = sorted(path.name for path in folder.path.glob("eval-*"))
    assert left == ["eval-000000.jsonl", "eval-000002.jsonl"]


def test_a_run_is_finished_when_its_outcome_is_there(tmp_path):
    folder = RunFolder.create(parsed(tmp_path))
    assert folder.read_outcome() is None
    folder.write_outcome({"step": 3})
    assert folder.read_outcome() == {"step": 3}


def test_old_versions_of_the_weights_are_dropped(tmp_path):
    folder = RunFolder.create(parsed(tmp_path))
    for number in (1, 2, 3):
        folder.version(number).mkdir()
    folder.drop_versions_before(3)
    assert [path.name for path in folder.weights.iterdir()] == ["v000003"]


# -- checkpoints ---------------------------------------------------------------------------------


def test_the_newest_whole_checkpoint_is_found_with_its_progress(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest() is None
    finish(checkpoints, 2)
    finish(checkpoints, 10, greedy_before=0.5)
    checkpoints.path(12).mkdir()  # the trainer's part was written, the last file was not
    newest = checkpoints.newest()
    assert newest.path == checkpoints.path(10)
    assert newest.progress == Progress(10, 11, {"greedy_before": 0.5})


def test_old_checkpoints_go_and_the_newest_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (0, 2, 4):
        finish(checkpoints, step)
    checkpoints.keep_newest(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000004"]


def test_the_only_checkpoint_being_damaged_the_run_begins_again_without_it(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    finish(checkpoints, 2)
    (checkpoints.path(2) / "conductor.json").write_text(json.dumps({"step": 2}))
    with pytest.raises(ResumeError, match=r"damaged: conductor.json .* delete .* to begin again"):
        checkpoints.newest()

"""Evaluating a policy: which episodes, what they say together, going on later."""

import asyncio
import json

import pytest

from relax_agent.envs import Play, ScriptedPolicy, Task, TaskSet, ToolEnv
from relax_agent.envs.evaluation import EvalJob, EvalReport, evaluate, is_success, plan
from relax_agent.envs.evaluation_log import EvaluationLog, free_folder, from_recorded, to_recorded
from relax_agent.envs.specs import EnvSpec
from relax_agent.errors import ConfigError, EngineUnavailable
from relax_agent.messages import Image, Text, Usage, assistant, user
from relax_agent.status import EpisodeStatus

TASKS = TaskSet(
    train=[Task(f"t{i}", f"{i}?", i) for i in range(8)],
    eval=[Task(f"e{i}", f"{i}?", i) for i in range(5)],
)


class Numbers(ToolEnv):
    """Say the number."""

    tasks = TASKS

    def score(self, task, transcript):
        return float(transcript.answer == str(task.answer))


SPEC = EnvSpec("test/Numbers-v0", Numbers)


class Counting:
    """Answers right for even numbers; fails to be asked for the tasks in ``down``."""

    def __init__(self, down=()):
        self.down = set(down)
        self.asked = []

    async def act(self, messages, tools):
        number = messages[-1].text.removesuffix("?")
        self.asked.append(number)
        if number in self.down:
            raise OSError("no route to the model")
        return assistant(number if int(number) % 2 == 0 else "no")


def run(policy, jobs, **options):
    return asyncio.run(evaluate(SPEC, lambda: policy, jobs, **options))


# -- which episodes -------------------------------------------------------------------------


def test_every_task_is_sampled_once_before_any_is_sampled_twice():
    jobs = plan(TASKS, samples=2, seed=3)
    assert [job.task for job in jobs] == [f"e{i}" for i in range(5)] * 2
    assert [job.sample for job in jobs] == [0] * 5 + [1] * 5
    assert len(set(jobs)) == 10 and {job.seed for job in jobs} == {3}


def test_more_tasks_keep_those_that_were_chosen_before():
    few = {job.task for job in plan(TASKS, split="train", count=3, seed=7)}
    many = {job.task for job in plan(TASKS, split="train", count=6, seed=7)}
    assert len(few) == 3 and len(many) == 6 and few < many
    assert len(plan(TASKS, split="train", count=99)) == 8


def test_without_tasks_the_seeds_are_the_tasks():
    jobs = plan(None, count=3, samples=2, seed=10)
    assert [job.seed for job in jobs] == [10, 11, 12] * 2
    assert {job.name for job in jobs} == {"seed 10", "seed 11", "seed 12"}


@pytest.mark.parametrize(
    ("tasks", "wish", "words"),
    [
        (TASKS, {"names": ["e9"]}, "e9"),
        (TASKS, {"samples": 0}, "samples"),
        (TASKS, {"count": 0}, "≥ 1"),
        (TaskSet([Task("a")]), {}, "try train"),
        (None, {"names": ["a"]}, "seeds"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused_with_words(tasks, wish, words):
    with pytest.raises(ConfigError, match=words):
        plan(tasks, **wish)


# -- what they say together -----------------------------------------------------------------


def test_success_and_pass_at_k_are_means_over_tasks():
    report = run(Counting(), plan(TASKS, samples=3))
    assert (report.tasks, report.episodes, report.unasked) == (5, 15, 0)
    assert report.success.value == report.reward.value == 0.6
    assert report.pass_at == {1: 0.6, 2: 0.6, 3: 0.6} == report.pass_all
    assert report.turns == 1 and report.statuses == {"completed": 15}


def test_a_policy_that_cannot_be_asked_is_counted_and_not_in_the_means():
    report = run(Counting(down=["1", "3"]), plan(TASKS))
    assert (report.episodes, report.unasked, report.success.value) == (3, 2, 1.0)
    assert any("no route to the model" in words for words in report.details)


def test_a_policy_that_never_answers_is_given_up_soon(tmp_path):
    never = Counting(down=map(str, range(10)))
    with pytest.raises(EngineUnavailable, match="no route to the model"):
        run(never, plan(TASKS, samples=50), log=log(tmp_path), concurrency=2)
    assert 24 <= len(never.asked) <= 30  # and not 250
    assert run(Counting(), plan(TASKS), log=log(tmp_path)).episodes == 5  # and goes on later


def test_an_environment_that_fails_counts_as_no_success():
    class Broken(Numbers):
        def score(self, task, transcript):
            if task.answer == 4:
                raise RuntimeError("lost")
            return super().score(task, transcript)

    spec = EnvSpec("test/Broken-v0", Broken)
    report = asyncio.run(evaluate(spec, Counting, plan(TASKS)))
    assert report.statuses == {"completed": 4, "env_failure": 1}
    assert report.success.value == 0.4 and any("lost" in words for words in report.details)


def test_nothing_played_is_a_report_too():
    report = EvalReport.of({})
    assert report.success is None and json.dumps(report.to_json())


@pytest.mark.parametrize(
    ("reward", "metrics", "success"),
    [
        (1.0, {}, True),
        (0.9, {}, False),
        (0.3, {"success": 1.0}, True),
        (1.0, {"success": 0}, False),
    ],
)
def test_success_is_the_environment_s_own_word_before_the_reward(reward, metrics, success):
    assert is_success(Play(rewards=[reward], metrics=metrics)) is success


def test_a_policy_for_every_episode_is_made_anew():
    def script():
        return ScriptedPolicy(["0"])

    report = asyncio.run(evaluate(SPEC, script, plan(TASKS, samples=2), concurrency=3))
    assert report.episodes == 10 and report.success.value == 0.2


# -- the folder -----------------------------------------------------------------------------


def log(folder, **about):
    return EvaluationLog(folder, {"env": "test/Numbers-v0", **about}, html=False)


def test_what_is_on_record_is_not_played_again_and_more_can_be_added(tmp_path):
    first = Counting()
    run(first, plan(TASKS, samples=2), log=log(tmp_path))
    second = Counting()
    report = run(second, plan(TASKS, samples=3), log=log(tmp_path))
    assert len(first.asked) == 10 and len(second.asked) == 5
    assert report.episodes == 15 and report.success.value == 0.6


def test_episodes_that_nobody_answered_are_played_again(tmp_path):
    run(Counting(down=["1", "2"]), plan(TASKS), log=log(tmp_path))
    again = Counting()
    report = run(again, plan(TASKS), log=log(tmp_path))
    assert sorted(again.asked) == ["1", "2"]
    assert (report.episodes, report.unasked) == (5, 0)


def test_an_interrupted_evaluation_goes_on(tmp_path):
    jobs = plan(TASKS, samples=4)
    played = []

    def stop(job, play):
        played.append(job)
        if len(played) == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Counting(), jobs, log=log(tmp_path), concurrency=2, on_play=stop)
    with (tmp_path / "episodes.jsonl").open("ab") as file:
        file.write(b'{"torn')
    rest = Counting()
    report = run(rest, jobs, log=log(tmp_path))
    assert report.episodes == 20 and 12 <= len(rest.asked) <= 13


def test_a_folder_of_another_evaluation_is_refused(tmp_path):
    log(tmp_path, model="a")
    run(Counting(), plan(TASKS, names=["e0"]), log=log(tmp_path, model="b"))  # nothing was in it
    with pytest.raises(ConfigError, match="model was 'b'"):
        log(tmp_path, model="a")


def test_the_next_free_folder_is_found_for_another_evaluation(tmp_path):
    folder, about = tmp_path / "e", {"env": "test/Numbers-v0", "model": "a"}
    assert free_folder(folder, about) == folder
    run(Counting(), plan(TASKS), log=log(folder, model="a"))
    assert free_folder(folder, about) == folder
    assert free_folder(folder, about, fresh=True) == tmp_path / "e-2"
    assert free_folder(folder, about | {"model": "b"}) == tmp_path / "e-2"


def test_an_episode_comes_back_from_the_folder_as_it_was():
    said = assistant("4")
    object.__setattr__(said, "usage", Usage(5, 2))
    play = Play(
        env_id="x/Y-v0", task_id="t", seed=1, status=EpisodeStatus.COMPLETED,
        messages=[user([Text("?"), Image(b"png")]), said], actions=[1], rewards=[0.5], turns=1,
        metrics={"success": 1.0}, terminated=True, usage=Usage(5, 2), duration_s=0.25,
    )  # fmt: skip
    back = from_recorded(to_recorded(play))
    back.id = play.id
    assert back == play


def test_jobs_are_told_apart_by_task_seed_and_sample():
    assert (
        len({EvalJob("a", 0, 0), EvalJob("a", 1, 0), EvalJob("a", 0, 1), EvalJob("b", 0, 0)}) == 4
    )


def test_leaving_in_the_moment_in_which_an_episode_ends_keeps_nobody_waiting(tmp_path):
    """T160: a cancellation that comes together with the end is no second end."""

    class Enough(Exception):
        pass

    async def leave(after):
        seen = []

        def count(job, play):
            seen.append(play)
            if len(seen) == after:
                raise Enough

        jobs = plan(TASKS, samples=4)
        folder = log(tmp_path / str(after))
        async with asyncio.timeout(3):  # a worker that hangs is waited for much longer
            await evaluate(SPEC, Counting, jobs, concurrency=2, on_play=count, log=folder)

    for after in range(1, 16):
        with pytest.raises(Enough):
            asyncio.run(leave(after))


@pytest.mark.parametrize("name", [7, "e3", "elsewhere"])
def test_an_environment_that_calls_its_tasks_otherwise_confuses_no_episodes(name):
    """U10: every job is done once, by the name that it was asked for."""

    class Renaming(Numbers):
        async def reset(self, *, seed=None, options=None):
            observation, info = await super().reset(seed=seed, options=options)
            return observation, info | {"task": name}

    done = []
    jobs = plan(TASKS, samples=2)
    spec = EnvSpec("test/Renaming-v0", Renaming)
    on_play = lambda job, play: done.append((job, play.task_id))  # noqa: E731
    asyncio.run(evaluate(spec, Counting, jobs, on_play=on_play))
    assert {job for job, _ in done} == set(jobs) and len(done) == len(jobs)
    assert all(job.task == task for job, task in done)

"""Rubrics: weighted functions under limits; whatever fails counts with the value stated for it."""

import asyncio
import inspect
import logging
import math
import re
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_agent import Reward, Rubric, Score, Task, Transcript
from relax_agent.envs.rewards import calling
from relax_agent.errors import ConfigError, EnvError, MissingExtraError
from relax_agent.messages import ToolCall, assistant, tool_message, user
from relax_agent.threads import THREADS
from relax_agent.tools import ToolResult

TASK = Task("t", "2+2?", "4")


def said(text="4"):
    return Transcript([user("2+2?"), assistant(text)])


def score(rubric, transcript=None):
    return asyncio.run(rubric.score(TASK, transcript or said()))


def right(task, transcript):
    return transcript.answer == task.answer


def short(task, transcript):
    return 1 / (1 + len(transcript.answer))


async def later(task, transcript):
    await asyncio.sleep(0)
    return 0.25


def broken(task, transcript):
    raise KeyError("nothing")


class LengthPenalty:
    """A reward function may be an object."""

    def __call__(self, task, transcript):
        return -1.0


# -- the sum -------------------------------------------------------------------------------------


def test_one_function_is_a_rubric():
    assert score(Rubric(right)) == Score(1.0, {"success": 1.0, "right": 1.0})


def test_the_reward_is_the_weighted_sum_and_every_value_is_a_metric():
    rubric = Rubric(right, (short, 0.5), Reward(later, weight=2), metrics=[LengthPenalty()])
    found = score(rubric)
    assert found.reward == 1 + 0.5 * 0.5 + 2 * 0.25
    assert found.metrics == {
        "success": 1.0, "right": 1.0, "short": 0.5, "later": 0.25, "length_penalty": -1.0,
    }  # fmt: skip
    assert rubric.names == ("right", "short", "later", "length_penalty")


def test_metrics_are_never_rewarded_whatever_weight_they_are_given():
    assert score(Rubric((right, 0.0), metrics=[(later, 5.0)])).reward == 0.0


def test_the_first_function_says_whether_an_episode_succeeded():
    rubric = Rubric((right, 0.7), (LengthPenalty(), 0.1))
    assert score(rubric).metrics["success"] == 1.0
    assert score(rubric, said("5")).metrics["success"] == 0.0
    by_metric = Rubric(LengthPenalty(), metrics=[later], success="later", success_at=0.25)
    assert score(by_metric).metrics["success"] == 1.0


def test_a_score_brings_metrics_of_its_own():
    def graded(task, transcript):
        return Score(0.5, {"style": 2, "success": 1.0})

    assert score(Rubric(graded)).metrics == {"graded": 0.5, "style": 2.0, "success": 1.0}


@pytest.mark.parametrize(
    ("value", "reward"), [(True, 1.0), (3, 3.0), (0.5, 0.5), (Score(2), 2.0)], ids=str
)
def test_whatever_is_a_number_is_a_value(value, reward):
    assert score(Rubric(lambda task, transcript: value)).reward == reward


def test_all_functions_of_an_episode_run_at_the_same_time():
    barrier = threading.Barrier(3, timeout=20)
    met = asyncio.Event()

    def meet(task, transcript):
        barrier.wait()
        return 1.0

    async def main():
        async def first(task, transcript):
            met.set()
            return 1.0

        async def second(task, transcript):
            await met.wait()
            return 1.0

        plain = [Reward(meet, name=f"meet{n}") for n in range(3)]
        return await Rubric(*plain, second, first).score(TASK, said())

    assert asyncio.run(main()).reward == 5.0


# -- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (broken, "KeyError: 'nothing'"),
        (lambda t, c: float("nan"), "it returned nan"),
        (lambda t, c: math.inf, "it returned inf"),
        (lambda t, c: -math.inf, "it returned -inf"),
        (lambda t, c: None, "it returned None, which is no number"),
        (lambda t, c: "1.0", "it returned '1.0', which is no number"),
        (lambda t, c: [1.0], "no number"),
        (lambda t, c: 1j, "no number"),
        (lambda t, c: 10**400, "no number"),
        (lambda t, c: Score(math.nan), "it returned nan"),
        (lambda t, c: Score(1.0, {"x": math.inf}), "it returned inf"),
        (lambda t, c: [].pop(), "IndexError"),
        (lambda t, c: exit(3), "SystemExit: 3"),
    ],
)
def test_what_gives_no_number_counts_with_its_stated_value(function, words):
    """NaN and infinity never get through, and no failure ends the episode."""
    found = score(Rubric(right, Reward(function, name="odd", weight=2, on_failure=-0.5)))
    assert found.reward == 0.0
    assert found.metrics["odd"] == -0.5
    assert words in found.failures["odd"]


def test_async_functions_fail_in_the_same_way():
    async def raises(task, transcript):
        raise ValueError("no")

    async def leaves(task, transcript):
        raise SystemExit(1)

    async def cancels(task, transcript):
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    def plainly_cancels(task, transcript):
        raise asyncio.CancelledError

    found = score(Rubric(right, raises, leaves, cancels, plainly_cancels))
    assert found.reward == 1.0
    assert found.failures.keys() == {"raises", "leaves", "cancels", "plainly_cancels"}


def test_a_function_that_hangs_is_given_up_and_the_others_count():
    """T154: a sync sleeper is abandoned in its thread and counted, an async one is cancelled."""
    release, ended = threading.Event(), []

    def sleeps(task, transcript):
        release.wait(30)
        return 1.0

    async def waits(task, transcript):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def main():
        before = THREADS.running
        rubric = Rubric(right, Reward(sleeps, timeout_s=0.05), Reward(waits, timeout_s=0.05))
        found = await rubric.score(TASK, said())
        return found, THREADS.running - before

    found, left_behind = asyncio.run(main())
    release.set()
    assert found.reward == 1.0
    assert found.failures == dict.fromkeys(("sleeps", "waits"), "no value within 0.05 s")
    assert left_behind == 1
    assert ended == [True]


def test_a_function_that_swallows_its_cancellation_is_left_behind(monkeypatch):
    monkeypatch.setattr(calling, "GRACE_S", 0.05)

    async def main():
        stop = asyncio.Event()

        async def clings(task, transcript):
            while not stop.is_set():
                try:
                    await stop.wait()
                except asyncio.CancelledError:
                    continue

        found = await Rubric(Reward(clings, timeout_s=0.05)).score(TASK, said())
        stop.set()
        return found

    assert asyncio.run(main()).failures == {"clings": "no value within 0.05 s"}


def test_the_event_loop_goes_on_while_a_plain_function_blocks():
    """T86's kind: only the loop can set what the function waits for."""
    seen = threading.Event()

    def blocks(task, transcript):
        return float(seen.wait(20))

    async def main():
        scoring = asyncio.create_task(Rubric(blocks).score(TASK, said()))
        await asyncio.sleep(0.01)
        seen.set()
        return await scoring

    assert asyncio.run(main()).reward == 1.0


def test_cancelling_a_score_stops_its_functions_and_leaves_no_task():
    """T160's kind."""
    ended = []

    async def main():
        begun = asyncio.Event()

        async def waits(task, transcript):
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        scoring = asyncio.create_task(Rubric(waits, right).score(TASK, said()))
        await begun.wait()
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        return len(asyncio.all_tasks())

    assert asyncio.run(main()) == 1
    assert ended == [True]


def test_a_failure_may_be_the_environments():
    with pytest.raises(EnvError, match="reward broken: KeyError: 'nothing'"):
        score(Rubric(right, Reward(broken, on_failure="raise")))


@pytest.mark.parametrize(
    "error", [EnvError("no display"), ConfigError("no key"), MissingExtraError("sympy", "envs")]
)
def test_what_cannot_be_judged_at_all_is_never_scored(error):
    def judge(task, transcript):
        raise error

    with pytest.raises(type(error)) as caught:
        score(Rubric(right, judge))
    assert caught.value is error


def test_failures_are_logged_but_not_a_thousand_times(caplog):
    rubric = Rubric(broken)
    with caplog.at_level(logging.WARNING):
        for _ in range(25):
            score(rubric)
    assert [record.args[1] for record in caplog.records] == [1, 10]
    assert rubric.final[0].failures == 25


# -- turns and groups ----------------------------------------------------------------------------


def test_steps_and_final_functions_are_asked_apart():
    rubric = Rubric(right, step=[(short, 0.1)])
    step = asyncio.run(rubric.score_step(TASK, said()))
    assert step == Score(0.05, {"short": 0.5})
    assert score(rubric).reward == 1.0


def test_a_group_function_sees_all_members_and_gives_one_value_each():
    def shortest(task, members):
        best = min(len(member.answer) for member in members)
        return [len(member.answer) == best for member in members]

    async def paid(task, members):
        return [member.reward for member in members]

    members = [said("4"), said("four"), said("5")]
    members[1].reward = 1.0
    rubric = Rubric(right, group=[(shortest, 0.5), paid])
    scores = asyncio.run(rubric.score_group(TASK, members))
    assert [each.reward for each in scores] == [0.5, 1.0, 0.5]
    assert scores[1].metrics == {"shortest": 0.0, "paid": 1.0}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1.0], "1 values for 2 members"),
        ([1.0, math.nan], "nan"),
        (3.0, "TypeError"),
        ("ab", "'a'"),
    ],
)
def test_a_group_function_that_fails_gives_all_members_its_stated_value(values, words):
    rubric = Rubric(group=[Reward(lambda task, members: values, name="odd", on_failure=-1.0)])
    scores = asyncio.run(rubric.score_group(TASK, [said(), said()]))
    assert [each.reward for each in scores] == [-1.0, -1.0]
    assert words in scores[0].failures["odd"]


# -- what is refused at once -----------------------------------------------------------------------


class NotInstalled:
    """Needs something that is not there."""

    def prepare(self):
        raise MissingExtraError("math-verify", "envs")

    def __call__(self, task, transcript):
        return 1.0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Rubric(), "needs a function"),
        (lambda: Rubric(right, right), "2 functions of a rubric are called 'right'"),
        (lambda: Rubric(right, step=[right]), "called 'right'"),
        (lambda: Rubric(lambda answer: 1.0), r"must take two arguments \(task, transcript\)"),
        (lambda: Rubric(group=[lambda members: 1.0]), r"\(task, transcripts\)"),
        (lambda: Rubric(1.0), "is no function"),
        (lambda: Rubric(LengthPenalty), "is a class → LengthPenalty()"),
        (lambda: Rubric((right, 1.0, 2.0)), "is not (function, weight)"),
        (lambda: Rubric((right, "1")), "is not (function, weight)"),
        (lambda: Rubric((right, math.nan)), "its weight is nan"),
        (lambda: Rubric(Reward(right, timeout_s=0)), "timeout_s must be positive"),
        (lambda: Rubric(Reward(right, on_failure=math.nan)), "on_failure must be"),
        (lambda: Rubric(Reward(right, on_failure="ignore")), "on_failure must be"),
        (lambda: Rubric(Reward(right, isolation="thread")), "isolation must be"),
        (lambda: Rubric(right, success="wrong"), "is called 'wrong'"),
        (lambda: Rubric(right, step=short), "are lists"),
        (lambda: Rubric("right"), "names no function"),
        (lambda: Rubric("math:nothing_there"), "there is no nothing_there in math"),
        (lambda: Rubric("no_such_module_at_all:f"), "cannot import no_such_module_at_all"),
    ],
)
def test_what_cannot_work_is_said_when_the_rubric_is_made(make, words):
    with pytest.raises(ConfigError) as caught:
        make()
    assert words.replace("\\", "") in str(caught.value)


def test_what_a_function_lacks_is_said_when_the_rubric_is_made():
    with pytest.raises(MissingExtraError, match="pip install"):
        Rubric(NotInstalled())


def test_a_function_may_be_named_as_text():
    rubric = Rubric("relax_agent.envs.rewards:exact_match")
    assert rubric.names == ("exact_match",)
    assert score(rubric).reward == 1.0


def test_a_sum_that_overflows_is_an_error():
    with pytest.raises(EnvError, match="weighted sum"):
        score(Rubric((lambda t, c: 1e300, 1e300)))


@given(
    st.lists(st.one_of(st.floats(), st.integers(), st.none(), st.text()), min_size=1, max_size=3)
)
@settings(max_examples=40, deadline=None)
def test_a_rubric_is_total_and_always_finite(values):
    functions = [Reward(lambda t, c, v=v: v, name=f"f{n}") for n, v in enumerate(values)]
    rubric = Rubric(*functions)
    try:
        found = score(rubric)
    except EnvError:  # finite values whose sum is not
        assert sum(abs(v) for v in values if isinstance(v, (int, float)) and v == v) > 1e300
        return
    assert math.isfinite(found.reward)
    assert all(map(math.isfinite, found.metrics.values()))


# -- transcripts -----------------------------------------------------------------------------------


def finished():
    calls = [ToolCall("a", {"x": 1}, "c0"), ToolCall("b", {}, "c1"), ToolCall("b", {}, "c1")]
    failed = ToolResult.failure("timeout", "too slow").to_message(calls[1])
    return [
        user("go"),
        assistant("thinking", tool_calls=calls),
        tool_message("second", calls[2]),
        tool_message("one", calls[0]),
        failed,
        assistant("done"),
    ]


def test_a_transcript_of_a_finished_episode_finds_its_calls():
    calls = Transcript(finished()).calls
    assert [(call.id, result.text) for call, result in calls] == [
        ("c1", "second"),
        ("c0", "one"),
        ("c1", "Error: too slow"),
    ]
    assert [result.ok for _, result in calls] == [True, True, False]


def test_a_transcript_survives_the_way_to_another_process():
    transcript = Transcript(finished())
    transcript.calls[2] = (transcript.calls[2][0], ToolResult.failure("timeout", "too slow"))
    transcript.reward, transcript.metrics = 0.5, {"turns": 2.0}
    again = Transcript.from_record(transcript.to_record())
    assert again == transcript
    assert again.calls == transcript.calls
    assert (again.reward, again.metrics) == (0.5, {"turns": 2.0})
    assert (again.answer, again.turns, again.tool_errors) == ("done", 2, 1)


def test_the_answer_is_what_the_assistant_said_last():
    assert Transcript([user("?"), assistant(" 4 "), user("Sure?")]).answer == "4"
    assert Transcript(finished()[:-1]).answer == ""
    assert Transcript([user("?")]).answer == ""


# -- the page about rewards ------------------------------------------------------------------------


def test_the_page_about_rewards_runs_as_it_stands(capsys):
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.S))
    names = {"__name__": "rewards_page"}
    exec(compile(code, "docs/rewards.md", "exec"), names)
    printed = capsys.readouterr().out.strip()
    assert printed and f"`{printed}`" in page

    async def play(kind, answer):
        async with kind() as env:
            await env.reset(seed=0)
            return (await env.step(assistant(answer)))[1]

    assert asyncio.run(play(names["Capitals"], "Rome")) in (0.0, 1.0)
    assert asyncio.run(play(names["Lamp"], "done")) == 0.0


def test_the_page_about_rewards_names_what_there_is():
    from relax_agent.envs import rewards

    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    table = page.partition("## Ready-made")[2].partition("The answer may")[0]
    for name, arguments in re.findall(r"`(\w+)(?:\(([^)`]*)\))?`", table):
        if not hasattr(rewards, name):
            assert name in ("envs", "JSON"), name
        for option in re.findall(r"\w+", re.sub(r"=\w+|model", "", arguments)):
            assert option in inspect.signature(getattr(rewards, name)).parameters, option

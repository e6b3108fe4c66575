"""What people write in their first environment: told once, in words, with what to do about it."""

import asyncio
import gc
import time

import pytest

from relax_agent.envs import Env, Task, TaskSet, ToolEnv, Wrapper, check_env, make, register
from relax_agent.envs.checking.checks import ALL_CHECKS
from relax_agent.envs.checking.running import run_checks
from relax_agent.errors import EnvError
from relax_agent.messages import user
from relax_agent.tools import tool
from relax_agent.tools.running import within


def sums(prompt="What is {n} + 7?", answer=str, count=6):
    return TaskSet(
        [Task(f"q{n}", prompt.format(n=n, sum=n + 7), answer(n + 7)) for n in range(count)]
    )


class Sum(ToolEnv):
    """Add."""

    tasks = sums()

    def score(self, task, transcript):
        return float(transcript.answer == task.answer)


class Asks(Env):
    """Ask."""

    tasks = sums()

    async def reset(self, *, seed=None, options=None):
        await super().reset(seed=seed)
        options = dict(options or {})
        self.task = self.tasks[options.pop("task", None) or self.rng.choice(self.tasks.ids())]
        if options:
            raise EnvError("unknown option")
        return self.task.to_messages(), {"task": self.task.id}

    async def step(self, action):
        return [], float(action.text == self.task.answer), True, False, {}


class ReturnsNothing(Sum):
    """Add."""

    def score(self, task, transcript):
        pass


class OtherSignature(Sum):
    """Add."""

    def score(self, transcript):
        return 1.0


class Misspelt(Sum):
    """Add."""

    def score(self, task, transcript):
        return float(transcript.anwser == task.answer)


class TakesTheMessageForText(Asks):
    """Ask."""

    async def step(self, action):
        return [], float(action.strip() == self.task.answer), True, False, {}


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (ReturnsNothing, "`return` a number"),
        (OtherSignature, "write `def score(self, task, transcript)`"),
        (Misspelt, "did you mean .answer?"),
        (TakesTheMessageForText, "its text is .text"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_one_defect_is_told_once_with_its_line_and_the_others_say_so(env, words):
    report = check_env(env, raises=False)
    (failure,) = report.failures
    assert failure.check == "step"
    assert words in failure.message
    assert "test_checking_first_time.py:" in failure.where
    assert report.warnings == []
    skipped = [row for row in report if row.status == "skip" and row.check != "spec"]
    assert len(skipped) > 10
    assert all("'step'" in row.message for row in skipped)


def test_two_defects_are_told_both():
    class Two(TakesTheMessageForText):
        """Ask."""

        async def close(self):
            raise ValueError("already closed")

    messages = [row.message for row in check_env(Two, raises=False).failures]
    assert sum("strip" in message for message in messages) == 1
    assert sum("already closed" in message for message in messages) == 1


def test_a_constructor_that_forgets_its_base_class_is_named():
    @register("first/Forgets-v0")
    class Forgets(Sum):
        """Add."""

        def __init__(self):
            self.count = 0

    words = r"Forgets.__init__\(\) does not call its base class's → super\(\).__init__"
    with pytest.raises(EnvError, match=words):
        make("first/Forgets-v0")
    with pytest.raises(EnvError, match=words):
        asyncio.run(Forgets().reset())
    (row,) = check_env(Forgets, raises=False).failures
    assert "does not call its base class's" in row.message

    class ForgetsToo(Wrapper):
        def __init__(self, env):
            self.count = 0

    with pytest.raises(EnvError, match=r"super\(\).__init__\(env\)"):
        ForgetsToo(Sum()).require_built()


def test_a_blocking_step_does_not_make_the_check_take_minutes():
    class Sleeps(Asks):
        """Ask."""

        async def step(self, action):
            time.sleep(0.55)  # noqa: ASYNC251
            return [user("Go on.")], 0.0, False, False, {}

    began = time.monotonic()
    report = check_env(Sleeps, raises=False)
    assert time.monotonic() - began < 30
    assert [row.check for row in report.failures] == ["event loop"]
    assert "see 'event loop'" in next(row for row in report if row.check == "release").message


def rows_of(env, name):
    checks = [check for check in ALL_CHECKS if check.name == name]
    return run_checks(env, checks, raises=False, timeout_s=20.0, seed=7).rows


def with_tasks(tasks):
    return type("Changed", (Sum,), {"tasks": tasks, "__doc__": "Add."})


@pytest.mark.parametrize(
    ("tasks", "status"),
    [
        (sums("What is {n} + 7? (gold: {sum})"), "warn"),
        (sums("What is {n} + 7? (gold: {sum})", int), "warn"),
        (sums("What is {n} + 7? (gold: {sum})", int, count=1), "warn"),
        (sums("{n} + 7 is {sum}, is it not?"), "warn"),
        (sums(), "ok"),
        (sums("Is {n} + 7 one of 7 8 9 10 11 12?"), "ok"),
        (TaskSet([Task("q", "Is 7 more than 8?", "7")]), "ok"),
        (TaskSet([Task(n, f"Which?\nA) {n}\nB) other", n) for n in ("one", "two")]), "ok"),
        (TaskSet([Task("q", "The cat is grey." * 99 + " What is grey?", "cat")]), "ok"),
    ],
)
def test_a_gold_answer_in_its_own_prompt_is_found_and_a_coincidence_is_not(tasks, status):
    (row,) = rows_of(with_tasks(tasks), "prompts")
    assert row.status == status


@tool(inline=True)
def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One number.
        b: The other.
    """
    return a + b


class WantsATag(Sum):
    """Add, and say it in a tag."""

    def score(self, task, transcript):
        return float(f"<answer>{task.answer}</answer>" in transcript.answer)


class WantsATool(Sum):
    """Add with the tool."""

    tools = (add,)

    def score(self, task, transcript):
        return float(bool(transcript.calls) and transcript.answer == task.answer)


class NeverEqual(Sum):
    """Add."""

    tasks = sums(answer=int)


class NeverEqualWithTools(NeverEqual):
    """Add."""

    tools = (add,)


@pytest.mark.parametrize("env", [NeverEqual, NeverEqualWithTools], ids=lambda env: env.__name__)
def test_a_score_that_no_answer_can_earn_is_found(env):
    (row,) = rows_of(env, "right answer")
    assert row.status == "warn"
    assert "str(task.answer)" in row.message


@pytest.mark.parametrize("env", [Sum, Asks, WantsATag, WantsATool], ids=lambda env: env.__name__)
def test_a_score_that_wants_a_form_or_a_tool_is_not_suspected(env):
    (row,) = rows_of(env, "right answer")
    assert row.status == "ok"


def test_a_reset_that_does_not_seed_is_named_also_where_chance_hides_it():
    class Unseeded(Asks):
        """Ask."""

        tasks = sums(count=1)

        async def reset(self, *, seed=None, options=None):
            self.rng.random()
            self.task = self.tasks["q0"]
            return self.task.to_messages(), {"task": "q0"}

    (row,) = rows_of(Unseeded, "seed")
    assert row.status == "fail"
    assert "await super().reset(seed=seed)" in row.message


def test_a_failure_in_the_moment_of_a_cancellation_is_no_unseen_exception():
    """`Future exception was never retrieved` on stderr says nothing to an author."""
    unseen = []

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: unseen.append(context))
        future = loop.create_future()
        waiting = asyncio.ensure_future(within(future, 5.0))
        await asyncio.sleep(0)
        future.set_exception(ValueError("no"))
        waiting.cancel()
        del future
        with pytest.raises(asyncio.CancelledError):
            await waiting
        del waiting
        gc.collect()

    asyncio.run(main())
    gc.collect()
    assert unseen == []

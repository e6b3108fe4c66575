"""ToolEnv: concurrent calls, failures as messages, an end, a score; and policies that play."""

import asyncio
import threading
from dataclasses import replace

import pytest

from relax_agent import Reward, Rubric, Transcript, tool
from relax_agent.envs import (
    PlayLimits,
    RandomPolicy,
    Score,
    Task,
    TaskSet,
    ToolEnv,
    make,
    play,
    register,
    registry,
)
from relax_agent.envs.rewards import exact_match
from relax_agent.errors import ConfigError, EnvError, InvalidAction, ResetNeeded, ToolErrorKind
from relax_agent.messages import ToolCall, assistant, parts, user
from relax_agent.tools import Toolset
from relax_agent.tools.calculator import calculator


class Sums(ToolEnv):
    """Asks for a sum."""

    tools = Toolset([calculator])
    tasks = TaskSet([Task("a", "1+2?", "3"), Task("b", "2+2?", "4")], [Task("e", "5+5?", "10")])
    system_prompt = "Use the calculator."
    max_turns = 3

    def score(self, task, transcript):
        return float(transcript.answer == task.answer)


def calls(*expressions, name="calculator"):
    return assistant(
        tool_calls=[ToolCall(name, {"expression": e}, f"c{i}") for i, e in enumerate(expressions)]
    )


async def run(env, *actions, task="a", seed=None):
    observation, info = await env.reset(seed=seed, options={"task": task})
    steps = [await env.step(action) for action in actions]
    return observation, info, steps


def test_an_episode_from_question_to_score():
    observation, info, steps = asyncio.run(run(Sums(), calls("1+2"), assistant(" 3 ")))
    assert [(m.role, m.text) for m in observation] == [
        ("system", "Use the calculator."),
        ("user", "1+2?"),
    ]
    assert info == {"task": "a"}
    (messages, reward, terminated, truncated, _), last = steps
    assert [(m.role, m.name, m.tool_call_id, m.text) for m in messages] == [
        ("tool", "calculator", "c0", "3")
    ]
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert last[:4] == ([], 1.0, True, False)
    assert last[4] == {
        "task": "a",
        "turn": 2,
        "metrics": {"success": 1.0, "turns": 2.0, "tool_calls": 1.0, "tool_errors": 0.0},
    }


def test_failures_of_tools_are_messages_and_the_episode_goes_on():
    """T58: an unknown tool, wrong arguments and unreadable calls never end an episode."""
    action = assistant(
        tool_calls=[
            ToolCall("calculator", {}, "c0"),
            ToolCall("abacus", {"expression": "1"}, "c1"),
            ToolCall("calculator", {}, "c2", error="not JSON"),
            ToolCall("calculator", {"expression": "1+2"}, "c3"),
        ]
    )
    env = Sums()
    _, _, steps = asyncio.run(run(env, action, assistant("3")))
    messages = steps[0][0]
    assert [m.tool_call_id for m in messages] == ["c0", "c1", "c2", "c3"]
    assert [m.text.startswith("Error: ") for m in messages] == [True, True, True, False]
    assert steps[1][1:3] == (1.0, True)
    assert steps[1][4]["metrics"]["tool_errors"] == 3
    assert [call.id for call, _ in env.transcript.successful_calls] == ["c3"]


def test_calls_of_one_message_run_at_once_and_answer_in_order():
    """T56: two calls of one tool are answered each with its own result."""
    barrier = threading.Barrier(2, timeout=20)

    @tool
    def meet(name: str) -> str:
        """Meet another call."""
        barrier.wait()
        return name

    action = assistant(
        tool_calls=[ToolCall("meet", {"name": "a"}, "c0"), ToolCall("meet", {"name": "b"}, "c1")]
    )
    _, _, steps = asyncio.run(run(Sums(tools=[meet]), action))
    assert [m.text for m in steps[0][0]] == ["a", "b"]


def test_the_turn_limit_truncates_after_its_calls_ran():
    _, _, steps = asyncio.run(run(Sums(), calls("1"), calls("2"), calls("3")))
    assert [step[2:4] for step in steps] == [(False, False), (False, False), (False, True)]
    assert [m.text for m in steps[2][0]] == ["3"]
    assert steps[2][1] == 0.0
    assert steps[2][4]["metrics"]["turns"] == 3


def test_an_answer_on_the_last_turn_terminates():
    _, _, steps = asyncio.run(run(Sums(max_turns=1), assistant("3")))
    assert steps[0][1:4] == (1.0, True, False)


def test_more_calls_than_allowed_are_refused_one_by_one():
    class Few(Sums):
        max_calls = 2

    env = Few()
    _, _, steps = asyncio.run(run(env, calls("1", "2", "3", "4")))
    assert len(steps[0][0]) == 4
    kinds = [result.error for _, result in env.transcript.calls]
    assert kinds == [None, None, ToolErrorKind.DENIED, ToolErrorKind.DENIED]


def test_order_and_actions_are_checked_without_make_too():
    async def main():
        env = Sums()
        with pytest.raises(ResetNeeded):
            await env.step(assistant("3"))
        await env.reset(seed=0)
        with pytest.raises(InvalidAction):
            await env.step(user("3"))
        await env.step(assistant("3"))
        with pytest.raises(ResetNeeded):
            await env.step(assistant("3"))

    asyncio.run(main())


def test_the_seed_chooses_the_task_from_the_split():
    async def main():
        env = Sums()
        ids = [(await env.reset(seed=n))[1]["task"] for n in range(20)]
        again = [(await env.reset(seed=n))[1]["task"] for n in range(20)]
        held_out = (await env.reset(seed=1, options={"split": "eval"}))[1]["task"]
        with pytest.raises(EnvError, match="unknown reset option 'tsak'"):
            await env.reset(options={"tsak": "a"})
        with pytest.raises(EnvError, match="there is no task 'zz'"):
            await env.reset(options={"task": "zz"})
        return ids, again, held_out

    ids, again, held_out = asyncio.run(main())
    assert ids == again
    assert set(ids) == {"a", "b"}
    assert held_out == "e"


def test_an_async_score_with_metrics():
    class Graded(Sums):
        async def score(self, task, transcript):
            await asyncio.sleep(0)
            return Score(0.3, {"success": 1.0, "style": 2})

    _, _, steps = asyncio.run(run(Graded(), assistant("x")))
    assert steps[0][1] == 0.3
    assert steps[0][4]["metrics"]["success"] == 1.0
    assert steps[0][4]["metrics"]["style"] == 2.0


def test_a_score_that_hangs_is_a_failure_that_is_counted():
    """T154: a reward function that never ends costs one episode, not the run."""
    release = threading.Event()

    class Hung(Sums):
        score_timeout = 0.05

        def score(self, task, transcript):
            release.wait(30)
            return 1.0

    _, _, steps = asyncio.run(run(Hung(), assistant("3")))
    release.set()
    assert steps[0][1:3] == (0.0, True)
    assert steps[0][4]["metrics"]["score_timeout"] == 1.0
    assert steps[0][4]["metrics"]["success"] == 0.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_an_error(value):
    class Odd(Sums):
        def score(self, task, transcript):
            return value

    with pytest.raises(EnvError, match=r"Odd\.score\(\) returned"):
        asyncio.run(run(Odd(), assistant("3")))


def test_methods_are_tools_with_the_environments_own_state():
    class Lamp(ToolEnv):
        """Switch the lamp on."""

        tasks = TaskSet([Task("t", "Switch it on.")])

        def first_messages(self, task):
            self.on = False
            return super().first_messages(task)

        @tool
        def switch(self, on: bool) -> str:
            """Switch the lamp."""
            self.on = on
            return "on" if on else "off"

        def score(self, task, transcript):
            return float(self.on)

    class Elsewhere(Lamp):
        """Has its tools somewhere else."""

        @property
        def tools(self):
            return object()

        @tools.setter
        def tools(self, value):
            raise AssertionError

    with pytest.raises(ConfigError, match="a remote toolset and tools of its own"):
        Elsewhere()
    action = assistant(tool_calls=[ToolCall("switch", {"on": True}, "c0")])

    async def main():
        lamps = [Lamp(), Lamp()]
        return await asyncio.gather(
            run(lamps[0], action, assistant("done"), task="t"),
            run(lamps[1], assistant("done"), task="t"),
        )

    (_, _, first), (_, _, second) = asyncio.run(main())
    assert first[1][1] == 1.0
    assert second[0][1] == 0.0
    assert Lamp().tools.names == ("switch",)


def test_the_gold_answer_never_leaves_the_environment():
    tasks = TaskSet([Task("t", "guess", answer="xyzzy")])
    observation, info, steps = asyncio.run(
        run(Sums(tasks=tasks), calls("1"), assistant("?"), task="t")
    )
    assert "xyzzy" not in repr((observation, info, steps))


def test_what_is_missing_is_said_at_once():
    class Empty(ToolEnv):
        def score(self, task, transcript):
            return 0.0

    with pytest.raises(ConfigError, match="has no tasks"):
        Empty()
    with pytest.raises(ConfigError, match="max_turns"):
        Sums(max_turns=0)
    for limit in ("max_calls", "score_timeout", "hook_timeout"):
        with pytest.raises(ConfigError, match=limit):
            type("Limited", (Sums,), {limit: 0})()
    with pytest.raises(ConfigError, match="neither a rubric nor a score"):
        type("NoScore", (ToolEnv,), {"tasks": [Task("t")]})()


def test_cancelling_a_step_cancels_its_tools():
    ended, begun = [], asyncio.Event()

    @tool
    async def hang() -> str:
        """Hang."""
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        return ""

    async def main():
        env = Sums(tools=[hang])
        await env.reset(options={"task": "a"})
        action = assistant(tool_calls=[ToolCall("hang", {}, "c0"), ToolCall("hang", {}, "c1")])
        step = asyncio.ensure_future(env.step(action))
        await begun.wait()
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step

    asyncio.run(main())
    assert ended == [True, True]


class Expert:
    """Calls the calculator once and repeats what it says."""

    def act(self, messages, tools):
        last = messages[-1]
        if last.role == "tool":
            return assistant(last.text)
        return calls(last.text.rstrip("?"))


class SlowExpert(Expert):
    """The same, asynchronous."""

    async def act(self, messages, tools):
        await asyncio.sleep(0)
        return super().act(messages, tools)


@pytest.mark.parametrize("policy", [Expert(), SlowExpert()])
def test_a_scripted_policy_plays_an_episode(policy):
    record = asyncio.run(play(Sums(), policy, task="b"))
    assert (record.task_id, record.reward, record.turns) == ("b", 1.0, 2)
    assert [m.role for m in record.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert record.terminated and not record.truncated
    assert record.metrics["success"] == 1.0


def test_play_stops_at_its_own_limit():
    record = asyncio.run(play(Sums(), Expert(), task="b", limits=PlayLimits(max_turns=1)))
    assert (record.turns, record.truncated, record.terminated) == (1, True, False)


def test_random_play_is_repeatable_and_survives_any_schema():
    @tool
    def many(
        a: int, b: float, c: bool, d: list[int], e: dict[str, int], f: str | None = None
    ) -> str:
        """Take many types."""
        return "ok"

    async def main(seed):
        env = Sums(tools=[calculator, many], max_turns=20)
        policy = RandomPolicy(seed, call_share=0.9)
        records = [await play(env, policy, seed=n) for n in range(20)]
        return [(r.reward, r.turns, r.metrics["tool_calls"]) for r in records]

    first = asyncio.run(main(1))
    assert first == asyncio.run(main(1))
    assert first != asyncio.run(main(2))
    assert sum(calls for _, _, calls in first) > 20


def test_make_overrides_the_toolset():
    register("test/Sums-v0", Sums)
    try:
        env = make("test/Sums-v0", tools=Toolset([]), max_turns=5)
    finally:
        del registry["test/Sums-v0"]
    assert env.tools.names == ()
    assert env.unwrapped.max_turns == 5


# -- what a message may look like ------------------------------------------------------------------


@pytest.mark.parametrize(
    "action", [assistant(""), assistant("  \n"), assistant("", reasoning="so it is 3")]
)
def test_an_empty_message_is_an_empty_answer(action):
    _, _, steps = asyncio.run(run(Sums(), action))
    assert steps[0][:4] == ([], 0.0, True, False)


def test_text_beside_calls_is_no_answer():
    action = replace(calls("1+2"), content=parts("3"))
    env = Sums(max_turns=1)
    _, _, steps = asyncio.run(run(env, action))
    assert [m.text for m in steps[0][0]] == ["3"]
    assert steps[0][1:4] == (0.0, False, True)
    assert env.transcript.answer == ""


def test_calls_with_one_id_are_all_run_and_answered_in_order():
    twice = replace(
        calls("1+2"),
        tool_calls=tuple(ToolCall("calculator", {"expression": e}, "c") for e in ("1+2", "2+2")),
    )
    _, _, steps = asyncio.run(run(Sums(), twice))
    assert [(m.tool_call_id, m.text) for m in steps[0][0]] == [("c", "3"), ("c", "4")]


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (ToolCall("calculator", {"expression": "1"}, "", error="no JSON"), "invalid_arguments"),
        (ToolCall("", {}, ""), "not_found"),
        (ToolCall("calculator", {"expresion": "1"}), "invalid_arguments"),
        (ToolCall("calculator", {"expression": 1}), "invalid_arguments"),
        (ToolCall("calculator", {"expression": "1/0"}), "invalid_arguments"),
        (ToolCall("calculator", {"expression": "1", "x" * 5000: 1}), "invalid_arguments"),
        (ToolCall("calculator", [1, 2]), "invalid_arguments"),
        (ToolCall("calculator", None), "invalid_arguments"),
    ],
)
def test_no_call_ends_an_episode_whatever_it_looks_like(call, kind):
    env = Sums()
    _, _, steps = asyncio.run(run(env, assistant(tool_calls=[call]), assistant("3")))
    assert steps[0][0][0].text.startswith("Error: ")
    assert env.transcript.calls[0][1].error == kind
    assert steps[1][1:3] == (1.0, True)


def test_a_tool_that_hangs_costs_its_own_limit_and_the_others_answer():
    release = threading.Event()

    @tool(timeout=0.05)
    def sleeps() -> str:
        """Sleep."""
        release.wait(30)
        return ""

    @tool
    async def quick() -> str:
        """Be quick."""
        return "here"

    action = assistant(tool_calls=[ToolCall("sleeps", {}, "a"), ToolCall("quick", {}, "b")])
    env = Sums(tools=[sleeps, quick])
    _, _, steps = asyncio.run(run(env, action))
    release.set()
    assert "timed out after 0.05 s" in steps[0][0][0].text
    assert steps[0][0][1].text == "here"


# -- rubrics ---------------------------------------------------------------------------------------


def close(task, transcript):
    return 1 / (1 + abs(int(transcript.answer or 0) - int(task.answer)))


def called(task, transcript):
    return float(bool(transcript.calls))


class Judged(ToolEnv):
    """Judged by a rubric."""

    tools = Toolset([calculator])
    tasks = TaskSet([Task("a", "1+2?", "3")])
    rubric = Rubric((exact_match, 1.0), step=[(called, 0.1)], metrics=[close])


def test_a_rubric_makes_a_score_unnecessary():
    env = Judged()
    _, _, steps = asyncio.run(run(env, calls("1+2"), assistant("3")))
    assert [step[1] for step in steps] == [0.1, 1.1]
    assert steps[0][4] == {"task": "a", "turn": 1}
    assert steps[1][4]["metrics"] == {
        "success": 1.0,
        "turns": 2.0,
        "tool_calls": 1.0,
        "tool_errors": 0.0,
        "called": 2.0,
        "exact_match": 1.0,
        "close": 1.0,
        "reward_failures": 0.0,
    }
    assert env.transcript.reward == pytest.approx(1.2)
    assert env.transcript.metrics == steps[1][4]["metrics"]


def test_a_rubric_given_to_the_constructor_replaces_both():
    rubric = Rubric(close)
    for kind in (Sums, Judged):
        _, _, steps = asyncio.run(run(kind(rubric=rubric), assistant("4")))
        assert steps[0][1] == 0.5


def test_the_more_derived_of_rubric_and_score_decides():
    class ByRubric(Sums):
        rubric = Rubric(close)

    class ByScore(Judged):
        def score(self, task, transcript):
            return 0.25

    class Both(Judged):
        rubric = Rubric(step=[called], metrics=[close])

        def score(self, task, transcript):
            return 0.25

    rewards = [asyncio.run(run(kind(), assistant("4")))[2][0] for kind in (ByRubric, ByScore, Both)]
    assert [step[1] for step in rewards] == [0.5, 0.25, 0.25]
    assert rewards[1][4]["metrics"]["close"] == 0.5, "metrics of an inherited rubric stay"
    assert rewards[2][4]["metrics"]["called"] == 0.0

    class Unclear(Sums):
        rubric = Rubric(close)

        def score(self, task, transcript):
            return 1.0

    with pytest.raises(ConfigError, match="Unclear has a rubric and a score"):
        Unclear()


def test_failures_of_reward_functions_are_metrics_and_words():
    def broken(task, transcript):
        raise ValueError("no idea")

    class Failing(Judged):
        rubric = Rubric(exact_match, Reward(broken, name="style"), step=[broken])

    _, _, steps = asyncio.run(run(Failing(), calls("1+2"), assistant("3")))
    assert [step[1] for step in steps] == [0.0, 1.0]
    assert steps[0][4]["reward_failures"] == {"broken": "ValueError: no idea"}
    assert steps[1][4]["reward_failures"].keys() == {"broken", "style"}
    metrics = steps[1][4]["metrics"]
    assert metrics["reward_failures"] == 3.0
    assert (metrics["broken_failed"], metrics["style_failed"]) == (2.0, 1.0)


def test_one_rubric_serves_many_environments_at_once():
    async def main():
        envs = [Judged() for _ in range(20)]
        answers = [assistant(str(n % 5)) for n in range(20)]
        jobs = [run(env, calls("1"), answer) for env, answer in zip(envs, answers, strict=True)]
        return [steps[-1][1] for _, _, steps in await asyncio.gather(*jobs)]

    assert asyncio.run(main()) == [1.1 if n % 5 == 3 else 0.1 for n in range(20)]


def test_a_score_that_raises_is_the_environments_failure():
    class Raises(Sums):
        def score(self, task, transcript):
            raise KeyError("gone")

    class Nothing(Sums):
        def score(self, task, transcript):
            return None

    class OddMetric(Sums):
        def score(self, task, transcript):
            return Score(1.0, {"style": float("inf")})

    with pytest.raises(KeyError):
        asyncio.run(run(Raises(), assistant("3")))
    for kind, words in ((Nothing, "None, which is no number"), (OddMetric, "returned inf")):
        with pytest.raises(EnvError, match=words):
            asyncio.run(run(kind(), assistant("3")))


# -- hooks -----------------------------------------------------------------------------------------


class Database(ToolEnv):
    """Has something to open and to close."""

    tasks = TaskSet([Task("a", "?", "1"), Task("b", "?", "2")])
    rubric = Rubric(exact_match)

    def __init__(self):
        super().__init__()
        self.log = []

    def setup(self, task):
        self.rows = [task.answer]
        self.log.append(f"open {task.id}")

    async def teardown(self):
        self.log.append("close")

    @tool(inline=True)
    def query(self) -> str:
        """Ask the database."""
        return self.rows[0]


def test_setup_gives_every_episode_its_state_and_teardown_ends_it_once():
    query = assistant(tool_calls=[ToolCall("query", {}, "c")])

    async def main():
        env = Database()
        await env.close()
        *_, steps = await run(env, query, assistant("1"), task="a")
        assert env.log == ["open a", "close"]
        await env.reset(options={"task": "b"})
        assert (await env.step(query))[0][0].text == "2"
        await env.reset(options={"task": "a"})  # before its end
        assert env.log[2:] == ["open b", "close", "open a"]
        await env.close()
        await env.close()
        assert env.log[2:] == ["open b", "close", "open a", "close"]
        return steps

    assert asyncio.run(main())[1][1] == 1.0


def test_the_score_still_sees_what_setup_opened():
    class Checked(Database):
        def score(self, task, transcript):
            return float("close" not in self.log)

    assert asyncio.run(run(Checked(), assistant("?")))[2][0][1] == 1.0


def test_a_setup_that_fails_is_told_and_a_teardown_that_fails_is_logged(caplog):
    class NoDisk(Database):
        async def setup(self, task):
            raise OSError("disk full")

        def teardown(self):
            raise AssertionError("nothing was opened")

    class Clings(Database):
        def teardown(self):
            raise OSError("busy")

    env = NoDisk()
    with pytest.raises(OSError, match="disk full"):
        asyncio.run(run(env))
    asyncio.run(env.close())
    _, _, steps = asyncio.run(run(Clings(), assistant("1")))
    assert steps[0][1] == 1.0
    assert "Clings.teardown(): OSError: busy" in caplog.text
    assert "nothing was opened" not in caplog.text


class Leased(Database):
    """Counts what its setups take and its teardowns give back; both need several rounds."""

    def __init__(self):
        super().__init__()
        self.taken = self.given = self.running = 0

    async def setup(self, task):
        self.rows = [task.answer]
        await asyncio.sleep(0)
        self.taken += 1
        await asyncio.sleep(0)

    async def teardown(self):
        self.running += 1
        await asyncio.sleep(0)
        self.given = self.taken
        await asyncio.sleep(0)
        self.running -= 1


def test_what_setup_took_is_given_back_wherever_an_episode_is_cancelled():
    """T160's kind: a cancellation between two calls, or within one, loses nothing."""

    async def cancelled_after(rounds):
        env = Leased()
        task = asyncio.create_task(run(env, assistant("1")))
        for _ in range(rounds):
            await asyncio.sleep(0)
        over = task.done()
        task.cancel()
        await asyncio.wait([task])
        await env.close()
        assert (env.given, env.running) == (env.taken, 0), rounds
        return over, env.taken

    async def main():
        rounds, taken = 0, 0
        while not (found := await cancelled_after(rounds))[0]:
            rounds, taken = rounds + 1, taken + found[1]
        assert rounds > 5 and taken > 5

    asyncio.run(main())


def test_hooks_that_hang_are_given_up():
    """T152's kind: the limit covers what opens an episode."""
    release = threading.Event()

    class Boots(Database):
        hook_timeout = 0.05

        def setup(self, task):
            release.wait(30)

    with pytest.raises(EnvError, match=r"Boots.setup\(\) took over 0.05 s"):
        asyncio.run(run(Boots()))
    release.set()


def test_first_messages_may_be_a_text_and_nothing_that_is_no_message():
    class Brief(Sums):
        def first_messages(self, task):
            return f"Now: {task.prompt}"

    class Odd(Sums):
        def first_messages(self, task):
            return [{"role": "user", "content": "?"}]

    observation, _, _ = asyncio.run(run(Brief()))
    assert [(m.role, m.text) for m in observation][1:] == [("user", "Now: 1+2?")]
    with pytest.raises(EnvError, match=r"Odd.first_messages\(\) returned"):
        asyncio.run(run(Odd()))


class Haggle(ToolEnv):
    """A user who replies until the price is right."""

    tasks = TaskSet([Task("a", "Offer?", "10")])
    rubric = Rubric(exact_match)
    max_turns = 3

    def follow_up(self, task, transcript):
        return None if transcript.answer == task.answer else "Too much."


class SlowHaggle(Haggle):
    """The same with an async user who sends a message."""

    async def follow_up(self, task, transcript):
        await asyncio.sleep(0)
        reply = super().follow_up(task, transcript)
        return [] if reply is None else [user(reply)]


@pytest.mark.parametrize("kind", [Haggle, SlowHaggle])
def test_a_simulated_user_replies_until_it_has_nothing_to_say(kind):
    env = kind()
    _, _, steps = asyncio.run(run(env, assistant("30"), assistant("20"), assistant("10")))
    assert [[m.text for m in step[0]] for step in steps] == [["Too much."], ["Too much."], []]
    assert [step[1:4] for step in steps] == [(0.0, False, False)] * 2 + [(1.0, True, False)]
    assert [m.role for m in env.transcript] == ["user", "assistant"] * 3
    _, _, steps = asyncio.run(run(env, assistant("30"), assistant("20"), assistant("15")))
    assert steps[2][1:4] == (0.0, False, True)
    assert [m.text for m in steps[2][0]] == ["Too much."]


@pytest.mark.parametrize("reply", [3, [assistant("me")], [None], object()])
def test_a_reply_that_is_no_message_is_the_environments_failure(reply):
    class Odd(Haggle):
        def follow_up(self, task, transcript):
            return reply

    with pytest.raises(EnvError, match=r"Odd.follow_up\(\) returned"):
        asyncio.run(run(Odd(), assistant("30")))


def test_group_functions_are_asked_through_score_group():
    def first(task, members):
        return [float(n == 0) for n in range(len(members))]

    class Compared(Judged):
        rubric = Rubric(exact_match, group=[(first, 2.0)])

    members = [Transcript([assistant("3")]), Transcript([assistant("4")])]
    assert asyncio.run(Compared().score_group("a", members)) == [2.0, 0.0]
    assert [member.metrics for member in members] == [{"first": 1.0}, {"first": 0.0}]
    assert (Compared().scores_groups, Judged().scores_groups) == (True, False)
    assert asyncio.run(Judged().score_group("a", members)) == [0.0, 0.0]

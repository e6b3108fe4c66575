"""The Python environment and the Python tool: code is run, judged, and never left running."""

import asyncio
import random
import re
import sys

import pytest

from relax_agent.envs import ScriptedPolicy, make, play
from relax_agent.envs.catalog.computations import KINDS
from relax_agent.envs.catalog.python_interpreter import draw
from relax_agent.errors import ConfigError, ToolErrorKind
from relax_agent.messages import ToolCall
from relax_agent.tools import Toolset
from relax_agent.tools.python import PythonSession, run_python, shared_sandbox
from relax_agent.tools.sandbox import Limits, Sandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the strong sandbox is Linux's")

ID = "relax/PythonInterpreter-v0"


def python(code):
    return ToolCall("python", {"code": code})


def played(*replies, task="train-00000"):
    async def main():
        async with make(ID) as env:
            gold = env.tasks[task].answer
            script = [r.format(gold=gold) if isinstance(r, str) else r for r in replies]
            return await play(env, ScriptedPolicy(script), task=task)

    return asyncio.run(main())


def test_the_gold_answers_agree_with_the_experts_code_for_every_kind():
    rng = random.Random(0)

    async def main():
        async with PythonSession() as session:
            for kind in KINDS:
                for _ in range(3):
                    values = kind.draw(rng)
                    result = await session.python.invoke({"code": kind.code.format(**values)})
                    assert result.text.strip("'\n") == str(kind.answer(*values.values())), kind.text

    asyncio.run(main())


def test_every_kind_is_drawn_and_no_question_shows_its_answer_or_a_gap():
    rng = random.Random(1)
    tasks = [draw(rng) for _ in range(300)]
    kinds = {re.sub(r"[\d-]+|[a-h]{60,}|\d+-\d+-\d+", "#", task.prompt) for task in tasks}
    assert len(kinds) == len(KINDS)
    assert not any("{" in task.prompt for task in tasks)


def test_the_expert_solves_both_splits():
    async def main():
        async with make(ID) as env:
            ids = [*env.tasks.ids("train")[:8], *env.tasks.ids("eval")[:8]]
            return [await play(env, env.unwrapped.expert(), task=each) for each in ids]

    records = asyncio.run(main())
    assert [(r.task_id, r.detail) for r in records if r.reward != 1.0] == []
    assert {r.turns for r in records} == {2}


def test_the_splits_share_no_question():
    env = make(ID, train_tasks=300, eval_tasks=300)
    train, eval_ = ({env.tasks[i].prompt for i in env.tasks.ids(s)} for s in ("train", "eval"))
    assert not train & eval_


@pytest.mark.parametrize(
    ("replies", "reward"),
    [
        (["{gold}"], 0.2),
        ([python("1"), "{gold}"], 0.2),
        ([python("1 / 0"), "{gold}."], 0.2),
        ([python("1"), "no idea"], 0.0),
        ([python("1"), ""], 0.0),
        (["1{gold}"], 0.0),
    ],
)
def test_the_right_answer_is_worth_most_if_code_has_shown_it(replies, reward):
    assert played(*replies).reward == reward


def test_variables_stay_within_an_episode_and_not_beyond_it():
    async def main():
        async with make(ID) as env:
            await env.reset(seed=0)
            step = ScriptedPolicy([python("x = 41"), python("x + 1")])
            first = await env.step(step.act([], []))
            second = await env.step(step.act([], []))
            await env.reset(seed=0)
            third = await env.step(ScriptedPolicy([python("x")]).act([], []))
            return [out[0][0].text for out in (first, second, third)]

    first, second, third = asyncio.run(main())
    assert first == "done (nothing was printed)"
    assert second == "42"
    assert "NameError: name 'x' is not defined" in third


@pytest.mark.parametrize("end", ["close", "reset", "cancel", "answer"])
def test_the_session_ends_with_the_episode(end):
    async def main():
        env = make(ID)
        await env.reset(seed=0)
        await env.step(ScriptedPolicy([python("x = 1")]).act([], []))
        interpreter = env.unwrapped.python._session._interpreter
        if end == "close":
            await env.close()
        elif end == "reset":
            await env.reset(seed=1)
        elif end == "answer":
            await env.step(ScriptedPolicy(["no idea"]).act([], []))
            await env.close()
        else:
            action = ScriptedPolicy([python("while True: pass")]).act([], [])
            job = asyncio.create_task(env.step(action))
            await asyncio.sleep(0.2)
            job.cancel()
            with pytest.raises(asyncio.CancelledError):
                await job
        assert interpreter.child.ended.done()
        await env.close()

    asyncio.run(main())


def test_the_models_code_cannot_import_the_answers():
    env = make(ID)
    record = played(python("import relax_agent"), "{gold}")
    assert "No module named 'relax_agent'" in record.messages[-2].text
    asyncio.run(env.close())


def test_a_limit_that_makes_no_sense_is_refused_when_the_environment_is_made():
    with pytest.raises(ConfigError, match="timeout_s must be"):
        make(ID, timeout_s=-1)


def test_the_tool_says_what_happened_and_works_again():
    async def main():
        async with PythonSession(limits=Limits(timeout_s=0.5)) as session:
            tools = Toolset([session.python])
            codes = ["print('a')\n'b'", "while True: pass", "1 + 1", "1 +"]
            results = [await tools.call(python(code)) for code in codes]
            missing = await tools.call(ToolCall("python", {"source": "1"}))
            return [(r.error, r.text) for r in (*results, missing)]

    ok, late, again, wrong, missing = asyncio.run(main())
    assert ok == (None, "a\n'b'")
    assert late[0] is ToolErrorKind.TIMEOUT
    assert late[1].startswith("timed out after 0.5 s; the interpreter was restarted")
    assert again == (None, "2")
    assert wrong[0] is ToolErrorKind.CRASHED
    assert "SyntaxError" in wrong[1]
    assert missing[0] is ToolErrorKind.INVALID_ARGUMENTS


def test_calls_of_one_message_share_the_session():
    async def main():
        async with PythonSession() as session:
            calls = [python(f"x{n} = {n}") for n in range(4)]
            await asyncio.gather(*(Toolset([session.python]).call(call) for call in calls))
            return (await session.python.invoke({"code": "x0 + x1 + x2 + x3"})).text

    assert asyncio.run(main()) == "6"


def test_the_stateless_tool_begins_afresh_each_time():
    async def main():
        first = await run_python.invoke({"code": "x = 1\nx"})
        second = await run_python.invoke({"code": "x"})
        return first.text, second.text

    first, second = asyncio.run(main())
    assert first == "1"
    assert "NameError" in second


def test_a_closed_session_refuses_and_a_restarted_one_works():
    async def main():
        session = PythonSession()
        await session.close()
        refused = await session.python.invoke({"code": "1"})
        await session.restart()
        again = await session.python.invoke({"code": "1"})
        await session.close()
        return refused, again

    refused, again = asyncio.run(main())
    assert refused.error is ToolErrorKind.UNAVAILABLE
    assert again.text == "1"


def test_sandboxes_are_shared_by_those_who_want_the_same_limits():
    assert shared_sandbox(Limits(timeout_s=3)) is shared_sandbox(Limits(timeout_s=3))
    assert shared_sandbox(Limits(timeout_s=3)) is not shared_sandbox(Limits(timeout_s=4))
    assert isinstance(shared_sandbox(), Sandbox)
    assert shared_sandbox(None) is shared_sandbox() is shared_sandbox(Limits())


def test_a_toolset_opens_one_session_of_python_for_each_of_its_own():
    async def main():
        toolset = Toolset([PythonSession])
        async with toolset.session() as one, toolset.session() as two:
            await one.call(python("x = 1"))
            return [(await each.call(python("x + 1"))).text for each in (one, two)]

    first, second = asyncio.run(main())
    assert first == "2"
    assert "NameError" in second

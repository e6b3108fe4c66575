"""Every ready-made environment: solvable, not by chance, seeded, and with its answers to itself."""

import asyncio
import itertools
import random
import re
import statistics
from pathlib import Path

import pytest

from relax_agent.envs import EnvSpec, RandomPolicy, ScriptedPolicy, make, play
from relax_agent.envs.catalog.shared import DrawnTasks, Expert, is_held_out
from relax_agent.envs.checking import check_env
from relax_agent.errors import ConfigError, EnvError, ResetNeeded
from relax_agent.messages import Rewrite, assistant

CATALOG = Path(__file__).parents[2] / "envs" / "catalog"
FILES = {
    "relax/Search-v0": "search",
    "relax/Sudoku-v0": "sudoku",
    "relax/TextGame-v0": "text_game",
    "relax/SQL-v0": "sql",
    "relax/ShopOrder-v0": "shop_order",
    "relax/Debate-v0": "debate",
}
IDS = list(FILES)
HARDER = {
    "relax/Search-v0": {"hops": 3, "pages": 60},
    "relax/Sudoku-v0": {"moves": "text", "blanks": 10},
    "relax/TextGame-v0": {"rooms": 9, "doors": 4, "max_turns": 100},
    "relax/SQL-v0": {"level": 2},
    "relax/ShopOrder-v0": {"things": 5},
    "relax/Debate-v0": {"rounds": 1, "max_operand": 9999},
}
WRONG = [
    ("relax/Search-v0", {"hops": 0}),
    ("relax/Search-v0", {"pages": 3}),
    ("relax/Sudoku-v0", {"size": 6}),
    ("relax/Sudoku-v0", {"blanks": 0}),
    ("relax/Sudoku-v0", {"size": 4, "blanks": 16}),
    ("relax/Sudoku-v0", {"moves": "telepathy"}),
    ("relax/Sudoku-v0", {"max_turns": 0}),
    ("relax/TextGame-v0", {"rooms": 1}),
    ("relax/TextGame-v0", {"rooms": 3, "doors": 3}),
    ("relax/TextGame-v0", {"max_turns": 0}),
    ("relax/SQL-v0", {"level": 9}),
    ("relax/SQL-v0", {"train_tasks": 0}),
    ("relax/ShopOrder-v0", {"things": 0}),
    ("relax/ShopOrder-v0", {"eval_tasks": -1}),
    ("relax/Debate-v0", {"rounds": 0}),
]


async def plays(env, policy, count):
    """Play ``count`` tasks of each split, spread over the split."""
    tasks = []
    for split in ("train", "eval"):
        ids = env.tasks.ids(split)
        tasks += ids[:: max(1, len(ids) // count)][:count]
    records = [await play(env, policy, task=task, seed=0) for task in tasks]
    await env.close()
    return records


def mean(records):
    return statistics.mean(record.reward for record in records)


@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize("harder", [False, True])
def test_the_expert_solves_every_task_without_the_gold_answers(id, harder):
    env = make(id, **(HARDER[id] if harder else {}))
    records = asyncio.run(plays(env, env.unwrapped.expert(), 12))
    assert [(r.task_id, r.detail) for r in records if r.metrics["success"] != 1.0] == []
    assert all(r.reward == pytest.approx(1.0) and r.terminated for r in records)


@pytest.mark.parametrize("id", IDS)
def test_a_random_policy_earns_nothing_worth_having(id):
    records = asyncio.run(plays(make(id), RandomPolicy(3), 20))
    assert -0.15 < mean(records) < 0.02
    assert not any(record.metrics.get("success") for record in records)


@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize("answer", ["", "0", "1", "yes", "I do not know.", "AGREE", "Answer: 0"])
def test_no_constant_answer_earns_anything(id, answer):
    records = asyncio.run(plays(make(id), ScriptedPolicy(lambda messages, tools: answer), 8))
    assert mean(records) < 0.05  # by luck, if at all


@pytest.mark.parametrize("id", IDS)
def test_an_experts_noise_costs_success_and_follows_from_its_seed(id):
    def run(seed):
        env = make(id)
        return asyncio.run(plays(env, env.unwrapped.expert(noise=0.6, seed=seed), 6))

    first, again, other = run(1), run(1), run(2)
    assert [r.messages for r in first] == [r.messages for r in again]
    assert [r.messages for r in first] != [r.messages for r in other]
    turns = [statistics.mean(r.turns for r in records) for records in (first, other)]
    assert min(mean(first), mean(other)) < 0.95 or max(turns) > 14  # or it takes longer


@pytest.mark.parametrize("id", IDS)
def test_the_splits_are_disjoint_and_follow_from_the_arguments(id):
    env, again, other = make(id), make(id), make(id, task_seed=1)

    def content(env, split):
        tasks = (env.tasks[task] for task in env.tasks.ids(split)[:60])
        return [repr((task.prompt, task.answer, task.data)) for task in tasks]

    train = content(env, "train")
    assert train == content(again, "train") != content(other, "train")
    assert not {*train} & {*content(env, "eval")}
    assert len({*train}) >= 55
    assert env.tasks.fingerprint() == again.tasks.fingerprint() != other.tasks.fingerprint()


@pytest.mark.parametrize("id", IDS)
def test_difficulty_changes_the_fingerprint(id):
    assert make(id).tasks.fingerprint() != make(id, **HARDER[id]).tasks.fingerprint()


async def trace(env, task):
    """Return everything that an expert's episode shows, message by message."""
    observation, info = await env.reset(seed=5, options={"task": task})
    view, ended, expert = list(observation), False, env.unwrapped.expert()
    yield view, info
    while not ended:
        action = expert.act(list(view), env.tools.schemas())
        observation, reward, terminated, truncated, info = await env.step(action)
        if isinstance(observation, Rewrite):
            view = list(observation.messages)
        else:
            view = [*view, action, *observation]
        ended = terminated or truncated
        yield view, (reward, terminated, truncated, info)


@pytest.mark.parametrize("id", IDS)
def test_environments_with_equal_seeds_do_not_disturb_each_other(id):
    """T161: interleaved step by step they show what they show alone; no global generator moves."""

    async def alone(env, task):
        return [step async for step in trace(env, task)]

    async def main():
        one, two = make(id), make(id)
        a, b = one.tasks.ids()[3], one.tasks.ids()[4]
        expected = [await alone(one, a), await alone(two, b)]
        before = random.getstate()
        runs, seen = [trace(one, a), trace(two, b)], [[], []]
        for turn in itertools.count():
            for run, steps in zip(runs, seen, strict=True):
                steps += [step async for step in _next(run)]
            if [len(steps) for steps in seen] == [len(steps) for steps in expected]:
                break
            assert turn < 100
        assert seen == expected
        assert random.getstate() == before
        await asyncio.gather(one.close(), two.close())

    asyncio.run(main())


async def _next(run):
    """Yield the next step of a run, if there is one."""
    try:
        yield await anext(run)
    except StopAsyncIteration:
        return


@pytest.mark.parametrize("id", IDS)
def test_the_gold_answer_is_in_no_opening_message(id):
    async def main():
        env = make(id)
        for task in env.tasks.ids()[:40]:
            observation, info = await env.reset(options={"task": task})
            answer = env.unwrapped.tasks[task].answer
            text = " ".join(m.text for m in observation) + str(info)
            if isinstance(answer, str) or (isinstance(answer, int) and abs(answer) > 99):
                assert not re.search(rf"\b{re.escape(str(answer))}\b", text), task
        await env.close()

    asyncio.run(main())


@pytest.mark.parametrize("id", IDS)
def test_a_spec_with_arguments_rebuilds_the_environment(id):
    env = make(id, **HARDER[id])
    again = make(EnvSpec.from_json(env.spec.to_json()))
    assert again.tasks.fingerprint() == env.tasks.fingerprint()
    assert again.tools.schemas() == env.tools.schemas()


@pytest.mark.parametrize("id", IDS)
def test_steps_outside_an_episode_are_refused(id):
    async def main():
        env = make(id)
        with pytest.raises(ResetNeeded):
            await env.step(assistant("too early"))
        await play(env, env.unwrapped.expert(), task=env.tasks.ids("eval")[0])
        with pytest.raises(ResetNeeded):
            await env.step(assistant("too late"))
        await env.close()
        await env.close()

    asyncio.run(main())


@pytest.mark.parametrize("id", IDS)
def test_a_seed_chooses_the_task_from_the_split_asked_for(id):
    async def main():
        env = make(id)
        chosen = [(await env.reset(seed=seed))[1]["task"] for seed in (1, 1, 2, 3)]
        held_out = (await env.reset(seed=1, options={"split": "eval"}))[1]["task"]
        assert chosen[0] == chosen[1] and len({*chosen}) > 1
        assert held_out in env.tasks.ids("eval")
        with pytest.raises(EnvError, match="unknown reset option 'level'"):
            await env.reset(options={"level": 3})
        with pytest.raises(EnvError, match="there is no task 'train-x'"):
            await env.reset(options={"task": "train-x"})
        await env.close()

    asyncio.run(main())


@pytest.mark.parametrize(("id", "arguments"), WRONG, ids=str)
def test_arguments_that_make_no_sense_are_refused_in_words(id, arguments):
    with pytest.raises(ConfigError) as error:
        make(id, **arguments)
    assert str([*arguments.values()][-1]) in str(error.value)


@pytest.mark.parametrize("id", IDS)
def test_each_environment_is_one_short_file_that_says_what_it_is(id):
    text = (CATALOG / f"{FILES[id]}.py").read_text()
    assert len(text.splitlines()) <= 150
    docstring = text.split('"""')[1]
    assert docstring.startswith(f"``{id}``: ")
    for part in ("Task: ", "Tools: ", "Reward: "):
        assert f"\n\n{part}" in docstring


@pytest.mark.parametrize("id", IDS)
def test_each_environment_keeps_the_contract(id):
    check_env(id).require()


def test_drawn_tasks_that_cannot_be_drawn_say_so():
    from relax_agent.envs import Task

    tasks = DrawnTasks(lambda rng: Task("", "always the same"), 1, 1, 0)
    split = "train" if is_held_out(("always the same", None, {})) else "eval"
    with pytest.raises(ConfigError, match="nothing can be drawn"):
        tasks[f"{split}-00000"]


def test_an_experts_noise_is_a_share():
    with pytest.raises(ConfigError, match="from 0 to 1"):
        Expert(lambda messages, tools: "", noise=1.5)

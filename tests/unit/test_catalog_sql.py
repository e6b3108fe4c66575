"""SQL: answers need queries, gold answers were not computed by SQL, and every task has its data."""

import asyncio
import random
import sqlite3
import threading

import pytest

from relax_agent.envs import ScriptedPolicy, make, play
from relax_agent.envs.catalog.ledger import QUESTIONS, WORDS, Ledger, draw
from relax_agent.messages import ToolCall


def sql(query):
    return ToolCall("sql", {"query": query})


@pytest.fixture
def env():
    return make("relax/SQL-v0", level=1)


def test_the_gold_answers_agree_with_sql_for_every_kind_of_question():
    rng = random.Random(0)
    for _ in range(25):
        ledger = Ledger.draw(rng)
        database = sqlite3.connect(":memory:")
        ledger.build(database)
        for question in QUESTIONS:
            for it in question.choose(ledger):
                if gold := question.answer(ledger, it):
                    query = question.sql.format(it=it, **ledger.words)
                    assert database.execute(query).fetchone()[0] == gold, query
        database.close()


def test_names_of_tables_and_columns_differ_between_tasks_and_never_clash():
    rng = random.Random(0)
    words = [draw(rng, 4).data["ledger"].words for _ in range(40)]
    assert {tuple(each) for each in words} == {tuple(WORDS)}
    for concept, names in WORDS.items():
        assert {each[concept] for each in words} == {*names}
    everything = [name for names in WORDS.values() for name in names]
    assert len({*everything}) == len(everything)


@pytest.mark.parametrize(
    ("replies", "reward"),
    [
        (["query", "gold"], 1.0),
        (["query", "spaced"], 1.0),
        (["schema", "query", "other", "gold"], 1.0),
        (["gold"], 0.0),
        (["schema", "gold"], 0.0),
        (["broken", "gold"], 0.0),
        (["other", "gold"], 0.2),
        (["query", "wrong"], 0.0),
        (["query", ""], 0.0),
        (["query", "many"], 0.0),
    ],
)
def test_the_reward_wants_the_right_answer_out_of_a_query(env, replies, reward):
    task = next(t for t in env.tasks if str(t.answer) != "1" and "live" not in t.prompt)
    words = task.data["ledger"].words
    thing = task.prompt.split()[3]
    values = {
        "query": sql(f"SELECT {words['price']} FROM {words['products']} WHERE name = '{thing}'"),
        "other": sql("SELECT 'nothing of it'"),
        "broken": sql("SELECT nothing FROM nowhere"),
        "schema": ToolCall("schema", {}),
        "gold": str(task.answer),
        "spaced": f" {task.answer}.\n",
        "wrong": str(task.answer + 1),
        "many": " ".join(str(n) for n in range(100)),
    }
    script = ScriptedPolicy([values.get(reply, reply) for reply in replies])
    assert asyncio.run(play(env, script, task=task.id)).reward == reward


def test_every_episode_has_its_own_database_and_leaves_no_thread(env):
    def alive():
        return sum(thread.name == "relax-sql" for thread in threading.enumerate())

    async def main():
        others = [make("relax/SQL-v0") for _ in range(8)]
        plays = [play(e, e.unwrapped.expert(), task=f"eval-{n:05}") for n, e in enumerate(others)]
        records = await asyncio.gather(*plays)
        for each in others:
            await each.close()
        for _ in range(200):
            if not alive():
                break
            await asyncio.sleep(0.01)
        return [record.reward for record in records], alive()

    assert asyncio.run(main()) == ([1.0] * 8, 0)


def test_levels_bound_the_joins():
    easy = {
        task.prompt.split()[0:2][1] for task in make("relax/SQL-v0", level=1, train_tasks=40).tasks
    }
    assert easy <= {"many", "does"}

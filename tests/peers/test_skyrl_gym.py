"""SkyRL-Gym's environments through the adapter, against the real package."""

import asyncio
import json
import sqlite3

import pytest
from peer_support import assert_pinned, run_contestant, run_snippets

from relax_agent.envs import EnvSpec, ScriptedPolicy, make, play
from relax_agent.envs.adapters import from_skyrl_gym
from relax_agent.errors import ConfigError, EnvError, UnknownEnv
from relax_agent.messages import ToolCall, assistant
from relax_agent.status import EpisodeStatus


def row(answer, **more):
    chat = [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": f"What gives {answer}?"},
    ]
    return {"prompt": chat, "reward_spec": {"ground_truth": answer}, **more}


ROWS = [row("7", id="seven"), row("12")]


def run(env, *replies, task=None, seed=0):
    async def go():
        async with env:
            return await play(env, ScriptedPolicy(list(replies)), task=task, seed=seed)

    return asyncio.run(go())


def test_the_library_is_the_pinned_one():
    assert_pinned("skyrl-gym")


def test_a_row_is_a_task_and_its_gold_answer_stays_behind():
    env = from_skyrl_gym("gsm8k", train=ROWS)
    good = run(env, "So #### 7", task="seven")
    assert (good.status, good.reward, good.metrics["success"]) == ("completed", 1.0, 1.0)
    assert [message.role for message in good.messages] == ["system", "user", "assistant"]
    assert good.messages[1].text == "What gives 7?"
    bad = run(from_skyrl_gym("gsm8k", train=ROWS), "#### 8", task="seven")
    assert (bad.reward, bad.metrics["success"]) == (0.0, 0.0)


def test_an_episode_of_several_turns_with_rewards_on_the_way():
    rows = [row("12", extra_info={"max_turns": 3})]
    played = run(from_skyrl_gym("gsm8k_multi_turn", train=rows), "#### 3", "hm", "#### 12")
    assert played.rewards == pytest.approx([0.2 / 3, 0.0, 1.0])
    assert [m.role for m in played.messages[2:]] == ["assistant", "user"] * 2 + ["assistant"]
    assert played.metrics["steps"] == 3


def test_its_own_configuration_and_tools_work(tmp_path):
    """text2sql runs the query in the tag itself and answers with the rows."""
    folder = tmp_path / "SynSQL-2.5M" / "databases" / "shop"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "shop.sqlite") as database:
        database.execute("create table fruit (name text, price int)")
        database.execute("insert into fruit values ('fig', 12), ('pear', 5)")
    query = "select name from fruit where price = 12"
    rows = [row(query, db_id="shop", data="synsql")]
    env = from_skyrl_gym("text2sql", train=rows, config={"db_path": str(tmp_path)})
    look = "<think>look</think><sql>select * from fruit</sql>"
    done = f"<think>ok</think><solution>{query}</solution>"
    played = run(env, look, done)
    assert "pear" in played.messages[3].text
    assert (played.status, played.reward) == ("completed", 1.0)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_come_from_files_and_the_spec_rebuilds_the_environment(tmp_path, suffix):
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)))
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    env = make("relax/SkyRLGym-v0", env_id="gsm8k", train=str(path))
    again = make(EnvSpec.from_json(env.spec.to_json()))
    assert again.tasks.ids("train") == env.tasks.ids("train") == ("seven", "train-1")
    assert again.tasks.fingerprint() == env.tasks.fingerprint()
    assert run(again, "#### 12", task="train-1").reward == 1.0


def test_the_seed_chooses_the_row():
    env = from_skyrl_gym("gsm8k", train=[row(str(i)) for i in range(50)])

    async def questions(seed):
        return (await env.reset(seed=seed))[0][1].text

    asked = [asyncio.run(questions(seed)) for seed in (1, 1, 2, 3)]
    assert asked[0] == asked[1] and len(set(asked)) > 1


def test_a_tool_call_is_answered_with_words_and_costs_nothing():
    call = assistant(tool_calls=[ToolCall("sql", {}, "c")])
    played = run(from_skyrl_gym("gsm8k", train=ROWS), call, "#### 7", task="seven")
    assert played.reward == 1.0 and "no tools" in played.messages[3].text


def test_what_is_wrong_is_said():
    with pytest.raises(UnknownEnv, match="gsm8k"):
        from_skyrl_gym("gsm8", train=ROWS)
    with pytest.raises(ConfigError, match="train-0 has no prompt"):
        from_skyrl_gym("gsm8k", train=[{"reward_spec": {}}])
    with pytest.raises(ConfigError, match="cannot read rows"):
        from_skyrl_gym("gsm8k", train="/nowhere/rows.jsonl")
    played = run(from_skyrl_gym("gsm8k", train=[{"prompt": "hi"}]), "x")
    assert played.status is EpisodeStatus.ENV_FAILURE and "reward_spec" in played.detail
    with pytest.raises(EnvError, match="eval split"):
        asyncio.run(from_skyrl_gym("gsm8k", train=ROWS).reset(options={"split": "eval"}))


def test_the_benchmark_s_steps_call_the_tool():
    assert run_contestant("skyrl_gym_steps.py", 100)["tool_steps_per_s"] > 0


def test_what_the_page_of_neighbours_shows_runs():
    run_snippets("SkyRL-Gym")

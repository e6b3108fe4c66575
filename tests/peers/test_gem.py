"""The adapter of GEM, in the venv of the real package."""

import asyncio
import logging
import random
import subprocess
import sys

import numpy as np
import pytest
from gem.envs.registration import ENV_REGISTRY
from peer_support import assert_pinned, run_snippets

from relax_agent.envs import EnvSpec, ScriptedPolicy, make, play
from relax_agent.envs.adapters import from_gem
from relax_agent.envs.checking import check_env
from relax_agent.errors import ConfigError, EnvError, MissingExtraError, UnknownEnv
from relax_agent.messages import assistant

GUESSING = "game:GuessTheNumber-v0-easy"
NEEDS_WORDS = ("Wordle", "Hangman", "WordSearch", "Crosswords")
SLOW = ("Sokoban-v0-hard", "Sokoban-v0-random")
"""Draws rooms until one can be solved: seconds for each."""
BROKEN = {"game:FifteenPuzzle-v0-random"}
"""Its own constructor raises in this version."""
GAMES = sorted(
    name
    for name in ENV_REGISTRY
    if name.startswith("game:") and not any(word in name for word in (*NEEDS_WORDS, *SLOW))
)


def boxed(value):
    return assistant(f"I say \\boxed{{{value}}}")


async def episode(env, *messages, seed=0, options=None):
    observation, info = await env.reset(seed=seed, options=options)
    said = [(observation, info)]
    for message in messages:
        said.append(await env.step(message))
        if said[-1][2] or said[-1][3]:
            break
        await asyncio.sleep(0)  # let others have their turn
    return said


def run(env, *messages, **how):
    return asyncio.run(episode(env, *messages, **how))


def test_the_library_is_the_pinned_one():
    assert_pinned("gem")


def test_a_number_is_guessed_by_halving():
    def halve(messages, tools):
        low, high = 1, 10
        for message in messages:
            words = message.text.split()
            if "higher" in words:
                low = int(words[words.index("guessed") + 1].strip(",")) + 1
            if "lower" in words:
                high = int(words[words.index("guessed") + 1].strip(",")) - 1
        return boxed((low + high) // 2)

    env = from_gem(GUESSING, system_prompt="Think.")
    records = [asyncio.run(play(env, ScriptedPolicy(halve), seed=seed)) for seed in range(5)]
    assert all(record.terminated and record.reward == 1.0 for record in records)
    assert all(record.metrics["success"] == 1.0 for record in records)
    first = records[0].messages
    assert first[0].role == "system" and "between 1 and 10" in first[1].text
    assert first[1].text.endswith("Enter your next guess.")


@pytest.mark.parametrize("name", GAMES)
def test_every_game_has_an_episode_of_five_tuples_that_its_seed_decides(name):
    if name in BROKEN:
        with pytest.raises(EnvError, match="TypeError"):
            from_gem(name)
        return
    messages = [boxed(3), boxed("up"), assistant("hm")]
    env = from_gem(name)
    first, second = (run(env, *messages, seed=4) for _ in range(2))
    assert first == second == run(from_gem(name), *messages, seed=4)
    assert first[0][0][0].role == "user" and len(first) > 1
    for observation, reward, terminated, truncated, _ in first[1:]:
        assert isinstance(observation, list) and isinstance(reward, float)
        assert not (terminated and truncated)


def test_equal_seeds_interleaved_are_what_they_are_alone_and_nobody_else_notices():
    """T161: GEM seeds the global generators; every environment here has its own state of them."""
    ids = ["game:Game2048-v0-easy"] * 2 + ["game:Minesweeper-v0-easy", "rg:chain_sum"]
    messages = [boxed(word) for word in ["up", "left", "down", "right"] * 4]
    random.seed(7)
    np.random.seed(7)
    before = random.getstate(), np.random.get_state()[1].tolist()

    async def together():
        envs = [from_gem(name) for name in ids]
        return await asyncio.gather(*(episode(env, *messages, seed=11) for env in envs))

    mixed = asyncio.run(together())
    alone = [run(from_gem(name), *messages, seed=11) for name in ids]
    assert mixed == alone and mixed[0] == mixed[1]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert len(mixed[0]) > 10


@pytest.mark.parametrize("name", ["game:Game2048-v0-easy", "game:Sokoban-v0-easy"])
def test_without_a_seed_an_environment_goes_on_with_its_own_draws(name):
    async def main(env):
        await env.reset(seed=3)
        return [(await env.reset())[0] for _ in range(4)]

    first, second = (asyncio.run(main(from_gem(name))) for _ in range(2))
    assert first == second and any(each != first[0] for each in first)


def test_one_turn_environments_end_with_nothing_more_to_say():
    _, last = run(from_gem("rg:chain_sum"), boxed(0), seed=1)
    assert last[0] == [] and last[2:4] == (True, False)
    assert last[4]["metrics"] == {"success": 0.0, "turns": 1.0}


def test_a_seed_gives_the_same_item_however_often_the_environment_was_reset():
    env = from_gem("rg:chain_sum", env_args={"size": 3})

    async def main():
        return [(await env.reset(seed=5))[0] for _ in range(5)]

    asked = asyncio.run(main())
    assert all(each == asked[0] for each in asked)


def test_tasks_are_seeds():
    env = from_gem(GUESSING, tasks=10, eval_tasks=2)

    async def asked(env, **how):
        return await episode(env, *[boxed(i) for i in range(1, 5)], **how)

    by_task = [asyncio.run(asked(env, seed=s, options={"task": "train-6"})) for s in (1, 2)]
    by_seed = asyncio.run(asked(from_gem(GUESSING), seed=6))
    assert [each[0] for each in by_task[0][1:]] == [each[0] for each in by_seed[1:]]
    assert by_task[0] == by_task[1] and by_task[0][0][1]["task"] == "train-6"
    with pytest.raises(EnvError, match="there is no task"):
        run(env, options={"task": "train-99"})
    with pytest.raises(EnvError, match="tasks=1000"):
        run(from_gem(GUESSING), options={"task": "x"})
    with pytest.raises(EnvError, match="unknown reset option 'colour'"):
        run(env, options={"colour": 1})


def test_our_own_checker_finds_nothing_wrong():
    check_env("relax/GEM-v0", env_id=GUESSING, tasks=5)


def test_limits_and_arguments_arrive():
    said = run(from_gem(GUESSING, env_args={"max_number": 1000}, max_turns=1), boxed(1))
    assert "between 1 and 1000" in said[0][0][0].text and said[-1][2:4] == (False, True)
    huge = run(from_gem(GUESSING), seed=2**40 + 1)
    assert huge[0][0] == run(from_gem(GUESSING), seed=2**40 + 1)[0][0]


def test_the_spec_rebuilds_the_environment_also_in_a_process_of_its_own():
    spec = from_gem("game:Game2048-v0-easy").spec
    messages = [boxed("up"), boxed("left")]
    here = run(make(EnvSpec.from_json(spec.to_json())), *messages, seed=3)

    async def elsewhere():
        async with make(spec, isolation="process") as env:
            return await episode(env, *messages, seed=3)

    assert [each[0] for each in asyncio.run(elsewhere())] == [each[0] for each in here]


def test_ids_that_do_not_exist_name_the_nearest():
    with pytest.raises(UnknownEnv, match=r"did you mean .*game:GuessTheNumber-v0-easy"):
        from_gem("game:GuessTheNumber-v0")
    with pytest.raises(UnknownEnv, match="ids in GEM"):
        from_gem("zzz")
    with pytest.raises(ConfigError, match="max_turns"):
        from_gem(GUESSING, max_turns=0)


def test_what_an_environment_needs_beside_gem_is_named():
    with pytest.raises(
        MissingExtraError, match=r"pandas, which game:Crosswords.*pip install 'pandas'"
    ):
        from_gem("game:Crosswords-v0-easy")


def test_a_list_of_words_that_is_missing_is_named(monkeypatch):
    import nltk

    monkeypatch.setattr(nltk, "download", lambda name: False)
    monkeypatch.setattr(nltk.data, "path", [])
    with pytest.raises(ConfigError, match=r"python -m nltk.downloader words"):
        from_gem("game:Hangman-v0-easy")


def test_importing_gem_leaves_the_logging_of_the_program_alone():
    code = (
        "import logging; from relax_agent.envs.adapters import from_gem;"
        f"from_gem({GUESSING!r}); root = logging.getLogger();"
        "assert root.handlers == [] and root.level == logging.WARNING, root.handlers"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert logging.getLogger().level != logging.INFO


def test_what_the_page_on_neighbours_shows_runs():
    run_snippets("GEM")

"""TextArena's games through the adapter, against the real package."""

import asyncio
import itertools
import random
import re

import pytest
from peer_support import assert_pinned, run_snippets
from textarena.envs.registration import ENV_REGISTRY

from relax_agent.envs import EnvSpec, ScriptedPolicy, make, play
from relax_agent.envs.adapters import from_textarena
from relax_agent.errors import ConfigError, EnvError, UnknownEnv
from relax_agent.messages import AssistantMessage, assistant

GUESSING = "GuessTheNumber-v0"
ODD = {
    "GuessWho", "TwentyQuestions", "Debate",  # ask a hosted model
    "Klondike",  # syntax of a newer Python
    "Wordle", "Hangman", "WordLadder", "WordSearch", "Crosswords", "WordChains",  # lists of words
}  # fmt: skip
SINGLE = [
    "2048-v0", "Bandit-v0", "Blackjack-v0", "Countdown-v0", "Cryptarithm-v0", "FifteenPuzzle-v0",
    "FrozenLake-v0", "GuessTheNumber-v0", "LightsOut-v0", "LogicPuzzle-v0", "Mastermind-v0",
    "Minesweeper-v0", "PegJump-v0", "RushHour-v0", "Secretary-v0", "Set-v0", "Slitherlink-v0",
    "Sudoku-v0", "ThreeCardMonte-v0", "TowerOfHanoi-v0",
]  # fmt: skip
SEVERAL = {
    "TicTacToe-v0": 2, "ConnectFour-v0": 2, "IteratedPrisonersDilemma-v0": 2,
    "SimpleNegotiation-v0": 2, "ThreePlayerTicTacToe-v0": 3,
}  # fmt: skip
PICKY = {
    "KuhnPoker-v0": 2, "Nim-v0": 2, "PigDice-v0": 2, "Othello-v0": 2, "LiarsDice-v0": 2
}  # fmt: skip
"""These end, or ask the same player again, for moves that say nothing to them."""


def halve(messages, tools):
    """Guess the number by halving what is left."""
    low, high = 1, 20
    for said, heard in itertools.pairwise(messages):
        guess = re.search(r"\[(\d+)\]", said.text)
        if isinstance(said, AssistantMessage) and guess:
            low = int(guess[1]) + 1 if "higher" in heard.text else low
            high = int(guess[1]) - 1 if "lower" in heard.text else high
    return f"I say [{(low + high) // 2}]"


def run(env, policy, **how):
    async def go():
        async with env:
            return await play(env, policy, **how)

    return asyncio.run(go())


def tictactoe():
    """Play the first free cell."""
    return ScriptedPolicy(
        lambda messages, tools: f"[{sum(m.role == 'user' for m in messages) - 1}]"
    )


def test_the_library_is_the_pinned_one():
    assert_pinned("textarena")


def test_a_game_for_one_is_won_and_only_news_are_told():
    records = [run(from_textarena(GUESSING), ScriptedPolicy(halve), seed=n) for n in range(5)]
    assert all(r.status == "completed" and r.reward == 1.0 for r in records)
    assert all(r.metrics["success"] == 1.0 and r.metrics["invalid_move"] == 0.0 for r in records)
    longest = max(records, key=lambda record: record.turns)
    said = [message.text for message in longest.messages]
    assert sum("You are playing Guess The Number" in text for text in said) == 1
    heard = [m.text for m in longest.messages if m.role == "user"][1:]
    assert heard and not any("I say" in text for text in heard)  # its own moves are not repeated


@pytest.mark.parametrize("name", SINGLE)
def test_a_seed_decides_the_game_and_the_process_s_own_draws_go_on(name):
    """T161: environments of the same seed, interleaved, are what each is alone."""

    async def openings():
        one, other = from_textarena(name), from_textarena(name)
        async with one, other:
            first = await one.reset(seed=5)
            await other.reset(seed=6)
            moved = [await one.step(assistant("[1]")), await other.step(assistant("[1]"))]
            again = await other.reset(seed=5)
            same = await other.step(assistant("[1]"))
            return first[0] == again[0], moved[0][:4] == same[:4]

    random.seed(3)
    before = random.getstate()
    assert asyncio.run(openings()) == (True, True)
    assert random.getstate() == before


@pytest.mark.parametrize(("name", "players"), (SEVERAL | PICKY).items())
def test_every_player_is_a_role_with_a_view_of_its_own(name, players):
    async def go():
        async with from_textarena(name, max_turns=6) as env:
            assert env.unwrapped.players == players
            seen = []
            _, info = await env.reset(seed=1)
            for turn in range(6):
                seen.append(info["role"])
                _, *_, terminated, truncated, info = await env.step(
                    assistant(f"[{turn}] I choose {turn}, player {info['role']}")
                )
                if terminated or truncated:
                    break
            return seen, info

    seen, info = asyncio.run(go())
    roles = {f"player_{number}" for number in range(players)}
    assert set(seen) == roles if name in SEVERAL else set(seen) <= roles
    assert set(info["metrics"]) == {"success", "turns", "invalid_move"}


def test_two_policies_play_each_other_and_one_may_play_both():
    env = from_textarena("TicTacToe-v0")
    apart = {"player_0": tictactoe(), "player_1": ScriptedPolicy(["[8]", "[7]", "[5]", "[3]"])}
    won = run(env, apart, seed=0)
    assert (won.status, won.reward) == ("completed", 1.0)
    assert [reason for _, reason in won.rewrites] == ["role: player_1", "role: player_0"] * 2
    lost = run(from_textarena("TicTacToe-v0", reward_of=1), {**apart, "player_1": tictactoe()})
    assert lost.reward <= 0
    both = run(from_textarena("TicTacToe-v0"), ScriptedPolicy(lambda messages, tools: "[4]"))
    assert both.status == "completed" and both.metrics["invalid_move"] in (0.0, 1.0)


def test_a_view_holds_what_that_player_said_and_heard():
    env = from_textarena("TicTacToe-v0")

    async def go():
        await env.reset(seed=0)
        first, *_ = await env.step(assistant("[0]"))
        second, *_ = await env.step(assistant("[8]"))
        return first.messages, second.messages

    first, second = asyncio.run(go())
    assert [m.role for m in first] == ["user"] and "Player 1" in first[0].text
    assert [m.role for m in second] == ["user", "assistant", "user"]
    assert second[1].text == "[0]" and "[8]" in second[2].text


def test_seeds_are_tasks_and_the_spec_rebuilds_the_environment():
    env = from_textarena(GUESSING, tasks=10, eval_tasks=3, system_prompt="Think.")
    again = make(EnvSpec.from_json(env.spec.to_json()))
    assert len(again.tasks.ids("train")) == 10 and len(again.tasks.ids("eval")) == 3
    numbers = set()
    for task in again.tasks.ids("train"):
        record = run(from_textarena(GUESSING, tasks=10), ScriptedPolicy(halve), task=task, seed=9)
        numbers.add(record.messages[record.actions[-1]].text)
    assert len(numbers) > 3  # the task is the seed, whatever the environment's seed is
    observation, info = asyncio.run(again.reset(options={"task": "train-2"}))
    assert info["task"] == "train-2" and observation[0].text == "Think."


def test_what_is_wrong_is_said():
    with pytest.raises(UnknownEnv, match="GuessTheNumber-v0"):
        from_textarena("GuesTheNumber-v0")
    with pytest.raises(ConfigError, match="reward_of=2"):
        from_textarena("TicTacToe-v0", reward_of=2)
    with pytest.raises(EnvError, match="Python"):
        from_textarena("Klondike-v0")
    with pytest.raises(ConfigError, match="nltk"):
        from_textarena("Wordle-v0")
    with pytest.raises(EnvError, match="no task 'x'"):
        asyncio.run(from_textarena(GUESSING).reset(options={"task": "x"}))


def test_a_game_that_never_ends_is_truncated():
    record = run(from_textarena("Bandit-v0", max_turns=2), ScriptedPolicy(lambda m, t: "hm"))
    assert record.status in ("truncated_turns", "completed") and record.turns <= 2


def test_names_that_are_left_out_here_are_still_there():
    """Whoever updates the pin looks at the list again."""
    assert all(any(name.startswith(odd) for name in ENV_REGISTRY) for odd in ODD)


def test_what_the_page_of_neighbours_shows_runs():
    run_snippets("TextArena")

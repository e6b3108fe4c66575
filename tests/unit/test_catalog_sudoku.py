"""Sudoku: one solution, rewards for right cells at once, and nothing for trying or repeating."""

import asyncio
import random
from itertools import islice

import pytest

from relax_agent.envs import ScriptedPolicy, make, play
from relax_agent.envs.catalog.grids import draw, show, solutions
from relax_agent.messages import ToolCall, assistant


def place(row, column, digit):
    return ToolCall(
        "place", {"row": row, "column": column, "digit": digit}, f"{row}{column}{digit}"
    )


async def steps(env, *moves, task="eval-00000"):
    """Play messages of moves; return all steps."""
    await env.reset(options={"task": task})
    return [await env.step(assistant(tool_calls=move)) for move in moves]


def cells(env, task="eval-00000", *, right=True):
    """Return the calls that fill the blanks, rightly or wrongly."""
    data = env.tasks[task].data
    size = env.unwrapped.size
    return [
        place(cell // size + 1, cell % size + 1, digit if right else digit % size + 1)
        for cell, digit in enumerate(data["solution"])
        if not data["puzzle"][cell]
    ]


@pytest.mark.parametrize(("size", "blanks", "count"), [(4, 8, 30), (4, 10, 30), (9, 40, 3)])
def test_a_puzzle_has_the_blanks_asked_for_and_one_solution(size, blanks, count):
    rng = random.Random(0)
    for _ in range(count):
        data = draw(rng, size, blanks).data
        assert data["puzzle"].count(0) == blanks
        assert list(islice(solutions(data["puzzle"]), 2)) == [data["solution"]]
        rows = [data["solution"][i * size : (i + 1) * size] for i in range(size)]
        for line in [*rows, *zip(*rows, strict=True)]:
            assert sorted(line) == list(range(1, size + 1))


def test_each_right_cell_pays_at_once_and_the_last_one_pays_the_bonus():
    env = make("relax/Sudoku-v0")
    *earlier, last = asyncio.run(steps(env, *[[cell] for cell in cells(env)]))
    assert [step[1] for step in earlier] == [0.5 / 8] * 7
    assert not any(step[2] or step[3] for step in earlier)
    assert last[1:4] == (0.5 / 8 + 0.5, True, False)
    assert last[4]["metrics"]["success"] == 1.0


def test_all_cells_may_be_filled_in_one_message():
    env = make("relax/Sudoku-v0")
    (step,) = asyncio.run(steps(env, cells(env)))
    assert (step[1], step[2]) == (1.0, True)
    assert step[0][-1].text.endswith(show(env.tasks["eval-00000"].data["solution"]))


def test_wrong_digits_cost_and_the_third_ends_the_episode():
    env = make("relax/Sudoku-v0")
    wrong = cells(env, right=False)
    result = asyncio.run(steps(env, [wrong[0]], [wrong[1]], [wrong[2]]))
    assert [step[1] for step in result] == [-0.1] * 3
    assert [step[2] for step in result] == [False, False, True]
    assert "wrong" in result[0][0][0].text
    assert result[2][4]["metrics"] | {"success": 0.0, "mistakes": 3.0} == result[2][4]["metrics"]


def test_after_the_third_wrong_digit_of_a_message_the_others_do_not_count():
    env = make("relax/Sudoku-v0")
    (step,) = asyncio.run(steps(env, [*cells(env, right=False)[:3], *cells(env)]))
    assert step[1:3] == (pytest.approx(-0.3), True)
    assert "over" in step[0][-1].text


def test_a_cell_that_is_full_pays_nothing_and_cannot_be_changed():
    env = make("relax/Sudoku-v0")
    first = cells(env)[0]
    again = [[first]] * 3
    result = asyncio.run(steps(env, *again))
    assert [step[1] for step in result] == [0.5 / 8, 0.0, 0.0]
    assert "full" in result[1][0][0].text


@pytest.mark.parametrize("move", [(0, 1, 1), (5, 1, 1), (1, -1, 1), (1, 1, 10), (10**9, 1, 1)])
def test_moves_outside_the_grid_are_answered_and_cost_a_turn(move):
    env = make("relax/Sudoku-v0")
    (step,) = asyncio.run(steps(env, [place(*move)]))
    assert step[1:4] == (0.0, False, False)
    assert "go from 1 to 4" in step[0][0].text


def test_trying_every_digit_in_every_cell_loses():
    def brute(messages, tools):
        tries = sum(len(message.tool_calls) for message in messages if message.role == "assistant")
        return place(1 + tries // 16 % 4, 1 + tries // 4 % 4, 1 + tries % 4)

    async def main():
        env = make("relax/Sudoku-v0", max_turns=100)
        tasks = env.tasks.ids()[:60]
        return [(await play(env, ScriptedPolicy(brute), task=task)).reward for task in tasks]

    rewards = asyncio.run(main())
    assert sum(rewards) / len(rewards) < 0.0


def test_the_whole_grid_is_shown_first_and_after_every_move():
    env = make("relax/Sudoku-v0")

    async def main():
        opening, _ = await env.reset(options={"task": "eval-00000"})
        result = [await env.step(assistant(tool_calls=[cell])) for cell in cells(env)[:2]]
        return [opening[-1].text, *[step[0][0].text for step in result]]

    texts = asyncio.run(main())
    assert texts[0] == show(env.tasks["eval-00000"].data["puzzle"])
    assert [text.count(".") - text.count("right.") for text in texts] == [8, 7, 6]


def test_text_moves_may_be_many_and_nonsense_is_answered_kindly():
    env = make("relax/Sudoku-v0", moves="text")
    moves = [cell.arguments for cell in cells(env)]
    lines = [f"{m['row']} {m['column']} = {m['digit']}" for m in moves]

    async def main():
        await env.reset(options={"task": "eval-00000"})
        said = ["Hello?", f"First {lines[0]}, then\n{lines[1]}", "", "\n".join(lines[2:])]
        return [await env.step(assistant(text)) for text in said]

    result = asyncio.run(main())
    assert "I see no move" in result[0][0][0].text
    assert [step[1] for step in result] == [0.0, 0.125, 0.0, pytest.approx(0.875)]
    assert [step[2] for step in result] == [False, False, False, True]
    assert env.tools.names == ()

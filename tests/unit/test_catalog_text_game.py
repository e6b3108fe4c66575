"""The text adventure: every house can be won, each subgoal pays once, and odd words do no harm."""

import asyncio
import random

import pytest

from relax_agent.envs import ScriptedPolicy, make, play
from relax_agent.envs.catalog.houses import BACK, Game, House, draw
from relax_agent.messages import assistant

HOUSE = House(
    exits={"hall": {"east": "attic"}, "attic": {"west": "hall"}},
    doors={("hall", "east"): "iron", ("attic", "west"): "iron"},
    things={"hall": ["iron key"], "attic": ["crown"]},
    treasure="crown",
)
WIN = ["take iron key", "unlock east", "go east", "take crown", "go west"]


def told(*commands):
    """Obey commands in a small house; return the game and what was told last."""
    game, words = Game(HOUSE), ""
    for command in commands:
        words = game.obey(command)
    return game, words


def test_the_small_house_is_won_by_five_commands():
    for count in range(len(WIN)):
        assert not told(*WIN[:count])[0].is_won
    game, _ = told(*WIN)
    assert game.is_won and game.progress == 3


def test_a_room_is_described_with_its_exits_things_and_what_is_carried():
    assert told()[0].look() == (
        "You are in the hall. Exits: east (locked iron door).\nHere: iron key. You carry: nothing."
    )
    assert told(*WIN[:2])[0].look() == (
        "You are in the hall. Exits: east.\nHere: nothing. You carry: iron key."
    )


@pytest.mark.parametrize(
    ("commands", "words"),
    [
        (["dance"], "I do not understand 'dance'. I know: look, go, take, unlock."),
        ([""], "I do not understand"),
        (["\n\n"], "I do not understand"),
        (["x" * 10_000], "I do not understand"),
        (["go east"], "The iron door is locked"),
        (["go up"], "no exit 'up'"),
        (["go"], "no exit ''"),
        (["take"], "no '' here"),
        (["take moon"], "no 'moon' here"),
        (["take iron key", "take iron key"], "no 'iron key' here"),
        (["unlock east"], "You do not carry the iron key."),
        (["unlock west"], "no locked door 'west'"),
        (["take iron key", "unlock east", "unlock east"], "no locked door 'east'"),
        (["look"], "You look around."),
        (["TAKE the Iron Key!"], "You take the iron key."),
        (["I think I should take it.\n> take iron key\n"], "You take the iron key."),
        (["take iron key", "unlock east", "east."], "You go east."),
    ],
)
def test_what_cannot_be_done_is_answered_in_words(commands, words):
    game, answer = told(*commands)
    assert words in answer
    assert len(answer) < 120 and not game.is_won


@pytest.mark.parametrize(("rooms", "doors"), [(2, 0), (2, 1), (6, 2), (10, 4), (5, 4)])
def test_every_key_lies_before_its_door_and_all_doors_are_on_the_way(rooms, doors):
    rng = random.Random(1)
    for _ in range(40):
        house = draw(rng, rooms, doors).data["house"]
        assert len(house.exits) == rooms and len(house.doors) == 2 * doors
        for room, exits in house.exits.items():
            for direction, behind in exits.items():
                assert house.exits[behind][BACK[direction]] == room
        steps = _walk(house)
        assert house.treasure in steps and len([s for s in steps if s.endswith("key")]) == doors


def _walk(house):
    """Take all that can be reached, opening doors as keys are found."""
    have, reached = [], {"hall"}
    while True:
        before = (len(have), len(reached))
        for room in sorted(reached):
            have += [thing for thing in house.things[room] if thing not in have]
            for direction, behind in house.exits[room].items():
                metal = house.doors.get((room, direction))
                if metal is None or f"{metal} key" in have:
                    reached.add(behind)
        if (len(have), len(reached)) == before:
            return have


def test_each_subgoal_pays_once_and_the_way_home_pays_the_rest():
    async def main():
        env = make("relax/TextGame-v0", rooms=2, doors=1)
        await env.reset(options={"task": "train-00000"})
        house = env.tasks["train-00000"].data["house"]
        (direction,) = house.exits["hall"]
        (key,) = house.things["hall"]
        commands = ["look", f"take {key}", f"take {key}", f"unlock {direction}"]
        commands += [f"unlock {direction}", f"go {direction}", f"take {house.treasure}"]
        commands += [f"go {BACK[direction]}"]
        return [await env.step(assistant(command)) for command in commands]

    steps = asyncio.run(main())
    third = pytest.approx(0.5 / 3)
    assert [step[1] for step in steps] == [0, third, 0, third, 0, 0, third, 0.5]
    assert [step[2] for step in steps] == [False] * 7 + [True]
    assert steps[-1][4]["metrics"] == {"success": 1.0, "turns": 8.0}


def test_sensible_words_at_random_hardly_ever_win():
    """A player who knows the commands but does not read: some subgoals, few treasures."""
    rng = random.Random(0)

    def babble(messages, tools):
        here = messages[-1].text.rpartition("Here: ")[2].partition(". You")[0].split(", ")
        way = rng.choice(sorted(BACK))
        return rng.choice([f"go {way}", f"unlock {way}", f"take {rng.choice(here)}"])

    async def main():
        env = make("relax/TextGame-v0")
        return [
            await play(env, ScriptedPolicy(babble), task=task)
            for task in env.tasks.ids("eval")[:60]
        ]

    records = asyncio.run(main())
    assert sum(r.metrics["success"] for r in records) / 60 < 0.05
    assert sum(r.reward for r in records) / 60 < 0.3


def test_an_episode_is_cut_after_the_turns_stated():
    env = make("relax/TextGame-v0", max_turns=3)
    record = asyncio.run(play(env, ScriptedPolicy(["look"] * 3), task="eval-00000"))
    assert (record.turns, record.truncated, record.terminated) == (3, True, False)
    assert record.metrics == {"success": 0.0, "turns": 3.0}

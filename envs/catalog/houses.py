"""The game inside ``relax/TextGame-v0``: rooms, locked doors, keys and a treasure.

A :class:`House` is drawn from a seed: a tree of rooms on a grid. The treasure lies in the room
farthest from the hall, the locked doors are on the way there, and the key of a door is never behind
it: every house can be solved. A :class:`Game` obeys commands in a house.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypeAlias

from relax_agent.envs.tasks import Task

STEPS = {"north": (0, 1), "east": (1, 0), "south": (0, -1), "west": (-1, 0)}
BACK = {"north": "south", "south": "north", "east": "west", "west": "east"}
ROOMS = (
    "kitchen",
    "library",
    "cellar",
    "attic",
    "study",
    "pantry",
    "chapel",
    "workshop",
    "gallery",
)
METALS = ("brass", "iron", "silver", "copper")
TREASURES = ("crown", "violin", "map", "ring", "coin")

Passage: TypeAlias = tuple[str, str, str]
"""A room, a direction, and the room that it leads to."""


@dataclass(frozen=True)
class House:
    """What an episode begins with; none of it changes."""

    exits: dict[str, dict[str, str]]
    """For each room, the directions and where they lead."""
    doors: dict[tuple[str, str], str]
    """The metal of each locked door, under the (room, direction) of both of its sides."""
    things: dict[str, list[str]]
    """What lies in each room."""
    treasure: str


class Game:
    """A house that is being played."""

    def __init__(self, house: House) -> None:
        self.room = "hall"
        self.carried: list[str] = []
        self._house = house
        self._things = {room: list(things) for room, things in house.things.items()}
        self._unlocked: set[str] = set()

    @property
    def progress(self) -> int:
        """Things taken and doors unlocked; never falls."""
        return len(self.carried) + len(self._unlocked)

    @property
    def is_won(self) -> bool:
        """Whether the treasure is in the hall."""
        return self.room == "hall" and self._house.treasure in self.carried

    def look(self) -> str:
        """Describe the room and what the player carries."""
        exits = [self._exit(direction) for direction in self._house.exits[self.room]]
        here, carried = ", ".join(self._things[self.room]), ", ".join(self.carried)
        return (
            f"You are in the {self.room}. Exits: {', '.join(exits)}.\n"
            f"Here: {here or 'nothing'}. You carry: {carried or 'nothing'}."
        )

    def _exit(self, direction: str) -> str:
        metal = self._lock(direction)
        return direction if metal is None else f"{direction} (locked {metal} door)"

    def _lock(self, direction: str) -> str | None:
        metal = self._house.doors.get((self.room, direction))
        return None if metal in self._unlocked else metal

    def obey(self, text: str) -> str:
        """Do what the last line says and tell what happened."""
        line = (text.strip().lower().splitlines() or [""])[-1].strip(" .!>")
        verb, _, rest = line.partition(" ")
        rest = rest.strip().removeprefix("the ")
        if line in STEPS:
            verb, rest = "go", line
        if verb == "look":
            return "You look around."
        known = {"go": self._go, "take": self._take, "unlock": self._unlock}
        if verb not in known:
            return f"I do not understand {line[:40]!r}. I know: look, go, take, unlock."
        return known[verb](rest)

    def _go(self, direction: str) -> str:
        if direction not in self._house.exits[self.room]:
            return f"There is no exit {direction[:40]!r} here."
        if metal := self._lock(direction):
            return f"The {metal} door is locked. Who carries its key can unlock {direction}."
        self.room = self._house.exits[self.room][direction]
        return f"You go {direction}."

    def _take(self, thing: str) -> str:
        if thing not in self._things[self.room]:
            return f"There is no {thing[:40]!r} here."
        self._things[self.room].remove(thing)
        self.carried.append(thing)
        return f"You take the {thing}."

    def _unlock(self, direction: str) -> str:
        metal = self._lock(direction)
        if metal is None:
            return f"There is no locked door {direction[:40]!r} here."
        if f"{metal} key" not in self.carried:
            return f"You do not carry the {metal} key."
        self._unlocked.add(metal)
        return f"You unlock the {metal} door."


def draw(rng: random.Random, rooms: int, doors: int) -> Task:
    """Draw a house in which the treasure is behind all of the doors."""
    while True:
        exits, ways = _rooms(rng, rooms)
        last = max(ways, key=lambda room: len(ways[room]))
        if len(ways[last]) >= doors:
            break
    house = House(exits, {}, {room: [] for room in ways}, rng.choice(TREASURES))
    metals = rng.sample(METALS, doors)
    for metal, passage in zip(metals, rng.sample(ways[last], doors), strict=True):
        room, direction, behind = passage
        house.doors[room, direction] = house.doors[behind, BACK[direction]] = metal
        before = [name for name, way in ways.items() if passage not in way]
        house.things[rng.choice(before)].append(f"{metal} key")
    house.things[last].append(house.treasure)
    return Task("", data={"house": house})


def _rooms(
    rng: random.Random, count: int
) -> tuple[dict[str, dict[str, str]], dict[str, list[Passage]]]:
    """Draw a tree of rooms; return their exits, and the way from the hall to each of them."""
    places = {"hall": (0, 0)}
    exits: dict[str, dict[str, str]] = {"hall": {}}
    ways: dict[str, list[Passage]] = {"hall": []}
    for name in rng.sample(ROOMS, count - 1):
        free = [
            (room, direction, (x + dx, y + dy))
            for room, (x, y) in places.items()
            for direction, (dx, dy) in STEPS.items()
            if (x + dx, y + dy) not in places.values()
        ]
        room, direction, places[name] = rng.choice(free)
        exits[room][direction] = name
        exits[name] = {BACK[direction]: room}
        ways[name] = [*ways[room], (room, direction, name)]
    return exits, ways

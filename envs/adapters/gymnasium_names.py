"""What the numbers of Gymnasium's own environments mean: names of actions and observations.

Atari games (``get_action_meanings``) and environments with an ``actions`` enumeration (MiniGrid)
tell the names of their actions themselves.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

ACTIONS: Mapping[str, tuple[str, ...]] = {
    "Acrobot": ("push_left", "no_push", "push_right"),
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
    "CliffWalking": ("up", "right", "down", "left"),
    "CliffWalkingSlippery": ("up", "right", "down", "left"),
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "LunarLander": ("nothing", "left_engine", "main_engine", "right_engine"),
    "MountainCar": ("left", "none", "right"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
}
"""Names of the actions of a Discrete action space, by the name in the id."""

COMPONENTS: Mapping[str, tuple[str, ...]] = {
    "Acrobot": (
        "cos(angle 1)", "sin(angle 1)", "cos(angle 2)", "sin(angle 2)",
        "angular velocity 1", "angular velocity 2",
    ),
    "Blackjack": ("your sum", "dealer shows", "usable ace"),
    "CartPole": ("cart position", "cart velocity", "pole angle", "pole angular velocity"),
    "LunarLander": (
        "x", "y", "x velocity", "y velocity", "angle", "angular velocity",
        "left leg touches", "right leg touches",
    ),
    "MountainCar": ("position", "velocity"),
    "MountainCarContinuous": ("position", "velocity"),
    "Pendulum": ("cos(angle)", "sin(angle)", "angular velocity"),
}  # fmt: skip
"""Names of the components of a Box or Tuple observation."""

TASKS: Mapping[str, str] = {
    "Acrobot": "Swing the free end of the two linked bars above the line by pushing the joint.",
    "Blackjack": "Come closer to 21 than the dealer without going over.",
    "CartPole": "Keep the pole on the cart upright by pushing the cart.",
    "CliffWalking": "Walk along the cliff to the goal without falling.",
    "CliffWalkingSlippery": "Walk along the slippery cliff to the goal without falling.",
    "FrozenLake": "Cross the frozen lake from S to the goal G without falling into a hole H.",
    "FrozenLake8x8": "Cross the frozen lake from S to the goal G without falling into a hole H.",
    "LunarLander": "Land softly between the flags.",
    "MountainCar": "Swing the car up the right hill.",
    "MountainCarContinuous": "Drive the car up the right hill with little force.",
    "Pendulum": "Swing the pendulum up and keep it upright.",
    "Taxi": "Pick up the passenger and drop them off at their destination.",
}
"""One sentence that says what to do."""


def action_names(name: str, env: Any, count: int) -> tuple[str, ...] | None:
    """Return the names of a Discrete action space of ``count`` actions, if anybody knows them."""
    known = ACTIONS.get(name) or _told_by(env)
    return known if known is not None and len(known) == count else None


def _told_by(env: Any) -> tuple[str, ...] | None:
    bare = env.unwrapped
    meanings = getattr(bare, "get_action_meanings", None)
    if callable(meanings):
        return tuple(str(each).lower() for each in meanings())
    actions = getattr(bare, "actions", None)
    if isinstance(actions, type) and issubclass(actions, enum.IntEnum):
        return tuple(each.name.lower() for each in actions)
    return None


def component_names(name: str, count: int) -> tuple[str, ...] | None:
    """Return the names of an observation's ``count`` components, if they are known."""
    known = COMPONENTS.get(name)
    return known if known is not None and len(known) == count else None


def describer(name: str, env: Any) -> Callable[[Any], str] | None:
    """Return the function that puts an observation of a grid world into words."""
    bare = env.unwrapped
    if name.startswith("FrozenLake") and hasattr(bare, "desc"):
        return lambda value: _cell(value, bare.ncol)
    if name.startswith("CliffWalking") and hasattr(bare, "shape"):
        rows, columns = bare.shape
        goal = f"; the goal is at row {rows - 1}, column {columns - 1}"
        return lambda value: _cell(value, columns) + goal
    if name == "Taxi" and hasattr(bare, "decode"):
        return lambda value: _taxi(*bare.decode(int(value)))
    return None


def _cell(value: Any, columns: int) -> str:
    row, column = divmod(int(value), int(columns))
    return f"you are at row {row}, column {column}"


def scene(name: str, env: Any) -> str:
    """Return the map of a grid world, which stays the same for the whole episode."""
    desc = getattr(env.unwrapped, "desc", None)
    if desc is None or not name.startswith(("FrozenLake", "Taxi")):
        return ""
    rows = [b"".join(row).decode() for row in desc.tolist()]
    note = "\n| is a wall, : is none" if name == "Taxi" else ""
    return "\n".join(rows) + note


_TAXI_STOPS = ("red (row 0, column 0)", "green (row 0, column 4)", "yellow (row 4, column 0)",
               "blue (row 4, column 3)")  # fmt: skip


def _taxi(row: int, column: int, passenger: int, goal: int) -> str:
    where = "in the taxi" if passenger == 4 else f"at {_TAXI_STOPS[passenger]}"
    return (
        f"the taxi is at row {row}, column {column}; the passenger is {where}"
        f" and wants to go to {_TAXI_STOPS[goal]}"
    )

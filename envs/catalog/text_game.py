"""``relax/TextGame-v0``: a small text adventure, played by typing commands.

Task: a house of ``rooms`` rooms with ``doors`` locked doors, drawn from a seed: find the treasure
behind them and bring it back to the hall, where the game begins. Half of all houses are held out.

Tools: none. A message is one command (its last line counts): ``look``, ``go north``,
``take brass key``, ``unlock east``. What cannot be done is answered in words, and costs a turn.

Reward: 1.0 in all. Half of it in equal parts for each key taken, each door unlocked and the
treasure taken, each paid once; the other half for bringing the treasure to the hall.

Written on :class:`Env` itself, without ``ToolEnv``, to show what an environment is made of.
"""

from __future__ import annotations

import re
from collections import deque
from functools import partial
from typing import Any

from relax_agent.envs.catalog.houses import BACK, METALS, ROOMS, TREASURES, Game, draw
from relax_agent.envs.catalog.shared import DrawnTasks, Expert, choose, within
from relax_agent.envs.core import Env, Info, StepResult
from relax_agent.envs.tasks import TaskSet
from relax_agent.errors import ResetNeeded
from relax_agent.messages import AssistantMessage, Message, Observation, system, user

RULES = """You play a text adventure. Find the treasure and bring it to the hall.
Reply with one command: look, go DIRECTION, take THING or unlock DIRECTION."""
_VIEW = re.compile(r"You are in the (\w+)\. Exits: (.+)\.\nHere: (.+)\. You carry: (.+)\.")
_EXIT = re.compile(r"(\w+)(?: \(locked (\w+) door\))?(?:, |$)")


class TextGameEnv(Env):
    """A text adventure: bring the treasure back to the hall. See the module's docstring."""

    def __init__(
        self,
        *,
        rooms: int = 6,
        doors: int = 2,
        train_tasks: int = 4096,
        eval_tasks: int = 512,
        task_seed: int = 0,
        max_turns: int = 40,
    ) -> None:
        """Make the environment.

        Args:
            rooms: Rooms of the house, the hall among them.
            doors: Locked doors between the hall and the treasure.
            train_tasks: How many houses to train on.
            eval_tasks: How many to hold out.
            task_seed: Other seeds give other houses.
            max_turns: Commands after which an episode is cut.
        """
        within("rooms", rooms, 2, len(ROOMS) + 1)
        within("doors", doors, 0, min(len(METALS), rooms - 1))
        within("max_turns", max_turns, 1)
        make = partial(draw, rooms=rooms, doors=doors)
        self.tasks: TaskSet = DrawnTasks(make, train_tasks, eval_tasks, task_seed, rooms, doors)
        self.max_turns, self._subgoals = max_turns, 2 * doors + 1
        self._running = False

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Put the player into the hall of a house."""
        await super().reset(seed=seed)
        task = await choose(self.tasks, options, self.rng)
        self.game = Game(task.data["house"])
        self.turn, self._running = 0, True
        return [system(RULES), user(self.game.look())], {"task": task.id}

    async def step(self, action: AssistantMessage) -> StepResult:
        """Carry out one command."""
        if not self._running:
            raise ResetNeeded("step() outside an episode", hint="await env.reset() first")
        self.turn += 1
        before = self.game.progress
        words = self.game.obey(action.text)
        reached = self.game.progress - before
        won = self.game.is_won
        truncated = not won and self.turn >= self.max_turns
        self._running = not (won or truncated)
        metrics = {"success": float(won), "turns": float(self.turn)}
        info: Info = {} if self._running else {"metrics": metrics}
        reward = 0.5 * reached / self._subgoals + 0.5 * won
        return [user(f"{words}\n{self.game.look()}")], reward, won, truncated, info

    @staticmethod
    def expert(noise: float = 0.0, seed: int = 0) -> Expert:
        """Return a policy that explores, remembers the way, and brings the treasure back."""
        return Expert(_plan, noise, seed)


class _Map:
    """What an explorer has seen: where each exit leads that it took, what it has, where it is."""

    def __init__(self, messages: list[Message]) -> None:
        self.room, self.here, self.carried = "", list[str](), list[str]()
        self.exits: dict[str, dict[str, str]] = {}
        """Where each exit of each room leads; nothing if it was not taken yet."""
        self.locked: dict[tuple[str, str], str] = {}
        command = ""
        for message in messages:
            if message.role == "user":
                self._see(message.text, command)
            command = message.text

    def _see(self, text: str, command: str) -> None:
        left, view = self.room, _VIEW.search(text)
        assert view is not None
        self.room, exits = view[1], dict(_EXIT.findall(view[2]))
        self.here, self.carried = view[3].split(", "), view[4].split(", ")
        known = self.exits.setdefault(self.room, dict.fromkeys(exits, ""))
        self.locked |= {(self.room, direction): metal for direction, metal in exits.items()}
        if left and left != self.room:
            direction = command.removeprefix("go ")
            self.exits[left][direction], known[BACK[direction]] = self.room, left

    def goal(self, room: str) -> str | None:
        """Say what to do in a room: unlock a door, or see what is behind it; None if nothing."""
        if {*TREASURES} & {*self.carried}:
            return "look" if room == "hall" else None
        for direction, behind in self.exits[room].items():
            metal = self.locked[room, direction]
            if metal and f"{metal} key" in self.carried:
                return f"unlock {direction}"
            if not metal and not behind:
                return f"go {direction}"
        return None


def _plan(messages: list[Message], tools: list[dict[str, Any]]) -> AssistantMessage | str:
    """Take what lies here; else do the next thing worth doing; else go to where there is one."""
    seen = _Map(messages)
    if seen.here != ["nothing"]:
        return f"take {seen.here[0]}"
    paths, visited = deque([(seen.room, "")]), {seen.room}
    while paths:
        room, first = paths.popleft()
        if command := seen.goal(room):
            return first or command
        for direction, behind in seen.exits[room].items():
            if behind and behind not in visited:
                visited.add(behind)
                paths.append((behind, first or f"go {direction}"))
    return "look"

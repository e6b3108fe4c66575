"""``relax/Sudoku-v0``: fill a Sudoku of 4×4 or 9×9 cells, with a reward for each right cell.

Task: a grid with exactly one solution, drawn from a seed, with ``blanks`` empty cells. The whole
grid comes back after every move. Half of all grids are held out.

Tools: ``place(row, column, digit)``. With ``moves="text"`` there is no tool: the model writes lines
such as ``2 3 = 4`` (row, column, digit) instead.

Reward: for every cell filled rightly 0.5 / ``blanks``, at once; for every wrong digit -0.1; when
the grid is full 0.5 more. A wrong digit is not written down, and the third one ends the episode.
A full cell gives nothing. So trying digits out loses, and repeating a move is idle.
"""

from __future__ import annotations

import re
from functools import partial
from math import isqrt
from typing import Any, Literal

from relax_agent.envs.catalog.grids import Grid, draw, show, solutions
from relax_agent.envs.catalog.shared import DrawnTasks, Expert, call, within
from relax_agent.envs.rewards import Rubric
from relax_agent.envs.tasks import Task
from relax_agent.envs.tool_env import Score, ToolEnv, Transcript
from relax_agent.errors import ConfigError
from relax_agent.messages import AssistantMessage, Message, user
from relax_agent.tools import tool

_MOVE = re.compile(r"\b(\d{1,2})[ ,]+(\d{1,2}) *= *(\d{1,2})\b")
_MAX_MISTAKES = 3


class SudokuEnv(ToolEnv):
    """A Sudoku that is filled cell by cell. See the module's docstring."""

    def __init__(
        self,
        *,
        size: Literal[4, 9] = 4,
        blanks: int | None = None,
        moves: Literal["tool", "text"] = "tool",
        train_tasks: int = 4096,
        eval_tasks: int = 512,
        task_seed: int = 0,
        max_turns: int | None = None,
    ) -> None:
        """Make the environment.

        Args:
            size: Rows and columns.
            blanks: Empty cells, by default 8 of a small and 40 of a large grid.
            moves: Whether the model calls a tool or writes its moves as text.
            train_tasks: How many grids to train on.
            eval_tasks: How many to hold out.
            task_seed: Other seeds give other grids.
            max_turns: Messages after which an episode is cut, by default ``blanks`` + 4.
        """
        if size not in (4, 9) or moves not in ("tool", "text"):
            raise ConfigError(f"size={size!r}, moves={moves!r}: 4 or 9, and 'tool' or 'text'")
        self.size, self.moves = size, moves
        self.blanks = {4: 8, 9: 40}[size] if blanks is None else blanks
        within("blanks", self.blanks, 1, {4: 10, 9: 50}[size])
        make = partial(draw, size=size, blanks=self.blanks)
        how = "call place" if moves == "tool" else "write lines such as `2 3 = 4`"
        super().__init__(
            tools=None if moves == "tool" else (),
            tasks=DrawnTasks(make, train_tasks, eval_tasks, task_seed, size, self.blanks),
            rubric=Rubric(step=[self.moves_made]),
            max_turns=self.blanks + 4 if max_turns is None else max_turns,
            system_prompt=f"Solve the Sudoku: {how}. Rows and columns count from 1.",
        )

    def setup(self, task: Task) -> None:
        """Put the puzzle on the table."""
        self.grid: list[int] = list(task.data["puzzle"])
        self.solution: Grid = task.data["solution"]
        self.mistakes, self._earned = 0, 0.0

    def first_messages(self, task: Task) -> list[Message]:
        """Show the grid."""
        return [user(show(self.grid))]

    @tool(inline=True)
    def place(self, row: int, column: int, digit: int) -> str:
        """Write a digit into an empty cell and show the grid.

        Args:
            row: Row, counted from 1 at the top.
            column: Column, counted from 1 at the left.
            digit: The digit.
        """
        return f"{self._write(row, column, digit)}\n{show(self.grid)}"

    def follow_up(self, task: Task, transcript: Transcript) -> str | None:
        """Carry out the moves of a text. Where moves are tool calls, a text is the end."""
        if self.moves == "tool":
            return None
        moves = _MOVE.findall(transcript.answer)[: self.size**2]
        said = [self._write(*map(int, move)) for move in moves]
        hint = "I see no move. Write one on each line, such as `2 3 = 4`."
        return "\n".join([*(said or [hint]), show(self.grid)])

    def _write(self, row: int, column: int, digit: int) -> str:
        cell = (row - 1) * self.size + column - 1
        if not all(1 <= number <= self.size for number in (row, column, digit)):
            return f"Row, column and digit go from 1 to {self.size}."
        if self.over or self.grid[cell]:
            return "The episode is over." if self.over else "That cell is full already."
        right = digit == self.solution[cell]
        if right:
            self.grid[cell] = digit
        self.mistakes += not right
        self._earned += 0.5 / self.blanks if right else -0.1
        self.over = self.mistakes == _MAX_MISTAKES or 0 not in self.grid
        return f"{digit} is right." if right else f"{digit} is wrong there."

    async def moves_made(self, task: Task, transcript: Transcript) -> float:
        """Reward the moves of this turn."""
        earned, self._earned = self._earned, 0.0
        return earned

    def score(self, task: Task, transcript: Transcript) -> Score:
        """Reward the full grid."""
        solved = 0 not in self.grid
        filled = 1 - self.grid.count(0) / self.blanks
        return Score(0.5 * solved, {"success": solved, "filled": filled, "mistakes": self.mistakes})

    @staticmethod
    def expert(noise: float = 0.0, seed: int = 0) -> Expert:
        """Return a policy that solves the grid that it sees, cell by cell."""
        return Expert(_plan, noise, seed)


def _plan(messages: list[Message], tools: list[dict[str, Any]]) -> AssistantMessage | str:
    """Solve the grid and place the first missing digit."""
    rows = re.findall(r"^[.\d](?: [.\d])+$", messages[-1].text, re.M)
    grid = tuple(int(digit) for digit in " ".join(rows).replace(".", "0").split())
    solved = next(solutions(grid))
    cell = grid.index(0)
    row, column = divmod(cell, isqrt(len(grid)))
    if not tools:
        return f"{row + 1} {column + 1} = {solved[cell]}"
    return call("place", row=row + 1, column=column + 1, digit=solved[cell])

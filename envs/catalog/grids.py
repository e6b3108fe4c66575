"""Sudoku grids: drawing, solving and showing them, for ``relax/Sudoku-v0``.

One backtracking search does everything: with a generator it draws a full grid, without one it
counts the solutions of a puzzle, and an expert plays what it finds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from math import isqrt
from typing import TypeAlias

from relax_agent.envs.tasks import Task

Grid: TypeAlias = tuple[int, ...]
"""Digits row by row; 0 is an empty cell."""


def draw(rng: random.Random, size: int, blanks: int) -> Task:
    """Draw a full grid and empty cells as long as the solution stays the only one."""
    solution = next(solutions((0,) * size**2, rng))
    while True:
        puzzle = list(solution)
        for cell in rng.sample(range(size**2), size**2):
            if puzzle.count(0) == blanks:
                return Task("", data={"puzzle": tuple(puzzle), "solution": solution})
            puzzle[cell] = 0
            if len(list(islice(solutions(tuple(puzzle)), 2))) > 1:
                puzzle[cell] = solution[cell]


def solutions(grid: Grid, rng: random.Random | None = None) -> Iterator[Grid]:
    """Yield every way to fill a grid, trying the cell with the fewest choices first."""
    size = isqrt(len(grid))
    choices = {cell: _choices(grid, cell, size) for cell, digit in enumerate(grid) if not digit}
    if not choices:
        yield grid
        return
    cell = min(choices, key=lambda each: len(choices[each]))
    digits = sorted(choices[cell])
    for digit in digits if rng is None else rng.sample(digits, len(digits)):
        yield from solutions((*grid[:cell], digit, *grid[cell + 1 :]), rng)


def _choices(grid: Grid, cell: int, size: int) -> set[int]:
    row, column = divmod(cell, size)
    box = isqrt(size)
    top, left = row - row % box, column - column % box
    seen = {*grid[row * size : (row + 1) * size], *grid[column::size]}
    for line in range(top, top + box):
        seen.update(grid[line * size + left : line * size + left + box])
    return {*range(1, size + 1)} - seen


def show(grid: Sequence[int]) -> str:
    """Return the grid as lines of digits; a dot is an empty cell."""
    size = isqrt(len(grid))
    rows = [grid[start : start + size] for start in range(0, len(grid), size)]
    return "\n".join(" ".join(str(digit or ".") for digit in row) for row in rows)

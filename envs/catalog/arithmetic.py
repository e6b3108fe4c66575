"""What the questions of ``relax/Calculator-v0`` are made of: two operations on whole numbers."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from relax_agent.envs.tasks import Task, TaskSet
from relax_agent.errors import ConfigError

WORDS = {"+": "plus", "-": "minus", "*": "times"}
_SYMBOLS = {word: symbol for symbol, word in WORDS.items()}
_FIRST_OPERATORS = "++--*"
_SECOND_OPERATORS = "+-***"
_IN_SYMBOLS = re.compile(r"\((\d+)([-+*])(\d+)\)([-+*])(\d+)")
_IN_WORDS = re.compile(r"(\d+) (plus|minus|times) (\d+), then (plus|minus|times) (\d+)")


@dataclass(frozen=True, slots=True)
class Question:
    """``(first op1 second) op2 third``, asked in symbols or in words."""

    first: int
    op1: str
    second: int
    op2: str
    third: int
    in_words: bool

    @property
    def expression(self) -> str:
        """The expression that gives the answer."""
        return f"({self.first}{self.op1}{self.second}){self.op2}{self.third}"

    @property
    def text(self) -> str:
        """The question as it is asked."""
        if not self.in_words:
            return f"What is {self.expression}?"
        begin = f"{self.first} {WORDS[self.op1]} {self.second}"
        return f"What is {begin}, then {WORDS[self.op2]} {self.third}?"

    @property
    def answer(self) -> int:
        """The value."""
        return _apply(_apply(self.first, self.op1, self.second), self.op2, self.third)

    @property
    def needs_parentheses(self) -> bool:
        """Whether leaving them out would change what is computed first."""
        return self.op2 == "*" and self.op1 != "*"

    @classmethod
    def parse(cls, text: str) -> Question | None:
        """Read a question back; None if the text holds none."""
        if found := _IN_SYMBOLS.search(text):
            return cls(int(found[1]), found[2], int(found[3]), found[4], int(found[5]), False)
        if found := _IN_WORDS.search(text):
            op1, op2 = _SYMBOLS[found[2]], _SYMBOLS[found[4]]
            return cls(int(found[1]), op1, int(found[3]), op2, int(found[5]), True)
        return None

    @classmethod
    def draw(cls, rng: random.Random, largest: int, word_share: float) -> Question:
        """Return a random question with operands from 0 to ``largest``."""
        first, second, third = (rng.randint(0, largest) for _ in range(3))
        op1, op2 = rng.choice(_FIRST_OPERATORS), rng.choice(_SECOND_OPERATORS)
        return cls(first, op1, second, op2, third, rng.random() < word_share)


@lru_cache(maxsize=16)
def make_tasks(
    max_operand: int, word_share: float, train_tasks: int, eval_tasks: int, seed: int
) -> TaskSet:
    """Return the tasks; equal arguments give equal tasks. Held-out expressions are held out whole.

    Raises:
        ConfigError: a number makes no sense, or there are not enough different questions.
    """
    if not 0.0 <= word_share <= 1.0:
        raise ConfigError(f"word_share must lie between 0 and 1, not {word_share}")
    room = 9 * (max_operand + 1) ** 3 if max_operand >= 0 else 0
    if min(train_tasks, eval_tasks) < 1 or train_tasks + eval_tasks > 2 * room // 3:
        raise ConfigError(
            f"{train_tasks} + {eval_tasks} tasks cannot be drawn from {room} expressions",
            hint="choose 1 or more of each, or a larger max_operand",
        )
    rng = random.Random(seed)
    held_out: dict[str, Question] = {}
    while len(held_out) < eval_tasks:
        question = Question.draw(rng, max_operand, word_share)
        held_out.setdefault(question.expression, question)
    train: dict[Question, None] = {}
    while len(train) < train_tasks:
        question = Question.draw(rng, max_operand, word_share)
        if question.expression not in held_out:
            train[question] = None
    return TaskSet(_tasks("train", list(train)), _tasks("eval", list(held_out.values())))


def _apply(left: int, operator: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def _tasks(split: str, questions: Sequence[Question]) -> list[Task]:
    return [Task(f"{split}-{i:05}", q.text, answer=q.answer) for i, q in enumerate(questions)]

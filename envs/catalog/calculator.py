"""``relax/Calculator-v0``: questions of two operations, a calculator, and an answer to give.

Task: a question such as "What is (17+5)*3?" or, in words, "What is 17 plus 5, then times 3?", which
means the same. Words are the harder half: where the second operation binds tighter than the first,
the expression needs parentheses that the question does not have. Most second operations are
multiplications, so this is common. No held-out expression ever appears in training, in symbols or
in words.

Tools: ``calculator(expression)``. The model writes the expression into a call and then repeats the
result.

Reward: 1.0 for a right answer if the calculator helped, 0.3 if it did not; nothing for a wrong one.

:class:`CalculatorExpert` plays the environment for a warm start. Its ``noise`` makes the mistakes
that reinforcement learning shall remove, a systematic one (forgotten parentheses) among them.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from relax_agent.envs.tasks import Task, TaskSet
from relax_agent.envs.tool_env import Score, ToolEnv, ToolSource, Transcript
from relax_agent.errors import ConfigError
from relax_agent.messages import AssistantMessage, Message, ToolCall, assistant
from relax_agent.tools.calculator import calculator

_WORDS = {"+": "plus", "-": "minus", "*": "times"}
_SYMBOLS = {word: symbol for symbol, word in _WORDS.items()}
_FIRST_OPERATORS = "++--*"
_SECOND_OPERATORS = "+-***"
_IN_SYMBOLS = re.compile(r"\((\d+)([-+*])(\d+)\)([-+*])(\d+)")
_IN_WORDS = re.compile(r"(\d+) (plus|minus|times) (\d+), then (plus|minus|times) (\d+)")
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,30}")
_REWARD_WITHOUT_CALL = 0.3


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
        begin = f"{self.first} {_WORDS[self.op1]} {self.second}"
        return f"What is {begin}, then {_WORDS[self.op2]} {self.third}?"

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


class CalculatorEnv(ToolEnv):
    """Two operations, one calculator. See the module's docstring."""

    tools = (calculator,)
    max_turns = 4
    system_prompt = "Use the calculator, then answer with the number alone."

    def __init__(
        self,
        *,
        max_operand: int = 20,
        word_share: float = 0.7,
        train_tasks: int = 4096,
        eval_tasks: int = 512,
        task_seed: int = 0,
        max_turns: int | None = None,
        tools: ToolSource | None = None,
    ) -> None:
        """Make the environment.

        Args:
            max_operand: Largest operand of a question; the smallest is 0.
            word_share: Share of questions that are asked in words.
            train_tasks: How many questions to train on.
            eval_tasks: How many questions to hold out.
            task_seed: Fixes the questions and the split.
            max_turns: Assistant messages after which an episode is cut.
            tools: Where the calculator runs, e.g. a ``RemoteToolset``; by default in this process.
        """
        tasks = make_tasks(max_operand, word_share, train_tasks, eval_tasks, task_seed)
        super().__init__(tools=tools, tasks=tasks, max_turns=max_turns)

    def score(self, task: Task, transcript: Transcript) -> Score:
        """Full reward for the right number after a call that worked; see the module."""
        right = bool(_WHOLE_NUMBER.fullmatch(transcript.answer)) and (
            int(transcript.answer) == task.answer
        )
        helped = bool(transcript.successful_calls)
        reward = (1.0 if helped else _REWARD_WITHOUT_CALL) if right else 0.0
        return Score(reward, {"success": float(right)})

    @staticmethod
    def expert(noise: float = 0.0, seed: int = 0) -> CalculatorExpert:
        """Return a policy that plays this environment; see :class:`CalculatorExpert`."""
        return CalculatorExpert(noise, seed)


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


class CalculatorExpert:
    """Writes the call, reads the result, gives the answer; sometimes in two calls.

    ``noise`` is the chance of a wrong operator (three times of four) or operand in a call, and a
    result is misread half as often. Questions in words lose their parentheses four times as often,
    whether it matters or not: from a noise of 0.15 on that is the rule, which even a greedy student
    then follows. Without noise the expert is always right.

    What it does depends on its seed, the question and how often it was asked before, so episodes
    that run at the same time do not disturb each other.
    """

    def __init__(self, noise: float = 0.0, seed: int = 0, *, two_call_share: float = 0.15) -> None:
        self.noise = noise
        self.two_call_share = two_call_share
        self._seed = seed
        self._asked: Counter[tuple[str, int]] = Counter()

    def act(self, messages: list[Message], tools: list[dict[str, Any]]) -> AssistantMessage:
        """Return the next message for a conversation of this environment."""
        asked = next(message for message in reversed(messages) if message.role == "user")
        question = Question.parse(asked.text)
        if question is None:
            return assistant("I only know questions of two operations.")
        history = messages[messages.index(asked) + 1 :]
        rng = self._generator(asked.text, len(history))
        if not history:
            return _call(tools, self._first_expression(question, rng))
        result = history[-1].text.strip()
        if _WHOLE_NUMBER.fullmatch(result) is None:
            return assistant("I cannot compute that.")
        if _is_first_half(history):
            return _call(tools, f"{result}{question.op2}{question.third}")
        return assistant(self._read(int(result), rng))

    def _generator(self, text: str, turn: int) -> random.Random:
        self._asked[text, turn] += 1
        return random.Random(f"{self._seed}/{text}/{turn}/{self._asked[text, turn]}")

    def _first_expression(self, question: Question, rng: random.Random) -> str:
        forgets = question.in_words and rng.random() < 4 * self.noise
        if rng.random() < self.noise:
            question = _spoilt(question, rng)
        if forgets:
            return question.expression.replace("(", "").replace(")", "")
        if rng.random() < self.two_call_share:
            return f"{question.first}{question.op1}{question.second}"
        return question.expression

    def _read(self, result: int, rng: random.Random) -> str:
        misreads = rng.random() < self.noise / 2
        return str(result + rng.choice([-10, -1, 1, 10]) if misreads else result)


def _apply(left: int, operator: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def _tasks(split: str, questions: Sequence[Question]) -> list[Task]:
    return [Task(f"{split}-{i:05}", q.text, answer=q.answer) for i, q in enumerate(questions)]


def _spoilt(question: Question, rng: random.Random) -> Question:
    """Change one part of a question into another one."""
    part = rng.choice(["op1", "op2", "op2", rng.choice(["first", "second", "third"])])
    largest = max(question.first, question.second, question.third, 9)
    choices: list[Any] = list(_WORDS) if part.startswith("op") else list(range(largest + 1))
    choices.remove(getattr(question, part))
    changes: dict[str, Any] = {part: rng.choice(choices)}
    return replace(question, **changes)


def _is_first_half(history: Sequence[Message]) -> bool:
    """Whether the last call computed the first operation only."""
    said = [message for message in history if isinstance(message, AssistantMessage)]
    if len(said) != 1 or not said[0].tool_calls:
        return False
    expression = str(said[0].tool_calls[0].arguments.get("expression", ""))
    return re.fullmatch(r"\d+[-+*]\d+", expression) is not None


def _call(tools: list[dict[str, Any]], expression: str) -> AssistantMessage:
    name = tools[0]["function"]["name"] if tools else "calculator"
    return assistant(tool_calls=[ToolCall(name, {"expression": expression}, "call_0")])

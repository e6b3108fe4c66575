"""The expert of ``relax/Calculator-v0``, which can be made to err as a beginner does."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from relax_agent.envs.catalog.arithmetic import WORDS, Question
from relax_agent.messages import AssistantMessage, Message, ToolCall, assistant

_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,30}")


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


def _spoilt(question: Question, rng: random.Random) -> Question:
    """Change one part of a question into another one."""
    part = rng.choice(["op1", "op2", "op2", rng.choice(["first", "second", "third"])])
    largest = max(question.first, question.second, question.third, 9)
    choices: list[Any] = list(WORDS) if part.startswith("op") else list(range(largest + 1))
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

"""What ready-made environments share: tasks drawn from a seed, and experts that err on purpose.

A :class:`DrawnTasks` set holds numbers; what a task is about is drawn when it is looked up, so ten
thousand puzzles cost nothing until they are played. A hash of what was drawn decides on its split:
nothing that is evaluated on ever comes up in training.
"""

from __future__ import annotations

import hashlib
import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from relax_agent.envs.tasks import Split, Task, TaskSet
from relax_agent.errors import ConfigError, EnvError
from relax_agent.messages import AssistantMessage, Message, ToolCall, assistant

Maker: TypeAlias = Callable[[random.Random], Task]
"""Draws a task; its id does not matter."""
Plan: TypeAlias = Callable[[list[Message], list[dict[str, Any]]], "AssistantMessage | str"]
"""What to say next, given the conversation so far and the tools' schemas."""
_MAX_DRAWS = 1000


@dataclass(frozen=True, slots=True)
class _DrawnTask:
    """A task that is drawn each time it is looked up, the same one each time."""

    id: str
    make: Maker
    seed: str
    held_out: bool

    def load(self) -> Task:
        rng = random.Random(self.seed)
        for _ in range(_MAX_DRAWS):
            task = self.make(rng)
            if is_held_out((task.prompt, task.answer, task.data)) == self.held_out:
                return Task(self.id, task.prompt, task.answer, task.data)
        raise ConfigError(
            f"nothing can be drawn for {self.id}", hint="choose a larger size or difficulty"
        )


class DrawnTasks(TaskSet):
    """Numbered tasks that ``make`` draws; equal arguments give equal tasks."""

    def __init__(self, make: Maker, train: int, eval: int, *recipe: object) -> None:
        """Make the set.

        Args:
            make: Draws one task from a generator.
            train: How many tasks to train on.
            eval: How many to hold out.
            recipe: A seed, and whatever else changes what ``make`` draws.
        """
        within("train_tasks", train, 1)
        within("eval_tasks", eval, 1)
        self._recipe = f"{recipe}"

        def numbered(split: Split, count: int) -> list[_DrawnTask]:
            ids = [f"{split}-{i:05}" for i in range(count)]
            return [_DrawnTask(i, make, f"{recipe}/{i}", split == "eval") for i in ids]

        super().__init__(numbered("train", train), numbered("eval", eval))

    def fingerprint(self) -> str:
        """Return a hash of the ids and of what decides on the draws."""
        return hashlib.sha256(f"{self._recipe}/{[*self._tasks]}".encode()).hexdigest()[:16]


def is_held_out(thing: object, one_in: int = 2) -> bool:
    """Whether something belongs to the eval split; its ``repr`` decides."""
    return zlib.crc32(repr(thing).encode()) % one_in == 0


async def choose(tasks: TaskSet, options: Mapping[str, Any] | None, rng: random.Random) -> Task:
    """Return the task that a reset's options name (``task``), or one of their ``split``."""
    given = dict(options or {})
    task_id, split = given.pop("task", None), given.pop("split", "train")
    if given:
        raise EnvError(f"unknown reset option {next(iter(given))!r}", hint="task or split")
    return await tasks.fetch(task_id or rng.choice(tasks.ids(split)))


def within(name: str, value: int, least: int, most: int | None = None) -> None:
    """Raise ConfigError if the argument ``name`` is out of its range."""
    if value < least or (most is not None and value > most):
        words = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name} must be {words}, not {value}")


def call(name: str, /, **arguments: Any) -> AssistantMessage:
    """Return a message that calls one tool."""
    return assistant(tool_calls=[ToolCall(name, arguments, "call_0")])


def said(messages: Sequence[Message]) -> list[AssistantMessage]:
    """Return what the policy itself has said so far."""
    return [message for message in messages if isinstance(message, AssistantMessage)]


class Expert:
    """A policy made of a plan, which slips with a chance of ``noise`` in each message.

    A slip changes one number or drops one word of what the plan says. It depends on the seed, the
    conversation and how often that came up, so episodes that run side by side do not disturb
    each other.
    """

    def __init__(self, plan: Plan, noise: float = 0.0, seed: int = 0) -> None:
        if not 0.0 <= noise <= 1.0:
            raise ConfigError(f"noise is a share from 0 to 1, not {noise}")
        self.noise = noise
        self._plan = plan
        self._seed = seed
        self._seen: Counter[int] = Counter()

    def act(self, messages: list[Message], tools: list[dict[str, Any]]) -> AssistantMessage:
        """Return the next message."""
        planned = self._plan(messages, tools)
        action = assistant(planned) if isinstance(planned, str) else planned
        if not self.noise:
            return action
        state = zlib.crc32("\n".join(message.text for message in messages).encode())
        self._seen[state] += 1
        rng = random.Random(f"{self._seed}/{state}/{self._seen[state]}")
        return _slip(action, rng) if rng.random() < self.noise else action


def _slip(action: AssistantMessage, rng: random.Random) -> AssistantMessage:
    if not action.tool_calls:
        return assistant(_spoil(action.text, rng))
    first, *others = action.tool_calls
    arguments = dict(first.arguments)
    if arguments:
        name = rng.choice(sorted(arguments))
        arguments[name] = _spoil(arguments[name], rng)
    return assistant(tool_calls=[replace(first, arguments=arguments), *others])


def _spoil(value: Any, rng: random.Random) -> Any:
    if isinstance(value, int):
        return value + rng.choice([-1, 1])
    text = str(value)
    if numbers := list(re.finditer(r"\d+", text)):
        chosen = rng.choice(numbers)
        wrong = max(0, int(chosen[0]) + rng.choice([-1, 1, 10]))
        return text[: chosen.start()] + str(wrong) + text[chosen.end() :]
    words = text.split()
    words.pop(rng.randrange(len(words))) if words else None
    return " ".join(words)

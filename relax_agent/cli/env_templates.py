"""The files that ``relax-agent envs new`` writes: an environment that works, and its test.

``@name@`` stands for the module, ``@Name@`` for the class, ``@id@`` for the environment's id.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Template:
    """One kind of environment to begin with."""

    about: str
    """What it is, in a few words."""
    code: str
    right: str
    """A script that earns the whole reward, as Python code."""
    wrong: str
    """A script that earns nothing."""
    task: str
    """The task that both play."""
    extra: str | None = None
    """The extra that it needs."""


_TOOL = '''\
"""@id@: how many letters has a word?"""

from relax_agent import Task, TaskSet, ToolEnv, register, tool

WORDS = ("apple", "banana", "blackberry", "cherry", "fig", "pear", "raspberry", "strawberry")


@tool
def count_letters(word: str) -> int:
    """Count the letters of a word.

    Args:
        word: The word.
    """
    return len(word)


@register("@id@")
class @Name@(ToolEnv):
    """Count letters: 1.0 for the right number, 0.0 for a wrong one."""

    tools = [count_letters]
    system_prompt = "Use the tool, then answer with the number alone."
    tasks = TaskSet.split(
        [Task(word, f"How many letters has {word!r}?", len(word)) for word in WORDS],
        eval_share=0.3,
    )

    def score(self, task, transcript):
        return float(transcript.answer == str(task.answer))
'''

_TEXT = '''\
"""@id@: guess a number by hints, over several turns."""

from relax_agent import Task, TaskSet, ToolEnv, register

NUMBERS = {split: [n for n in range(1, 101) if (n % 5 == 0) == split] for split in (True, False)}
QUESTION = "I think of a number from 1 to 100. What is it?"


@register("@id@")
class @Name@(ToolEnv):
    """Guess a number: 1.0 at once, less with each guess, 0.0 after ten."""

    max_turns = 10
    system_prompt = "Answer with one number alone."
    tasks = TaskSet(
        train=[Task(f"n{n}", QUESTION, n) for n in NUMBERS[False]],
        eval=[Task(f"n{n}", QUESTION, n) for n in NUMBERS[True]],
    )

    def follow_up(self, task, transcript):  # a reply, or None for the end
        if not transcript.answer.isdecimal():
            return "Answer with one number."
        guess = int(transcript.answer)
        return None if guess == task.answer else "Higher." if guess < task.answer else "Lower."

    def score(self, task, transcript):
        return (11 - transcript.turns) / 10 if transcript.answer == str(task.answer) else 0.0
'''

_IMAGE = '''\
"""@id@: count the squares in a picture."""

import random

import numpy as np

from relax_agent import Task, TaskSet, ToolEnv, register
from relax_agent.media import encode_png


def ask(seed: int) -> Task:
    rng = random.Random(seed)
    count = rng.randint(1, 9)
    pixels = np.full((128, 128, 3), 255, np.uint8)
    for spot in rng.sample(range(16), count):
        y, x = 32 * (spot // 4), 32 * (spot % 4)
        pixels[y + 8 : y + 24, x + 8 : x + 24] = (200, 40, 40)
    return Task(f"picture-{seed}", ("How many squares do you see?", encode_png(pixels)), count)


@register("@id@")
class @Name@(ToolEnv):
    """Count squares: 1.0 for the right number, 0.0 for a wrong one."""

    system_prompt = "Answer with the number alone."
    tasks = TaskSet(train=map(ask, range(40)), eval=map(ask, range(40, 60)))

    def score(self, task, transcript):
        return float(transcript.answer == str(task.answer))
'''

TEST = '''\
"""@id@ keeps the contract, can be solved, and gives nothing for a wrong answer."""

import asyncio

from relax_agent import @imports@check_env, make, play

import @name@  # noqa: F401  registers the environment


def reward(*script):
    async def main():
        async with make("@id@") as env:
            return await play(env, ScriptedPolicy(script), task="@task@", seed=0)

    return asyncio.run(main()).reward


def test_it_keeps_the_contract():
    check_env("@id@")


def test_a_right_answer_earns_everything():
    assert reward(@right@) == 1.0


def test_a_wrong_answer_earns_nothing():
    assert reward(@wrong@) == 0.0
'''

TEMPLATES = {
    "tool": Template(
        "a tool to call, then an answer",
        _TOOL,
        'ToolCall("count_letters", {"word": "banana"}), "6"',
        '"7"',
        "banana",
    ),
    "text": Template(
        "several turns of text, without tools",
        _TEXT,
        '"50"',
        ", ".join(['"1"'] * 10),
        "n50",
    ),
    "image": Template("a question about a picture", _IMAGE, '"8"', '"0"', "picture-40",
                      extra="media"),
}  # fmt: skip


def environment_code(kind: str, name: str, class_name: str, env_id: str) -> str:
    """Return the environment's file."""
    return _filled(TEMPLATES[kind].code, name, class_name, env_id)


def code_of_test(kind: str, name: str, class_name: str, env_id: str) -> str:
    """Return the file of its test."""
    template = TEMPLATES[kind]
    names = [each for each in ("ScriptedPolicy", "ToolCall") if each in TEST + template.right]
    text = TEST.replace("@imports@", "".join(f"{each}, " for each in names))
    text = text.replace("@right@", template.right).replace("@wrong@", template.wrong)
    return _filled(text.replace("@task@", template.task), name, class_name, env_id)


def _filled(text: str, name: str, class_name: str, env_id: str) -> str:
    return text.replace("@id@", env_id).replace("@Name@", class_name).replace("@name@", name)

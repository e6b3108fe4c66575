"""What authors easily get wrong about gold answers: told in the prompt, or never to be met.

An answer in its own prompt is told from a coincidence (a number of the question, a choice among
several) by the answers of other tasks, which stand in a prompt just as often then.

Whether a score can be right at all is tried: an episode that says the gold answer, in the forms
that environments usually ask for, must earn more than one that says something else.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from relax_agent.envs.checking.answers import Planted, plant
from relax_agent.envs.checking.lab import CallFailed, Lab
from relax_agent.envs.checking.places import place_of, place_of_method
from relax_agent.envs.checking.report import Findings
from relax_agent.envs.checking.running import Check
from relax_agent.envs.checking.subject import authors_class
from relax_agent.envs.core import Env
from relax_agent.envs.policies import ScriptedPolicy
from relax_agent.envs.tasks import Task, TaskSet

_READ = 24
"""Tasks whose prompts are read."""
_TRIED = 3
"""Tasks that are played with their gold answers."""
_LEAST = 3
"""Characters of an answer that does not stand in a prompt by chance."""
_PASSAGE = 1_000
"""A longer prompt holds a text that the answer is to be found in."""
_CHOICES = re.compile(r"^\s*[(\[]?[A-Ha-h1-8][)\].:]\s", re.M)
_WRONG = "I have no idea."
_FORMS = (
    "{}",
    "\\boxed{{{}}}",
    "<answer>{}</answer>",
    "The answer is {}",
    "Answer: {}",
    "#### {}",
    "Final answer: \\boxed{{{}}}",
)
"""How a model is usually asked to say its answer."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A task whose gold answer is a plain text or number."""

    id: str
    answer: str
    is_text: bool
    prompt: str


def _known(tasks: Any, count: int) -> list[_Known]:
    if not isinstance(tasks, TaskSet) or tasks.ids_only:
        return []
    found: list[_Known] = []
    for task_id in [*tasks.ids("train")[:count], *tasks.ids("eval")[:count]][:count]:
        task = tasks[task_id]
        text = _plain_answer(task)
        if text:
            prompt = "\n".join(message.text for message in task.to_messages())
            found.append(_Known(task_id, text, isinstance(task.answer, str), prompt))
    return found


def _plain_answer(task: Task) -> str:
    if isinstance(task.answer, bool) or not isinstance(task.answer, (str, int, float)):
        return ""
    return str(task.answer).strip()


# -- in the prompt ---------------------------------------------------------------------------------


async def _prompts(lab: Lab, tell: Findings) -> None:
    env = await lab.main()
    read = [task for task in _known(env.tasks, _READ) if not _is_question_of_choice(task.prompt)]
    own = [task for task in read if _stands(task.answer, task.prompt)]
    by_chance = _share_of_others(read)
    if len(read) > 1:
        bad = len(own) > len(read) / 2 and len(own) / len(read) > 2 * by_chance
    else:
        bad = bool(own) and (len(own[0].answer) >= _LEAST or _is_named(own[0]))
    if not bad:
        return
    words = f"the gold answer stands in the prompt of {len(own)} of {len(read)} tasks"
    told = f"{words}, such as {own[0].id!r}: {own[0].answer[:60]!r}"
    hint = "take it out, unless the prompt offers it as one of several choices"
    tell.warn(f"{told}; {hint}", place_of(authors_class(env)))


def _is_question_of_choice(prompt: str) -> bool:
    return len(prompt) > _PASSAGE or len(_CHOICES.findall(prompt)) > 1


def _stands(answer: str, prompt: str) -> bool:
    found = re.search(rf"(?<!\w){re.escape(answer.lower())}(?![\w])", prompt.lower())
    return found is not None


def _is_named(task: _Known) -> bool:
    """Whether a prompt calls the answer what it is: ``(gold: 8)``."""
    words = r"\b(gold|answer|solution|label|target)s?\b(\W+is)?\W{1,8}"
    return bool(re.search(rf"{words}{re.escape(task.answer)}(?!\w)", task.prompt, re.I))


def _share_of_others(read: Sequence[_Known]) -> float:
    """Return how often a prompt holds the answer of another task, where that is another answer."""
    pairs = [
        (one, other) for one in read for other in read if one.answer.lower() != other.answer.lower()
    ]
    return sum(_stands(b.answer, a.prompt) for a, b in pairs) / len(pairs) if pairs else 0.0


# -- never right -----------------------------------------------------------------------------------


async def _right(lab: Lab, tell: Findings) -> None:
    """Try: only where an episode ends on an answer, and where no tool may be needed for it."""
    env = await lab.main()
    tasks = _known(env.tasks, _TRIED)
    if not tasks:
        tell.seen("not tried: its answers are no plain texts or numbers")
        return
    for task in tasks:
        wrong = await _earned(lab, env, task, _WRONG)
        if wrong is None:
            tell.seen("not tried: an answer does not end its episodes")
            return
        for said in _ways(task.answer):
            right = await _earned(lab, env, task, said)
            if right is None or right > wrong:
                return
    if lab.schemas(env) and (tasks[0].is_text or not await _right_as_text(lab, tasks[0])):
        tell.seen("not tried: an answer may need its tools")
        return
    words = f"the gold answer earns no more than {_WRONG!r} (task {tasks[0].id!r})"
    hint = "let score() compare what the prompt asks the model to say"
    if not tasks[0].is_text:
        hint = "the answer of a transcript is text: float(transcript.answer == str(task.answer))"
        hint += ", or numeric_match in a Rubric"
    kind = authors_class(env)
    where = place_of_method(kind, "score") if hasattr(kind, "score") else ""
    tell.warn(f"{words}; {hint}", where or place_of_method(kind, "step"))


async def _right_as_text(lab: Lab, task: _Known) -> bool:
    """Tell whether the answer would earn something if the task held it as text."""
    if lab.single or lab.subject.url:
        return False
    async with lab.fresh(here=True) as env:
        assert env.tasks is not None
        if not plant(env, _AsText(env.tasks)):
            return False
        right, wrong = [await _earned(lab, env, task, said) for said in (task.answer, _WRONG)]
    return right is not None and wrong is not None and right > wrong


class _AsText(Planted):
    """The same tasks with their answers as text."""

    def _stand_in(self, task: Task) -> Task:
        other = copy.copy(task)
        object.__setattr__(other, "_answer", str(task.answer))
        return other


def _ways(answer: str) -> Iterator[str]:
    return (form.format(answer) for form in _FORMS)


async def _earned(lab: Lab, env: Env, task: _Known, said: str) -> float | None:
    """Return the reward of an episode of one answer; None if that does not end it."""
    try:
        policy = ScriptedPolicy([said])
        trace = lab.sound(await lab.play(env, policy, task=task.id, max_turns=1))
    except CallFailed:
        return None  # told by the check of steps
    return trace.turns[-1].reward if trace.ended and trace.turns[-1].terminated else None


GOLD_CHECKS = [
    Check("prompts", "no prompt tells its gold answer", _prompts),
    Check("right answer", "the gold answer earns more than a wrong one", _right),
]

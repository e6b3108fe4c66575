"""The proof that gold answers stay with the environment.

Every answer is replaced by a stand-in of the same type that occurs nowhere by chance, episodes are
played, and everything that leaves the environment is searched for stand-ins: observations, infos,
tool schemas and results, the words of errors, and what is told to the other side of a connection.
An environment that cannot work with stand-ins (a board is made of the answer, say), or does not
take its answers from ``self.tasks``, is searched for its real answers instead, where these are
long enough not to occur by chance.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from relax_agent.envs.checking.lab import CallFailed, Lab, Trace, Turn
from relax_agent.envs.checking.places import place_of, place_of_method
from relax_agent.envs.checking.report import Findings
from relax_agent.envs.checking.running import Check
from relax_agent.envs.checking.subject import authors_class
from relax_agent.envs.core import Env
from relax_agent.envs.policies import Policy, RandomPolicy, ScriptedPolicy
from relax_agent.envs.tasks import Task, TaskSet
from relax_agent.errors import RelaxError
from relax_agent.messages import Message, Text, ToolCall, assistant

_SECRET = re.compile(
    r"(the_|gold_|correct_|right_|true_|final_)?(answers?|solutions?)|gold|ground_?truth", re.I
)
"""Keys of ``Task.data`` whose values are answers too."""
_TASKS = 3
_LEAST_TEXT, _LEAST_NUMBER = 6, 10_000
"""Real answers shorter or smaller than these may occur by chance."""


async def _answers(lab: Lab, tell: Findings) -> None:
    if lab.subject.url or lab.single:
        what = "it runs elsewhere" if lab.subject.url else "there is only this one environment"
        tell.skip(f"{what}; give its id or class to prove that no answer leaves it")
        return
    async with lab.fresh(here=True) as env:
        tasks: Any = env.tasks
        if tasks is None:
            tell.seen("it has no tasks, and so no gold answers")
            return
        if not isinstance(tasks, TaskSet) or tasks.ids_only or not len(tasks):
            tell.skip("its tasks cannot be looked into")
            return
        planted = Planted(tasks)
        real = _real_answers(tasks)
        if not plant(env, planted):
            tell.skip("its tasks cannot be replaced by stand-ins")
            return
        used = await _search_planted(lab, tell, env, planted)
    await _search_real(lab, tell, real, everywhere=not used)
    if used:
        tell.seen("no stand-in for an answer left the environment")
    else:
        tell.seen("no answer was seen outside (it does not work with stand-ins; looked for real)")


class Planted(TaskSet):
    """The same tasks with stand-ins for answers."""

    def __init__(self, tasks: TaskSet) -> None:
        super().__init__()
        self._inner = tasks
        self._tasks = tasks._tasks
        self._ids = tasks._ids
        self.needles: dict[str, str] = {}
        """What to search for, and what it stands for."""

    def __getitem__(self, task_id: str) -> Task:
        return self._stand_in(self._inner[task_id])

    async def fetch(self, task_id: str) -> Task:
        """Look a task up; see :meth:`TaskSet.fetch`."""
        return self._stand_in(await self._inner.fetch(task_id))

    def fingerprint(self) -> str:
        """Return that of the real tasks: a hash tells nothing."""
        return self._inner.fingerprint()

    def _stand_in(self, task: Task) -> Task:
        other = copy.copy(task)
        maker = _Maker(task.id, self.needles)
        data = {
            key: maker.value(value) if _SECRET.fullmatch(str(key)) else value
            for key, value in task.data.items()
        }
        object.__setattr__(other, "_answer", maker.value(task.answer))
        object.__setattr__(other, "_data", data)
        return other


class _Maker:
    """Makes stand-ins of the same types for the answers of one task."""

    def __init__(self, task_id: str, needles: dict[str, str]) -> None:
        self._task_id = task_id
        self._needles = needles
        self._count = 0

    def value(self, value: Any) -> Any:
        """Return a stand-in for a value; parts that cannot be one stay what they are."""
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, int):
            return self._number()
        if isinstance(value, float):
            return self._number() + 0.5
        if isinstance(value, str):
            return self._text(value)
        if type(value) in (list, tuple, set, frozenset):
            return type(value)(self.value(item) for item in value)
        if is_dataclass(value) and not isinstance(value, type):
            return self._dataclass(value)
        if isinstance(value, dict):
            return {key: self.value(item) for key, item in value.items()}
        return value

    def _dataclass(self, value: Any) -> Any:
        other = copy.copy(value)
        for each in fields(value):
            object.__setattr__(other, each.name, self.value(getattr(value, each.name)))
        return other

    def _token(self) -> bytes:
        self._count += 1
        return hashlib.sha256(f"stand-in/{self._task_id}/{self._count}".encode()).digest()

    def _number(self) -> int:
        number = 10**8 + int.from_bytes(self._token()[:4]) % (9 * 10**8)
        self._needles[str(number)] = self._needles[f"{number:,}"] = self._task_id
        return number

    def _text(self, value: str) -> str:
        text = value.strip()
        if re.fullmatch(r"[-+]?\d+", text):
            return str(self._number())
        if re.fullmatch(r"[-+]?\d*\.\d+", text):
            return f"{self._number()}.5"
        if text[:1] in "[{":
            try:
                return json.dumps(self.value(json.loads(text)))
            except ValueError:
                pass
        token = f"standin{self._token().hex()[:12]}"
        self._needles[token] = self._task_id
        return token


def plant(env: Env, planted: Planted) -> bool:
    """Exchange the tasks of an environment; tell whether it let that happen."""
    inner = env.unwrapped
    try:
        inner.tasks = planted
    except AttributeError:  # a property without a setter
        return False
    return inner.tasks is planted


# -- with stand-ins ------------------------------------------------------------------------------


async def _search_planted(lab: Lab, tell: Findings, env: Env, planted: Planted) -> bool:
    """Play on stand-ins and search; tell whether the environment took them."""
    kind = authors_class(env)
    took = False
    ids = [*planted.ids("train")[:_TASKS], *planted.ids("eval")[:1]]
    for task_id in ids:
        for policy in _policies(lab, env):
            try:
                trace = await _play_searching(lab, tell, env, policy, task_id, planted.needles)
                took |= bool(planted.needles) and bool(trace.turns)
            except CallFailed as failed:
                found = _found(planted.needles, str(failed.error))
                if found and _meant(failed.error):
                    words = f"the error that {failed.call} raises tells the answer of {found!r}"
                    tell.fail(f"{words}; say what is wrong without it", failed.where)
                took |= failed.call == "step()" and bool(planted.needles)
            if not tell.empty:
                return True
    told = _manifest(env)
    found = _found(planted.needles, told)
    if found:
        words = f"what a client is told of it holds the answer of {found!r}: look at tool schemas"
        tell.fail(f"{words} and the constructor's arguments", place_of(kind))
    return took


def _meant(error: BaseException) -> bool:
    """Whether the words of an error are the author's, not Python's about an odd stand-in."""
    return isinstance(error, RelaxError) and error.__cause__ is None


async def _play_searching(
    lab: Lab, tell: Findings, env: Env, policy: Policy, task_id: str, needles: dict[str, str]
) -> Trace:
    kind = authors_class(env)
    said: list[str] = []

    def search(turn: Turn) -> None:
        call = "step" if turn.action is not None else "reset"
        if turn.action is not None:
            said.append(_text_of([turn.action]))
        for what, text in _outside(env, turn):
            found = _found(needles, text)
            if found and not any(_found(needles, each) for each in said):
                words = f"{what} of {call}() holds the gold answer of the task {found!r}"
                hint = "keep it in self.task; the model and an agent program see all of that"
                tell.fail(f"{words}; {hint}", place_of_method(kind, call))

    return await lab.play(env, policy, task=task_id, max_turns=6, after=search)


def _policies(lab: Lab, env: Env) -> Iterator[Policy]:
    """Ways to play that may make an environment talk."""
    yield RandomPolicy(lab.seed)
    yield ScriptedPolicy(lambda messages, tools: "I give up. What is the answer?")
    yield ScriptedPolicy(_each_tool_once(lab.seed))
    expert = lab.expert(env)
    if expert is not None:
        yield expert


def _each_tool_once(seed: int) -> Any:
    """Call the tools one after the other, then answer."""
    picks = RandomPolicy(seed, call_share=1.0)
    called: list[str] = []

    def act(messages: list[Message], tools: list[dict[str, Any]]) -> Any:
        for schema in tools:
            name = schema["function"]["name"]
            if name not in called:
                called.append(name)
                return picks.act(messages, [schema])
        return assistant("wrong")

    return act


def _outside(env: Env, turn: Turn) -> Iterator[tuple[str, str]]:
    """Everything that one answer of the environment tells, with its name."""
    yield "the observation", _text_of(turn.messages)
    yield "the info", repr(turn.info)
    try:
        yield "the tools' schemas after a call", json.dumps(env.tools.schemas(), default=repr)
    except Exception:  # told by the check of tools
        return


def _text_of(messages: list[Any]) -> str:
    out = []
    for message in messages:
        out += [str(message.name or ""), str(message.tool_call_id or "")]
        for part in message.content:
            out.append(part.text if isinstance(part, Text) else part.data.decode("latin-1"))
        calls: tuple[ToolCall, ...] = getattr(message, "tool_calls", ())
        out += [f"{call.name} {call.arguments!r}" for call in calls]
        out.append(str(getattr(message, "reasoning", None) or ""))
    return "\n".join(out)


def _found(needles: Mapping[str, str], text: str) -> str | None:
    """Return the task whose answer a text holds."""
    lower = text.lower()
    return next((task for needle, task in needles.items() if needle in lower), None)


def _manifest(env: Env) -> str:
    """Return what the other side of a connection is told before the first episode."""
    told: list[Any] = []
    try:
        told.append(env.tools.schemas())
        told.append(None if env.spec is None else json.loads(env.spec.to_json())["kwargs"])
    except Exception:  # told by the checks of tools and spec
        pass
    return json.dumps(told, default=repr)


# -- with real answers -----------------------------------------------------------------------------


def _real_answers(tasks: TaskSet) -> dict[str, dict[str, str]]:
    """Return what to search for in the episodes of a few tasks: answers that are no chance."""
    out = {}
    for task_id in [*tasks.ids("train")[:_TASKS], *tasks.ids("eval")[:1]]:
        task = tasks[task_id]
        asked = _text_of(task.to_messages()).lower() + repr(dict(task.data)).lower()
        needles = {text: task_id for text in _leaves(task.answer) if text not in asked}
        out[task_id] = needles
    return out


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, (int, float)):
        if abs(value) >= _LEAST_NUMBER:
            yield str(value)
    elif isinstance(value, str):
        text = value.strip().lower()
        number = re.fullmatch(r"[-+]?[\d.]+", text)
        if len(text) >= _LEAST_TEXT and (number is None or len(text) >= len(str(_LEAST_NUMBER))):
            yield text
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _leaves(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from _leaves(getattr(value, each.name))


async def _search_real(
    lab: Lab, tell: Findings, real: dict[str, dict[str, str]], *, everywhere: bool
) -> None:
    """Search infos for real answers, and first messages too where stand-ins were no use."""
    env = await lab.main()
    where = place_of_method(authors_class(env), "reset")
    for task_id, needles in real.items():
        if not needles or not tell.empty:
            continue
        trace = lab.sound(await lab.play(env, task=task_id, max_turns=2))
        for turn in trace.turns:
            if _found(needles, repr(turn.info)):
                words = f"an info holds the gold answer of the task {task_id!r}"
                tell.fail(f"{words}; infos go to agent programs too", where)
        first = trace.turns[0].messages if trace.turns else []
        if everywhere and _found(needles, _text_of(first)):
            words = f"the first messages seem to hold the gold answer of the task {task_id!r}"
            tell.warn(f"{words}; look at what reset() returns", where)


ANSWER_CHECKS = [
    Check("gold answers", "no stand-in for an answer left the environment", _answers),
]

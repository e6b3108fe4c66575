"""Checks of the contract of ``reset``, ``step`` and ``close``."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

from relax_agent.envs.checking.forms import Problem
from relax_agent.envs.checking.lab import CallFailed, Hung, Lab, Trace, Turn
from relax_agent.envs.checking.places import place_of, place_of_method
from relax_agent.envs.checking.report import Findings
from relax_agent.envs.checking.running import Check
from relax_agent.envs.checking.subject import authors_class
from relax_agent.envs.core import Env
from relax_agent.envs.policies import RandomPolicy, ScriptedPolicy
from relax_agent.envs.specs import EnvSpec
from relax_agent.errors import ConfigError
from relax_agent.messages import Rewrite, ToolCall, assistant

_LONG = 50
"""Turns after which an episode of random play should have ended."""
UNSTEADY = "equal seeds give different episodes, see seed"
"""Why a check that compares episodes is not done."""


async def _build(lab: Lab, tell: Findings) -> None:
    env = await lab.main()
    kind = authors_class(env)
    for name, needed in (("reset", ("seed", "options")), ("step", ())):
        method = getattr(kind, name, None)
        _check_signature(tell, kind, name, method, needed)
    if not (vars(kind).get("__doc__") or "").strip():
        words = f"{kind.__name__} has no docstring; say in one line what the task is"
        tell.warn(f"{words}: `relax-agent envs list` shows it", place_of(kind))


def _check_signature(
    tell: Findings, kind: type, name: str, method: Any, needed: Sequence[str]
) -> None:
    if not callable(method):
        tell.fail(f"{kind.__name__} has no {name}()", place_of(kind))
        return
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    missing = [each for each in needed if each not in parameters and not takes_all]
    if missing:
        words = f"reset() does not take {' and '.join(missing)}; write"
        tell.fail(
            f"{words} `def reset(self, *, seed=None, options=None)`", place_of_method(kind, name)
        )


async def _forms(lab: Lab) -> list[Problem]:
    """Play some episodes and return everything that was wrong with what came back; once."""
    known: list[Problem] | None = lab.notes.get("forms")
    if known is not None:
        return known
    env = await lab.main()
    problems: list[Problem] = []
    plays: list[tuple[Any, int]] = [(RandomPolicy(lab.seed + n), lab.seed + n) for n in range(3)]
    plays.append((ScriptedPolicy(lambda messages, tools: "I do not know."), lab.seed))
    expert = lab.expert(env)
    if expert is not None:
        plays.append((expert, lab.seed))
    for policy, seed in plays:
        trace = await lab.play(env, policy, seed=seed)
        problems += trace.problems
        if trace.broken():
            break
    lab.notes["forms"] = problems
    return problems


def _form_check(name: str) -> Any:
    async def check(lab: Lab, tell: Findings) -> None:
        kind = authors_class(await lab.main())
        try:
            problems = await _forms(lab)
        except CallFailed as failed:
            if name == "reset" and failed.call != "reset()":
                return  # the next row tells it
            raise
        for problem in problems:
            if problem.check == name:
                say = tell.warn if problem.warning else tell.fail
                say(problem.message, place_of_method(kind, problem.call))

    return check


async def _order(lab: Lab, tell: Findings) -> None:
    kind = authors_class(await lab.main())
    where = place_of_method(kind, "step")
    if lab.subject.guarded:
        tell.seen("step() outside an episode is refused, by the guard that make() adds")
        return
    if not lab.single:
        async with lab.fresh() as env:
            if await _accepts(lab, env):
                words = "step() before reset() is accepted; raise ResetNeeded"
                tell.warn(f"{words}, or let people use make(), whose guard does it", where)
    env = await lab.main()
    trace = lab.sound(await lab.play(env, max_turns=_LONG))
    if trace.ended and await _accepts(lab, env):
        words = "step() after the episode's end is accepted; raise ResetNeeded"
        tell.warn(f"{words}, or let people use make(), whose guard does it", where)


async def _accepts(lab: Lab, env: Env) -> bool:
    """Whether a step outside an episode is taken as if nothing were wrong."""
    try:
        await lab.step(env, assistant("hello"))
    except CallFailed:
        return False
    return True


async def _objects(lab: Lab, tell: Findings) -> None:
    """What was returned is the caller's: it must not change later, nor change anything."""
    env = await lab.main()
    kind = authors_class(env)
    turns: list[Turn] = []
    clean = lab.sound(await lab.play(env, after=turns.append))
    for number, turn in enumerate(turns):
        call = "step" if number else "reset"
        _check_kept(tell, turn, call, place_of_method(kind, call))
    for number, (one, other) in enumerate(itertools.pairwise(turns), 1):
        where = place_of_method(kind, "step")
        if _same_object(one.given[0], other.given[0]):
            words = f"step() number {number} returned the very list that was returned before"
            tell.fail(f"{words}; make a new list each time", where)
        if one.given[1] is other.given[1] and isinstance(one.given[1], dict):
            words = f"step() number {number} returned the very info that was returned before"
            tell.fail(f"{words}; make a new dict each time", where)
    if tell.empty and not lab.notes.get("unsteady"):
        await _vandalize(lab, tell, clean)


def _check_kept(tell: Findings, turn: Turn, call: str, where: str) -> None:
    given, info = turn.given
    if not isinstance(given, Rewrite) and list(given) != turn.observation:
        words = f"the list that {call}() returned has changed since; return a copy: list(messages)"
        tell.fail(words, where)
    if turn.comparable and info != turn.info:
        tell.fail(f"the info that {call}() returned has changed since; return a new dict", where)


async def _vandalize(lab: Lab, tell: Findings, clean: Trace) -> None:
    """Empty whatever is returned; an environment that keeps its own goes on as before."""

    def empty(turn: Turn) -> None:
        observation, info = turn.given
        if isinstance(observation, list):
            observation.clear()
        if isinstance(info, dict):
            info.clear()

    env = await lab.main()
    kind = authors_class(env)
    words = "reset() or step() hands out an object that the environment itself still uses"
    again: Trace | None
    try:
        again = await lab.replay(env, clean, seed=lab.seed, after=empty)
    except (CallFailed, Hung):
        again = None
    if again is None or (not again.broken() and difference(clean, again)):
        words += ": the episode is another one when a caller empties it; return a copy"
        tell.fail(words, place_of_method(kind, "reset"))


def _same_object(one: Any, other: Any) -> bool:
    return one is other and isinstance(one, list)


async def _words(lab: Lab, tell: Findings) -> None:
    """Whatever a model says, ``step`` answers."""
    env = await lab.main()
    for what, action in odd_actions(lab.schemas(env)):
        try:
            lab.sound(await lab.play(env, ScriptedPolicy([action]), max_turns=1))
        except CallFailed as failed:
            words = f"after {what}, {failed}; answer it with a message that says what was wrong"
            tell.fail(words, failed.where)


def odd_actions(schemas: Sequence[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Return messages that a model will say sooner or later, with what is odd about each."""
    calls: list[tuple[str, Any]] = [
        ("an empty message", assistant("")),
        ("a very long message", assistant("la " * 50_000)),
        ("strange characters", assistant("\x00\u202e\U0001f600 \ud800")),
        ("an answer in another form", assistant('{"answer": [null, 1e400]}')),
        ("a call of a tool that does not exist", _call("no_such_tool", {})),
        ("a call of a tool without a name", _call("", {})),
        ("a call that could not be read",
         assistant(tool_calls=[ToolCall("x", {}, "c0", "it ends too early")])),
        ("forty calls at once",
         assistant(tool_calls=[ToolCall("no_such_tool", {}, f"c{n}") for n in range(40)])),
    ]  # fmt: skip
    for schema in schemas[:4]:
        name = schema["function"].get("name", "")
        calls.append((f"a call of {name} without arguments", _call(name, {})))
        wrong = {"no_such_argument": {"a": [None]}}
        calls.append((f"a call of {name} with wrong arguments", _call(name, wrong)))
    return calls


def _call(name: str, arguments: dict[str, Any]) -> Any:
    return assistant(tool_calls=[ToolCall(name, arguments, "c0")])


async def _ends(lab: Lab, tell: Findings) -> None:
    env = await lab.main()
    where = place_of_method(authors_class(env), "step")
    whos = [("random play", RandomPolicy(lab.seed))]
    if lab.schemas(env):
        whos.append(("a model that only ever calls tools", RandomPolicy(lab.seed, call_share=1.0)))
    for who, policy in whos:
        trace = lab.sound(await lab.play(env, policy, max_turns=_LONG))
        turns = len(trace.actions)
        if trace.ended:
            continue
        if turns < _LONG:
            tell.skip(f"its steps are too slow to play more than {turns} turns of {who}")
            return
        words = f"an episode of {who} has not ended after {turns} turns"
        tell.warn(f"{words}; give it an end, such as the wrapper TimeLimit(max_turns=…)", where)


async def _spec(lab: Lab, tell: Findings) -> None:
    env = await lab.main()
    where = place_of(authors_class(env))
    if lab.subject.url:
        tell.skip("an address has no spec")
        return
    if env.spec is None:
        tell.skip("it is not registered: `@register('my/Name-v0')` above its class gives it an id")
        return
    try:
        text = env.spec.to_json()
        again = EnvSpec.from_json(text)
        if again.to_json() != text:
            tell.fail("its spec is another one after to_json() and from_json()", where)
    except ConfigError as error:
        words = "it cannot be rebuilt elsewhere (served, in a process of its own, in a recipe)"
        tell.warn(f"{words}: {error}", where)


async def _close(lab: Lab, tell: Findings) -> None:
    if lab.single:
        tell.skip("there is only this one environment; give its class or a function that makes one")
        return
    for when in ("before any reset()", "in the middle of an episode", "after an episode"):
        async with lab.fresh() as env:
            where = place_of_method(authors_class(env), "close")
            if when != "before any reset()":
                turns = 1 if when == "in the middle of an episode" else _LONG
                lab.sound(await lab.play(env, max_turns=turns))
            for time in ("", " a second time"):
                try:
                    await lab.call(env, "close", env.close)
                except CallFailed as failed:
                    words = f"close(){time} {when} raised {type(failed.error).__name__}"
                    words += f": {failed.error}; it must always give back what is held"
                    tell.fail(words, failed.where or where)


def difference(one: Trace, other: Trace) -> str:
    """Say where two episodes differ first; empty if they are the same."""
    for number, (a, b) in enumerate(zip(one.turns, other.turns, strict=False)):
        call = f"step {number}" if number else "reset()"
        if a.observation != b.observation:
            return f"the observation of {call}: {_shown(a.messages)} and {_shown(b.messages)}"
        if a.reward != b.reward:
            return f"the reward of {call}: {a.reward:g} and {b.reward:g}"
        if (a.terminated, a.truncated) != (b.terminated, b.truncated):
            return f"whether the episode has ended at {call}"
    if len(one.turns) != len(other.turns):
        return f"the number of turns: {len(one.turns) - 1} and {len(other.turns) - 1}"
    return ""


def _shown(messages: Sequence[Any]) -> str:
    media = [len(part.data) for message in messages for part in message.media]
    text = " / ".join(message.text for message in messages)
    text = f"{text[:60]}…" if len(text) > 60 else text
    return repr(text) + (f" with {len(media)} media of {sum(media)} bytes" if media else "")


FORM_CHECKS = [
    Check("build", "it can be built, and its calls take what they must", _build),
    Check("reset", "reset() returns (observation, info)", _form_check("reset")),
    Check("step", "step() returns five values of the right types", _form_check("step")),
    Check("observation", "observations are lists of new messages", _form_check("observation")),
    Check("tool messages", "every tool call is answered once", _form_check("tool messages")),
    Check("info", "infos are plain data, metrics finite numbers", _form_check("info")),
    Check("reward", "rewards are finite numbers", _form_check("reward")),
]
BEHAVIOUR_CHECKS = [
    Check("order", "step() outside an episode is refused", _order),
    Check("fresh objects", "what was returned never changes later", _objects),
    Check("any message", "whatever a model says is answered", _words),
    Check("end", "episodes come to an end by themselves", _ends),
    Check("spec", "its spec goes to JSON and back", _spec),
    Check("close", "close() may be called at any time, twice", _close),
]

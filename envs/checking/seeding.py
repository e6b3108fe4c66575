"""Checks of randomness: equal seeds and equal actions give equal episodes, and nothing leaks out.

Before each run the process's own generators are put into another state, so that an environment
that draws from them gives itself away; afterwards they are as they were.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

from relax_agent.envs.checking.contract import UNSTEADY, difference
from relax_agent.envs.checking.lab import CallFailed, Lab, Trace
from relax_agent.envs.checking.places import place_of_method
from relax_agent.envs.checking.report import Findings
from relax_agent.envs.checking.running import Check, kept_generators
from relax_agent.envs.checking.subject import authors_class

_SEEDS = 8
_LARGE = 2**53 + 1
"""A seed as runs draw them: more than 32 bits."""


async def _equal_seeds(lab: Lab, tell: Findings) -> None:
    env = await lab.main()
    where = place_of_method(authors_class(env), "reset")
    with stirred(1):
        first, unseeded = await _watching_rng(lab, env)
    if unseeded:
        lab.notes["unsteady"] = True
        words = f"reset(seed={lab.seed}) does not seed self.rng, and the environment draws from it"
        tell.fail(f"{words}; begin reset() with `await super().reset(seed=seed)`", where)
        return
    with stirred(2):
        again = lab.sound(await lab.replay(env, first, seed=lab.seed))
    what = difference(first, again)
    if not what and not lab.single:
        async with lab.fresh() as other:
            with stirred(3):
                what = difference(first, lab.sound(await lab.replay(other, first, seed=lab.seed)))
    if what:
        lab.notes["unsteady"] = True
        words = f"equal seeds and equal actions give different episodes: {what}"
        tell.fail(
            f"{words}; draw from self.rng only, after super().reset(seed=seed); set all state anew"
            " in reset(); use no clock, no order of a set, no global generator",
            where,
        )
        return
    try:
        lab.sound(await lab.play(env, seed=_LARGE, max_turns=1))
    except CallFailed as failed:
        words = f"reset(seed={_LARGE}) raised {type(failed.error).__name__}: {failed.error}"
        tell.fail(f"{words}; seeds have up to 64 bits", failed.where)


async def _watching_rng(lab: Lab, env: Any) -> tuple[Trace, bool]:
    """Play an episode; tell whether it drew from a generator that its seed had not reached."""
    inner = env.unwrapped
    before, planted = getattr(inner, "_rng", None), random.Random(0)
    state = planted.getstate()
    inner._rng = planted
    trace = lab.sound(await lab.play(env))
    unseeded = inner._rng is planted and planted.getstate() != state
    if inner._rng is planted:
        inner._rng = before
    return trace, unseeded


async def _after_abort(lab: Lab, tell: Findings) -> None:
    """An episode that was broken off leaves nothing behind."""
    if lab.notes.get("unsteady"):
        tell.skip(UNSTEADY)
        return
    env = await lab.main()
    first = lab.sound(await lab.play(env))
    for turns in (1, 2):
        lab.sound(await lab.play(env, seed=lab.seed + 1, max_turns=turns))
        again = lab.sound(await lab.replay(env, first, seed=lab.seed))
        what = difference(first, again)
        if what:
            words = f"after an episode that was broken off, the same seed gives another one: {what}"
            tell.fail(
                f"{words}; set all state anew in reset()",
                place_of_method(authors_class(env), "reset"),
            )
            return


async def _other_seeds(lab: Lab, tell: Findings) -> None:
    """Where the seed chooses, seeds choose differently."""
    if lab.notes.get("unsteady"):
        tell.skip(UNSTEADY)
        return
    env = await lab.main()
    where = place_of_method(authors_class(env), "reset")
    first = lab.sound(await lab.play(env))
    traces: list[Trace] = [first]
    tasks: set[Any] = set()
    for number in range(_SEEDS):
        traces.append(lab.sound(await lab.replay(env, first, seed=lab.seed + 1 + number)))
        info = traces[-1].turns[0].info
        tasks.add(str(info.get("task")) if isinstance(info, dict) else None)
    differ = any(difference(first, trace) for trace in traces[1:])
    count = 0 if env.tasks is None else len(env.tasks.ids("train"))
    if count > 1 and len(tasks) == 1 and not differ:
        words = f"{_SEEDS} seeds pose the same of {count} tasks; without options={{'task': …}}"
        tell.warn(f"{words} choose one by the seed: self.rng.choice(self.tasks.ids())", where)
    elif differ:
        tell.seen("the seed chooses the episode")
    elif _ignores_seed(env, traces):
        words = f"{_SEEDS} seeds give the same episode, though the environment draws numbers"
        tell.warn(f"{words}; seed its generator in reset(): super().reset(seed=seed)", where)
    else:
        tell.seen("the seed changes nothing; that is right if nothing is random")


def _ignores_seed(env: Any, traces: list[Trace]) -> bool:
    """Whether the author's object holds a generator of its own that no seed has reached."""
    inner = env.unwrapped
    state = getattr(inner, "__dict__", {})
    kinds = (random.Random, *_numpy_kinds())
    return any(isinstance(value, kinds) for key, value in state.items() if key != "_rng")


def _numpy_kinds() -> tuple[type, ...]:
    numpy: Any = sys.modules.get("numpy")
    return () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)


async def _globals(lab: Lab, tell: Findings) -> None:
    """The process's own generators belong to whoever runs the environments."""
    async with lab.fresh() as env:
        lab.sound(await lab.play(env))  # so that everything is imported
    with stirred(4):  # a generator that is always set to one state would look untouched
        before = _states()
        async with lab.fresh() as env:
            where = place_of_method(authors_class(env), "reset")
            built = _states()
            lab.sound(await lab.play(env))
            lab.sound(await lab.play(env, seed=lab.seed + 1))
        after = _states()
    for name, state in before.items():
        if not _same(state, built.get(name)):
            words = f"building it changes the state of the global generator {name}"
        elif not _same(state, after.get(name)):
            words = f"an episode changes the state of the global generator {name}"
        else:
            continue
        tell.fail(f"{words}; draw from self.rng, or from a generator seeded by it", where)


def _states() -> dict[str, Any]:
    """Return the state of every global generator that is loaded."""
    found: dict[str, Any] = {"random": random.getstate()}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy.random"] = numpy.random.get_state(legacy=False)
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = torch.get_rng_state().numpy().tobytes()
    return found


def _same(one: Any, other: Any) -> bool:
    return repr(_plain(one)) == repr(_plain(other))


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state


@contextlib.contextmanager
def stirred(number: int) -> Iterator[None]:
    """Put the global generators into a stated state, and back afterwards."""
    with kept_generators():
        random.seed(f"stirred {number}")
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(number)
        yield


SEED_CHECKS = [
    Check("seed", "equal seeds and actions give equal episodes", _equal_seeds),
    Check("other seeds", "the seed chooses the episode", _other_seeds),
    Check("aborted episode", "an episode that was broken off leaves nothing behind", _after_abort),
    Check("global random", "no global generator is touched", _globals),
]

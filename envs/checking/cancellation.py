"""Checks of what happens to a call that is cancelled while it waits.

A loop that drives environments cancels a call that takes too long. The call must let the
cancellation through, soon; afterwards the environment either begins a new episode as if nothing
had happened, or says clearly that it is dead.
"""

from __future__ import annotations

import asyncio
from typing import Any

from relax_agent.envs.checking.contract import difference
from relax_agent.envs.checking.lab import CallFailed, Hung, Lab, breathe, is_clear
from relax_agent.envs.checking.places import place_of_error, place_of_method
from relax_agent.envs.checking.report import Findings
from relax_agent.envs.checking.running import Check, quiet
from relax_agent.envs.checking.subject import authors_class
from relax_agent.envs.core import Env
from relax_agent.envs.policies import Policy, RandomPolicy
from relax_agent.messages import AssistantMessage

_GRACE_S = 2.0
_MOMENTS = (1, 2, 4, 8)
"""After how many rounds of the event loop a call is cancelled."""


async def _step_cut(lab: Lab, tell: Findings) -> None:
    await _cut(lab, tell, "step")


async def _reset_cut(lab: Lab, tell: Findings) -> None:
    await _cut(lab, tell, "reset")


async def _cut(lab: Lab, tell: Findings, call: str) -> None:
    clean = lab.sound(await lab.play(await lab.main()))
    waited = False
    for rounds in _MOMENTS:
        if not tell.empty:
            break
        async with lab.fresh() as env:
            with quiet():
                waited |= await _cut_once(lab, tell, env, call, rounds)
                if tell.empty:
                    await _afterwards(lab, tell, env, call, clean)
        if lab.single:
            break
    if not waited and tell.empty:
        tell.seen(f"{call}() never waits, so it cannot be cut off")


async def _cut_once(lab: Lab, tell: Findings, env: Env, call: str, rounds: int) -> bool:
    """Cancel one call after some rounds of the loop; tell whether it was still running."""
    where = place_of_method(authors_class(env), call)
    coroutine = await _begun(lab, env, call)
    others = asyncio.all_tasks()
    task = asyncio.ensure_future(coroutine)
    await breathe(rounds)
    if task.done():
        task.cancelled() or task.exception()
        return False
    task.cancel()
    await asyncio.wait({task}, timeout=_GRACE_S)
    if not task.done():
        words = f"{call}() does not end within {_GRACE_S:g} s of its cancellation"
        tell.fail(f"{words}; let CancelledError through and keep `finally` short", where)
    elif task.cancelled():
        await _orphans(tell, others, call, where)
    elif task.exception() is None:
        words = f"{call}() swallows its cancellation and returns as if nothing were wrong"
        tell.fail(f"{words}; `except asyncio.CancelledError: raise`", where)
    else:
        error = task.exception()
        assert error is not None
        words = f"{call}() turns its cancellation into {type(error).__name__}: {error}"
        tell.fail(f"{words}; let CancelledError through", place_of_error(error) or where)
    return True


async def _begun(lab: Lab, env: Env, call: str) -> Any:
    """Bring the environment to where the call can be made, and return the call."""
    if call == "reset":
        return env.reset(seed=lab.seed)
    policy: Policy = lab.expert(env) or RandomPolicy(lab.seed, call_share=1.0)
    trace = lab.sound(await lab.play(env, policy, max_turns=1))
    if trace.ended:
        await lab.reset(env, lab.seed)
    actions: list[AssistantMessage] = trace.actions
    return env.step(actions[0])


async def _orphans(tell: Findings, others: set[Any], call: str, where: str) -> None:
    """Nothing that the call began may go on without it."""
    await asyncio.sleep(0.02)
    left = [task for task in asyncio.all_tasks() - others if not task.done()]
    if left:
        name = getattr(left[0].get_coro(), "__qualname__", "?")
        words = f"a cancelled {call}() leaves the task {name} running"
        tell.fail(f"{words}; start tasks in an asyncio.TaskGroup", where)


async def _afterwards(lab: Lab, tell: Findings, env: Env, call: str, clean: Any) -> None:
    """A new episode as if nothing had happened, or a clear word that there can be none."""
    where = place_of_method(authors_class(env), "reset")
    try:
        again = lab.sound(await lab.replay(env, clean, seed=lab.seed))
    except CallFailed as failed:
        if not is_clear(failed.error):
            words = f"after a cancelled {call}(), {failed}"
            hint = "set all state anew in reset(), or raise EnvError that says it is dead"
            tell.fail(f"{words}; {hint}", failed.where)
        return
    except Hung as hung:
        words = f"after a cancelled {call}(), {hung}; a lock may still be held"
        tell.fail(f"{words}: release it in `finally`", hung.where)
        return
    what = "" if lab.notes.get("unsteady") else difference(clean, again)
    if what:
        words = f"after a cancelled {call}(), the same seed gives another episode: {what}"
        tell.fail(f"{words}; set all state anew in reset()", where)


CANCELLATION_CHECKS = [
    Check("cancelled step", "a step that is cut off leaves it usable, or clearly dead", _step_cut),
    Check(
        "cancelled reset", "a reset that is cut off leaves it usable, or clearly dead", _reset_cut
    ),
]

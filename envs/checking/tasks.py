"""Checks of tasks: chosen by id, the same everywhere, refused in words where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relax_agent.envs.checking.contract import difference
from relax_agent.envs.checking.lab import CallFailed, Lab, Trace, is_clear
from relax_agent.envs.checking.places import place_of, place_of_method
from relax_agent.envs.checking.report import Findings
from relax_agent.envs.checking.running import Check
from relax_agent.envs.checking.subject import authors_class
from relax_agent.envs.tasks import SPLITS, TaskSet
from relax_agent.errors import RelaxError

_FEW = 5
_MISSING = "no-such-task-8b1c"
_FINGERPRINTED = 20_000
"""Larger sets are not read from end to end for a check."""


async def _set(lab: Lab, tell: Findings) -> None:
    env = await lab.main()
    where = place_of(authors_class(env))
    tasks: Any = env.tasks
    if tasks is None:
        tell.seen("it has no tasks: the seed is the task")
        return
    if not isinstance(tasks, TaskSet):
        tell.fail(f"tasks is a {type(tasks).__name__}; wrap it: TaskSet(train=[...])", where)
        return
    ids = [task_id for split in SPLITS for task_id in tasks.ids(split)]
    if not ids:
        tell.fail("there is no task in it; TaskSet(train=[Task(id, prompt, answer)])", where)
    if not tasks.ids("train") and tasks.ids("eval"):
        tell.warn("all tasks are held out; training needs some in the train split", where)
    if tell.empty and not lab.single and len(ids) <= _FINGERPRINTED:
        async with lab.fresh() as other:
            assert other.tasks is not None
            if other.tasks.fingerprint() != tasks.fingerprint():
                words = "two instances have different tasks; a run could not go on after a stop"
                tell.fail(f"{words}: make them from fixed seeds and in a fixed order", where)
    counts = ", ".join(f"{len(tasks.ids(split))} {split}" for split in SPLITS)
    tell.seen(f"tasks: {counts}")


async def _chosen(lab: Lab, tell: Findings) -> None:
    """``options={"task": id}`` poses that task, whatever the seed."""
    env = await lab.main()
    where = place_of_method(authors_class(env), "reset")
    if env.tasks is None:
        tell.seen("it has no tasks")
        return
    ids = _some(env.tasks.ids("train")) + _some(env.tasks.ids("eval"))
    traces: list[Trace] = []
    for task_id in ids:
        trace = lab.sound(await lab.play(env, task=task_id, max_turns=1))
        again = lab.sound(await lab.replay(env, trace, seed=lab.seed, task=task_id))
        traces.append(trace)
        what = difference(trace, again)
        if what:
            words = f"the task {task_id!r} with the same seed gives different episodes: {what}"
            tell.fail(words, where)
            return
        told = trace.turns[0].info.get("task")
        if told is None:
            words = "reset() does not say which task it poses; return {'task': id} as info"
            tell.warn(words, where)
        elif told != task_id:
            words = f"options={{'task': {task_id!r}}} poses the task {told!r}"
            tell.fail(f"{words}; take the task from the options", where)
            return
    firsts = [trace.turns[0].messages for trace in traces]
    prompts = (
        {task.prompt for task in map(env.tasks.__getitem__, ids)} if _known(env.tasks) else ids
    )
    if len(ids) > 1 and len(prompts) > 1 and all(first == firsts[0] for first in firsts):
        words = f"{len(ids)} tasks begin with the same messages; options['task'] seems ignored"
        tell.fail(f"{words}: task = self.tasks[options['task']]", where)


def _known(tasks: TaskSet) -> bool:
    return not tasks.ids_only


def _some(ids: Sequence[str]) -> list[str]:
    """A few of the ids, from all over."""
    step = max(1, len(ids) // _FEW)
    return list(ids[::step][:_FEW])


async def _unknown(lab: Lab, tell: Findings) -> None:
    """What does not exist is refused, in words."""
    env = await lab.main()
    where = place_of_method(authors_class(env), "reset")
    if env.tasks is None:
        tell.seen("it has no tasks")
    else:
        await _refused(lab, tell, {"task": _MISSING}, "a task that does not exist", where)
    try:
        await lab.reset(env, lab.seed, {"no_such_option": 1})
    except CallFailed as failed:
        if not is_clear(failed.error):
            words = f"after an option that does not exist, {failed}"
            tell.warn(
                f"{words}; raise EnvError (relax_agent.errors) and name those there are",
                failed.where,
            )
    else:
        words = "an option that does not exist is accepted; a typing error would go unseen"
        tell.warn(f"{words}: raise EnvError (relax_agent.errors) and name those there are", where)
    await lab.reset(env, lab.seed)  # it still works


async def _refused(
    lab: Lab, tell: Findings, options: dict[str, Any], what: str, where: str
) -> None:
    env = await lab.main()
    try:
        result = await lab.reset(env, lab.seed, options)
    except CallFailed as failed:
        if not isinstance(failed.error, RelaxError):
            words = f"after {what}, {failed}"
            tell.warn(f"{words}; self.tasks[id] raises an EnvError that names one", failed.where)
        return
    del result
    words = f"{what} is accepted; raise EnvError, as self.tasks[id] does"
    tell.fail(words, where)


TASK_CHECKS = [
    Check("tasks", "tasks are in order", _set),
    Check("chosen task", "options={'task': id} poses that task", _chosen),
    Check("unknown task", "what does not exist is refused in words", _unknown),
]

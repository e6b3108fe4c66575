"""Finding a taskset of verifiers, refusing what cannot run here, and its tasks as ours.

A task has the id that its source gave it (``TaskData.id``), else its own ``key``, else its name;
and where tasks have none of these that tells them apart, a hash of what is in them. So an id stays
with its task when others come or go.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import itertools
import json
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from relax_agent.envs.adapters.common import PrivateRandomness, require, unknown
from relax_agent.envs.adapters.verifiers_chat import from_verifiers_message, opening
from relax_agent.envs.adapters.verifiers_tools import check_placement
from relax_agent.envs.tasks import Task, TaskSet, chosen_for_eval
from relax_agent.errors import ConfigError, MissingExtraError
from relax_agent.importing import import_named

INSTALL = "verifiers==0.4.0"
_ELSEWHERE = "run it with verifiers itself"


@dataclass(frozen=True)
class Wish:
    """Which tasks are wanted; plain data, so that it can be compared and kept."""

    taskset: str
    config: str
    """JSON."""
    eval_config: str
    """JSON; ``null`` if there is none."""
    select: str
    """JSON."""
    limit: int | None
    eval_share: float
    skip_signals: bool


@dataclass(frozen=True)
class Loaded:
    """A taskset with its tasks."""

    taskset: Any
    """The one that training tasks come from."""
    env: type[Any]
    """The class that says how an agent plays a task."""
    tasks: TaskSet
    by_id: Mapping[str, Any]
    """Verifiers' own tasks."""
    skipped: tuple[str, ...]
    """Signals that need a runtime."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A task that is read when it is looked up."""

    id: str
    task: Any

    def load(self) -> Task:
        data = self.task.data
        told = tuple(from_verifiers_message(each) for each in opening(data))
        users = [message for message in told if message.role == "user"]
        return Task(
            self.id,
            users[-1].content if users else "",
            getattr(data, "answer", None),
            data.model_dump(mode="json", exclude={"prompt", "idx"}),
            told,
        )


def library() -> Any:
    """Return the package ``verifiers.v1``."""
    return require("verifiers.v1", "verifiers 0.4 (with verifiers.v1)", install=INSTALL)


@lru_cache(maxsize=8)
def load(wish: Wish) -> Loaded:
    """Load a taskset once in a process; all its environments share the tasks.

    Raises:
        MissingExtraError: verifiers, or what the taskset needs, is not installed.
        UnknownEnv: There is no such taskset.
        ConfigError: It cannot run here, or its configuration is wrong.
    """
    library()
    kind, env = _find(wish.taskset)
    taskset = _build(kind, wish, json.loads(wish.config))
    train = _tasks(taskset, wish)
    held_out: list[Any] = []
    if wish.eval_config != "null":
        other = json.loads(wish.config) | json.loads(wish.eval_config)
        held_out = _tasks(_build(kind, wish, other), wish)
    skipped = _check_class(train[0], taskset, env, wish)
    for task in (*train, *held_out):
        _check_task(task, env)
    tasks, by_id = _split(train, held_out, wish.eval_share)
    return Loaded(taskset, env, tasks, by_id, skipped)


# -- finding ---------------------------------------------------------------------------------------


def _find(name: str) -> tuple[type[Any], type[Any]]:
    """Return the class of a taskset, and that of the environment it belongs to."""
    from verifiers.v1 import Env, Harness, SingleAgentEnv, Taskset

    if ":" in name:
        module_name, _, attribute = name.partition(":")
        module = import_named(module_name)
        kind = getattr(module, attribute, None)
        if not (isinstance(kind, type) and issubclass(kind, Taskset)):
            raise ConfigError(f"{name} is not a Taskset of verifiers", hint="module:MyTaskset")
    else:
        module = _package(name)
        kind = _exported(module, Taskset, name)
        if kind is None:
            raise ConfigError(
                f"the package of taskset {name} exports no Taskset", hint="its __all__ must name it"
            )
    if not hasattr(module, "__all__"):
        _check_nothing_is_meant(module, (Env, Harness), name)
    if _exported(module, Harness, name) is not None:
        raise ConfigError(
            f"taskset {name} brings a harness of its own, which only verifiers runs",
            hint=_ELSEWHERE,
        )
    return kind, _exported(module, Env, name) or SingleAgentEnv


def _package(name: str) -> Any:
    from verifiers.v1 import import_taskset, tasksets

    try:
        return import_taskset(name)
    except ModuleNotFoundError as error:
        missing = getattr(error.__cause__, "name", None) or name
        if missing.partition(".")[0] in (name.rpartition("/")[2].replace("-", "_"), "verifiers"):
            known = [each.name for each in pkgutil.iter_modules(tasksets.__path__)]
            hint = f'those that come with verifiers: {", ".join(known)}; or "module:MyTaskset"'
            raise unknown("taskset", name, known).__class__(
                f"there is no taskset {name!r}", hint=hint
            ) from error
        raise MissingExtraError(f"{missing}, which {name} needs,", "", install=missing) from error
    except ImportError as error:
        raise ConfigError(f"taskset {name} cannot be loaded: {' '.join(str(error).split())}") from (
            error
        )


def _exported(module: Any, base: type[Any], name: str) -> type[Any] | None:
    found = {
        each
        for key in getattr(module, "__all__", ())
        if isinstance(each := getattr(module, key, None), type)
        and issubclass(each, base)
        and each is not base
    }
    if len(found) > 1:
        names = ", ".join(sorted(each.__name__ for each in found))
        raise ConfigError(
            f"taskset {name}: {module.__name__} exports several: {names}",
            hint=f"name one: {module.__name__}:{min(names.split(', '))}",
        )
    return found.pop() if found else None


def _check_nothing_is_meant(module: Any, bases: tuple[type[Any], ...], name: str) -> None:
    """Refuse to guess whether an Env that stands beside a taskset is meant to play it."""
    for each in vars(module).values():
        own = isinstance(each, type) and each.__module__ == module.__name__
        if own and issubclass(each, bases):
            raise ConfigError(
                f"taskset {name}: is {each.__name__} meant for it?",
                hint=f"say so in {module.__name__}: __all__ = [the taskset, and what plays it]",
            )


def _build(kind: type[Any], wish: Wish, config: dict[str, Any]) -> Any:
    from pydantic import ValidationError
    from verifiers.v1 import Taskset, TasksetConfig
    from verifiers.v1.utils.generic import concrete_type

    config_type = concrete_type(kind, TasksetConfig, origin=Taskset) or TasksetConfig
    own_id = {} if ":" in wish.taskset else {"id": wish.taskset}
    try:
        return kind(config_type.model_validate({**config, **own_id}))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "config"
        known = ", ".join(name for name in config_type.model_fields if name != "id")
        raise ConfigError(
            f"{wish.taskset}: config: {where}: {first['msg']}", hint=f"it has {known}"
        ) from error


def _tasks(taskset: Any, wish: Wish) -> list[Any]:
    from pydantic import ValidationError
    from verifiers.v1 import SelectConfig

    try:
        taskset = taskset.select(SelectConfig.model_validate(json.loads(wish.select)))
    except (ValidationError, ValueError) as error:
        raise ConfigError(f"select: {' '.join(str(error).split())}") from error
    if wish.limit is not None:
        taskset = taskset.take(wish.limit)
    if not taskset.bounded:
        raise ConfigError(f"{wish.taskset} has no end of tasks", hint="limit=1000")
    try:
        with PrivateRandomness(0).swapped_in():
            found = list(taskset)
    except Exception as error:
        raise ConfigError(
            f"{wish.taskset} cannot load its tasks: {type(error).__name__}: "
            f"{' '.join(str(error).split())}"
        ) from error
    if not found:
        raise ConfigError(f"{wish.taskset} has no tasks", hint="look at config, select and limit")
    return found


# -- refusing --------------------------------------------------------------------------------------


def needs_runtime(function: Callable[..., Any]) -> bool:
    """Say whether a signal cannot be computed without a runtime."""
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _check_class(task: Any, taskset: Any, env: type[Any], wish: Wish) -> tuple[str, ...]:
    """Refuse what no task of a class can do here; return the signals that are left out."""
    from verifiers.v1.utils.decorators import discover_decorated

    name = type(task).__name__
    if type(task).NEEDS_CONTAINER:
        raise ConfigError(f"tasks of {name} need a container", hint=_ELSEWHERE)
    hooks = [hook.__name__ for hook in discover_decorated(task, "intercept")]
    if hooks:
        raise ConfigError(
            f"{name}.{hooks[0]} rewrites messages between model and harness (@intercept), and"
            " there is nothing between them here",
            hint=_ELSEWHERE,
        )
    try:
        judges = task.plugged_judges()
        rewards = {fn.__name__: fn for fn in task.hooks("reward")}
        metrics = {fn.__name__: fn for fn in task.hooks("metric")}
        task.hooks("stop")
        for toolset in (*task.toolsets(task.config), *taskset.toolsets(taskset.config)):
            check_placement(toolset)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{name}: {' '.join(str(error).split())}") from error
    rewards |= {judge.reward_name: judge.score for judge in judges}
    lost = [key for key, function in rewards.items() if needs_runtime(function)]
    if lost and (not wish.skip_signals or len(lost) == len(rewards)):
        raise ConfigError(
            f"{name}: {', '.join(lost)} of its {len(rewards)} rewards need a runtime, and there is"
            " none here",
            hint=_ELSEWHERE
            if len(lost) == len(rewards)
            else "skip_signals=True does without those",
        )
    return (*lost, *(key for key, function in metrics.items() if needs_runtime(function)))


def _check_task(task: Any, env: type[Any]) -> None:
    """Refuse a task that asks for more than a conversation."""
    from verifiers.v1 import SingleAgentEnv

    data = task.data
    wants = {
        f"the image {data.image}": data.image is not None,
        f"the user {data.agent_user}": data.agent_user is not None,
        "skills": bool(data.skills),
        "limits on the network": "*" not in data.network_allow or bool(data.network_block),
    }
    for what, wanted in wants.items():
        if wanted:
            raise ConfigError(
                f"task {_label(task)} asks for {what}, which takes a runtime", hint=_ELSEWHERE
            )
    if data.prompt is None and env is SingleAgentEnv:
        raise ConfigError(
            f"task {_label(task)} has no prompt, and nobody to open the conversation",
            hint="an Env in the taskset's package says who does",
        )


def _label(task: Any) -> str:
    return str(task.data.id or task.data.name or task.data.idx)


# -- ids -------------------------------------------------------------------------------------------


def _split(
    train: Sequence[Any], held_out: Sequence[Any], eval_share: float
) -> tuple[TaskSet, dict[str, Any]]:
    ids, held_ids = _ids(train), _ids(held_out)
    both = {_content(task) for task in train} & {_content(task) for task in held_out}
    if both:
        raise ConfigError(
            f"{len(both)} of {len(held_out)} held-out tasks are also trained on",
            hint="eval_config must choose others",
        )
    if set(ids) & set(held_ids):
        held_ids = [f"eval-{each}" for each in held_ids]
    rows = list(itertools.starmap(_Row, zip(ids, train, strict=True)))
    kept = [row for row in rows if not chosen_for_eval(row.id, eval_share)]
    out = [row for row in rows if chosen_for_eval(row.id, eval_share)]
    out += itertools.starmap(_Row, zip(held_ids, held_out, strict=True))
    return TaskSet(kept, out), {row.id: row.task for row in (*kept, *out)}


def _ids(tasks: Sequence[Any]) -> list[str]:
    """Return an id for each task, no two alike."""
    for source in _sources(tasks):
        ids = [source(task) for task in tasks]
        if all(isinstance(each, str) and each for each in ids) and len(set(ids)) == len(ids):
            return ids
    return list(_numbered(_content(task)[:16] for task in tasks))


def _sources(tasks: Sequence[Any]) -> Iterator[Callable[[Any], Any]]:
    from verifiers.v1 import Task as Base

    yield lambda task: task.data.id
    if tasks and type(tasks[0]).key is not Base.key:
        yield lambda task: task.key
    yield lambda task: task.data.name


def _numbered(names: Iterator[str]) -> Iterator[str]:
    seen: dict[str, int] = {}
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        yield name if seen[name] == 1 else f"{name}-{seen[name]}"


def _content(task: Any) -> str:
    """Return a hash of a task's data, whatever its place among the others."""
    data = task.data.model_dump(mode="json", exclude_none=True, exclude={"idx"})
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def reference(taskset: str | type[Any]) -> str:
    """Return the name of a taskset that may be given as a class."""
    if isinstance(taskset, str):
        return taskset
    name = f"{taskset.__module__}:{taskset.__qualname__}"
    if (
        "<locals>" in name
        or getattr(importlib.import_module(taskset.__module__), taskset.__qualname__, None)
        is not taskset
    ):
        raise ConfigError(
            f"{taskset.__qualname__} cannot be found by name", hint="define it in a module"
        )
    return name

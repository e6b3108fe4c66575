"""What the adapters share: finding another library, naming what was meant, private randomness.

An adapter works without its library until it is used: :func:`require` imports it then, and says
which ``pip install`` is missing. Some libraries draw from the process's global generators.
:class:`PrivateRandomness` gives one environment a state of its own for them: it is swapped in for
the time of a call and out again, so no other code notices.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from relax_agent.envs.core import Env, SyncEnv, plain_calls
from relax_agent.envs.guard import Guard
from relax_agent.envs.tasks import Task, TaskSet
from relax_agent.envs.threaded import ThreadedEnv
from relax_agent.errors import (
    ConfigError,
    EnvError,
    MissingExtraError,
    ToolErrorKind,
    UnknownEnv,
)
from relax_agent.messages import ToolCall
from relax_agent.tools import ToolResult
from relax_agent.tools.toolset import refuse

_GLOBAL_GENERATORS = threading.RLock()
_FIRST_EVAL_SEED = 1 << 30
"""Seeds of held-out tasks begin here, far from those of training."""
_PATIENCE_S = 300.0
"""Seconds to wait for the global generators, while another environment's call has them."""


def require(module: str, package: str, *, extra: str = "", install: str | None = None) -> Any:
    """Import an optional library, or raise MissingExtraError that names the ``pip install``.

    Args:
        module: What to import, e.g. ``gem``.
        package: The distribution's name, e.g. ``gem-llm``.
        extra: The extra of this project that brings it, if one does.
        install: What to install otherwise, e.g. ``gem-llm==0.1.0``.
    """
    if sys.modules.get(module) is not None:
        return sys.modules[module]
    try:
        with PrivateRandomness(0).swapped_in(), _logging_kept():
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        if missing == module.partition(".")[0]:
            raise MissingExtraError(package, extra, install=install) from error
        raise MissingExtraError(
            f"{missing}, which {package} needs,", "", install=missing
        ) from error


@contextmanager
def _logging_kept() -> Iterator[None]:
    """Undo what a library does to the root logger when it is imported."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def guarded(env: Env | SyncEnv | Callable[[], SyncEnv]) -> Env:
    """Return an environment behind the guard that ``make`` puts around all of them.

    Args:
        env: An environment, or what makes a plain one: it then runs in a thread of its own,
            constructor included.
    """
    if isinstance(env, Guard):
        return env
    if isinstance(env, Env) and not plain_calls(type(env)):
        return Guard(env)
    if isinstance(env, (Env, SyncEnv)):
        given = env
        return Guard(ThreadedEnv(lambda: given))
    return Guard(ThreadedEnv(env))


def placed(template: str, **values: str) -> str:
    """Fill ``{name}`` of each value into a text; all other braces stay what they are."""
    for name, value in values.items():
        template = template.replace(f"{{{name}}}", value)
    return template


def unknown(kind: str, name: str, known: Iterable[str], *, where: str = "") -> UnknownEnv:
    """Return the error for a name that does not exist; it names the nearest ones that do."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if not near:
        lowered = name.lower()
        near = [each for each in names if lowered and lowered in each.lower()][:3]
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {len(names)}{where}"
    return UnknownEnv(f"there is no {kind} {name!r}", hint=hint)


def seed_tasks(tasks: int | Sequence[int], eval_tasks: int | Sequence[int]) -> TaskSet:
    """Return tasks that are nothing but a seed, ``task.data["seed"]``.

    Args:
        tasks: How many seeds to train on, or which.
        eval_tasks: How many other seeds to hold out, or which.
    """
    train = range(tasks) if isinstance(tasks, int) else tasks
    held_out = eval_tasks
    if isinstance(held_out, int):
        held_out = range(_FIRST_EVAL_SEED, _FIRST_EVAL_SEED + held_out)
    both = set(train) & set(held_out)
    if both or not train:
        raise ConfigError(
            f"seed {min(both)} is both trained on and held out" if both else "there are no tasks",
            hint="tasks=1000, eval_tasks=100",
        )
    return TaskSet(
        [Task(f"train-{seed}", data={"seed": seed}) for seed in train],
        [Task(f"eval-{seed}", data={"seed": seed}) for seed in held_out],
    )


def choose(env: SyncEnv, options: dict[str, Any]) -> Task | None:
    """Take ``task`` and ``split`` out of reset's options; return the task that they mean.

    Args:
        env: The environment, already seeded: without a task, its generator draws one.
        options: The options; what else is in them stays.
    """
    task_id, split = options.pop("task", None), options.pop("split", "train")
    if env.tasks is not None:
        return env.tasks[task_id or env.rng.choice(env.tasks.ids(split))]
    if task_id is not None:
        raise EnvError(f"there is no task {task_id!r}", hint="tasks=1000 makes a set")
    return None


def require_no_more(options: Mapping[str, Any], hint: str = "task or split") -> None:
    """Raise EnvError if there is a reset option that nobody has read."""
    if options:
        raise EnvError(f"unknown reset option {next(iter(options))!r}", hint=hint)


class StepTools:
    """What the model may call where ``step`` runs the calls: each is a part of the episode."""

    def __init__(self, schemas: Sequence[dict[str, Any]]) -> None:
        self._schemas = list(schemas)

    @property
    def names(self) -> tuple[str, ...]:
        """The tools' names."""
        return tuple(item["function"]["name"] for item in self._schemas)

    def schemas(self) -> list[dict[str, Any]]:
        """Return every tool as chat templates and SDKs want it."""
        return list(self._schemas)

    def parameters(self, name: str) -> dict[str, Any]:
        """Return the schema of a tool's arguments."""
        found = next(item for item in self._schemas if item["function"]["name"] == name)
        schema: dict[str, Any] = found["function"]["parameters"]
        return schema

    async def call(self, call: ToolCall) -> ToolResult:
        """Refuse: what a call does is seen, and rewarded, in the episode only."""
        told = "it is a part of the episode: say it to the environment's step()"
        return refuse(call, self.names) or ToolResult.failure(ToolErrorKind.DENIED, told)

    async def close(self) -> None:
        """Do nothing: what the calls need is the environment's."""


class PrivateRandomness:
    """A state of ``random`` and ``numpy.random`` that belongs to one environment.

    ``with randomness:`` swaps it in; draws inside go on where the last ones ended. Calls of
    different environments take turns, and whatever the process's own generators gave before and
    after is what they would have given anyway. Code of *other* threads that draws from the global
    generators in the very same moment is the one thing this cannot see: an environment that must
    be exact beside such code runs with ``isolation="process"``.
    """

    def __init__(self, seed: int | str | None = None) -> None:
        self.seed(seed)

    def seed(self, seed: int | str | None) -> None:
        """Begin anew; equal seeds give equal draws, None an arbitrary state."""
        own = random.Random(seed)
        self._python = own.getstate()
        self._numpy_seed = own.getrandbits(32)
        self._numpy: Any = None

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Give the global generators this state, and their own back at the end."""
        if not _GLOBAL_GENERATORS.acquire(timeout=_PATIENCE_S):
            raise EnvError(
                f"another environment has held the global generators for {_PATIENCE_S:g} s",
                hint='isolation="process" for environments that may hang',
            )
        try:
            numpy = _numpy_random()
            theirs = random.getstate(), None if numpy is None else numpy.get_state()
            try:
                self._put_in(numpy)
                yield
            finally:
                self._take_out(_numpy_random())
                _restore(*theirs)
        finally:
            _GLOBAL_GENERATORS.release()

    def _put_in(self, numpy: Any) -> None:
        random.setstate(self._python)
        if numpy is None:
            return
        if self._numpy is None:
            numpy.seed(self._numpy_seed)
        else:
            numpy.set_state(self._numpy)

    def _take_out(self, numpy: Any) -> None:
        self._python = random.getstate()
        if numpy is not None:
            self._numpy = numpy.get_state()


def _numpy_random() -> Any:
    """Return ``numpy.random`` if anybody has imported numpy; else nobody draws from it."""
    return importlib.import_module("numpy.random") if "numpy" in sys.modules else None


def _restore(python: Any, numpy: Any) -> None:
    random.setstate(python)
    if numpy is not None:
        sys.modules["numpy.random"].set_state(numpy)

"""The environment API: Gymnasium's five-tuple for agents, async first.

An :class:`Env` runs one episode at a time. ``reset`` gives the first messages, ``step`` takes an
:class:`~relax_agent.messages.AssistantMessage` and gives the *new* messages since then:

    observation, info = await env.reset(seed=7, options={"task": "train-12"})
    observation, reward, terminated, truncated, info = await env.step(action)

``terminated`` is the task's own end, ``truncated`` an outside limit. Only the id of a task
travels; the environment looks the task up, gold answer included, on its own side. Randomness
comes from ``self.rng``, which ``reset`` seeds, never from a global generator: two environments
with equal seeds give the same, however they are interleaved.

An author may write plain ``def`` functions, all of them or some: ``make`` runs those in a thread
of the environment's own (:mod:`relax_agent.envs.threaded`), and the ``async def`` ones in the
event loop. :class:`SyncEnv` is the base class whose own functions are plain as well.
"""

from __future__ import annotations

import inspect
import operator
import random
import weakref
from collections.abc import Coroutine, Generator, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeAlias, TypeVar

from relax_agent.closing import Closing
from relax_agent.envs.specs import EnvSpec, WrapperSpec
from relax_agent.errors import ConfigError, EnvError
from relax_agent.messages import AssistantMessage, Observation
from relax_agent.tools import AnyToolset, Toolset

if TYPE_CHECKING:
    from relax_agent.envs.tasks import TaskSet
    from relax_agent.envs.transcript import Transcript

Info: TypeAlias = dict[str, Any]
StepResult: TypeAlias = tuple[Observation, float, bool, bool, Info]
T = TypeVar("T")


class _Given(Coroutine[Any, Any, T], Generic[T]):
    """A result that is there already: it may be awaited, or unpacked without.

    So ``super().reset(seed=seed)`` means the same in a plain ``def reset`` as
    ``await super().reset(seed=seed)`` does in an ``async def``.
    """

    __slots__ = ("_value",)

    def __init__(self, value: T) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, Any, T]:
        return self._value
        yield  # makes this a generator

    def __iter__(self) -> Iterator[Any]:
        return iter(self._value)  # type: ignore[call-overload,no-any-return]

    def send(self, value: Any) -> NoReturn:
        """End at once with the result."""
        raise StopIteration(self._value)

    def throw(self, kind: Any, value: Any = None, trace: Any = None) -> NoReturn:
        """Raise what is thrown in."""
        raise kind if value is None else value

    def close(self) -> None:
        """Do nothing: nothing runs."""


def whole_seed(seed: Any) -> int:
    """Return a seed as a plain int, also one of NumPy; raise EnvError for anything else."""
    try:
        return operator.index(seed)
    except TypeError:
        raise EnvError(f"a seed is a whole number, not {seed!r:.80}") from None


class _Base:
    """What async and sync environments share: tools, tasks, spec and a generator."""

    tools: AnyToolset = Toolset()
    """What the model may call; may be empty."""
    tasks: TaskSet | None = None
    """What the episodes are about; None where the seed alone is the task."""
    spec: EnvSpec | None = None
    """The registered description that ``make`` built this environment from."""
    _rng: random.Random | None = None

    @property
    def rng(self) -> random.Random:
        """The environment's own generator, seeded by ``reset(seed=…)``."""
        if self._rng is None:
            self._rng = random.Random()
        return self._rng

    def seed_rng(self, seed: int | None) -> None:
        """Start the generator anew from ``seed``; None lets it go on."""
        if seed is not None:
            self._rng = random.Random(whole_seed(seed))

    @property
    def unwrapped(self) -> Any:
        """The innermost environment, without wrappers."""
        return self

    def require_built(self) -> None:
        """Raise EnvError if a base class's constructor has not run, which an author forgot."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}{'' if self.spec is None else f' {self.spec.id}'}>"


class Env(_Base, Closing):
    """One environment. ``reset`` and ``step`` are for the author to write."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Coroutine[Any, Any, tuple[Observation, Info]]:
        """Begin an episode and return its first messages.

        Args:
            seed: Seeds ``self.rng``; an author calls ``await super().reset(seed=seed)`` for it.
            options: ``{"task": task_id}`` chooses the task.
        """
        self.seed_rng(seed)
        return _Given(([], {}))

    async def step(self, action: AssistantMessage) -> StepResult:
        """Take one assistant message; return (observation, reward, terminated, truncated, info)."""
        raise EnvError(
            f"{type(self).__name__} does not define step()",
            hint="async def step(self, action): return [], reward, terminated, truncated, {}",
        )

    def close(self) -> Coroutine[Any, Any, None]:
        """Give back what the environment holds. May be called twice."""
        return _Given(None)

    async def score_group(self, task_id: str, members: Sequence[Transcript]) -> list[float]:
        """Return what is added to each member's reward once all episodes of a group have ended.

        Args:
            task_id: The task that all members worked on.
            members: One conversation per episode.
        """
        return [0.0] * len(members)


class SyncEnv(_Base):
    """The same environment written with plain functions; ``make`` gives it a thread of its own."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin an episode; call ``super().reset(seed=seed)`` to seed ``self.rng``."""
        self.seed_rng(seed)
        return [], {}

    def step(self, action: AssistantMessage) -> StepResult:
        """Take one assistant message; return (observation, reward, terminated, truncated, info)."""
        raise EnvError(
            f"{type(self).__name__} does not define step()",
            hint="def step(self, action): return [], reward, terminated, truncated, {}",
        )

    def close(self) -> None:
        """Give back what the environment holds. May be called twice."""

    def score_group(self, task_id: str, members: Sequence[Transcript]) -> list[float]:
        """Return what is added to each member's reward; see :meth:`Env.score_group`."""
        return [0.0] * len(members)


CALLS = ("reset", "step", "close", "score_group")
"""What a driver calls on an environment."""


_plain: weakref.WeakKeyDictionary[type, frozenset[str]] = weakref.WeakKeyDictionary()


def plain_calls(kind: type) -> frozenset[str]:
    """Which of :data:`CALLS` an author wrote as plain functions; they run in a thread."""
    known = _plain.get(kind)
    if known is None:
        known = _plain[kind] = frozenset(
            name
            for name in CALLS
            if getattr(kind, name, None) is not getattr(Env, name)
            and not inspect.iscoroutinefunction(getattr(kind, name, None))
        )
    return known


class Wrapper(Env):
    """An environment around another one; by itself it changes nothing.

    ``tools``, ``tasks``, ``spec`` and ``rng`` are the inner environment's, whenever they are
    asked for. A wrapper that has other tools sets ``self.tools``, or overrides the property. The
    constructor's arguments are noted by the class itself, so that ``spec`` rebuilds wrappers too.
    """

    env: Env
    _given: tuple[tuple[Any, ...], dict[str, Any]]
    _own_tools: AnyToolset | None = None
    _own_tasks: TaskSet | None = None
    _own_spec: EnvSpec | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Note the constructor's arguments."""
        self = super().__new__(cls)
        self._given = (args, kwargs)
        return self

    def __init__(self, env: Env) -> None:
        _require_env(type(self).__name__, env)
        if plain_calls(type(env)):  # a plain environment, wrapped by hand
            from relax_agent.envs.threaded import ThreadedEnv

            inner = env
            env = ThreadedEnv(lambda: inner)
        self.env = env

    @property
    def tools(self) -> AnyToolset:  # type: ignore[override]
        """What the model may call, as of now."""
        return self.env.tools if self._own_tools is None else self._own_tools

    @tools.setter
    def tools(self, value: AnyToolset) -> None:
        self._own_tools = value

    @property
    def tasks(self) -> TaskSet | None:  # type: ignore[override]
        """What the episodes are about."""
        return self.env.tasks if self._own_tasks is None else self._own_tasks

    @tasks.setter
    def tasks(self, value: TaskSet | None) -> None:
        self._own_tasks = value

    @property
    def spec(self) -> EnvSpec | None:  # type: ignore[override]
        """The inner environment's spec with this wrapper added; None if there is none."""
        if self._own_spec is not None:
            return self._own_spec
        inner = self.env.spec
        own = None if inner is None else self.wrapper_spec()
        if inner is None or own is None:
            return inner
        return replace(inner, wrappers=(*inner.wrappers, own))

    @spec.setter
    def spec(self, value: EnvSpec | None) -> None:
        self._own_spec = value  # an entry point that is a function built this wrapper as well

    @property
    def rng(self) -> random.Random:
        """The inner environment's generator."""
        return self.env.rng

    @property
    def unwrapped(self) -> Any:
        """The innermost environment, without wrappers."""
        return self.env.unwrapped

    def seed_rng(self, seed: int | None) -> None:
        """Seed the inner environment's generator."""
        self.env.seed_rng(seed)

    def require_built(self) -> None:
        """Raise EnvError if this constructor has not run."""
        if "env" not in vars(self):
            raise EnvError(
                f"{type(self).__name__}.__init__() does not call its base class's",
                hint="super().__init__(env) in its first line",
            )

    def wrapper_spec(self) -> WrapperSpec | None:
        """Describe this wrapper and its arguments; None for one that ``make`` adds by itself."""
        return WrapperSpec(type(self), _named(type(self), *self._given))

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin an episode of the inner environment."""
        return await self.env.reset(seed=seed, options=options)

    async def step(self, action: AssistantMessage) -> StepResult:
        """Step the inner environment."""
        return await self.env.step(action)

    async def close(self) -> None:
        """Close the inner environment."""
        await self.env.close()

    async def score_group(self, task_id: str, members: Sequence[Transcript]) -> list[float]:
        """Ask the inner environment."""
        return await self.env.score_group(task_id, members)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}{self.env!r}>"


def _require_env(owner: str, env: object) -> None:
    """Raise ConfigError for what people hand over in the place of an environment."""
    if isinstance(env, type):
        words, hint = f"the class {env.__name__}", f"{env.__name__}(…), or make('…'), builds one"
    elif not callable(getattr(env, "step", None)):
        words, hint = f"{env!r:.80}", f"make({env!r:.60}) builds one" if env else "make('…')"
    else:
        return
    raise ConfigError(f"{owner} needs an environment, not {words}", hint=hint)


def _named(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a wrapper's arguments by name, the environment left out."""
    bound = inspect.signature(kind.__init__).bind(None, *args, **kwargs)  # type: ignore[misc]
    out: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[2:]:
        shape = bound.signature.parameters[name].kind
        if shape is inspect.Parameter.VAR_KEYWORD:
            out |= value
        else:
            nameless = shape in (
                inspect.Parameter.VAR_POSITIONAL,
                inspect.Parameter.POSITIONAL_ONLY,
            )
            out[f"*{name}" if nameless else name] = value
    return out

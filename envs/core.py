"""The environment API: Gymnasium's five-tuple for agents, async first.

An :class:`Env` runs one episode at a time. ``reset`` gives the first messages, ``step`` takes an
:class:`~relax_agent.messages.AssistantMessage` and gives the *new* messages since then:

    observation, info = await env.reset(seed=7, options={"task": "train-12"})
    observation, reward, terminated, truncated, info = await env.step(action)

``terminated`` is the task's own end, ``truncated`` an outside limit. Only the id of a task
travels; the environment looks the task up, gold answer included, on its own side. Randomness
comes from ``self.rng``, which ``reset`` seeds, never from a global generator: two environments
with equal seeds give the same, however they are interleaved.

An author who prefers plain ``def reset`` and ``def step`` derives from :class:`SyncEnv`; ``make``
runs such an environment in a thread of its own (:mod:`relax_agent.envs.threaded`).
"""

from __future__ import annotations

import random
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from relax_agent.messages import AssistantMessage, Observation
from relax_agent.tools import AnyToolset, Toolset

if TYPE_CHECKING:
    from relax_agent.envs.registration import EnvSpec
    from relax_agent.envs.tasks import TaskSet

Info: TypeAlias = dict[str, Any]
StepResult: TypeAlias = tuple[Observation, float, bool, bool, Info]


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
            self._rng = random.Random(seed)


class Env(_Base):
    """One environment. ``reset`` and ``step`` are for the author to write."""

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin an episode and return its first messages.

        Args:
            seed: Seeds ``self.rng``; an author calls ``await super().reset(seed=seed)`` for it.
            options: ``{"task": task_id}`` chooses the task.
        """
        self.seed_rng(seed)
        return [], {}

    async def step(self, action: AssistantMessage) -> StepResult:
        """Take one assistant message; return (observation, reward, terminated, truncated, info)."""
        raise TypeError(f"{type(self).__name__} does not define step()")

    async def close(self) -> None:
        """Give back what the environment holds. May be called twice."""

    @property
    def unwrapped(self) -> Any:
        """The innermost environment, without wrappers."""
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}{'' if self.spec is None else f' {self.spec.id}'}>"


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
        raise TypeError(f"{type(self).__name__} does not define step()")

    def close(self) -> None:
        """Give back what the environment holds. May be called twice."""


class Wrapper(Env):
    """An environment around another one; by itself it changes nothing."""

    def __init__(self, env: Env) -> None:
        self.env = env
        self.tools = env.tools
        self.tasks = env.tasks
        self.spec = env.spec

    @property
    def rng(self) -> random.Random:
        """The inner environment's generator."""
        return self.env.rng

    @property
    def unwrapped(self) -> Any:
        """The innermost environment, without wrappers."""
        return self.env.unwrapped

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

    def __repr__(self) -> str:
        return f"<{type(self).__name__}{self.env!r}>"

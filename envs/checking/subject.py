"""What is checked: an id, a spec, a class, a function that makes environments, or one environment.

All but the last can be built anew as often as a check needs; what is built has its guard taken
off, so that a check sees what the author's code really returns. One environment that has no spec
can only be checked by itself, and some checks say that they need more.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from relax_agent.envs.core import Env, SyncEnv, Wrapper, plain_calls
from relax_agent.envs.guard import Guard
from relax_agent.envs.registration import make
from relax_agent.envs.registration import spec as find_spec
from relax_agent.envs.specs import EnvSpec
from relax_agent.envs.threaded import ThreadedEnv
from relax_agent.errors import ConfigError, EnvError

Checkable: TypeAlias = str | EnvSpec | Env | SyncEnv | Callable[[], Any]
"""What every check takes."""


class Subject:
    """Builds what is checked."""

    def __init__(self, env: Checkable, kwargs: dict[str, Any] | None = None) -> None:
        self.spec: EnvSpec | None = None
        self.url = isinstance(env, str) and env.startswith(("ws://", "wss://"))
        self.only: Any = None
        """The one environment there is, where no other can be built."""
        self._kwargs = kwargs or {}
        self._factory: Callable[[], Any]
        if isinstance(env, Env) and env.spec is not None and not self._kwargs:
            env = env.spec
        if self.url:
            self.label = str(env)
            self._factory = partial(make, self.label, **self._kwargs)
        elif isinstance(env, (str, EnvSpec)):
            self._describe(find_spec(env) if isinstance(env, str) else env)
        elif isinstance(env, (Env, SyncEnv)):
            self.only, self.label = env, type(getattr(env, "unwrapped", env)).__name__
            self._factory = lambda: env
        elif callable(env):
            self.label = getattr(env, "__name__", None) or type(env).__name__
            self._factory = partial(env, **self._kwargs)
            if isinstance(env, type) and issubclass(env, (Env, SyncEnv)) and plain_calls(env):
                self._factory = partial(ThreadedEnv, self._factory)
        else:
            raise ConfigError(
                f"{env!r:.80} cannot be checked",
                hint="give an id, a spec, a class, a function that makes one, or an environment",
            )

    def _describe(self, spec: EnvSpec) -> None:
        self.spec = replace(spec, kwargs={**spec.kwargs, **self._kwargs})
        self.label = spec.id
        self._factory = lambda: make(self.spec) if self.spec else None

    @property
    def guarded(self) -> bool:
        """Whether users get it from ``make``, behind its guard."""
        return self.spec is not None or self.url

    def build(self, *, here: bool = False) -> Env:
        """Return a new environment without its guard, or the only one there is.

        Args:
            here: Build it in this process, also if its spec says otherwise.
        """
        if here and self.spec is not None and self.spec.isolation is not None:
            return _bare(make(replace(self.spec, isolation=None)))
        return _bare(self._factory())


def _bare(built: Any) -> Env:
    if inspect.isawaitable(built):
        if inspect.iscoroutine(built):
            built.close()
        raise ConfigError("the function that makes environments is async", hint="write it as def")
    if not isinstance(built, (Env, SyncEnv)):
        raise EnvError(
            f"{type(built).__name__} is not an environment",
            hint="derive the class from relax_agent.Env, SyncEnv or ToolEnv",
        )
    built.require_built()
    if isinstance(built, SyncEnv) or plain_calls(type(built)):
        return ThreadedEnv(lambda: built)
    return built.env if isinstance(built, Guard) else built


def authors_class(env: Env) -> type:
    """Return the class that an author wrote: the one inside all wrappers."""
    return type(env.unwrapped)


def wrappers_of(env: Env) -> list[Wrapper]:
    """Return the wrappers of an environment, the outermost first."""
    found = []
    while isinstance(env, Wrapper):
        found.append(env)
        env = env.env
    return found

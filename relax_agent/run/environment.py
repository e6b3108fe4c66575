"""The environment of a run: what a recipe says about it, made and checked."""

from __future__ import annotations

import inspect
from typing import Any

from relax_agent.envs import Env, Policy, TaskSet, make, make_async
from relax_agent.envs.registration import load_entry_point
from relax_agent.envs.specs import Isolation
from relax_agent.errors import ConfigError
from relax_agent.importing import import_named
from relax_agent.run.recipe import Recipe
from relax_agent.tools import RemoteToolset


class EnvMaker:
    """Builds the environments of one run."""

    def __init__(
        self, env_id: str, arguments: dict[str, Any], isolation: Isolation | None = None
    ) -> None:
        self._env_id, self._arguments, self._isolation = env_id, arguments, isolation

    def __call__(self) -> Env:
        """Build one at once."""
        return make(self._env_id, isolation=self._isolation, **self._arguments)

    async def build(self) -> Env:
        """Build one while the event loop goes on."""
        return await make_async(self._env_id, isolation=self._isolation, **self._arguments)


def env_maker(recipe: Recipe, tools: RemoteToolset | None = None) -> EnvMaker:
    """Return what builds environments of a run.

    Args:
        recipe: Names the environment, its arguments and the modules that register it.
        tools: Replace the environment's own; None leaves them in this process.

    Raises:
        ConfigError: A module cannot be imported.
    """
    for module in recipe.env.modules:
        import_named(module)
    arguments = dict(recipe.env.args)
    if tools is not None:
        arguments["tools"] = tools
    return EnvMaker(recipe.env.id, arguments, recipe.env.isolation)


def require_tasks(env: Env) -> TaskSet:
    """Return an environment's tasks, or raise ConfigError if it has not enough to train on."""
    name = env.spec.id if env.spec else type(env.unwrapped).__name__
    tasks = env.tasks
    if not isinstance(tasks, TaskSet):
        raise ConfigError(f"{name} has no tasks to train on", hint="give the environment a TaskSet")
    if not tasks.ids("train"):
        raise ConfigError(f"{name} has no tasks to train on", hint="its TaskSet is empty")
    if not tasks.ids("eval"):
        raise ConfigError(
            f"{name} has no tasks to evaluate on",
            hint="give its TaskSet held-out tasks, e.g. TaskSet.split(tasks, eval_share=0.1)",
        )
    return tasks


def require_tools_argument(env: Env) -> None:
    """Raise ConfigError if an environment's constructor does not take other tools than its own."""
    if env.spec is None:
        return
    try:
        signature = inspect.signature(load_entry_point(env.spec))
    except (TypeError, ValueError):
        return
    kinds = {each.kind for each in signature.parameters.values()}
    if "tools" not in signature.parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
        raise ConfigError(
            f"the recipe's tools section cannot be used: {env.spec.id} takes no tools argument",
            hint="remove the section, or hand tools on in __init__: super().__init__(tools=tools)",
        )


def find_expert(env: Env, *, noise: float = 0.0, seed: int = 0) -> Policy | None:
    """Return the expert that an environment brings (its ``expert`` method), or None."""
    factory = getattr(env.unwrapped, "expert", None)
    if factory is None and env.spec is not None:  # it runs elsewhere: ask its class
        kind: Any = load_entry_point(env.spec)
        own = inspect.getattr_static(kind, "expert", None)
        factory = kind.expert if isinstance(own, (staticmethod, classmethod)) else None
    return None if factory is None else factory(noise=noise, seed=seed)


def require_expert(env: Env, *, noise: float, seed: int) -> Policy:
    """Return the expert, or raise ConfigError if there is none."""
    expert = find_expert(env, noise=noise, seed=seed)
    if expert is None:
        raise ConfigError(
            f"{env.spec.id if env.spec else env} has no expert to learn from",
            hint="give the environment an expert() or set trainer.warm_start.steps=0",
        )
    return expert

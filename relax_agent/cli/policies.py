"""Who plays: the policies that a command line can name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from relax_agent.envs import Env, Policy, RandomPolicy
from relax_agent.errors import ConfigError
from relax_agent.importing import import_named

PolicyName = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="NAME",
        help="expert (the environment's own), random, or module:factory of your own.",
    ),
]


def named_policy(name: str, env: Env, seed: int = 0) -> Callable[[], Policy]:
    """Return what makes a policy for an episode.

    Args:
        name: ``expert``, ``random`` or ``module:factory``; the factory is called for each episode.
        env: The environment; ``expert`` is its own.
        seed: Where the randomness of ``random`` begins; every episode gets another.

    Raises:
        ConfigError: There is no such policy.
    """
    if name == "expert":
        factory = getattr(env.unwrapped, "expert", None)
        if factory is None:
            raise ConfigError(
                f"{env.spec.id if env.spec else env} has no expert",
                hint="give its class an expert() that returns a policy, see docs/recipes.md",
            )
        return _checked(name, factory)
    if name == "random":
        seeds = iter(range(seed, 2**63))
        return lambda: RandomPolicy(next(seeds))
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(f"there is no policy {name!r}", hint="expert, random or module:factory")
    factory = getattr(import_named(module), attribute, None)
    if not callable(factory):
        raise ConfigError(f"{module} has no factory {attribute!r}")
    return _checked(name, factory)


def _checked(name: str, factory: Callable[[], Any]) -> Callable[[], Policy]:
    def make() -> Policy:
        made = factory()
        if not isinstance(made, Policy):
            raise ConfigError(f"{name} gave a {type(made).__name__}, which has no act()")
        return made

    make()  # what is wrong with it shall show before anything is played
    return make

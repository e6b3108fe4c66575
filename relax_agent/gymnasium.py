"""Every environment of this project, to be made by Gymnasium.

    gymnasium.make("relax_agent.gymnasium:relax/Calculator-v0")

Gymnasium imports what stands before the colon, and importing this module registers everything that
Relax Agent knows, installed plugins included. What is registered later is added at once.

The rest is what a program that talks through Gymnasium needs: :func:`as_gymnasium` and the codec
between messages and the texts of the two spaces.
"""

from __future__ import annotations

from typing import Any

import gymnasium

from relax_agent.envs.adapters.gymnasium_codec import (
    decode_action,
    decode_observation,
    encode_action,
    encode_observation,
)
from relax_agent.envs.adapters.gymnasium_export import (
    ENTRY_POINT,
    agent_env_class,
    as_gymnasium,
)
from relax_agent.envs.adapters.gymnasium_space import message_space_class
from relax_agent.envs.registration import load_plugins, registry, watchers
from relax_agent.envs.specs import EnvSpec

__all__ = [
    "AgentEnv",
    "MessageSpace",
    "as_gymnasium",
    "decode_action",
    "decode_observation",
    "encode_action",
    "encode_observation",
    "make_agent_env",
]

AgentEnv = agent_env_class()
MessageSpace = message_space_class()


def make_agent_env(
    relax_spec: str, *, render_mode: str | None = None, **kwargs: Any
) -> gymnasium.Env[str, str]:
    """Make a registered environment; this is what Gymnasium calls.

    Args:
        relax_spec: The id, or the spec as JSON.
        render_mode: ``ansi``, or None.
        **kwargs: Arguments of the environment's constructor.
    """
    known = EnvSpec.from_json(relax_spec) if relax_spec.startswith("{") else relax_spec
    return as_gymnasium(known, render_mode=render_mode, **kwargs)


def _register(spec: EnvSpec) -> None:
    if spec.id not in gymnasium.registry:
        gymnasium.register(spec.id, ENTRY_POINT, kwargs={"relax_spec": spec.id})


def _register_all() -> None:
    load_plugins()
    for spec in registry.values():
        _register(spec)
    watchers.append(_register)


_register_all()

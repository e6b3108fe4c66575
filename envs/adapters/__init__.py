"""Environments of other libraries as agent environments, and the other way round.

Each library has a module of its own, which imports it when it is used and not before.
"""

from relax_agent.envs.adapters.gem import from_gem
from relax_agent.envs.adapters.gymnasium import from_gymnasium
from relax_agent.envs.adapters.gymnasium_export import as_gymnasium
from relax_agent.envs.adapters.openenv import from_openenv
from relax_agent.envs.adapters.reasoning_gym import from_reasoning_gym
from relax_agent.envs.adapters.skyrl_gym import from_skyrl_gym
from relax_agent.envs.adapters.textarena import from_textarena
from relax_agent.envs.adapters.verifiers import from_verifiers

__all__ = [
    "as_gymnasium",
    "from_gem",
    "from_gymnasium",
    "from_openenv",
    "from_reasoning_gym",
    "from_skyrl_gym",
    "from_textarena",
    "from_verifiers",
]

"""Environments: what an agent is trained and tested in.

:class:`Env` is the API, :class:`ToolEnv` the base class that most people use, ``register`` and
``make`` the registry. Ready-made environments are registered here by name only; they are imported
when they are made.
"""

from typing import TYPE_CHECKING, Any

from relax_agent.envs.core import Env, Info, StepResult, SyncEnv, Wrapper
from relax_agent.envs.jobs import Job
from relax_agent.envs.listing import load_module_envs, pprint_registry
from relax_agent.envs.playing import Play, PlayLimits, play
from relax_agent.envs.policies import Policy, RandomPolicy, ScriptedPolicy
from relax_agent.envs.registration import (
    EnvSpec,
    WrapperSpec,
    load_plugins,
    make,
    make_async,
    register,
    registry,
    spec,
)
from relax_agent.envs.rewards import Reward, Rubric
from relax_agent.envs.tasks import Split, Task, TaskOrder, TaskSet
from relax_agent.envs.tool_env import Score, ToolEnv, Transcript
from relax_agent.envs.vector import VectorEnv, make_vec
from relax_agent.envs.wrappers import TimeLimit

if TYPE_CHECKING:
    from relax_agent.envs.checking import (
        benchmark_env,
        check_cancellation,
        check_env,
        check_isolation,
        check_seeding,
        check_tools,
    )

__all__ = [
    "Env",
    "EnvSpec",
    "Info",
    "Job",
    "Play",
    "PlayLimits",
    "Policy",
    "RandomPolicy",
    "Reward",
    "Rubric",
    "Score",
    "ScriptedPolicy",
    "Split",
    "StepResult",
    "SyncEnv",
    "Task",
    "TaskOrder",
    "TaskSet",
    "ToolEnv",
    "Transcript",
    "TimeLimit",
    "VectorEnv",
    "Wrapper",
    "WrapperSpec",
    "benchmark_env",
    "check_cancellation",
    "check_env",
    "check_isolation",
    "check_seeding",
    "check_tools",
    "load_module_envs",
    "load_plugins",
    "make",
    "make_async",
    "make_vec",
    "play",
    "pprint_registry",
    "register",
    "registry",
    "spec",
]


def __getattr__(name: str) -> Any:
    """Load the checks when they are first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from relax_agent.envs import checking

    return getattr(checking, name)


register("relax/Calculator-v0", "relax_agent.envs.catalog.calculator:CalculatorEnv")
register("relax/Search-v0", "relax_agent.envs.catalog.search:SearchEnv")
register("relax/Sudoku-v0", "relax_agent.envs.catalog.sudoku:SudokuEnv")
register("relax/TextGame-v0", "relax_agent.envs.catalog.text_game:TextGameEnv")
register("relax/SQL-v0", "relax_agent.envs.catalog.sql:SqlEnv")
register("relax/ShopOrder-v0", "relax_agent.envs.catalog.shop_order:ShopOrderEnv")
register("relax/Debate-v0", "relax_agent.envs.catalog.debate:DebateEnv")
register(
    "relax/PythonInterpreter-v0",
    "relax_agent.envs.catalog.python_interpreter:PythonInterpreterEnv",
)
register("relax/Gymnasium-v0", "relax_agent.envs.adapters.gymnasium:GymnasiumEnv")
register("relax/SkyRLGym-v0", "relax_agent.envs.adapters.skyrl_gym:SkyRLGymEnv")
register("relax/OpenEnv-v0", "relax_agent.envs.adapters.openenv:OpenEnvEnv")
register("relax/TextArena-v0", "relax_agent.envs.adapters.textarena:TextArenaEnv")
register("relax/Verifiers-v0", "relax_agent.envs.adapters.verifiers:VerifiersEnv")
register("relax/ReasoningGym-v0", "relax_agent.envs.adapters.reasoning_gym:ReasoningGymEnv")
register("relax/GEM-v0", "relax_agent.envs.adapters.gem:GemEnv")

"""Relax Agent: a Gymnasium for agents, with the whole training stack attached.

Messages are imported at once; everything else when it is first used, so that ``import
relax_agent`` stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relax_agent.messages import (
    AssistantMessage,
    Audio,
    Image,
    Message,
    Rewrite,
    Text,
    ToolCall,
    Video,
)

if TYPE_CHECKING:
    from relax_agent.envs import (
        Env,
        EnvSpec,
        Play,
        PlayLimits,
        Policy,
        RandomPolicy,
        Reward,
        Rubric,
        Score,
        ScriptedPolicy,
        SyncEnv,
        Task,
        TaskSet,
        ToolEnv,
        Transcript,
        Wrapper,
        check_env,
        make,
        make_vec,
        play,
        pprint_registry,
        register,
        registry,
        spec,
    )
    from relax_agent.tools import RemoteToolset, Tool, ToolError, ToolResult, Toolset, tool

__version__ = "0.1.0"

__all__ = [
    "AssistantMessage",
    "Audio",
    "Env",
    "EnvSpec",
    "Image",
    "Message",
    "Play",
    "PlayLimits",
    "Policy",
    "RandomPolicy",
    "RemoteToolset",
    "Reward",
    "Rewrite",
    "Rubric",
    "Score",
    "ScriptedPolicy",
    "SyncEnv",
    "Task",
    "TaskSet",
    "Text",
    "Tool",
    "ToolCall",
    "ToolEnv",
    "ToolError",
    "ToolResult",
    "Toolset",
    "Transcript",
    "Video",
    "Wrapper",
    "check_env",
    "make",
    "make_vec",
    "play",
    "pprint_registry",
    "register",
    "registry",
    "spec",
    "tool",
]

_TOOLS = frozenset({"RemoteToolset", "Tool", "ToolError", "ToolResult", "Toolset", "tool"})


def __getattr__(name: str) -> Any:
    """Load a public name from where it lives."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    home = "relax_agent.tools" if name in _TOOLS else "relax_agent.envs"
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

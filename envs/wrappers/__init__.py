"""Wrappers that any environment can wear, one theme a module.

Each is thin, knows only messages, and goes to JSON with the environment's spec. Those put on later
are outside of those put on earlier; docs/wrappers.md tells which order makes sense.
"""

from relax_agent.envs.wrappers.compaction import Compaction
from relax_agent.envs.wrappers.format import FormatPenalty
from relax_agent.envs.wrappers.limits import TimeLimit, TokenLimit, WallClock
from relax_agent.envs.wrappers.prompts import SystemPrompt
from relax_agent.envs.wrappers.record import RecordEpisode
from relax_agent.envs.wrappers.recording import RecordedEpisode, read_episodes
from relax_agent.envs.wrappers.rewards import RewardClip, RewardScale, RewardShaping

__all__ = [
    "Compaction",
    "FormatPenalty",
    "RecordEpisode",
    "RecordedEpisode",
    "RewardClip",
    "RewardScale",
    "RewardShaping",
    "SystemPrompt",
    "TimeLimit",
    "TokenLimit",
    "WallClock",
    "read_episodes",
]

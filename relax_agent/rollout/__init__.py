"""Rollout: the fleet of engines, the loop of one episode, groups, and what keeps the queue full."""

from relax_agent.rollout.env_pool import EnvPool
from relax_agent.rollout.episode_loop import EpisodeOptions, run_episode
from relax_agent.rollout.evaluate import EvalReport, evaluate
from relax_agent.rollout.expert import ExpertSource
from relax_agent.rollout.fleet import EngineLoad, Fleet
from relax_agent.rollout.groups import (
    EpisodeRunner,
    GroupOutcome,
    GroupRunner,
    episode_options,
)
from relax_agent.rollout.limits import EpisodeLimits
from relax_agent.rollout.producer import Producer
from relax_agent.rollout.sampling import PolicySource
from relax_agent.rollout.settings import RolloutSettings

__all__ = [
    "EngineLoad",
    "EnvPool",
    "EpisodeLimits",
    "EpisodeOptions",
    "EpisodeRunner",
    "EvalReport",
    "ExpertSource",
    "Fleet",
    "GroupOutcome",
    "GroupRunner",
    "PolicySource",
    "Producer",
    "RolloutSettings",
    "episode_options",
    "evaluate",
    "run_episode",
]

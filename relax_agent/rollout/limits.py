"""Limits of an episode; :mod:`relax_agent.limits` waits under them."""

from __future__ import annotations

from dataclasses import dataclass

from relax_agent.limits import (
    GRACE_S,
    Overrun,
    TimeBudget,
    bounded,
    contained,
    outcome,
    stop,
    wait_bounded,
)
from relax_agent.rollout.settings import RolloutSettings

__all__ = [
    "GRACE_S",
    "EpisodeLimits",
    "Overrun",
    "TimeBudget",
    "bounded",
    "contained",
    "outcome",
    "stop",
    "wait_bounded",
]


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """What ends an episode from outside."""

    max_turns: int = 8
    max_tokens_per_turn: int = 256
    """Sampled tokens in one assistant message."""
    max_context: int = 4096
    """Tokens of the whole sequence."""
    timeout_s: float = 600.0
    """Seconds for the episode, pauses of the engines not counted."""
    env_timeout_s: float = 120.0
    """Seconds for one reset or step."""
    max_resumes: int = 8
    """How often one answer goes on after an engine has aborted it."""

    @classmethod
    def of(cls, settings: RolloutSettings) -> EpisodeLimits:
        """Take the limits from a recipe."""
        return cls(
            settings.max_turns,
            settings.max_tokens_per_turn,
            settings.max_context,
            settings.episode_timeout_s,
            settings.env_timeout_s,
        )

"""Limits of an episode; :mod:`relax_agent.limits` waits under them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    max_tokens_per_episode: int | None = None
    """Sampled tokens in all messages of the episode together."""
    on_overflow: Literal["end", "drop_oldest"] = "end"
    """What to do where the conversation leaves no room for an answer."""

    def room(self, prompt: int, sampled: int) -> int:
        """Return how many tokens the next message may have; 0 or less: none.

        Args:
            prompt: Tokens of the sequence before it.
            sampled: Tokens that the episode has sampled before it.
        """
        return min(self.max_tokens_per_turn, self.max_context - prompt, self.left(sampled))

    def left(self, sampled: int) -> int:
        """Return how many tokens an episode that has sampled so many may still sample."""
        most = self.max_tokens_per_episode
        return self.max_context if most is None else most - sampled

    def used_up(self, prompt: int, sampled: int) -> str:
        """Say why there is no room."""
        if self.left(sampled) <= 0:
            return f"{sampled} of {self.max_tokens_per_episode} sampled tokens are used"
        return f"{prompt} of {self.max_context} tokens are used"

    @classmethod
    def of(cls, settings: RolloutSettings) -> EpisodeLimits:
        """Take the limits from a recipe."""
        return cls(
            settings.max_turns,
            settings.max_tokens_per_turn,
            settings.max_context,
            settings.episode_timeout_s,
            settings.env_timeout_s,
            max_tokens_per_episode=settings.max_tokens_per_episode,
            on_overflow=settings.on_overflow,
        )

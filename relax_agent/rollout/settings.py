"""What a recipe says about rollout: groups, episodes and their limits."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class RolloutSettings(BaseModel):
    """How episodes are made."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    groups_per_step: int = Field(default=8, ge=1)
    """Groups in one optimizer step."""
    group_size: int = Field(default=8, ge=1)
    """Episodes of one task whose rewards are compared."""
    max_concurrent_episodes: int = Field(default=64, ge=1)
    """Episodes that run at the same time, over all groups."""
    max_turns: int = Field(default=8, ge=1)
    """Assistant messages in one episode."""
    max_tokens_per_turn: int = Field(default=256, ge=1)
    """Sampled tokens in one assistant message."""
    max_context: int = Field(default=4096, ge=2)
    """Tokens of one episode's sequence, prompts and tool messages included."""
    max_tokens_per_episode: int | None = Field(default=None, ge=1)
    """Sampled tokens in one episode, over all its messages; null: only ``max_context`` counts."""
    on_overflow: Literal["end", "drop_oldest"] = "end"
    """What follows when the conversation leaves no room for an answer: the episode ends, or its
    oldest answers, each with all that came back for it, are left out until a whole message of
    ``max_tokens_per_turn`` fits. That forks the token log."""
    episode_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds for one episode; the time that engines are paused for new weights does not count."""
    env_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds for one reset or step of the environment; past it the environment has failed."""
    temperature: float = Field(default=1.0, gt=0)
    """Of sampling in training. The trainer applies the same."""
    on_abort: Literal["resume", "retry"] = "resume"
    """What follows when an engine aborts an answer: go on after the tokens that are there, or begin
    the episode anew from a clean copy."""
    keep_equal_rewards: bool = True
    """Whether groups whose rewards are all the same go to the trainer; False filters them out."""
    max_failures_in_a_row: int = Field(default=16, ge=1)
    """So many groups that fail one after another end the run, with the last cause."""

"""How an episode ended: one word, the same in token logs, plays and metrics."""

from __future__ import annotations

from enum import StrEnum


class EpisodeStatus(StrEnum):
    """How an episode ended. An episode has exactly one."""

    RUNNING = "running"
    COMPLETED = "completed"
    TRUNCATED_TURNS = "truncated_turns"
    TRUNCATED_TOKENS = "truncated_tokens"
    TRUNCATED_TIME = "truncated_time"
    PARSE_FAILURE = "parse_failure"
    TOOL_FAILURE = "tool_failure"
    ENV_FAILURE = "env_failure"
    ENGINE_FAILURE = "engine_failure"
    CANCELLED = "cancelled"

    @property
    def trainable(self) -> bool:
        """Whether the reward of such an episode says something about the policy."""
        return self not in _UNTRAINABLE


TRUNCATIONS = {
    status.value: status
    for status in EpisodeStatus
    if status.value.startswith("truncated_") or status.value.endswith("_failure")
}
"""What an environment that truncates may say of it in ``info["status"]``."""

_UNTRAINABLE = {
    EpisodeStatus.RUNNING,
    EpisodeStatus.TOOL_FAILURE,
    EpisodeStatus.ENV_FAILURE,
    EpisodeStatus.ENGINE_FAILURE,
    EpisodeStatus.CANCELLED,
}

"""The record of one episode at the level of messages, and the limits that it was played under."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from relax_agent.errors import ConfigError, EpisodeError
from relax_agent.messages import Message, Usage, from_record, to_record
from relax_agent.status import EpisodeStatus


@dataclass(frozen=True, slots=True)
class PlayLimits:
    """What ends an episode from outside. Seconds may be ``math.inf``."""

    max_turns: int = 100
    """Assistant messages."""
    timeout_s: float = 600.0
    """Seconds for the whole episode."""
    step_timeout_s: float = 300.0
    """Seconds for one reset or step."""
    policy_timeout_s: float = 300.0
    """Seconds for one answer of the policy."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "timeout_s", "step_timeout_s", "policy_timeout_s"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"{name} must be > 0, not {value}")


@dataclass(slots=True)
class Play:
    """What happened when a policy played one episode."""

    env_id: str = ""
    task_id: str | None = None
    seed: int | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    status: EpisodeStatus = EpisodeStatus.RUNNING
    detail: str = ""
    """One line on why it ended so."""
    messages: list[Message] = field(default_factory=list)
    """Everything that was said, in order, also what a ``Rewrite`` took out of sight."""
    rewrites: list[tuple[int, str]] = field(default_factory=list)
    """Where in ``messages`` a rewritten conversation begins, and why it was rewritten."""
    rewards: list[float] = field(default_factory=list)
    """One for each step."""
    turns: int = 0
    """Assistant messages."""
    actions: list[int] = field(default_factory=list)
    """Where in ``messages`` stands what the policy said."""
    metrics: dict[str, float] = field(default_factory=dict)
    terminated: bool = False
    truncated: bool = False
    usage: Usage = field(default_factory=Usage)
    """Tokens of all answers together."""
    duration_s: float = 0.0

    @property
    def reward(self) -> float:
        """The sum of all rewards."""
        return math.fsum(self.rewards)

    def finish(self, status: EpisodeStatus, detail: str = "") -> None:
        """End the episode. A second end is an error: every episode ends exactly once."""
        self.require_running()
        if status is EpisodeStatus.RUNNING:
            raise EpisodeError("an episode cannot end as running")
        self.status, self.detail = status, detail
        if status.value.startswith("truncated_") and not self.terminated:
            self.truncated = True

    def require_running(self) -> None:
        """Raise EpisodeError if the episode has ended."""
        if self.status is not EpisodeStatus.RUNNING:
            raise EpisodeError(f"episode {self.id} has already ended as {self.status}")

    def to_record(self) -> dict[str, Any]:
        """Return everything as plain JSON data; :meth:`from_record` rebuilds it."""
        return {
            "id": self.id,
            "env_id": self.env_id,
            "task_id": self.task_id,
            "seed": self.seed,
            "status": self.status.value,
            "detail": self.detail,
            "reward": self.reward,
            "rewards": list(self.rewards),
            "turns": self.turns,
            "actions": list(self.actions),
            "metrics": dict(self.metrics),
            "terminated": self.terminated,
            "truncated": self.truncated,
            "usage": asdict(self.usage),
            "duration_s": self.duration_s,
            "rewrites": [list(item) for item in self.rewrites],
            "messages": [to_record(message) for message in self.messages],
        }

    @classmethod
    def from_record(cls, data: Mapping[str, Any]) -> Play:
        """Rebuild what :meth:`to_record` returned."""
        rest = {key: value for key, value in data.items() if key != "reward"}
        return cls(
            **{
                **rest,
                "status": EpisodeStatus(data["status"]),
                "usage": Usage(**data["usage"]),
                "rewrites": [(place, reason) for place, reason in data["rewrites"]],
                "messages": [from_record(item) for item in data["messages"]],
            }
        )

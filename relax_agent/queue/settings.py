"""What a recipe says about the trajectory queue."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class QueueSettings(BaseModel):
    """The trajectory queue between rollout and trainer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["local"] = "local"
    """``local``: payload files and an SQLite index in the run folder."""
    max_staleness: int = Field(default=1, ge=0)
    """How many steps older than the trainer a group may be when it is trained; 0 is on-policy."""
    on_straggler: Literal["wait", "overtake"] = "wait"
    """``wait``: no step starts that would push an unfinished group past the bound."""
    beyond: Literal["train", "mask", "drop"] = "train"
    """What happens to data beyond the bound (possible with ``overtake`` only): train on it all the
    same, mask the tokens that are too old, or drop the group."""
    lease_timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds after which a group that was handed out and never acknowledged is offered again."""
    no_progress_s: float = Field(default=900.0, gt=0)
    """Seconds without any new group after which a waiting trainer gets an error."""

"""How new weights reach the engines, as the recipe's ``weights`` section."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class WeightsSettings(BaseModel):
    """The way of the weights and what a pause does to running requests."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["disk", "tensor"] = "disk"
    """``disk``: engines read the folder themselves (every engine, shared file system);
    ``tensor``: each file's bytes are sent to the engine (embedded engine)."""
    pause: Literal["retract", "in_place"] = "retract"
    """``retract``: running requests compute their key-value cache anew under the new weights;
    ``in_place``: they keep the old one, which is faster and slightly off-policy."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Seconds in which all engines must have the new weights and run again."""

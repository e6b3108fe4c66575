"""Which algorithm, and its constants. Free of torch, so that a recipe can be read without it."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator


class GrpoSettings(BaseModel):
    """Group relative policy optimisation: advantages from the group, clipped token loss."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["grpo"] = "grpo"
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The ratio is held above ``1 - clip_low``."""
    clip_high: float = Field(default=0.28, ge=0)
    """The ratio is held below ``1 + clip_high``."""
    dual_clip: float | None = Field(default=3.0, gt=1)
    """A negative advantage gives a loss of at most ``-dual_clip × advantage``; null: no bound."""
    normalize_std: bool = True
    """Divide advantages by the group's standard deviation."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """``token_mean``: every token of the step weighs the same. ``sequence_mean``: every episode."""
    shuffle_rewards: bool = False
    """Diagnostic: permute the rewards over the whole step. Whatever is still learned afterwards is
    not learned from the rewards.
    """

    @model_validator(mode="after")
    def _bounds_in_order(self) -> GrpoSettings:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"dual_clip: {self.dual_clip} must lie above 1 + clip_high = {1 + self.clip_high}"
            )
        return self


AlgorithmSettings: TypeAlias = GrpoSettings
"""Every algorithm's settings, told apart by ``kind``."""

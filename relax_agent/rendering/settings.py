"""Settings of the renderer: which chat format a model speaks."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class RendererSettings(BaseModel):
    """How messages become tokens. The name chooses one of the ``renderers`` package's formats."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "qwen3"
    """A format of the ``renderers`` package, e.g. ``qwen3``, ``glm-4.5``, ``kimi-k2``."""
    enable_thinking: bool | None = None
    """Whether the model may think before it answers; None is the format's own default."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the format's own configuration, checked by it."""

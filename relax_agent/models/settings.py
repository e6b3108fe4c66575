"""Settings of the model: a folder on disk, or a tiny model that the run makes for itself."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class TinySettings(BaseModel):
    """A small random model with a real architecture; it trains on a laptop's CPU in minutes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["qwen3_moe", "qwen3", "qwen3_vl", "qwen3_omni"] = "qwen3_moe"
    """The architecture: mixture of experts, dense, dense that sees pictures and films, or the
    thinker of Qwen3-Omni: a mixture of experts that sees and hears."""
    seed: int = 0
    """Fixes the initial weights."""
    hidden: int = Field(64, ge=8, multiple_of=8)
    """Width of the residual stream."""
    layers: int = Field(4, ge=1)
    """Transformer layers."""
    heads: int = Field(4, ge=1)
    """Attention heads."""
    kv_heads: int = Field(2, ge=1)
    """Key and value heads; a divisor of ``heads``."""
    head_dim: int = Field(32, ge=8, multiple_of=8)
    """Width of one head."""
    experts: int = Field(8, ge=2)
    """Experts per layer (``qwen3_moe`` and ``qwen3_omni``)."""
    top_k: int = Field(2, ge=1)
    """Experts that see each token (``qwen3_moe`` and ``qwen3_omni``)."""
    expert_hidden: int = Field(128, ge=8, multiple_of=8)
    """Inner width of one expert; a dense layer is ``top_k`` times as wide."""
    vocab: int = Field(1024, ge=320)
    """Most tokens the vocabulary may have; fewer where the texts have no more to merge."""
    max_positions: int = Field(2048, ge=128)
    """Longest context, in tokens."""
    init_std: float = Field(0.04, gt=0)
    """Standard deviation of the initial weights."""

    @model_validator(mode="after")
    def _shapes_fit(self) -> TinySettings:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.kind in ("qwen3_moe", "qwen3_omni") and self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} is more than experts {self.experts}")
        return self


class ModelSettings(BaseModel):
    """Which model a run trains: exactly one of ``path`` and ``tiny``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path | None = None
    """A folder in Hugging Face layout: config.json, safetensors, tokenizer."""
    tiny: TinySettings | None = None
    """Make a small random model, with a tokenizer trained on the environment's own texts."""

    @model_validator(mode="after")
    def _exactly_one(self) -> ModelSettings:
        if (self.path is None) == (self.tiny is None):
            raise ValueError("give exactly one of path and tiny, e.g. tiny: {kind: qwen3_moe}")
        return self

"""Settings of the trainer: which implementation, how fast it learns, how it lays out its work.

One model for both implementations, so that a recipe changes ``kind`` and nothing else. What an
implementation cannot do is refused here, with a reason: no key is accepted and ignored.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class WarmStartSettings(BaseModel):
    """Supervised steps on an environment's expert before reinforcement learning starts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    episodes: int = Field(default=256, ge=0)
    """Expert episodes to collect; 0 turns the warm start off."""
    noise: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of expert answers that are wrong on purpose, so that something is left to learn."""
    steps: int = Field(default=0, ge=0)
    """Supervised optimizer steps; 0 turns the warm start off."""
    batch_episodes: int = Field(default=32, ge=1)
    """Expert episodes per supervised step."""
    lr: float = Field(default=1e-3, gt=0)
    """Learning rate of the supervised steps, constant after a short linear rise."""

    @property
    def enabled(self) -> bool:
        """Whether there is anything to do."""
        return self.episodes > 0 and self.steps > 0


class ParallelSettings(BaseModel):
    """How the ranks of the Megatron trainer share the model. The rest is data parallel."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tensor: int = Field(default=1, ge=1)
    """Ranks that share each matrix."""
    pipeline: int = Field(default=1, ge=1)
    """Ranks that share the layers."""
    expert: int = Field(default=1, ge=1)
    """Ranks that share the experts of a layer."""


class TrainerSettings(BaseModel):
    """Everything a trainer needs besides the model's folder and the algorithm."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["megatron", "torch"] = "megatron"
    """``megatron``: megatron-core, any number of ranks. ``torch``: plain transformers, one rank."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the weights live."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of forward and backward; the optimizer's own copy is always float32."""
    threads: int = Field(default=1, ge=1)
    """CPU threads per rank."""
    ranks: int = Field(default=1, ge=1)
    """Processes. ``torch`` has one."""
    parallel: ParallelSettings = ParallelSettings()
    """How the ranks share the model."""

    lr: float = Field(default=1e-4, gt=0)
    """Peak learning rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from 0 to ``lr``."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay; matrices only, never norms or biases."""
    clip_grad: float = Field(default=1.0, gt=0)
    """Gradients longer than this are scaled down to it."""

    micro_batch_tokens: int = Field(default=4096, ge=2)
    """Tokens of one forward pass. A longer sequence is an error."""
    temperature: float = Field(default=1.0, gt=0)
    """Logits are divided by it before log-probs are compared; the recipe sets the rollout's own."""
    routing_replay: bool = True
    """Use the experts that the engine chose (R3). Without effect on a model without experts."""
    recompute: Literal["none", "full"] = "none"
    """``full``: keep only each layer's input and run its forward again in the backward pass."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Longest that one step, one publication or one checkpoint may take, in seconds."""
    seed: int = 0
    """Seeds everything the trainer draws."""
    warm_start: WarmStartSettings = WarmStartSettings()
    """Supervised steps before the first reinforcement-learning step."""

    @model_validator(mode="after")
    def _layout_exists(self) -> TrainerSettings:
        model_ranks = self.parallel.tensor * self.parallel.pipeline
        if self.kind == "torch" and (self.ranks, self.parallel) != (1, ParallelSettings()):
            raise ValueError("kind: torch runs on one rank → use kind: megatron for more")
        if self.ranks % model_ranks:
            raise ValueError(
                f"ranks: {self.ranks} is not a multiple of tensor × pipeline = {model_ranks}"
            )
        if (self.ranks // self.parallel.pipeline) % self.parallel.expert:
            raise ValueError(
                f"ranks / pipeline = {self.ranks // self.parallel.pipeline} is not a multiple of "
                f"expert = {self.parallel.expert}"
            )
        return self

    def lr_at(self, step: int) -> float:
        """Return the learning rate of optimizer step ``step``; the first is 1.

        It depends on the step alone, so a resumed run cannot advance a schedule twice.
        """
        return self.lr * min(1.0, step / self.warmup_steps) if self.warmup_steps else self.lr

    def sft_lr_at(self, step: int) -> float:
        """Return the learning rate of supervised step ``step`` (the first is 1)."""
        rise = max(1, self.warm_start.steps // 10)
        return self.warm_start.lr * min(1.0, step / rise)

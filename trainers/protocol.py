"""What a trainer can do, and what one step of it reports.

A trainer is a synchronous object inside one process (one rank). It takes a finished
:class:`~relax_agent.trainers.batch.Batch`, so that both implementations learn from exactly the
same numbers, and gives weights back under the names that ``save_pretrained`` writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from relax_agent.timeline import Timeline
    from relax_agent.trainers.batch import Batch


@dataclass(frozen=True, slots=True)
class RouteShape:
    """What routed experts must look like for one model."""

    layers: int
    """All decoder layers, dense ones included: routes are indexed by global layer."""
    moe_layers: tuple[int, ...]
    """Global indices of the layers that have experts; only their routes are read."""
    top_k: int
    experts: int


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """How one trainer wants its batches packed."""

    micro_batch_tokens: int
    """Most tokens of one micro-batch."""
    vocab_size: int
    """Token ids lie in ``[0, vocab_size)``."""
    routes: RouteShape | None
    """None: the model has no experts, or routing replay is off."""
    multiple: int = 1
    """The number of micro-batches is a multiple of this (data-parallel ranks take equal counts)."""
    takes_media: bool = False
    """Whether the trainer can train on tokens that stand for media."""


@dataclass(slots=True)
class StepReport:
    """What one step did. Means are over the trained tokens of all ranks."""

    step: int = 0
    """Optimizer steps of this kind so far, this one included."""
    skipped: str | None = None
    """Why no optimizer step was made; None if one was."""
    loss: float = 0.0
    grad_norm: float = 0.0
    """Before clipping."""
    lr: float = 0.0
    reward: float = 0.0
    """Mean over the episodes that count."""
    tokens: int = 0
    """Sampled tokens in the loss's denominator."""
    sequences: int = 0
    """Episodes in the loss's denominator."""
    forward_tokens: int = 0
    """Tokens that went through the model, prompts included."""
    micro_batches: int = 0
    logprob_mismatch: float = 0.0
    """Mean ``|engine − trainer|`` of the log-probs, before this step's update, in nats."""
    mismatch_kl: float = 0.0
    """Estimate (k3) of ``KL(engine ‖ trainer)`` per token, before this step's update, in nats."""
    ratio_mean: float = 1.0
    """Mean ``exp(trainer − engine)``."""
    clip_share: float = 0.0
    """Share of tokens whose gradient the clipping removed."""
    routes_replayed: float = 0.0
    """Share of forward tokens that used the engine's experts."""
    routes_differ: float = 0.0
    """Share of replayed choices that the live router would not have made."""
    staleness_mean: float = 0.0
    """Trainer's version minus the version that sampled the token, over tokens."""
    staleness_max: int = 0
    excluded: dict[str, int] = field(default_factory=dict)
    """What was left out and why: episodes, groups or tokens by reason."""
    time_s: dict[str, float] = field(default_factory=dict)
    """Seconds by part since the last report (or the start): they sum to the wall clock."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StepReport:
        """Rebuild a report from :meth:`to_json`."""
        return cls(**data)


class Trainer(Protocol):
    """One rank of a trainer. All ranks get the same calls with the same batches."""

    timeline: Timeline
    """Where this rank's time goes; whoever drives the trainer adds its own parts."""

    @property
    def layout(self) -> BatchLayout:
        """How batches for this trainer must be packed."""

    def step(self, batch: Batch) -> StepReport:
        """Do one optimizer step of the algorithm. A bad batch raises before a weight changes."""

    def sft_step(self, batch: Batch) -> StepReport:
        """Do one supervised optimizer step: likelihood of the sampled tokens."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight under its Hugging Face name, as ``save_pretrained`` writes it.

        Every rank must exhaust the iterator (gathering is collective); rank 0's is complete.
        """

    def save(self, folder: Path) -> None:
        """Write model, optimizer, step and random state: atomic and without pickle."""

    def restore(self, folder: Path) -> None:
        """Read what :meth:`save` wrote: the next step is the same number as without a stop."""

    def close(self) -> None:
        """Release processes and groups. Idempotent."""

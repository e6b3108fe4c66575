"""The Megatron trainer: one optimizer step from a packed batch.

Every micro-batch goes forward with the engine's experts (``replay``) and its weighted loss goes
backward at once, so only one micro-batch's activations are alive. Gradients gather in the flat
buffer of Megatron's ``DistributedDataParallel``; they are *summed* over micro-batches and ranks,
because each token's weight already holds the denominator of the whole step. Megatron's optimizer
then moves float32 weights.

Ranks share data. Sharing the model (tensor, pipeline, expert) is refused until it is verified.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relax_agent.errors import ConfigError, TrainerError
from relax_agent.timeline import Timeline
from relax_agent.trainers.algorithms.settings import AlgorithmSettings
from relax_agent.trainers.batch import Batch, MicroBatch
from relax_agent.trainers.losses import (
    SUMS,
    new_sums,
    policy_micro_loss,
    report_of,
    sft_micro_loss,
)
from relax_agent.trainers.megatron import device as machine
from relax_agent.trainers.protocol import BatchLayout, StepReport
from relax_agent.trainers.settings import ParallelSettings, TrainerSettings

MicroLoss = Callable[[MicroBatch, Tensor], tuple[Tensor, Tensor]]


class MegatronTrainer:
    """Megatron-core behind the Trainer protocol."""

    def __init__(
        self,
        settings: TrainerSettings,
        algorithm: AlgorithmSettings,
        model_path: Path,
        *,
        rank: int = 0,
        init_method: str | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """Build the model and read its weights.

        Args:
            settings: Must not ask for what Megatron cannot do here; see :func:`check_settings`.
            algorithm: What :meth:`step` optimises.
            model_path: A Hugging Face folder.
            rank: This process among ``settings.ranks``.
            init_method: Where the ranks meet; one rank needs none.
            timeline: Where time is charged.
        """
        check_settings(settings)
        self.settings, self.algorithm, self.rank = settings, algorithm, rank
        self.timeline = timeline or Timeline()
        torch.set_num_threads(settings.threads)
        torch.manual_seed(settings.seed)
        self._owns_groups = machine.start(
            settings.device,
            rank=rank,
            ranks=settings.ranks,
            init_method=init_method,
            seed=settings.seed,
        )
        self.steps = 0
        """Optimizer steps of the algorithm so far."""
        self.sft_steps = 0
        try:
            self._build(model_path)
        except BaseException:
            self.close()
            raise

    def _build(self, model_path: Path) -> None:
        from relax_agent.trainers.megatron import convert, model

        settings = self.settings
        self.config = model.read_config(model_path)
        dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
        self.model = model.build_model(self.config, dtype=dtype, recompute=settings.recompute)
        self.model.to(settings.device, dtype)  # torch's norms ignore params_dtype
        convert.load_hf(self.model, model_path)
        self.wrapped = _data_parallel(self.model)
        self.optimizer = _optimizer(self.wrapped, settings)

    @property
    def layout(self) -> BatchLayout:
        """How batches for this trainer must be packed."""
        from relax_agent.trainers.megatron.model import route_shape

        routes = route_shape(self.config) if self.settings.routing_replay else None
        return BatchLayout(
            self.settings.micro_batch_tokens,
            self.config.vocab_size,
            routes,
            multiple=self.settings.ranks,
        )

    def step(self, batch: Batch) -> StepReport:
        """Do one optimizer step of the algorithm."""
        if self.sft_steps and not self.steps:
            # Moments of another loss, at another scale, would steer the first steps.
            from relax_agent.trainers.megatron.checkpoint import clear_moments

            clear_moments(self.optimizer)

        def loss(micro: MicroBatch, logprobs: Tensor) -> tuple[Tensor, Tensor]:
            return policy_micro_loss(micro, logprobs, self.algorithm)

        report = self._update(batch, loss, self.settings.lr_at(self.steps + 1))
        self.steps += report.skipped is None
        report.step = self.steps
        return report

    def sft_step(self, batch: Batch) -> StepReport:
        """Do one supervised optimizer step on every sampled token."""
        report = self._update(batch, sft_micro_loss, self.settings.sft_lr_at(self.sft_steps + 1))
        self.sft_steps += report.skipped is None
        report.step = self.sft_steps
        return report

    def _update(self, batch: Batch, loss: MicroLoss, lr: float) -> StepReport:
        if batch.skip_reason is not None:
            report = report_of(batch)
        else:
            report = report_of(batch, self.accumulate(batch, loss))
            with self.timeline.part("optimizer"):
                report.grad_norm, report.lr = self._apply(lr), lr
        report.time_s = self.timeline.lap()
        return report

    def accumulate(self, batch: Batch, loss: MicroLoss) -> Tensor:
        """Leave the step's gradient in every parameter's ``main_grad`` and return the sums.

        Args:
            batch: The step's batch.
            loss: From a micro-batch and its log-probs to its share of the loss, and its sums.

        Returns:
            ``[len(SUMS)]``, of all ranks.
        """
        self.wrapped.train()
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums = new_sums()
        for micro in batch.shard(self.rank, self.settings.ranks):
            sums += self._forward_backward(micro, loss)
        with self.timeline.part("communication"):
            from megatron.core.distributed import finalize_model_grads

            finalize_model_grads([self.wrapped])
            if self.settings.ranks > 1:
                joined = sums.to(self.settings.device)
                torch.distributed.all_reduce(joined)
                sums = joined.cpu()
        return sums

    def _forward_backward(self, micro: MicroBatch, loss: MicroLoss) -> Tensor:
        from relax_agent.trainers.megatron.attention import PackedRows

        micro = micro.to(self.settings.device)
        with self.timeline.part("forward"):
            rows = PackedRows.of(micro, replay=self.settings.routing_replay)
            share, sums = loss(micro, self.wrapped(micro, rows, self.settings.temperature))
        with self.timeline.part("backward"):
            share.backward()
        if rows.has_route is not None and not micro.filler:
            sums[SUMS.index("replayed_tokens")] = int(rows.has_route.sum())
            sums[SUMS.index("replayed_choices")] = sum(map(int, rows.replayed.values()))
            sums[SUMS.index("differing_choices")] = sum(map(int, rows.differing.values()))
        return sums

    def _apply(self, lr: float) -> float:
        """Clip, move the weights, return the gradient's norm before clipping."""
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            raise TrainerError(
                f"the gradient's norm is {norm}; no weight was changed",
                hint="look at logprob_mismatch of the steps before, and lower trainer.lr",
            )
        if norm > self.settings.clip_grad:
            groups = self.optimizer.param_groups
            gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
            torch._foreach_mul_(gradients, self.settings.clip_grad / (norm + 1e-6))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            # Left to its own, Megatron's optimizer decays norms too: only its scheduler, which
            # nobody runs here, multiplies by wd_mult.
            group["weight_decay"] = self.settings.weight_decay * group["wd_mult"]
        self.optimizer.step_with_ready_grads()
        return norm

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight under its Hugging Face name, as ``save_pretrained`` writes it."""
        from relax_agent.trainers.megatron.convert import hf_weights

        yield from hf_weights(self.model)

    def save(self, folder: Path) -> None:
        """Write model, optimizer, counters and random state; rank 0 writes for all."""
        from relax_agent.trainers.megatron import checkpoint

        if self.rank == 0:
            counts = {"steps": self.steps, "sft_steps": self.sft_steps}
            checkpoint.save(folder, self.model, self.optimizer, counts)
        self._meet()

    def restore(self, folder: Path) -> None:
        """Read what :meth:`save` wrote; the next step gives the same number as without a stop."""
        from relax_agent.trainers.megatron import checkpoint

        document = checkpoint.restore(folder, self.model, self.optimizer)
        self.steps, self.sft_steps = document["steps"], document["sft_steps"]
        self._meet()

    def _meet(self) -> None:
        if self.settings.ranks > 1:
            torch.distributed.barrier()

    def close(self) -> None:
        """Leave the process group, if this trainer started it. Idempotent."""
        if self._owns_groups:
            self._owns_groups = False
            machine.stop()


def check_settings(settings: TrainerSettings) -> None:
    """Raise ConfigError for what this trainer would have to ignore or cannot do.

    Args:
        settings: Of kind ``megatron``.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device is cuda, but this machine has none")
    if settings.device == "cpu" and settings.dtype != "float32":
        raise ConfigError(
            "trainer.kind: megatron computes in float32 on the CPU",
            hint="set trainer.dtype: float32",
        )
    if settings.parallel != ParallelSettings():
        raise ConfigError(
            "trainer.kind: megatron shares data between ranks, not yet the model: exporting and "
            "saving a shared model is missing",
            hint="leave trainer.parallel at 1, 1, 1",
        )


def _data_parallel(model: Any) -> Any:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )

    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False
    )
    return DistributedDataParallel(model.config, config, model)


def _optimizer(wrapped: Any, settings: TrainerSettings) -> Any:
    """Return Megatron's AdamW over float32 weights."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        # The trainer clips by itself: Megatron's clipping asks for CUDA tensors by name.
        clip_grad=0.0,
        bf16=settings.dtype == "bfloat16",
        params_dtype=torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32,
        use_distributed_optimizer=False,
    )
    return get_megatron_optimizer(config, [wrapped])

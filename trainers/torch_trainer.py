"""A trainer for any transformers language model on one device: CPU or one GPU.

One step: every micro-batch goes forward as packed rows (``packed_attention``) with the engine's
experts forced (``replay_hf``), logits are computed only where a trained token is predicted, and its
weighted loss goes backward at once, so that only one micro-batch's activations are alive. Then
gradients are clipped and AdamW moves the float32 weights. With ``dtype: bfloat16`` forward and
backward run under autocast and weights are published in bfloat16.

Models that see or hear are trained whole, towers included: what the media of a row look like is
computed from the encoded media (``media_rows``), and the tokens that stand for media are left out
of the softmax, as the engine leaves them out when it samples.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from relax_agent.errors import ConfigError, ResumeError, TrainerError
from relax_agent.models.load import load_pretrained
from relax_agent.models.media_model import MediaModel, media_model
from relax_agent.timeline import Timeline
from relax_agent.trainers import packed_attention, replay_hf
from relax_agent.trainers.algorithms.settings import AlgorithmSettings
from relax_agent.trainers.batch import Batch, MicroBatch
from relax_agent.trainers.hf_folder import atomic_folder
from relax_agent.trainers.losses import (
    SUMS,
    new_sums,
    policy_micro_loss,
    report_of,
    sft_micro_loss,
)
from relax_agent.trainers.media_rows import media_inputs
from relax_agent.trainers.packed_attention import Packing
from relax_agent.trainers.protocol import BatchLayout, StepReport
from relax_agent.trainers.settings import TrainerSettings

MicroLoss = Callable[[MicroBatch, Tensor], tuple[Tensor, Tensor]]


class TorchTrainer:
    """Plain transformers and AdamW behind the Trainer protocol."""

    def __init__(
        self,
        settings: TrainerSettings,
        algorithm: AlgorithmSettings,
        model_path: Path,
        *,
        timeline: Timeline | None = None,
    ) -> None:
        self.settings, self.algorithm = settings, algorithm
        self.timeline = timeline or Timeline()
        torch.set_num_threads(settings.threads)
        torch.manual_seed(settings.seed)
        self.model = _load(settings, model_path)
        self.names = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = _adamw(self.names, settings)
        self.steps = 0
        """Optimizer steps of the algorithm so far."""
        self.sft_steps = 0
        self.media = media_model(self.model, model_path)
        packed_attention.install(self.model if self.media is None else self.media.language_model)
        self.replay = replay_hf.install(self.model, self._probe) if self._replays else None

    @property
    def _replays(self) -> bool:
        return self.settings.routing_replay

    @property
    def layout(self) -> BatchLayout:
        """How batches for this trainer must be packed."""
        config = self.model.config.get_text_config()
        routes = None if self.replay is None else self.replay.shape
        return BatchLayout(
            self.settings.micro_batch_tokens,
            config.vocab_size,
            routes,
            takes_media=self.media is not None,
        )

    def step(self, batch: Batch) -> StepReport:
        """Do one optimizer step of the algorithm."""
        if self.sft_steps and not self.steps:
            # Moments of another loss, at another scale, would steer the first steps.
            self.optimizer.state.clear()

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
            self.model.train()
            self.optimizer.zero_grad(set_to_none=True)
            sums = new_sums()
            for micro in batch.micro_batches:
                sums += self._forward_backward(micro, loss)
            report = report_of(batch, sums)
            with self.timeline.part("optimizer"):
                report.grad_norm, report.lr = self._apply(lr), lr
        report.time_s = self.timeline.lap()
        return report

    def _forward_backward(self, micro: MicroBatch, loss: MicroLoss) -> Tensor:
        micro = micro.to(self.settings.device)
        with self._routes_of(micro):
            with self.timeline.part("forward"):
                share, sums = loss(micro, self._logprobs(micro))
            with self.timeline.part("backward"):
                share.backward()
        if self.replay is not None:
            sums[SUMS.index("replayed_tokens")] = self.replay.replayed_tokens
            sums[SUMS.index("replayed_choices")] = self.replay.replayed_choices
            sums[SUMS.index("differing_choices")] = self.replay.differing
        return sums

    def _routes_of(self, micro: MicroBatch) -> AbstractContextManager[None]:
        if self.replay is None:
            return nullcontext()
        return self.replay.replaying(micro.routes, micro.has_route)

    def _logprobs(self, micro: MicroBatch) -> Tensor:
        """Return log-probs of the targets, ``[trained]``, with gradient."""
        packing = Packing.of(micro.lengths, self.settings.device)
        with self._autocast():
            if self.media is None:
                logits = self._logits(micro.token_ids, micro.positions, packing, micro.predictors)
            else:
                logits = self._media_logits(self.media, micro, packing)
        scaled = logits.float() / self.settings.temperature
        return -functional.cross_entropy(scaled, micro.targets, reduction="none")

    def _logits(
        self, token_ids: Tensor, positions: Tensor, packing: Packing, keep: Tensor
    ) -> Tensor:
        """Return logits ``[kept, vocab]`` of one packed sequence ``[tokens]``."""
        return self.model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=keep,
            packing=packing,
        ).logits[0]

    def _media_logits(self, model: MediaModel, micro: MicroBatch, packing: Packing) -> Tensor:
        """Return logits ``[trained, vocab]`` of packed rows of which some may hold media."""
        device = self.settings.device
        positions, inputs = media_inputs(model, micro)
        logits = model.logits(
            micro.token_ids[None],
            positions.to(device),
            None if inputs is None else inputs.to(device),
            micro.predictors,
            packing=packing,
        )
        return logits.index_fill(1, model.suppressed.to(device), -torch.inf)

    def _probe(self, token_ids: Tensor) -> Tensor:
        count = len(token_ids)
        steps = torch.arange(count, device=token_ids.device)
        packing = Packing.of([count], self.settings.device)
        if self.media is not None:
            positions = steps.expand(3, -1)
            ids, last = token_ids[None], steps[-1:]
            return self.media.logits(ids, positions, None, last, packing=packing)
        return self._logits(token_ids, steps, packing, steps[-1:])

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.settings.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.settings.device, dtype=torch.bfloat16)

    def _apply(self, lr: float) -> float:
        """Clip, move the weights, return the gradient's norm before clipping."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.names.values(), self.settings.clip_grad))
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise TrainerError(
                f"the gradient's norm is {norm}; no weight was changed",
                hint="look at logprob_mismatch of the steps before, and lower trainer.lr",
            )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return norm

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight as ``save_pretrained`` writes it: one tensor per expert and matrix.

        transformers keeps the experts of a layer in one tensor; engines load them one by one.
        """
        from transformers.core_model_loading import revert_weight_conversion

        dtype = torch.bfloat16 if self.settings.dtype == "bfloat16" else torch.float32
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or ())
        state = {k: v for k, v in self.model.state_dict().items() if k not in tied}
        for _, names in groupby(state, key=_layer_of):  # layer by layer: never a second whole model
            part = {name: state[name].detach() for name in names}
            for name, tensor in revert_weight_conversion(self.model, part).items():
                yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor

    def save(self, folder: Path) -> None:
        """Write model, optimizer, step and random state."""
        state: dict[str, Tensor] = {"rng": torch.get_rng_state()}
        for name, parameter in self.names.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                state[f"{key}/{name}"] = value
        if self.settings.device == "cuda":
            state["rng.cuda"] = torch.cuda.get_rng_state()
        with atomic_folder(folder) as draft:
            model = {name: p.detach().contiguous() for name, p in self.names.items()}
            save_file(model, draft / "model.safetensors")
            save_file(state, draft / "optimizer.safetensors")
            counts = {"kind": "torch", "steps": self.steps, "sft_steps": self.sft_steps}
            (draft / "trainer.json").write_text(json.dumps(counts))

    def restore(self, folder: Path) -> None:
        """Read what :meth:`save` wrote; the next step gives the same number as without a stop."""
        counts, model, state = _read_checkpoint(folder)
        if set(model) != set(self.names):
            raise ResumeError(
                f"{folder} holds another model: {len(model)} weights, not {len(self.names)}"
            )
        rng = state.pop("rng")
        if (cuda := state.pop("rng.cuda", None)) is not None:
            torch.cuda.set_rng_state(cuda)
        with torch.no_grad():
            for name, parameter in self.names.items():
                if model[name].shape != parameter.shape:
                    raise ResumeError(f"{folder}: {name} has shape {tuple(model[name].shape)}")
                parameter.copy_(model[name])
        self.optimizer.state.clear()
        for full_name, value in state.items():
            key, _, name = full_name.partition("/")
            where = value if key == "step" else value.to(self.settings.device)
            self.optimizer.state[self.names[name]][key] = where
        self.steps, self.sft_steps = counts["steps"], counts["sft_steps"]
        torch.set_rng_state(rng)

    def close(self) -> None:
        """Nothing outlives this object."""


def _load(settings: TrainerSettings, model_path: Path) -> Any:
    from transformers.utils import logging

    logging.disable_progress_bar()  # the log's last line is what a death is told with
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device is cuda, but this machine has none")
    model: Any = load_pretrained(model_path, torch.float32)
    model.to(settings.device)
    if settings.recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _adamw(names: dict[str, Tensor], settings: TrainerSettings) -> torch.optim.AdamW:
    decayed = [p for p in names.values() if p.ndim >= 2]
    others = [p for p in names.values() if p.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


def _layer_of(name: str) -> str:
    found = re.match(r".*\blayers\.\d+\b", name)
    return found[0] if found else ""


def _read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    try:
        counts = json.loads((folder / "trainer.json").read_text())
        model = load_file(folder / "model.safetensors")
        state = load_file(folder / "optimizer.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise ResumeError(f"{folder} is not a whole trainer checkpoint: {error}") from error
    if counts.get("kind") != "torch":
        raise ResumeError(f"{folder} was written by trainer kind {counts.get('kind')}, not torch")
    return counts, model, state

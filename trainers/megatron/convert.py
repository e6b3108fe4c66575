"""Weights between Hugging Face's names and Megatron's, tensor by tensor, in both directions.

Megatron fuses what Hugging Face keeps apart: query, key and value of each head group stand together
in ``linear_qkv``, gate and up projection in ``linear_fc1``. One table says which; everything else
is derived from it: loading (any rank's slice under tensor, pipeline and expert parallelism),
exporting, and the optimizer's moments, which are laid out like the weights.

Nothing but views and concatenations happens to a number, so there and back is exact. Experts are
read under both names that transformers 5 knows (fused ``experts.gate_up_proj`` in a state dict, one
tensor per expert on disk) and written as ``save_pretrained`` and SGLang have them: per expert.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from safetensors import safe_open
from torch import Tensor

from relax_agent.errors import TrainerError

if TYPE_CHECKING:
    from relax_agent.trainers.megatron.model import PolicyModel

Lookup = Callable[[str, Tensor], Tensor]
"""From a Megatron parameter (name, parameter) to the tensor that is read or written for it."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How one Megatron tensor is made of Hugging Face tensors."""

    names: tuple[str, ...]
    """The Hugging Face tensors, in the order in which they stand in Megatron's."""
    dim: int | None = None
    """Along which dimension tensor parallelism cuts each of them; None: every rank has all."""
    interleaved: bool = False
    """Query, key and value stand together per head group instead of one after another."""

    def join(self, parts: Sequence[Tensor], groups: int) -> Tensor:
        """Return Megatron's tensor from Hugging Face's.

        Args:
            parts: Whole tensors, or this rank's shards of them.
            groups: Key-value heads in ``parts``.
        """
        if self.interleaved:
            width = parts[0].shape[1]
            return torch.cat([part.view(groups, -1, width) for part in parts], 1).reshape(-1, width)
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def split(self, tensor: Tensor, groups: int, head_dim: int) -> list[Tensor]:
        """Undo :meth:`join`; ``head_dim`` is the width of one head."""
        if self.interleaved:
            width = tensor.shape[1]
            stacked = tensor.view(groups, -1, width)
            queries = stacked.shape[1] - 2 * head_dim
            parts = stacked.split([queries, head_dim, head_dim], 1)
            return [part.reshape(-1, width) for part in parts]
        return list(tensor.chunk(len(self.names)))

    def shard(self, part: Tensor, rank: int, ranks: int) -> Tensor:
        """Return what tensor-parallel ``rank`` holds of a whole Hugging Face tensor."""
        if self.dim is None or ranks == 1:
            return part
        if part.shape[self.dim] % ranks:
            raise TrainerError(
                f"{self.names[0]}: {part.shape[self.dim]} cannot be shared by {ranks} ranks"
            )
        return part.chunk(ranks, self.dim)[rank]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """Undo :meth:`shard`: return the whole tensor from all ranks' shards."""
        return shards[0] if self.dim is None else torch.cat(list(shards), self.dim)


_MODEL: Final = {
    "embedding.word_embeddings.weight": Rule(("model.embed_tokens.weight",), 0),
    "decoder.final_layernorm.weight": Rule(("model.norm.weight",)),
    "output_layer.weight": Rule(("lm_head.weight",), 0),
}
_LAYER: Final = {
    "input_layernorm.weight": Rule(("input_layernorm.weight",)),
    "pre_mlp_layernorm.weight": Rule(("post_attention_layernorm.weight",)),
    "self_attention.linear_qkv.weight": Rule(
        tuple(f"self_attn.{part}_proj.weight" for part in "qkv"), 0, interleaved=True
    ),
    "self_attention.linear_proj.weight": Rule(("self_attn.o_proj.weight",), 1),
    "self_attention.q_layernorm.weight": Rule(("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": Rule(("self_attn.k_norm.weight",)),
    "mlp.linear_fc1.weight": Rule(("mlp.gate_proj.weight", "mlp.up_proj.weight"), 0),
    "mlp.linear_fc2.weight": Rule(("mlp.down_proj.weight",), 1),
    "mlp.router.weight": Rule(("mlp.gate.weight",)),
}
_EXPERT: Final = {
    "linear_fc1.weight": Rule(("gate_proj.weight", "up_proj.weight"), 0),
    "linear_fc2.weight": Rule(("down_proj.weight",), 1),
}
_LAYER_NAME: Final = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT_NAME: Final = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_HF_EXPERT: Final = re.compile(r"(.+\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")


def rule_of(name: str, layer_offset: int = 0, expert_offset: int = 0) -> Rule:
    """Return the rule of a Megatron parameter.

    Args:
        name: Its name on this rank.
        layer_offset: Decoder layers on earlier pipeline stages.
        expert_offset: Experts on earlier expert-parallel ranks.
    """
    layer = _LAYER_NAME.fullmatch(name)
    if layer is None:
        rule, prefix = _MODEL.get(name), ""
    else:
        prefix = f"model.layers.{int(layer[1]) + layer_offset}."
        expert = _EXPERT_NAME.fullmatch(layer[2])
        if expert is None:
            rule = _LAYER.get(layer[2])
        else:
            rule = _EXPERT.get(expert[2])
            prefix += f"mlp.experts.{int(expert[1]) + expert_offset}."
    if rule is None:
        raise TrainerError(f"no Hugging Face name is known for Megatron's {name}")
    return Rule(tuple(prefix + part for part in rule.names), rule.dim, rule.interleaved)


class Source:
    """Hugging Face tensors by name: a folder of safetensors, or a state dict."""

    def __init__(self, tensors: Path | Mapping[str, Tensor]) -> None:
        self._tensors: Mapping[str, Tensor] | None = None
        self._folder = Path()
        self._files: dict[str, str] = {}
        if isinstance(tensors, Path):
            self._folder, self._files = tensors, _index(tensors)
        else:
            self._tensors = tensors
        self.unread = set(self._files if self._tensors is None else self._tensors)
        """Names that nobody has asked for yet."""

    def __getitem__(self, name: str) -> Tensor:
        if self._holds(name):
            return self._read(name)
        fused = self._from_fused(name)
        if fused is None:
            raise TrainerError(
                f"the model's weights lack {name}",
                hint="the checkpoint belongs to another architecture than its config.json",
            )
        return fused

    def _holds(self, name: str) -> bool:
        return name in (self._files if self._tensors is None else self._tensors)

    def _read(self, name: str, row: int | None = None) -> Tensor:
        """Return a tensor, or one slice of its first dimension without reading the rest."""
        self.unread.discard(name)
        if self._tensors is not None:
            return self._tensors[name] if row is None else self._tensors[name][row]
        with safe_open(self._folder / self._files[name], "pt") as file:
            if row is None:
                return file.get_tensor(name)
            part: Tensor = file.get_slice(name)[row : row + 1]
            return part[0]

    def _from_fused(self, name: str) -> Tensor | None:
        """Return an expert's matrix out of the fused ``[experts, …]`` tensors of transformers 5."""
        expert = _HF_EXPERT.fullmatch(name)
        if expert is None:
            return None
        kind = expert[3]
        fused = expert[1] + ("down_proj" if kind == "down" else "gate_up_proj")
        if not self._holds(fused):
            return None
        matrix = self._read(fused, int(expert[2]))
        return matrix if kind == "down" else matrix.chunk(2)[kind == "up"]


def _index(folder: Path) -> dict[str, str]:
    """Return which file of a folder holds each tensor."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return dict(json.loads(index.read_text())["weight_map"])
    single = folder / "model.safetensors"
    if not single.exists():
        raise TrainerError(
            f"{folder} holds no model.safetensors and no index of shards",
            hint="save the model with save_pretrained(safe_serialization=True)",
        )
    with safe_open(single, "pt") as file:
        return dict.fromkeys(file.keys(), single.name)


def load_hf(
    model: PolicyModel, tensors: Path | Mapping[str, Tensor], lookup: Lookup | None = None
) -> None:
    """Fill a Megatron model with Hugging Face weights; this rank's slice, one tensor at a time.

    Args:
        model: The model.
        tensors: A model folder, or a state dict.
        lookup: What to fill instead of each parameter, e.g. the optimizer's moment of it.

    Raises:
        TrainerError: A weight is missing, has another shape, or has no place in the model.
    """
    source = Source(tensors)
    place = model.place
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rule = _rule(model, name)
            sizes = place.tensor if ".experts." not in name else place.expert_tensor
            parts = [rule.shard(source[part], *sizes) for part in rule.names]
            whole = rule.join(parts, _groups(model))
            target = parameter if lookup is None else lookup(name, parameter)
            if whole.shape != target.shape:
                raise TrainerError(
                    f"{rule.names[0]} makes {tuple(whole.shape)} of Megatron's {name}, "
                    f"which is {tuple(target.shape)}"
                )
            target.copy_(whole)
    if place.holds_all:
        _refuse_unread(source.unread, tied=model.share_embeddings_and_output_weights)


def _refuse_unread(unread: Iterable[str], *, tied: bool) -> None:
    """A weight without a place would be lost in silence, and the model would be another one."""
    left = {name for name in unread if not name.endswith("rotary_emb.inv_freq")}
    if tied:
        left.discard("lm_head.weight")
    if left:
        raise TrainerError(f"the Megatron model has no place for {sorted(left)[0]}")


def hf_weights(model: PolicyModel, lookup: Lookup | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight under its Hugging Face name, as ``save_pretrained`` writes it.

    Args:
        model: A model that one rank holds whole.
        lookup: What to yield instead of each parameter, e.g. the optimizer's moment of it.
    """
    if not model.place.holds_all:
        raise TrainerError("weights of a model that ranks share cannot be exported yet")
    for name, parameter in model.named_parameters():
        rule = _rule(model, name)
        tensor = (parameter if lookup is None else lookup(name, parameter)).detach()
        parts = rule.split(tensor, _groups(model), model.config.kv_channels)
        yield from zip(rule.names, parts, strict=True)


def _rule(model: PolicyModel, name: str) -> Rule:
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return _MODEL["embedding.word_embeddings.weight"]  # a later stage's copy of the first's
    return rule_of(name, model.place.first_layer, model.place.first_expert)


def _groups(model: PolicyModel) -> int:
    return model.config.num_query_groups // model.place.tensor[1]

"""From a Hugging Face config to a Megatron GPT model: Qwen3 and Qwen3-MoE.

The model is Megatron's own (embedding, decoder, output layer of ``GPTModel``, built from its local
layer spec). Three things are different. Attention runs over packed rows (:class:`RowAttention`).
Rotary angles are given per token, from the positions in the micro-batch, which restart in every
row. And ``forward`` returns log-probs of the trained tokens instead of logits of all: the output
layer runs only where something is trained, in chunks whose logits are recomputed in the backward
pass, so no ``[tokens, vocabulary]`` matrix of a whole micro-batch ever exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from relax_agent.errors import ConfigError
from relax_agent.trainers.batch import MicroBatch
from relax_agent.trainers.megatron.attention import PackedRows, RowAttention
from relax_agent.trainers.megatron.replay import install as install_replay
from relax_agent.trainers.protocol import RouteShape

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES: Final = ("qwen3", "qwen3_moe")
"""``model_type`` of the configs that this module knows."""

LOGITS_PER_CHUNK = 1 << 25
"""Most logits (trained tokens times vocabulary) that exist at once."""

_MUST_BE: Final[Mapping[str, tuple[Any, ...]]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "use_sliding_window": (False, None),
    "attention_dropout": (0, 0.0, None),
}


@dataclass(frozen=True, slots=True)
class Place:
    """Which part of the model this rank holds. Pairs are ``(rank, ranks)``."""

    tensor: tuple[int, int] = (0, 1)
    expert_tensor: tuple[int, int] = (0, 1)
    first_layer: int = 0
    first_expert: int = 0
    holds_all: bool = True

    @classmethod
    def here(cls, layers: int, experts: int) -> Place:
        """Read the place from Megatron's parallel groups; stages hold equal shares of layers."""
        state = parallel_state
        stage, stages = state.get_pipeline_model_parallel_rank(), _stages()
        expert_ranks = state.get_expert_model_parallel_world_size()
        tensor_ranks = state.get_tensor_model_parallel_world_size()
        return cls(
            tensor=(state.get_tensor_model_parallel_rank(), tensor_ranks),
            expert_tensor=(
                state.get_expert_tensor_parallel_rank(),
                state.get_expert_tensor_parallel_world_size(),
            ),
            first_layer=layers // stages * stage,
            first_expert=experts // expert_ranks * state.get_expert_model_parallel_rank(),
            holds_all=(stages, expert_ranks, tensor_ranks) == (1, 1, 1),
        )


def _stages() -> int:
    return int(parallel_state.get_pipeline_model_parallel_world_size())


class PolicyModel(GPTModel):
    """A GPT model over packed rows that answers with log-probs."""

    place: Place
    """Set by :func:`build_model`."""

    def forward(self, micro: MicroBatch, rows: PackedRows, temperature: float = 1.0) -> Tensor:
        """Return the log-probs of the trained tokens, ``[trained]`` float32, with gradient.

        Args:
            micro: The packed rows; ``targets`` are predicted at ``predictors``.
            rows: Its plan, with the routes to replay.
            temperature: Logits are divided by it.
        """
        hidden = self.hidden_states(micro, rows)
        return self._logprobs(hidden[micro.predictors], micro.targets, temperature)

    def hidden_states(self, micro: MicroBatch, rows: PackedRows) -> Tensor:
        """Return what the output layer reads, ``[tokens, 1, hidden]``."""
        ids, positions = micro.token_ids[None], micro.positions[None]
        hidden: Tensor = self.decoder(
            hidden_states=self.embedding(input_ids=ids, position_ids=positions),
            attention_mask=None,
            rotary_pos_emb=self._angles(micro.positions),
            packed_seq_params=rows,
        )
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[n, 1, vocabulary / tensor-parallel ranks]`` of ``[n, 1, hidden]``."""
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else None
        logits: Tensor = self.output_layer(hidden, weight=weight)[0]
        return logits

    def _angles(self, positions: Tensor) -> Tensor:
        """Return the rotary angles of each token, ``[tokens, 1, 1, head_dim]``."""
        inverse = self.rotary_pos_emb.inv_freq.to(positions.device)
        angles = torch.outer(positions.to(inverse.dtype), inverse)
        return torch.cat([angles, angles], -1)[:, None, None, :]

    def _logprobs(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        size = max(1, LOGITS_PER_CHUNK // self.vocab_size)
        if len(targets) <= size:
            return self._chunk_logprobs(hidden, targets, temperature)
        chunks = zip(hidden.split(size), targets.split(size), strict=True)
        return torch.cat(
            [
                checkpoint(self._chunk_logprobs, *chunk, temperature, use_reentrant=False)
                for chunk in chunks
            ]
        )

    def _chunk_logprobs(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        logits = self.logits(hidden).float()
        if temperature != 1.0:
            logits = logits / temperature
        loss: Tensor = tensor_parallel.vocab_parallel_cross_entropy(logits, targets[:, None])
        return -loss[:, 0]


def read_config(folder: Path) -> PretrainedConfig:
    """Read a model folder's config and refuse what cannot be built.

    Raises:
        ConfigError: The family, or something in its config, is not supported; says what.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    check_supported(config)
    return config


def check_supported(config: PretrainedConfig) -> None:
    """Raise ConfigError naming the first thing in a config that Megatron would compute wrongly."""
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"trainer.kind: megatron has no layer spec and no weight table for the family "
            f"{config.model_type!r}; it knows {', '.join(FAMILIES)}",
            hint="use trainer.kind: torch, which runs any transformers model",
        )
    for name, allowed in _MUST_BE.items():
        value = getattr(config, name, None)
        if value not in allowed:
            raise ConfigError(f"trainer.kind: megatron does not support {name}: {value}")
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") != "default":
        raise ConfigError(
            f"trainer.kind: megatron does not support rope_type: {rope['rope_type']}; "
            "only the default is converted"
        )


def moe_layers(config: PretrainedConfig) -> tuple[int, ...]:
    """Return the global indices of the layers that have experts, by transformers' own rule."""
    if config.model_type != "qwen3_moe" or not config.num_experts:
        return ()
    return tuple(
        index
        for index in range(config.num_hidden_layers)
        if index not in config.mlp_only_layers and (index + 1) % config.decoder_sparse_step == 0
    )


def route_shape(config: PretrainedConfig) -> RouteShape | None:
    """Return what routes for this model look like; None if it has no experts."""
    layers = moe_layers(config)
    if not layers:
        return None
    return RouteShape(
        config.num_hidden_layers, layers, config.num_experts_per_tok, config.num_experts
    )


def transformer_config(
    config: PretrainedConfig, *, dtype: torch.dtype = torch.float32, recompute: str = "none"
) -> TransformerConfig:
    """Return Megatron's config for a supported Hugging Face config."""
    options = _expert_options(config)
    if recompute == "full":
        options |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=_stages(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        # Weights are loaded, so drawing them first would only cost time.
        perform_initialization=False,
        # Losses are shares of the step: gradients are summed over ranks, never averaged.
        calculate_per_token_loss=True,
        use_cpu_initialization=not torch.cuda.is_available(),
        # Each of these needs Transformer Engine, Apex or CUDA.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=False,
        cuda_graph_scope=[],  # the default is a deprecated word that warns
        **options,
    )


def _expert_options(config: PretrainedConfig) -> dict[str, Any]:
    layers = moe_layers(config)
    if not layers:
        return {}
    return {
        "num_moe_experts": config.num_experts,
        "moe_layer_freq": [int(index in layers) for index in range(config.num_hidden_layers)],
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        # Softmax over the chosen experts equals transformers' softmax over all, renormalised.
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
    }


def build_model(
    config: PretrainedConfig, *, dtype: torch.dtype = torch.float32, recompute: str = "none"
) -> PolicyModel:
    """Return an unfilled Megatron model with replay installed; groups must have been started.

    Args:
        config: A supported Hugging Face config.
        dtype: Of the parameters.
        recompute: ``"none"`` or ``"full"``.
    """
    check_supported(config)
    megatron = transformer_config(config, dtype=dtype, recompute=recompute)
    model = PolicyModel(
        config=megatron,
        transformer_layer_spec=_block_spec(megatron),
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=True),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
        position_embedding_type="rope",
        rotary_percent=1.0,
        rotary_base=config.rope_parameters["rope_theta"],
        share_embeddings_and_output_weights=bool(config.tie_word_embeddings),
    )
    model.place = Place.here(config.num_hidden_layers, megatron.num_moe_experts or 0)
    install_replay(model)
    return model


def _block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Return Megatron's local spec with attention over packed rows."""
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = RowAttention
    return spec

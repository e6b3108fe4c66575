"""Attention over packed rows in Megatron: each row attends only to itself.

Megatron's own ``DotProductAttention`` cannot run packed rows without Transformer Engine, and a
block-diagonal mask ``[tokens, tokens]`` would compute every pair between rows only to hide it.
Here rows of similar length are cut into rectangles (:class:`Packing`, planned once per micro-batch)
and attended causally, one call per rectangle; padding stands behind a row's real tokens, where
causality keeps it from all of them.

:class:`PackedRows` is what travels through the decoder as ``packed_seq_params``: the plan, and the
routes to replay. Because it is handed to every layer call, recomputation included, a layer always
sees the data of the micro-batch it is working on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from relax_agent.errors import TrainerError
from relax_agent.trainers.batch import MicroBatch
from relax_agent.trainers.packed_attention import Packing


@dataclass
class PackedRows(PackedSeqParams):
    """One micro-batch as the decoder's layers see it."""

    packing: Packing | None = None
    routes: Tensor | None = None
    """``[tokens, layers, top_k]`` int64; None leaves every router alone."""
    has_route: Tensor | None = None
    """``[tokens]`` bool."""
    replayed: dict[int, Tensor] = field(default_factory=dict)
    """Replayed choices by global layer; written by the routers' first pass."""
    differing: dict[int, Tensor] = field(default_factory=dict)
    """How many of them the live router would not have made."""

    @classmethod
    def of(cls, micro: MicroBatch, *, replay: bool = True) -> PackedRows:
        """Plan a micro-batch.

        Args:
            micro: The packed rows, already on the model's device.
            replay: Whether its routes, if it has any, are used.
        """
        longest = max(micro.lengths)
        routed = replay and micro.routes is not None
        return cls(
            # Not "thd": there Megatron rotates row by row in Python. Angles are given per token.
            qkv_format="sbhd",
            cu_seqlens_q=micro.cu_seqlens,
            cu_seqlens_kv=micro.cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            packing=Packing.of(micro.lengths, micro.token_ids.device),
            routes=micro.routes.long() if routed and micro.routes is not None else None,
            has_route=micro.has_route if routed else None,
        )


class RowAttention(MegatronModule):
    """Megatron's ``core_attention`` for packed rows."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **extras: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.shares_heads = config.num_query_groups != config.num_attention_heads

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend within rows.

        Args:
            query: ``[tokens, 1, heads, head_dim]``.
            key: ``[tokens, 1, kv_heads, head_dim]``.
            value: ``[tokens, 1, kv_heads, head_dim]``.
            attention_mask: None: rows are causal.
            attn_mask_type: Not read; always causal.
            attention_bias: None.
            packed_seq_params: The micro-batch's :class:`PackedRows`.

        Returns:
            ``[tokens, 1, heads * head_dim]``.
        """
        if not isinstance(packed_seq_params, PackedRows) or packed_seq_params.packing is None:
            raise TrainerError("packed rows reached an attention layer without their plan")
        packing = packed_seq_params.packing
        parts = []
        for shape in packing.rectangles:
            q, k, v = (x[:, 0][shape.gather].transpose(1, 2) for x in (query, key, value))
            out = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=self.shares_heads
            )
            parts.append(out.transpose(1, 2).flatten(0, 1)[shape.cells])
        return torch.cat(parts)[packing.order].flatten(1)[:, None]

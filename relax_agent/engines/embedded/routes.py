"""Which experts the model chose, and how they are computed.

transformers lets the experts' forward of every mixture-of-experts model be replaced. Ours keeps
the expert ids that it is called with: these are the **routes**, exactly those that were used.
It then multiplies all tokens of an expert at once (``grouped_mm``), in the same order as
transformers' own implementation, but with a third less of small operations around it, which
are what a decoding step on a CPU spends its time on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relax_agent.errors import ConfigError

EXPERTS = "relax_recording"


class Routes:
    """Collects expert ids during a forward."""

    def __init__(self, layers: int, top_k: int, moe_layers: Sequence[int]) -> None:
        self.layers = layers
        """All hidden layers, dense ones included."""
        self.top_k = top_k
        self.moe_layers = list(moe_layers)
        self.chosen: dict[int, Tensor] = {}

    @property
    def width(self) -> int:
        """Expert ids that one token leaves behind."""
        return len(self.moe_layers) * self.top_k

    def take(self) -> Tensor:
        """Return what the last forward chose, ``[tokens, moe_layers * top_k]`` int16."""
        stacked = torch.stack([self.chosen[layer] for layer in self.moe_layers], dim=1)
        self.chosen.clear()
        return stacked.reshape(len(stacked), -1).to(torch.int16)

    def spread(self, rows: npt.NDArray[np.int16]) -> npt.NDArray[np.int32]:
        """Give every hidden layer its place: ``[tokens, layers, top_k]``, dense ones zero."""
        full = np.zeros((len(rows), self.layers, self.top_k), dtype=np.int32)
        full[:, self.moe_layers] = rows.reshape(len(rows), len(self.moe_layers), self.top_k)
        return full


def record_routes(model: Any, config: Any) -> Routes | None:
    """Make a mixture-of-experts model keep the expert ids of each forward; None if dense."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    experts = {
        _layer_of(name): module
        for name, module in model.named_modules()
        if hasattr(module, "_is_expert_parallel")
    }
    if not experts:
        return None
    routes = Routes(config.num_hidden_layers, config.num_experts_per_tok, sorted(experts))
    for layer, module in experts.items():
        module.relax_routes = (routes.chosen, layer)
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _recording_experts)
    model.set_experts_implementation(EXPERTS)
    return routes


def _layer_of(name: str) -> int:
    found = re.search(r"\blayers\.(\d+)\.", name)
    if found is None:
        raise ConfigError(f"cannot tell the layer of the experts at {name}")
    return int(found[1])


def _recording_experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    chosen, layer = module.relax_routes
    chosen[layer] = top_k_index
    if _is_plain(module):
        return plain_experts(module, hidden_states, top_k_index, top_k_weights)
    from transformers.integrations.moe import grouped_mm_experts_forward

    return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]


def _is_plain(module: Any) -> bool:
    """Return whether the experts are gated and nothing else."""
    return bool(
        module.has_gate
        and not (module.has_bias or module.is_transposed or module.has_post_expert_norm)
        and hasattr(torch.nn.functional, "grouped_mm")
    )


def plain_experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run gated experts.

    Args:
        module: Holds ``gate_up_proj [experts, 2 * width, hidden]`` and ``down_proj``.
        hidden_states: ``[tokens, hidden]``
        top_k_index: ``[tokens, top_k]`` expert ids.
        top_k_weights: ``[tokens, top_k]``

    Returns:
        ``[tokens, hidden]``
    """
    tokens, top_k = top_k_index.shape
    flat = top_k_index.reshape(-1)
    order = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=module.num_experts).cumsum(0, dtype=torch.int32)
    multiply = torch.nn.functional.grouped_mm
    inputs = hidden_states[order // top_k]
    inner = module._apply_gate(multiply(inputs, module.gate_up_proj.transpose(1, 2), offs=ends))
    outputs = multiply(inner, module.down_proj.transpose(1, 2), offs=ends)
    outputs.mul_(top_k_weights.reshape(-1)[order, None])
    back = torch.empty_like(outputs).index_copy_(0, order, outputs)
    return back.view(tokens, top_k, -1).sum(dim=1).to(hidden_states.dtype)

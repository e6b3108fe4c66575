"""R3 in Megatron: the experts that the engine chose are the experts used here.

Megatron's own ``RouterReplay`` keeps its routers in a class-level list (two models of one process
share it) and finds the routes of a recomputed pass by popping a queue: one forward without a
backward, and every later pass reads its neighbour's routes without an error. Here nothing is
global and nothing is queued. A micro-batch's routes travel *with* it, in the ``packed_seq_params``
that every layer call receives, the recomputed call included; a hook before the layer hands them to
the layer's router. So forward, backward and recomputation of any micro-batch, in any order, see
their own routes.

The router asks its ``router_replay`` for the top-k. It gets the engine's experts where a route was
recorded and its own choice elsewhere, each with the *live* score gathered at it: what follows
(softmax over the chosen, scaling) and the gradient to the router are Megatron's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from relax_agent.errors import RouteError, TrainerError
from relax_agent.trainers.megatron.attention import PackedRows


class LayerReplay:
    """The ``router_replay`` of one layer's router."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        """Global index from 0, as routes are indexed; dense layers count."""
        self.rows: PackedRows | None = None

    def before_layer(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Note the micro-batch that the layer is about to work on (a forward pre-hook)."""
        rows = kwargs.get("packed_seq_params")
        if not isinstance(rows, PackedRows):
            raise TrainerError(f"layer {self.layer} was called without packed rows")
        self.rows = rows

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Choose experts; the name and the arguments are Megatron's.

        Args:
            scores: ``[tokens, experts]``.
            topk: Experts per token.
            num_groups: Groups of experts, for routers that choose groups first.
            group_topk: Groups per token.
            default_compute_topk: The live choice.

        Returns:
            Scores and indices of the chosen experts, ``[tokens, top_k]`` each.
        """
        assert default_compute_topk is not None
        live, own = default_compute_topk(scores, topk, num_groups, group_topk)
        rows = self.rows
        if rows is None or rows.routes is None or rows.has_route is None:
            return live, own
        if rows.routes.shape[0] != scores.shape[0]:
            raise RouteError(
                f"layer {self.layer} routes {scores.shape[0]} tokens, but "
                f"{rows.routes.shape[0]} have routes"
            )
        recorded = rows.routes[:, self.layer]
        chosen = torch.where(rows.has_route[:, None], recorded, own)
        self._count(rows, chosen, own)
        return scores.gather(1, chosen), chosen

    def _count(self, rows: PackedRows, chosen: Tensor, own: Tensor) -> None:
        if self.layer in rows.replayed:  # recomputation: the first pass has counted
            return
        assert rows.has_route is not None
        missed = (chosen[:, :, None] != own[:, None, :]).all(-1)
        # Tensors, not numbers: reading one would make a GPU wait in the middle of the forward.
        rows.replayed[self.layer] = rows.has_route.sum() * chosen.shape[1]
        rows.differing[self.layer] = missed.sum()


def install(model: nn.Module) -> list[LayerReplay]:
    """Put a :class:`LayerReplay` on every router of a Megatron GPT model and return them."""
    replays = []
    for layer in model.decoder.layers:  # type: ignore[union-attr]
        router = getattr(layer.mlp, "router", None)
        if router is None:
            continue
        replay = LayerReplay(layer.layer_number - 1)
        router.router_replay = replay
        layer.register_forward_pre_hook(replay.before_layer, with_kwargs=True)
        replays.append(replay)
    return replays

"""R3 for transformers' models: the experts that the engine chose are the experts used here.

A router scores all experts, picks ``top_k`` with ``torch.topk``, and turns the picked scores into
weights. Replay answers that one ``topk`` call with the engine's choice and the *live* scores at it;
everything the architecture does before and after (softmax or sigmoid, normalising, scaling) runs
as written, and gradients flow to the router through the scores. Tokens without a recorded route
(the last sampled token never re-entered the engine) keep the live choice.

The call is caught by a torch function mode that is active only inside routers. Whether a model
really picks its experts this way is probed once, when replay is installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from relax_agent.errors import ConfigError, TrainerError
from relax_agent.trainers.protocol import RouteShape


class _ReplayTopK(TorchFunctionMode):
    """Answers the ``topk`` over a layer's experts with the recorded choice."""

    def __init__(self, replay: RoutingReplay, layer: int) -> None:
        super().__init__()
        self.replay, self.layer = replay, layer

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        scores = args[0] if args else (kwargs or {})["input"]
        if not self.replay.picks(scores, result[1]):
            return result
        indices = self.replay.choose(self.layer, result[1])
        return torch.return_types.topk((scores.gather(-1, indices), indices))


class RoutingReplay:
    """Replays routes in every router of one model.

    Use :meth:`replaying` around forward *and* backward: recomputation runs the routers again.
    """

    def __init__(self, model: nn.Module, shape: RouteShape) -> None:
        self.shape = shape
        self.routes: Tensor | None = None
        self.has_route: Tensor | None = None
        self.differing = 0
        """Replayed choices (token, layer, expert) that the live router would not have made."""
        self.replayed_tokens = 0
        self._seen: set[int] = set()
        for layer, router in _routers(model, shape).items():
            self._wrap(router, layer)

    def _wrap(self, router: nn.Module, layer: int) -> None:
        live_forward = router.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.routes is None:
                return live_forward(*args, **kwargs)
            with _ReplayTopK(self, layer):
                return live_forward(*args, **kwargs)

        router.forward = forward  # type: ignore[method-assign]

    @contextmanager
    def replaying(self, routes: Tensor | None, has_route: Tensor) -> Iterator[None]:
        """Use these routes within the block.

        Args:
            routes: ``[tokens, layers, top_k]`` uint8 or uint16; None leaves every router alone.
            has_route: ``[tokens]`` bool.
        """
        self.routes, self.has_route = routes, has_route
        self.differing, self.replayed_tokens, self._seen = 0, 0, set()
        try:
            yield
            missing = set(self.shape.moe_layers) - self._seen
            if routes is not None and missing:
                raise TrainerError(f"the routers of layers {sorted(missing)} ran without replay")
        finally:
            self.routes = self.has_route = None

    def picks(self, scores: Tensor, indices: Tensor) -> bool:
        """Tell whether a ``topk`` chose experts and not, say, groups of experts."""
        return scores.ndim == 2 and (scores.shape[-1], indices.shape[-1]) == (
            self.shape.experts,
            self.shape.top_k,
        )

    def choose(self, layer: int, live: Tensor) -> Tensor:
        """Return the engine's experts where recorded, else the live ones, ``[tokens, top_k]``."""
        assert self.routes is not None and self.has_route is not None
        if len(live) != len(self.routes):
            raise TrainerError(f"layer {layer} routes {len(live)} tokens, not {len(self.routes)}")
        recorded = self.routes[:, layer].to(torch.int64)
        chosen = torch.where(self.has_route[:, None], recorded, live)
        if layer not in self._seen:  # a second call is recomputation: already counted
            self._seen.add(layer)
            self.differing += int((chosen[:, :, None] != live[:, None, :]).all(-1).sum())
            self.replayed_tokens = int(self.has_route.sum())
        return chosen

    @property
    def replayed_choices(self) -> int:
        """Choices (token, layer, expert) that were taken from the engine."""
        return self.replayed_tokens * len(self.shape.moe_layers) * self.shape.top_k


def route_shape(model: Any) -> RouteShape | None:
    """Return what routes for this transformers model look like; None if it has no experts."""
    config = model.config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((n for name in names if (n := getattr(config, name, None))), None)
    blocks = _blocks(model)
    if experts is None or not blocks:
        return None
    top_k = getattr(config, "num_experts_per_tok", None) or config.top_k_experts
    return RouteShape(config.num_hidden_layers, tuple(sorted(blocks)), top_k, experts)


def _blocks(model: nn.Module) -> dict[int, nn.Module]:
    """Return each expert layer's block (the parent of ``experts``) by global layer index."""
    blocks = {}
    for name, module in model.named_modules():
        layer = re.search(r"\blayers\.(\d+)\b", name)
        if layer and isinstance(getattr(module, "experts", None), nn.Module):
            blocks[int(layer[1])] = module
    return blocks


def _routers(model: nn.Module, shape: RouteShape) -> dict[int, nn.Module]:
    """Return what to wrap in each layer: the router if it picks by itself, else its block."""
    return {layer: _router(block, shape) for layer, block in _blocks(model).items()}


def _router(block: nn.Module, shape: RouteShape) -> nn.Module:
    for name, child in block.named_children():
        weight = getattr(child, "weight", None)
        if name == "experts" or isinstance(child, nn.Linear) or not isinstance(weight, Tensor):
            continue
        if weight.ndim == 2 and weight.shape[0] == shape.experts:
            return child
    return block


def install(model: Any, forward: Any) -> RoutingReplay | None:
    """Install replay and prove on a few tokens that forced experts are the ones used.

    Args:
        model: A transformers causal LM.
        forward: Runs the model on ``[tokens]`` ids and returns anything.

    Returns:
        The replay, or None if the model has no experts.

    Raises:
        ConfigError: This architecture picks its experts in a way that replay does not reach.
    """
    shape = route_shape(model)
    if shape is None:
        return None
    replay = RoutingReplay(model, shape)
    tokens = 3
    routes = torch.arange(shape.top_k).repeat(tokens, shape.layers, 1)
    device = next(model.parameters()).device
    try:
        with torch.no_grad(), replay.replaying(routes.to(device), _all_true(tokens, device)):
            forward(torch.zeros(tokens, dtype=torch.int64, device=device))
    except TrainerError as error:
        raise ConfigError(
            f"routing replay does not reach the routers of {type(model).__name__}: {error}",
            hint="set trainer.routing_replay: false",
        ) from error
    return replay


def _all_true(tokens: int, device: torch.device) -> Tensor:
    return torch.ones(tokens, dtype=torch.bool, device=device)

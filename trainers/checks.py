"""What one training row must be like. Checked before any weight changes."""

from __future__ import annotations

import numpy as np

from relax_agent.episode import Row
from relax_agent.errors import BatchError, RouteError
from relax_agent.trainers.protocol import BatchLayout, RouteShape


def check_row(name: str, row: Row, layout: BatchLayout) -> None:
    """Raise the error that names what is wrong with a row, if anything is.

    Args:
        name: What messages call it.
        row: One leaf of an episode.
        layout: What the trainer's model can take.

    Raises:
        BatchError: Columns, ids, log-probs or the length.
        RouteError: Missing or misfitting routes, where the layout wants some.
    """
    count = len(row.token_ids)
    columns = (row.loss_mask, row.logprobs, row.weight_versions, row.has_route)
    if any(len(column) != count for column in columns):
        raise BatchError(f"{name}: columns of different lengths")
    if count and not 0 <= int(row.token_ids.min()) <= int(row.token_ids.max()) < layout.vocab_size:
        raise BatchError(
            f"{name}: a token id lies outside the model's vocabulary of {layout.vocab_size}",
            hint="the engine and the trainer must load the same model",
        )
    trained = row.loss_mask != 0
    if not np.isfinite(row.logprobs[trained]).all():
        raise BatchError(f"{name}: a log-prob is not finite")
    if count and trained[0]:
        raise BatchError(f"{name}: the first token is trained, but nothing predicts it")
    last = int(np.flatnonzero(trained)[-1]) if trained.any() else 0
    if last > layout.micro_batch_tokens:
        raise BatchError(
            f"{name}: {last} tokens do not fit into micro_batch_tokens = "
            f"{layout.micro_batch_tokens}",
            hint="raise trainer.micro_batch_tokens or lower the episode's context limit",
        )
    if row.media and not layout.takes_media:
        raise BatchError(
            f"{name}: it holds media, which this trainer does not take",
            hint="train models that see or hear with trainer.kind: torch",
        )
    if layout.routes is not None and last:
        _check_routes(name, row, layout.routes)


def _check_routes(name: str, row: Row, shape: RouteShape) -> None:
    if row.routes is None or not row.has_route.any():
        raise RouteError(
            f"{name}: no routed experts, but routing replay is on",
            hint="the engine must return routes, or set trainer.routing_replay: false",
        )
    expected = (len(row.token_ids), shape.layers, shape.top_k)
    if row.routes.shape != expected:
        raise RouteError(
            f"{name}: routes have shape {row.routes.shape}, the model needs {expected} "
            "(tokens, decoder layers, experts per token)"
        )
    if row.routes.dtype not in (np.uint8, np.uint16):
        raise RouteError(f"{name}: routes are {row.routes.dtype}, not uint8 or uint16")
    chosen = row.routes[row.has_route][:, list(shape.moe_layers)]
    if chosen.size and int(chosen.max()) >= shape.experts:
        raise RouteError(f"{name}: a route names expert {chosen.max()} of {shape.experts}")
    ordered = np.sort(chosen, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise RouteError(f"{name}: a route names one expert twice for one token")

"""What a scripted engine is told to answer, and how it makes up what it was not told."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

import numpy as np

from relax_agent.engines.protocol import GenerateRequest, Routes
from relax_agent.engines.wire import RouteShape
from relax_agent.errors import EngineUnavailable


class Fault(StrEnum):
    """What can go wrong with one request."""

    ERROR = "error"
    """The engine answers HTTP 500."""
    REJECT = "reject"
    """The engine refuses the request."""
    SILENCE = "silence"
    """No answer ever comes."""
    DEATH = "death"
    """The engine ends in the middle of the answer, and every other request with it."""
    NO_LOGPROBS = "no_logprobs"
    """The answer has no log-probs at all."""
    WRONG_TOKEN = "wrong_token"
    """The first log-prob belongs to another token than the sampled one."""
    TOP_K = "top_k"
    """Log-probs are dictionaries in rank order; a likelier token than the sampled one is first."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What to answer to one request."""

    output_ids: Sequence[int]
    """Tokens in the order in which they are sampled; limits of the request may cut them."""
    logprobs: Sequence[float] | None = None
    """One per token; None gives -1, -1.5, -2, … so that no two neighbours are equal."""
    routes: Routes | None = None
    """All positions ``[prompt + completion - 1, layers, top_k]``; None makes them up."""
    fault: Fault | None = None
    """What goes wrong."""
    abort_after: int | None = None
    """The engine itself aborts once this many tokens are there."""


Script = Callable[[GenerateRequest], Reply]


def as_script(script: Script | Sequence[Reply] | None) -> Script:
    """Make a function of replies in order; None becomes :func:`pseudo_random`."""
    if script is None:
        return pseudo_random
    if callable(script):
        return script
    replies: Iterator[Reply] = iter(script)

    def take(request: GenerateRequest) -> Reply:
        for reply in replies:
            return reply
        raise EngineUnavailable(f"the script has no reply for request {request.rid}")

    return take


def logprob_entries(output_ids: Sequence[int], reply: Reply, vocab_size: int) -> Any:
    """Build SGLang's ``output_token_logprobs``, right or with the fault that was asked for."""
    if reply.fault is Fault.NO_LOGPROBS:
        return None
    values = reply.logprobs or [-1.0 - position / 2 for position in range(len(output_ids))]
    pairs = list(zip(values, output_ids, strict=False))
    if reply.fault is Fault.TOP_K:
        return [
            {str((token + 1) % vocab_size): value / 2, str(token): value} for value, token in pairs
        ]
    entries = [[value, token, None] for value, token in pairs]
    if reply.fault is Fault.WRONG_TOKEN and entries:
        entries[0][1] = (output_ids[0] + 1) % vocab_size
    return entries


def pseudo_random(request: GenerateRequest) -> Reply:
    """Answer repeatable tokens for a greedy or seeded request, up to its limit."""
    sampling = request.sampling
    seed = 0 if sampling.temperature == 0 else sampling.seed
    state = hashlib.sha256(repr((list(request.input_ids), seed)).encode()).digest()
    if seed is None:
        state += request.rid.encode()
    tokens, logprobs = [], []
    for _ in range(sampling.max_new_tokens):
        state = hashlib.sha256(state).digest()
        token, size = struct.unpack_from("<II", state)
        tokens.append(3 + token % 200)
        logprobs.append(-size / 2**32 - 0.01)
    return Reply(tokens, logprobs)


def made_up_routes(ids: Sequence[int], shape: RouteShape) -> Routes:
    """Derive distinct expert ids ``[tokens, layers, top_k]`` from token ids and positions."""
    tokens = np.asarray(ids, dtype=np.int64)[:, None, None]
    positions = np.arange(len(ids))[:, None, None]
    layers = np.arange(shape.layers)[None, :, None]
    choice = np.arange(shape.top_k)[None, None, :]
    routes = (tokens + 3 * positions + 5 * layers + choice) % shape.experts
    return cast("Routes", routes.astype(shape.dtype))

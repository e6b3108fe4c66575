"""Sampling one assistant message, over as many requests as it takes.

Usually that is one. When an engine aborts a request, what it had sampled is kept and the next
request goes on behind it, with the tokens that are left: the message stays one turn, each token
with its own log-prob, weight version and route. ``finish_reason`` "abort" is never taken for an
end of the message.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from relax_agent.engines.protocol import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Routes,
    SamplingParams,
)
from relax_agent.errors import EngineError
from relax_agent.media import Media
from relax_agent.rollout.seeds import stable_seed

_BACKOFF_S = 0.05


class PolicySource(Protocol):
    """Where sampled tokens come from: a fleet, or a single engine."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one answer."""

    async def abort(self, rid: str | None = None) -> None:
        """End one request; it returns its partial answer."""


@dataclass(slots=True)
class SampledTurn:
    """What has been sampled of one message; valid at any moment, after a failure too."""

    prompt: Sequence[int]
    """The whole sequence before the message."""
    route_start: int
    """First position of the sequence whose route is not known yet."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: list[tuple[int, Routes]] = field(default_factory=list)
    """``(first position, routes)`` of every request."""
    finish_reason: FinishReason = "abort"
    """"abort" until a request has ended by itself."""

    def take(self, request: GenerateRequest, result: GenerateResult) -> None:
        """Append an engine's answer, or raise EngineError and append nothing."""
        count = len(result.output_ids)
        if not count == len(result.logprobs) == len(result.versions):
            raise EngineError(
                f"request {request.rid}: {count} tokens came with {len(result.logprobs)} log-probs"
                f" and {len(result.versions)} weight versions"
            )
        if count > request.sampling.max_new_tokens:
            raise EngineError(
                f"request {request.rid}: {count} tokens came, at most"
                f" {request.sampling.max_new_tokens} were asked for"
            )
        if not all(map(math.isfinite, result.logprobs)):
            raise EngineError(f"request {request.rid}: a log-prob is not finite")
        if request.return_routes:
            self._take_routes(request, result)
        self.ids += result.output_ids
        self.logprobs += result.logprobs
        self.versions += result.versions
        self.finish_reason = result.finish_reason

    def _take_routes(self, request: GenerateRequest, result: GenerateResult) -> None:
        end = len(request.input_ids) + len(result.output_ids) - 1
        expected = max(0, end - request.routes_start)
        found = 0 if result.routes is None else len(result.routes)
        # An engine that is interrupted may not have read everything yet. The next request goes on
        # behind the last known route, so nothing is lost.
        if found > expected or (found < expected and result.finish_reason != "abort"):
            raise EngineError(f"request {request.rid}: {found} routes for {expected} positions")
        if result.routes is not None and found:
            self.routes.append((request.routes_start, result.routes))
            self.route_start += found


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """How one message is sampled."""

    rid: str
    """Identity of the message; each request gets a number behind it."""
    sampling: SamplingParams
    """With ``max_new_tokens`` for the whole message."""
    seed: tuple[int | str, ...]
    """What the seeds of its requests are made from."""
    return_routes: bool
    on_abort: Literal["resume", "retry"]
    max_resumes: int
    media: tuple[Media, ...] = ()
    """All media of the prompt, in its order."""


async def sample_turn(
    turn: SampledTurn,
    plan: TurnPlan,
    ask: Callable[[GenerateRequest], Awaitable[GenerateResult]],
) -> None:
    """Fill ``turn`` until the message is whole, or its ``finish_reason`` stays "abort"."""
    for attempt in range(plan.max_resumes + 1):
        room = plan.sampling.max_new_tokens - len(turn.ids)
        if room <= 0:
            turn.finish_reason = "length"
            return
        request = GenerateRequest(
            input_ids=[*turn.prompt, *turn.ids],
            sampling=replace(
                plan.sampling, max_new_tokens=room, seed=stable_seed(*plan.seed, attempt)
            ),
            rid=f"{plan.rid}.{attempt:02d}",
            return_routes=plan.return_routes,
            routes_start=turn.route_start,
            media=plan.media,
        )
        turn.take(request, await ask(request))
        if turn.finish_reason != "abort" or plan.on_abort == "retry":
            return
        if attempt < plan.max_resumes:
            await asyncio.sleep(_BACKOFF_S * 2**attempt)

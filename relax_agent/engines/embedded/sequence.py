"""One request from arrival to answer, as the scheduler sees it."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from relax_agent.engines.embedded.requests import Job, encode_routes, token_logprobs

Routes = npt.NDArray[np.int32]

_WORTH_WAITING = 16
"""Shared tokens for which a request waits a turn instead of reading them itself."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished request."""

    job: Job
    output_ids: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float] | None
    finish_reason: dict[str, Any]
    spans: list[tuple[str, int, int]]
    """Weight version, first output token, one past the last."""
    version: str
    """Weight version at the end."""
    routes: Routes | None
    """``[positions, layers, top_k]``"""
    cached_tokens: int
    retractions: int
    latency_s: float

    def to_json(self) -> dict[str, Any]:
        """Return the body of the answer."""
        job = self.job
        meta: dict[str, Any] = {
            "id": job.rid,
            "finish_reason": self.finish_reason,
            "prompt_tokens": len(job.input_ids),
            "completion_tokens": len(self.output_ids),
            "cached_tokens": self.cached_tokens,
            "weight_version": self.version,
            "weight_versions": [
                {"version": version, "start": start, "end": end}
                for version, start, end in self.spans
            ],
            "num_retractions": self.retractions,
            "e2e_latency": self.latency_s,
        }
        if job.return_logprob:
            meta["output_token_logprobs"] = token_logprobs(self.logprobs, self.output_ids)
            meta["output_token_logprobs_length"] = len(self.output_ids)
            meta["input_token_logprobs"] = self._input_logprobs()
        if self.routes is not None:
            meta["routed_experts"] = encode_routes(self.routes)
        return {"output_ids": self.output_ids, "meta_info": meta}

    def _input_logprobs(self) -> list[list[Any]]:
        if self.prompt_logprobs is None:
            return []
        ids = self.job.input_ids
        return [[None, ids[0], None], *token_logprobs(self.prompt_logprobs, ids[1:])]


class Sequence:
    """The state of one request. Only the scheduler's thread touches it, but for ``done``."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.done: Future[Outcome] = Future()
        self.done.set_running_or_notify_cancel()  # an answer always comes
        self.tokens = list(job.input_ids)
        """Prompt and output."""
        self.keys = self.tokens if job.prompt is None else list(job.prompt.keys)
        """The same as the prefix cache knows it: media by their content."""
        self.output_ids: list[int] = []
        self.logprobs: list[float] = []
        self.length = 0
        """Tokens whose keys and values are in the row."""
        self.limit = len(job.input_ids) + job.sampling.max_new_tokens
        """Tokens that it may grow to."""
        self.epoch = -1
        """Weights under which its row was begun."""
        self.finish_reason: dict[str, Any] | None = None
        self.failure: str | None = None
        self._spans: list[tuple[str, int]] = []
        self._cached: int | None = None
        self._retractions = 0
        self._prompt_logprobs: list[float] | None = None
        self._routes: Routes | None = None
        self.arrived = time.perf_counter()

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether the whole prompt must be read with logits."""
        return self.job.prompt_logprobs and self._prompt_logprobs is None

    def unread(self, known: int) -> int:
        """Return how many tokens are left to read beside ``known`` ones."""
        return len(self.tokens) - known

    def pending(self) -> list[int]:
        """Return the tokens that the next forward reads."""
        return self.tokens[self.length :]

    def begin(self, known: int, epoch: int) -> bool:
        """Take a row with ``known`` tokens from the cache; return whether it is the first."""
        self.length, self.epoch = known, epoch
        first = self._cached is None
        if first:
            self._cached = known
        return first

    def retract(self, routes: Routes | None) -> None:
        """Give the row up; everything is read anew later.

        The routes so far are kept: they belong to the log-probs, which stay.
        """
        self.length = 0
        self._retractions += 1
        self._routes = self._all_routes(routes)

    def _all_routes(self, routes: Routes | None) -> Routes | None:
        """Return the routes of all tokens read, the earliest reading of each."""
        if routes is None or self._routes is None:
            return self._routes if routes is None else routes
        return np.concatenate([self._routes, routes[len(self._routes) :]])

    def shares(self, other: Sequence, known: int) -> bool:
        """Return whether ``other`` is about to read much that this one needs and lacks."""
        stop = known + _WORTH_WAITING
        if stop >= len(self.tokens) or self.needs_prompt_logprobs:
            return False
        return self.keys[known:stop] == other.keys[known:stop] and (
            self.keys[:known] == other.keys[:known]
        )

    def take_prompt_logprobs(self, logits: torch.Tensor) -> None:
        """Keep the log-probs of the prompt's tokens out of ``[tokens, vocabulary]``."""
        count = len(self.job.input_ids) - 1
        targets = torch.tensor(self.job.input_ids[1:], dtype=torch.long)
        logprobs = logits[:count].log_softmax(dim=-1).gather(1, targets[:, None])
        self._prompt_logprobs = logprobs[:, 0].tolist()

    def accept(self, token: int, logprob: float, version: str) -> bool:
        """Append a sampled token; return whether the request ends with it."""
        sampling = self.job.sampling
        if not sampling.max_new_tokens:
            self.finish_reason = {"type": "length", "length": 0}
            return True
        if math.isnan(logprob):
            self.failure = f"the model returned NaN for request {self.job.rid}"
            return True
        if not self._spans or self._spans[-1][0] != version:
            self._spans.append((version, len(self.output_ids)))
        self.output_ids.append(token)
        self.logprobs.append(logprob)
        self.tokens.append(token)
        if self.keys is not self.tokens:
            self.keys.append(token)
        if token in sampling.stop_token_ids:
            self.finish_reason = {"type": "stop", "matched": token}
        elif len(self.output_ids) >= sampling.max_new_tokens:
            self.finish_reason = {"type": "length", "length": len(self.output_ids)}
        return self.finish_reason is not None

    def outcome(self, version: str, routes: Routes | None) -> Outcome:
        """Gather the answer; ``routes`` are those of its row, ``[tokens, layers, top_k]``."""
        assert self.finish_reason is not None
        routes = self._all_routes(routes)
        starts = [start for _, start in self._spans]
        spans = zip(self._spans, [*starts, len(self.output_ids)][1:], strict=True)
        return Outcome(
            job=self.job,
            output_ids=self.output_ids,
            logprobs=self.logprobs,
            prompt_logprobs=self._prompt_logprobs,
            finish_reason=self.finish_reason,
            spans=[(name, start, end) for (name, start), end in spans],
            version=version,
            routes=None if routes is None else routes[self.job.routes_start : len(self.tokens) - 1],
            cached_tokens=self._cached or 0,
            retractions=self._retractions,
            latency_s=time.perf_counter() - self.arrived,
        )

"""From logits to tokens, for all rows at once.

Each request has its own stream of uniform numbers: a hash of its seed and of how many tokens it
has sampled. A token is the inverse of the cumulative distribution at that number. So what a
request samples does not depend on who else is in the batch, and a retracted request goes on
exactly where it was. Log-probs are those of the distribution that is sampled from: after logit
bias and temperature. Temperature 0 takes the most likely token and reports the log-prob of
temperature 1. Tokens that stand for media are never sampled: a policy can make none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_UNIT = 2.0**-52


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request samples."""

    max_new_tokens: int
    temperature: float
    seed: int
    stop_token_ids: frozenset[int]
    min_new_tokens: int = 0
    """Stop tokens are not sampled before this many tokens."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)


def uniform(seeds: npt.NDArray[np.uint64], counters: npt.NDArray[np.uint64]) -> Tensor:
    """Return numbers in [0, 1), ``[rows]`` float64, that depend on seed and counter only."""
    with np.errstate(over="ignore"):
        bits = _mix(_mix(seeds + _GOLDEN) + counters * _GOLDEN)
    return torch.from_numpy((bits >> np.uint64(12)).astype(np.float64) * _UNIT)


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble as splitmix64 does."""
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
    return bits ^ (bits >> np.uint64(31))


class Sampler:
    """Samples for a fixed list of rows; made anew when the list changes."""

    def __init__(self, rows: Sequence[Sampling], suppressed: Tensor | None = None) -> None:
        """Prepare.

        Args:
            rows: How each row samples.
            suppressed: ``[ids]``: tokens that no row ever samples.
        """
        self._suppressed = suppressed
        temperature = np.array([row.temperature for row in rows], dtype=np.float32)
        greedy = temperature == 0
        self._greedy = torch.from_numpy(greedy)
        self._any_greedy, self._all_greedy = bool(greedy.any()), bool(greedy.all())
        temperature[greedy] = 1.0
        self._scale = None if (temperature == 1).all() else torch.from_numpy(temperature)[:, None]
        self._seeds = np.array([row.seed % 2**64 for row in rows], dtype=np.uint64)
        self._bias = _bias_entries(rows)
        self._held = [(at, row) for at, row in enumerate(rows) if row.min_new_tokens]

    def sample(self, logits: Tensor, counters: Sequence[int]) -> tuple[list[int], list[float]]:
        """Sample one token per row.

        Args:
            logits: ``[rows, vocabulary]`` float32; overwritten.
            counters: How many tokens each row has sampled before.

        Returns:
            Tokens and their log-probs; a log-prob is NaN where the logits are.
        """
        logprobs = self.logprobs(logits, counters)
        tokens = self._choose(logprobs, counters)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        return tokens.tolist(), chosen.tolist()

    def logprobs(self, logits: Tensor, counters: Sequence[int]) -> Tensor:
        """Return the log of the sampled distribution, ``[rows, vocabulary]``."""
        if self._suppressed is not None:
            logits.index_fill_(1, self._suppressed, -torch.inf)
        if self._bias is not None:
            rows, tokens, values = self._bias
            logits.index_put_((rows, tokens), values, accumulate=True)
        for at, row in self._held:
            if counters[at] < row.min_new_tokens:
                logits[at, list(row.stop_token_ids)] = -torch.inf
        if self._scale is not None:
            logits.div_(self._scale)
        return torch.log_softmax(logits, dim=-1)

    def _choose(self, logprobs: Tensor, counters: Sequence[int]) -> Tensor:
        if self._all_greedy:
            return logprobs.argmax(dim=-1)
        cumulative = logprobs.double().exp_().cumsum_(dim=-1)
        numbers = uniform(self._seeds, np.asarray(counters, dtype=np.uint64))
        # Strictly below the total, and to the right of equal values: never a token of chance 0.
        aim = numbers[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, aim, right=True)[:, 0]
        tokens.clamp_(max=logprobs.shape[1] - 1)  # only NaN goes past the end
        if self._any_greedy:
            tokens = torch.where(self._greedy, logprobs.argmax(dim=-1), tokens)
        return tokens


def _bias_entries(rows: Sequence[Sampling]) -> tuple[Tensor, Tensor, Tensor] | None:
    entries = [
        (at, token, value) for at, row in enumerate(rows) for token, value in row.logit_bias.items()
    ]
    if not entries:
        return None
    where, tokens, values = zip(*entries, strict=True)
    return torch.tensor(where), torch.tensor(tokens), torch.tensor(values, dtype=torch.float32)

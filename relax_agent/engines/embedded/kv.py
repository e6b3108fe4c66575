"""Where keys and values live: slots for running requests, a pool for cached prefixes.

A running request owns one **row** of the slots; rows are kept dense (the last row moves into a
gap), so attention over all of them is a plain slice. The **pool** holds one entry per token,
addressed by the indices of :class:`~relax_agent.engines.embedded.prefix.PrefixTree`. Routed
experts sit beside both, so a cached prefix still knows which experts it went through.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from relax_agent.engines.embedded.prefix import Indices

_CAPACITY_STEP = 64


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token leaves behind."""

    layers: int
    heads: int
    """Key-value heads per layer."""
    key_dim: int
    value_dim: int
    routes: int
    """Mixture-of-experts layers times experts per token; 0 for a dense model."""
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Memory of one token in bytes."""
        size = torch.empty((), dtype=self.dtype).element_size()
        return self.layers * self.heads * (self.key_dim + self.value_dim) * size + 2 * self.routes


class Pool:
    """Storage of cached prefixes: one entry per token."""

    def __init__(self, shape: KvShape, capacity: int) -> None:
        """Reserve address space; the memory is taken as entries are filled."""
        lead = (capacity, shape.layers, shape.heads)
        self.keys = torch.empty((*lead, shape.key_dim), dtype=shape.dtype)
        self.values = torch.empty((*lead, shape.value_dim), dtype=shape.dtype)
        self.routes = torch.empty((capacity, shape.routes), dtype=torch.int16)


class Slots:
    """Keys, values and routes of running requests.

    Attributes:
        keys: ``[layers, rows, heads, capacity, key_dim]``
        values: ``[layers, rows, heads, capacity, value_dim]``
        routes: ``[rows, capacity, moe_layers * top_k]``
    """

    def __init__(self, shape: KvShape, max_tokens: int) -> None:
        """Start small; :meth:`reserve` grows up to ``max_tokens`` = rows times capacity."""
        self.shape = shape
        self.max_tokens = max_tokens
        self.rows = 0
        self.capacity = 0
        self._allocate(1, _CAPACITY_STEP)

    def fits(self, rows: int, length: int) -> bool:
        """Return whether ``rows`` rows of up to ``length`` tokens can be held."""
        return rows * length <= self.max_tokens

    def reserve(self, rows: int, length: int, used: int) -> None:
        """Make room for ``rows`` rows of ``length`` tokens and keep the first ``used`` rows."""
        if rows <= self.rows and length <= self.capacity:
            return
        new_rows, capacity = self._layout(rows, length)
        old = (self.keys, self.values, self.routes)
        keep = min(capacity, self.capacity)
        self._allocate(new_rows, capacity)
        self.keys[:, :used, :, :keep] = old[0][:, :used, :, :keep]
        self.values[:, :used, :, :keep] = old[1][:, :used, :, :keep]
        self.routes[:used, :keep] = old[2][:used, :keep]

    def _layout(self, rows: int, length: int) -> tuple[int, int]:
        """Choose rows and capacity: growing by doubling, or, near the limit, as it allows."""
        new_rows = self.rows if rows <= self.rows else max(rows, 2 * self.rows)
        capacity = max(self.capacity, _round_up(length))
        if self.fits(new_rows, capacity):
            return new_rows, capacity
        roomy = max(length, min(length + _CAPACITY_STEP, self.max_tokens // rows))
        new_rows = max(rows, min(new_rows, self.max_tokens // roomy))
        return new_rows, self.max_tokens // new_rows

    def wipe(self) -> None:
        """Set everything to zero, so that no bad number outlives bad weights."""
        self.keys.zero_()
        self.values.zero_()

    def wipe_row(self, row: int) -> None:
        """Set one row to zero."""
        self.keys[:, row].zero_()
        self.values[:, row].zero_()

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of one row over another."""
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]
        if self.shape.routes:
            self.routes[target, :length] = self.routes[source, :length]

    def load(self, row: int, pool: Pool, indices: Indices) -> None:
        """Fill the start of ``row`` from the pool."""
        where, length = torch.from_numpy(indices), len(indices)
        self.keys[:, row, :, :length] = pool.keys[where].permute(1, 2, 0, 3)
        self.values[:, row, :, :length] = pool.values[where].permute(1, 2, 0, 3)
        if self.shape.routes:
            self.routes[row, :length] = pool.routes[where]

    def store(self, row: int, start: int, pool: Pool, indices: Indices) -> None:
        """Copy tokens of ``row`` from ``start`` on into the pool."""
        where, stop = torch.from_numpy(indices), start + len(indices)
        pool.keys[where] = self.keys[:, row, :, start:stop].permute(2, 0, 1, 3)
        pool.values[where] = self.values[:, row, :, start:stop].permute(2, 0, 1, 3)
        if self.shape.routes:
            pool.routes[where] = self.routes[row, start:stop]

    def _allocate(self, rows: int, capacity: int) -> None:
        # Zeros, because masked attention multiplies what was never written by a weight of zero.
        shape, lead = self.shape, (self.shape.layers, rows, self.shape.heads, capacity)
        self.rows, self.capacity = rows, capacity
        self.keys = torch.zeros((*lead, shape.key_dim), dtype=shape.dtype)
        self.values = torch.zeros((*lead, shape.value_dim), dtype=shape.dtype)
        self.routes = torch.zeros((rows, capacity, shape.routes), dtype=torch.int16)


def _round_up(length: int) -> int:
    return -(-length // _CAPACITY_STEP) * _CAPACITY_STEP

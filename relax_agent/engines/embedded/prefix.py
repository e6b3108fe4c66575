"""A radix tree from token ids to positions in the key-value pool.

Every node holds a run of tokens and, for each, the index of its entry in the pool. Lookups
match token by token, so a group member finds its whole prompt and a second turn finds all of
the first. The tree knows nothing of tensors: :meth:`PrefixTree.insert` hands out free indices
and the caller fills them. When the pool is full, the least recently used leaves make room.

The tree belongs to one set of weights. New weights :meth:`~PrefixTree.clear` it, so no lookup
can reach an entry that older weights computed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


class _Node:
    __slots__ = ("children", "indices", "parent", "tokens", "used")

    def __init__(self, tokens: list[int], indices: Indices, parent: _Node | None) -> None:
        self.tokens = tokens
        self.indices = indices
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.used = 0


class PrefixTree:
    """Longest-prefix lookup over at most ``capacity`` tokens."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._clock = 0
        self._free: Indices
        self._free_count = 0
        self._root: _Node
        self.clear()

    def __len__(self) -> int:
        """Return how many tokens are held."""
        return self.capacity - self._free_count

    def clear(self) -> None:
        """Forget everything."""
        self._root = _Node([], np.empty(0, dtype=np.int64), None)
        self._free = np.arange(self.capacity - 1, -1, -1, dtype=np.int64)
        self._free_count = self.capacity

    def match(self, tokens: Sequence[int]) -> Indices:
        """Return the pool indices of the longest known prefix of ``tokens``."""
        path, length, within = self._walk(tokens)
        if not length:
            return self._root.indices
        parts = [node.indices for node in path]
        parts[-1] = parts[-1][:within]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def insert(self, tokens: Sequence[int]) -> tuple[int, Indices]:
        """Make ``tokens`` known, as many as fit.

        Returns:
            How many were known already, and the pool indices of those that follow; the caller
            must fill these before the next lookup.
        """
        path, length, within = self._walk(tokens)
        wanted = len(tokens) - length
        if wanted <= 0:
            return length, self._root.indices
        parent = self._split(path[-1], within) if path else self._root
        indices = self._allocate(wanted)
        if len(indices):
            self._attach(parent, list(tokens[length : length + len(indices)]), indices)
        return length, indices

    def _attach(self, parent: _Node, tokens: list[int], indices: Indices) -> None:
        node = _Node(tokens, indices, parent)
        node.used = self._clock
        parent.children[tokens[0]] = node

    def _walk(self, tokens: Sequence[int]) -> tuple[list[_Node], int, int]:
        """Follow ``tokens`` down; return the path, its length, and that within its last node."""
        self._clock += 1
        node, done, within = self._root, 0, 0
        path: list[_Node] = []
        while done < len(tokens) and (child := node.children.get(tokens[done])) is not None:
            child.used = self._clock
            path.append(child)
            within = _common(child.tokens, tokens, done)
            done += within
            if within < len(child.tokens):
                break
            node = child
        return path, done, within

    def _split(self, node: _Node, length: int) -> _Node:
        """Cut ``node`` after ``length`` tokens; return the upper part."""
        if length == len(node.tokens):
            return node
        assert node.parent is not None
        upper = _Node(node.tokens[:length], node.indices[:length], node.parent)
        upper.used = node.used
        node.parent.children[upper.tokens[0]] = upper
        node.tokens, node.indices = node.tokens[length:], node.indices[length:]
        node.parent = upper
        node.used -= 1  # this part was not asked for: it may make room for what was
        upper.children[node.tokens[0]] = node
        return upper

    def _allocate(self, count: int) -> Indices:
        if count > self._free_count:
            self._evict(count)
        count = min(count, self._free_count)
        self._free_count -= count
        return self._free[self._free_count : self._free_count + count].copy()

    def _evict(self, count: int) -> None:
        """Drop old leaves until ``count`` entries and a tenth more are free.

        Nodes that the current call walked over are the newest and stay.
        """
        goal = min(self.capacity, count + self.capacity // 10)
        heap = [(node.used, id(node), node) for node in self._leaves()]
        heapq.heapify(heap)
        while heap and self._free_count < goal:
            used, _, node = heapq.heappop(heap)
            if used == self._clock or node.parent is None:
                break
            parent = node.parent
            del parent.children[node.tokens[0]]
            self._release(node.indices)
            if not parent.children and parent is not self._root:
                heapq.heappush(heap, (parent.used, id(parent), parent))

    def _release(self, indices: Indices) -> None:
        self._free[self._free_count : self._free_count + len(indices)] = indices
        self._free_count += len(indices)

    def _leaves(self) -> list[_Node]:
        leaves, stack = [], list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if not node.children:
                leaves.append(node)
        return leaves


def _common(run: list[int], tokens: Sequence[int], start: int) -> int:
    """Count how many tokens of ``run`` equal ``tokens`` from ``start`` on."""
    stop = min(len(run), len(tokens) - start)
    if run[:stop] == list(tokens[start : start + stop]):
        return stop
    low, high = 0, stop  # invariant: run[:low] matches, run[:high] does not
    while high - low > 1:
        middle = (low + high) // 2
        if run[low:middle] == list(tokens[start + low : start + middle]):
            low = middle
        else:
            high = middle
    return low

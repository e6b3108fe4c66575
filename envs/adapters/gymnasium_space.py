"""The observation space of an exported environment: texts that worker processes can share.

Gymnasium's ``Text`` goes through the shared memory of ``AsyncVectorEnv`` one 32-bit number a
character, and what the vector environment hands out is the memory as it was in the beginning.
:class:`MessageSpace` is a ``Text`` with a shared memory of its own: one byte a character, behind a
length, and read at the moment that somebody looks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from relax_agent.envs.adapters.common import require
from relax_agent.errors import EnvError

if TYPE_CHECKING:
    import gymnasium

_LENGTH_BYTES = 4


@functools.cache
def message_space_class() -> type[gymnasium.spaces.Text]:
    """Return :class:`relax_agent.gymnasium.MessageSpace`, and tell Gymnasium how it is shared."""
    gymnasium = require("gymnasium", "gymnasium", extra="envs")
    body = {"__doc__": "A text, shared by processes.", "__module__": "relax_agent.gymnasium"}
    made: Any = type("MessageSpace", (gymnasium.spaces.Text,), body)
    utils = require("gymnasium.vector.utils", "gymnasium", extra="envs")
    utils.create_shared_memory.register(made, _create)
    utils.write_to_shared_memory.register(made, _write)
    utils.read_from_shared_memory.register(made, Texts)
    return made  # type: ignore[no-any-return]


def _create(space: Any, *args: Any, **kwargs: Any) -> Any:
    """Let Gymnasium make the memory, as for an array of so many bytes."""
    gymnasium = require("gymnasium", "gymnasium", extra="envs")
    size = _LENGTH_BYTES + space.max_length
    utils = require("gymnasium.vector.utils", "gymnasium", extra="envs")
    as_bytes = gymnasium.spaces.Box(0, 255, (size,), "uint8")
    return utils.create_shared_memory(as_bytes, *args, **kwargs)


def _write(space: Any, index: int, values: str, shared_memory: Any) -> None:
    data = values.encode("ascii")
    if len(data) > space.max_length:
        raise EnvError(
            f"an observation of {len(data):,} characters does not fit into {space.max_length:,}",
            hint="as_gymnasium(…, max_chars=…), or less media",
        )
    slot = _bytes_of(shared_memory)[index * (_LENGTH_BYTES + space.max_length) :]
    slot[:_LENGTH_BYTES] = len(data).to_bytes(_LENGTH_BYTES)
    slot[_LENGTH_BYTES : _LENGTH_BYTES + len(data)] = data


def _bytes_of(shared_memory: Any) -> memoryview:
    return memoryview(shared_memory.get_obj()).cast("B")


class Texts:
    """The texts in a shared memory. They change; a (deep) copy is a tuple of what they are now."""

    def __init__(self, space: Any, shared_memory: Any, n: int = 1) -> None:
        self._space, self._memory, self._count = space, shared_memory, n

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> str:
        if not -self._count <= index < self._count:
            raise IndexError(f"there are {self._count} texts")
        start = (index % self._count) * (_LENGTH_BYTES + self._space.max_length)
        slot = _bytes_of(self._memory)[start:]
        length = int.from_bytes(slot[:_LENGTH_BYTES])
        return str(slot[_LENGTH_BYTES : _LENGTH_BYTES + length], "ascii")

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(self._count))

    def __deepcopy__(self, memo: dict[int, Any]) -> tuple[str, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        return repr(tuple(self))

"""Slots: places for environments that are replaced when they fail.

A slot's environment is built when it is first needed and used again for the next episode. One
that hung, crashed or could not be reset is given up: closed while the others go on, and another
one is built when the slot is needed again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from relax_agent.envs.core import Env, Info
from relax_agent.errors import ConfigError, MissingExtraError, ToolError, one_line
from relax_agent.limits import GRACE_S, Overrun, all_bounded
from relax_agent.status import EpisodeStatus

logger = logging.getLogger(__name__)


class SlotFailed(Exception):
    """A slot's environment failed; says how. Internal."""

    def __init__(self, status: EpisodeStatus, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail

    @classmethod
    def of(cls, call: str, error: Exception, seconds: float) -> SlotFailed:
        """Say what went wrong in a call that had so many seconds."""
        if isinstance(error, Overrun):
            return cls(EpisodeStatus.ENV_FAILURE, f"{call}: no answer within {seconds:g} s")
        tool = isinstance(error, ToolError)
        status = EpisodeStatus.TOOL_FAILURE if tool else EpisodeStatus.ENV_FAILURE
        return cls(status, f"{call}: {one_line(error)}")

    def info(self) -> Info:
        """Return it as an info tells it."""
        return {"status": self.status.value, "detail": self.detail}


class Slot:
    """One place for an environment, and how its episode stands."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.made: Env | None = None
        self.running = False
        self.terminated = False
        self.truncated = False

    @property
    def env(self) -> Env:
        """The environment that is there."""
        assert self.made is not None
        return self.made

    def set(self, terminated: bool, truncated: bool) -> None:
        """Note how the episode stands."""
        self.terminated, self.truncated = terminated, truncated
        self.running = not (terminated or truncated)


class Slots:
    """Builds, gives up and closes the environments of a number of slots."""

    def __init__(
        self, name: str, n: int, build: Callable[[], Awaitable[Env]], start_timeout_s: float
    ) -> None:
        """Prepare ``n`` empty slots.

        Args:
            name: What stands in log messages.
            n: How many.
            build: Builds one environment, and keeps to ``start_timeout_s`` by itself if it can.
            start_timeout_s: Seconds that it may take.
        """
        self._name = name
        self._build = build
        self._start_timeout_s = start_timeout_s
        self._closing: set[asyncio.Task[None]] = set()
        self.all = [Slot(number) for number in range(n)]
        self.replaced = 0
        """Environments that were given up after a failure."""

    async def fill(self, slots: Sequence[Slot]) -> dict[Slot, SlotFailed]:
        """Build an environment for every slot that has none; return what failed."""
        empty = [slot for slot in slots if slot.made is None]
        if not empty:
            return {}
        built = await all_bounded([self._build() for _ in empty], self._start_timeout_s + GRACE_S)
        failed: dict[Slot, SlotFailed] = {}
        wrong: Exception | None = None
        for slot, result in zip(empty, built, strict=True):
            if isinstance(result, Exception):
                failed[slot] = self.failure(slot, "make", result, self._start_timeout_s)
                if isinstance(result, (ConfigError, MissingExtraError)):
                    wrong = result
            else:
                slot.made = result
        if wrong is not None:
            raise wrong  # no other environment would fare better
        return failed

    def failure(self, slot: Slot, call: str, error: Exception, seconds: float) -> SlotFailed:
        """Say what befell a slot, and give its environment up."""
        self.discard(slot)
        failed = SlotFailed.of(call, error, seconds)
        logger.warning("%s, slot %d: %s", self._name, slot.number, failed)
        return failed

    def discard(self, slot: Slot) -> None:
        """Give a slot's environment up and close it while the others go on."""
        env, slot.made = slot.made, None
        if env is None:
            return
        self.replaced += 1
        task = asyncio.get_running_loop().create_task(_close([env]))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all environments at once; each has a short time for it."""
        envs = [slot.made for slot in self.all if slot.made is not None]
        for slot in self.all:
            slot.made, slot.running = None, False
        await _close(envs)
        await self.settle()

    async def settle(self) -> None:
        """Wait for the environments that were given up and still close."""
        if self._closing:
            await asyncio.wait(self._closing)


async def _close(envs: Sequence[Env]) -> None:
    """Close environments; one that cannot be closed must not stop the others."""
    results = await all_bounded([env.close() for env in envs], GRACE_S)
    for env, result in zip(envs, results, strict=True):
        if isinstance(result, Overrun):
            logger.warning("%r did not close within %g s", env, GRACE_S)
        elif isinstance(result, Exception):
            logger.warning("%r could not be closed: %s", env, result)

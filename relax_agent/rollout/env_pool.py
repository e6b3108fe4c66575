"""Environments that are used again and again, each by one episode at a time.

The pool's size is the number of episodes that run at the same time. An environment whose episode
did not end in order (it raised, hung, was cancelled) is closed and never used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from relax_agent.envs import Env
from relax_agent.errors import EnvError, RelaxError
from relax_agent.rollout.limits import GRACE_S, Overrun, TimeBudget, bounded

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Borrowed:
    """An environment on loan."""

    env: Env
    reusable: bool = False
    """The borrower sets it when the episode has ended in order."""


class EnvPool:
    """Makes, lends and closes environments of one kind."""

    def __init__(
        self, make: Callable[[], Env | Awaitable[Env]], size: int, *, timeout_s: float = 300.0
    ) -> None:
        """Prepare an empty pool.

        Args:
            make: Builds one environment; one that may take long does it in a coroutine.
            size: Most environments on loan at the same time.
            timeout_s: Seconds that building one may take.
        """
        self._make = make
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(size)
        self._idle: list[Env] = []
        self._closed = False
        self.size = size
        self.discarded = 0
        """Environments that were given up after a failure."""

    @contextlib.asynccontextmanager
    async def borrow(self) -> AsyncIterator[Borrowed]:
        """Wait for a free place and lend an environment; first come, first served.

        Raises:
            EnvError: no environment could be built.
        """
        async with self._slots:
            borrowed = Borrowed(self._idle.pop() if self._idle else await self._build())
            try:
                yield borrowed
            finally:
                await self._take_back(borrowed)

    async def _build(self) -> Env:
        try:
            made = self._make()
            if not inspect.isawaitable(made):
                return made
            return await bounded(made, TimeBudget(self._timeout_s).left)
        except Overrun:
            raise EnvError(f"was not built within {self._timeout_s:g} s") from None
        except RelaxError:
            raise  # a wrong recipe, a missing extra: no other environment would fare better
        except Exception as error:
            raise EnvError(f"cannot be built: {type(error).__name__}: {error}") from error

    async def _take_back(self, borrowed: Borrowed) -> None:
        if borrowed.reusable and not self._closed:
            self._idle.append(borrowed.env)
            return
        self.discarded += not borrowed.reusable
        await _close(borrowed.env)

    async def close(self) -> None:
        """Close all idle environments; those on loan are closed when they come back."""
        self._closed = True
        idle, self._idle = self._idle, []
        for env in idle:
            await _close(env)


async def _close(env: Env) -> None:
    """Close an environment; one that cannot even be closed must not stop the others' episodes."""
    try:
        await bounded(env.close(), TimeBudget(GRACE_S).left)
    except Overrun:
        logger.warning("%r did not close within %g s", env, GRACE_S)
    except Exception as error:
        logger.warning("%r could not be closed: %s: %s", env, type(error).__name__, error)

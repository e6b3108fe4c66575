"""The slots of an environment server: how many environments there are, and who has them.

A lease is one environment in one slot, from the time a client takes it to the time it is given
back. The environment is built at its first ``reset`` and never lent twice. A slot is free again
when its environment is closed, or has shown that it cannot be: one that hangs is left behind and
counted, so that it costs the server a thread or a process at worst, not a place.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from relax_agent.envs.core import Env
from relax_agent.envs.registration import make_async
from relax_agent.envs.serving.protocol import REQUESTS
from relax_agent.envs.serving.session import Answer, EnvSession, describe_env, unknown_request
from relax_agent.envs.serving.wire import Json, dumps
from relax_agent.envs.specs import EnvSpec
from relax_agent.errors import ConfigError, EnvError, RelaxError, ResetNeeded
from relax_agent.limits import GRACE_S, Overrun, TimeBudget, bounded

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """What an environment server allows."""

    slots: int = 64
    """Environments at the same time."""
    idle_timeout_s: float = 600.0
    """Seconds between two requests after which a client loses its environment."""
    step_timeout_s: float = 300.0
    """Seconds that one request may take, its reply included."""
    start_timeout_s: float = 300.0
    """Seconds that building one environment may take."""
    max_request_bytes: int = 64 << 20
    """Size of one request, media included."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0, not {getattr(self, name)}")


class NoSlot(RelaxError):
    """All environments are taken, or the server is about to end."""


class Lease:
    """One environment in one slot."""

    def __init__(self, leases: Leases) -> None:
        self.running = False
        """Whether an episode runs."""
        self._leases = leases
        self._session: EnvSession | None = None
        self._ended = False

    async def answer(self, request: Json, blobs: Sequence[bytes]) -> Answer:
        """Answer one request; the first one that needs an environment builds it."""
        op = request.get("op")
        if not isinstance(op, str) or op not in REQUESTS:
            self._leases.requests["unknown"] += 1
            raise unknown_request(op)
        leases = self._leases
        leases.requests[op] += 1
        try:
            if op == "reset" and leases.draining:
                raise NoSlot("this server is about to end", hint="use another one, or try later")
            session = self._session or await self._open(op)
            answer = ({}, []) if session is None else await session.answer(request, blobs)
        except Exception:
            leases.failures += 1
            self.running = self.running and op not in ("reset", "step")
            raise
        if op == "step":
            reply = answer[0]
            self.running = not (reply["terminated"] or reply["truncated"])
        elif op == "reset":
            self.running = True
            leases.episodes += 1
        return answer

    async def _open(self, op: object) -> EnvSession | None:
        """Build the environment; there is nothing to build for closing it."""
        if op == "step":
            raise ResetNeeded("step() outside an episode", hint="reset() first")
        if op == "close":
            return None
        if op not in REQUESTS:
            raise unknown_request(op)
        env = await self._leases.build()
        if self._ended:
            await self._leases.close_env(env)
            raise EnvError("the lease has ended")
        self._session = EnvSession(env, self._leases.tools)
        return self._session

    async def end(self) -> None:
        """Close the environment and free the slot. May be called twice."""
        if self._ended:
            return
        self._ended, self.running = True, False
        try:
            if self._session is not None:
                await self._leases.close_env(self._session.env)
        finally:
            self._leases.free(self)


class Leases:
    """All slots of one server."""

    def __init__(self, spec: EnvSpec, limits: ServingLimits) -> None:
        self.spec = spec
        self.limits = limits
        self.draining = False
        """Whether no new episode may begin."""
        self.manifest: Json = {}
        self.manifest_json = b""
        self.requests: Counter[str] = Counter()
        self.failures = 0
        self.episodes = 0
        self.refused = 0
        self.left_behind = 0
        """Environments that could not be closed in time."""
        self._taken: set[Lease] = set()
        self._spare: Env | None = None

    async def prepare(self) -> None:
        """Build one environment, to see that it can be built and what it tells of itself."""
        if self.manifest:
            return
        self._spare = await self._make()
        limits = self.limits
        self.manifest = describe_env(self._spare, self.spec.id) | {
            "step_timeout_s": limits.step_timeout_s,
            "slots": limits.slots,
            "max_request_bytes": limits.max_request_bytes,
        }
        self.manifest_json = dumps(self.manifest)

    @property
    def tools(self) -> list[Json]:
        """The schemas that clients know from the manifest."""
        tools: list[Json] = self.manifest["tools"]
        return tools

    @property
    def taken(self) -> int:
        """Slots in use."""
        return len(self._taken)

    @property
    def running(self) -> int:
        """Episodes that run."""
        return sum(lease.running for lease in self._taken)

    def take(self) -> Lease:
        """Take a slot, or raise NoSlot."""
        if self.draining:
            self.refused += 1
            raise NoSlot("this server is about to end", hint="use another one, or try later")
        if len(self._taken) >= self.limits.slots:
            self.refused += 1
            raise NoSlot(
                f"all {self.limits.slots} environments are taken", hint="try later, or serve more"
            )
        lease = Lease(self)
        self._taken.add(lease)
        return lease

    def free(self, lease: Lease) -> None:
        """Take a slot back."""
        self._taken.discard(lease)

    async def build(self) -> Env:
        """Build one more environment; the first one is there already."""
        env, self._spare = self._spare, None
        return env or await self._make()

    async def _make(self) -> Env:
        limit = self.limits.start_timeout_s
        try:
            return await bounded(
                make_async(self.spec, start_timeout_s=limit), TimeBudget(limit + GRACE_S).left
            )
        except Overrun:
            raise EnvError(f"{self.spec.id} was not built within {limit:g} s") from None

    async def close_env(self, env: Env) -> None:
        """Close an environment, or leave it behind."""
        try:
            await bounded(env.close(), TimeBudget(GRACE_S).left)
        except Overrun:
            self.left_behind += 1
            logger.warning("%r did not close within %g s", env, GRACE_S)
        except Exception as error:
            logger.warning("%r could not be closed: %s: %s", env, type(error).__name__, error)

    async def drain(self, limit_s: float) -> None:
        """Let no new episode begin, and wait until none runs, for ``limit_s`` seconds at most."""
        self.draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        while self.running:
            left = deadline - loop.time()
            if left <= 0:
                return
            await asyncio.sleep(min(left, 0.1))  # an end of an episode is no event: steps are hot

    async def close(self) -> None:
        """Close everything."""
        self.draining = True
        async with asyncio.TaskGroup() as group:
            for lease in list(self._taken):
                group.create_task(lease.end())
            if self._spare is not None:
                spare, self._spare = self._spare, None
                group.create_task(self.close_env(spare))

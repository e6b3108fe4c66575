"""What stands here for an environment that runs elsewhere: its tools, its tasks, its calls."""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from relax_agent.envs.core import Env, Info, StepResult
from relax_agent.envs.listing import about
from relax_agent.envs.serving import wire
from relax_agent.envs.serving.protocol import Manifest
from relax_agent.envs.serving.wire import Blobs, Json
from relax_agent.envs.tasks import TaskSet
from relax_agent.envs.transcript import Transcript
from relax_agent.errors import EnvError, InvalidAction, RelaxError, ToolErrorKind
from relax_agent.messages import AssistantMessage, Observation, ToolCall
from relax_agent.tools import ToolResult
from relax_agent.tools.toolset import refuse

Ask: TypeAlias = Callable[[Json, Blobs], Awaitable[tuple[Json, Blobs]]]


class ProxyTools:
    """The tools of an environment that runs elsewhere: schemas here, calls there."""

    def __init__(self, schemas: Sequence[dict[str, Any]], ask: Ask) -> None:
        self._schemas = list(schemas)
        self._names = tuple(str(item["function"]["name"]) for item in schemas)
        self._ask = ask

    @property
    def names(self) -> tuple[str, ...]:
        """The tools' names, in the order of their schemas."""
        return self._names

    def schemas(self) -> list[dict[str, Any]]:
        """Return every tool as chat templates and SDKs want it."""
        return list(self._schemas)

    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call where the environment is. Failures are results; only cancellation raises."""
        refused = refuse(call, self._names)
        if refused is not None:
            return refused
        try:
            request = {"op": "call_tool", "call": wire.call_to_wire(call)}
            return wire.read_tool(*await self._ask(request, []))
        except RelaxError as error:
            return ToolResult.failure(ToolErrorKind.UNAVAILABLE, f"{call.name}: {error}")

    async def close(self) -> None:
        """Do nothing: the tools belong to the environment."""

    def __repr__(self) -> str:
        return f"ProxyTools({', '.join(self._names)})"


class ProxyEnv(Env):
    """An environment that runs elsewhere; how requests get there is for the derived class."""

    about: str = ""
    """The first lines of the environment's own docstring."""

    def _introduce(self, manifest: Manifest) -> None:
        """Take over what the environment told of itself."""
        self.about = manifest.get("about", "")
        self.tools = ProxyTools(manifest["tools"], _ask_of(self))
        tasks = manifest["tasks"]
        if tasks is not None:
            self.tasks = TaskSet.of_ids(tasks["train"], tasks["eval"], tasks["fingerprint"])

    async def _ask(self, request: Json, blobs: Blobs) -> tuple[Json, Blobs]:
        """Carry one request there and its reply back."""
        raise NotImplementedError

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin an episode, where the environment is."""
        reply, blobs = await self._ask({"op": "reset", "seed": seed, "options": options}, [])
        self._hear_of_tools(reply)
        return wire.read_reset(reply, blobs)

    async def step(self, action: AssistantMessage) -> StepResult:
        """Take one assistant message, where the environment is."""
        if not isinstance(action, AssistantMessage):
            raise InvalidAction(f"step() takes an AssistantMessage, not {type(action).__name__}")
        blobs: Blobs = []
        request = {"op": "step", "action": wire.message_to_wire(action, blobs)}
        reply, media = await self._ask(request, blobs)
        self._hear_of_tools(reply)
        return wire.read_step(reply, media)

    async def score_group(self, task_id: str, members: Sequence[Transcript]) -> list[float]:
        """Ask the environment what the members of a group get beside their own rewards."""
        blobs: Blobs = []
        told = [wire.transcript_to_wire(member, blobs) for member in members]
        request = {"op": "score_group", "task_id": task_id, "members": told}
        reply, _ = await self._ask(request, blobs)
        return wire.read_rewards(reply)

    def _hear_of_tools(self, reply: Json) -> None:
        if "tools" in reply:
            self.tools = ProxyTools(wire.read_tools(reply["tools"]), _ask_of(self))


def about_env(env: Env) -> str:
    """Return the first lines of the docstring of an environment, wherever it runs."""
    inner = env.unwrapped
    return inner.about if isinstance(inner, ProxyEnv) else about(type(inner))


def _ask_of(env: ProxyEnv) -> Ask:
    """Return ``env._ask`` without holding the environment.

    One that is forgotten lets go of its process or connection at once, not when cycles are
    collected.
    """
    known = weakref.ref(env)

    async def ask(request: Json, blobs: Blobs) -> tuple[Json, Blobs]:
        env = known()
        if env is None:
            raise EnvError("the environment of these tools is gone", hint="keep env, not env.tools")
        return await env._ask(request, blobs)

    return ask

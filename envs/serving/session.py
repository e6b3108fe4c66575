"""What one served environment answers, whatever carries the requests.

A child process (:mod:`relax_agent.envs.serving.process`) and a server
(:mod:`relax_agent.envs.serving.server`) hand requests in and carry replies out; both use
:class:`EnvSession`, so they cannot differ. Only ids of tasks leave it, never a gold answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from relax_agent.envs.core import Env
from relax_agent.envs.serving import wire
from relax_agent.envs.serving.protocol import PROTOCOL_VERSION, REQUESTS
from relax_agent.envs.serving.proxies import about_env
from relax_agent.envs.serving.wire import Blobs, Json, WireError
from relax_agent.envs.tasks import TaskSet
from relax_agent.tools import AnyToolset
from relax_agent.tools.toolset import refuse

Answer: TypeAlias = tuple[Json, Blobs]


def describe_env(env: Env, env_id: str) -> Json:
    """Return the manifest of an environment."""
    return {
        "version": PROTOCOL_VERSION,
        "id": env_id,
        "about": about_env(env),
        "tools": env.tools.schemas(),
        "tasks": None if env.tasks is None else _ids(env.tasks),
    }


def _ids(tasks: TaskSet) -> Json:
    return {
        "train": list(tasks.ids("train")),
        "eval": list(tasks.ids("eval")),
        "fingerprint": tasks.fingerprint(),
    }


def unknown_request(op: object) -> WireError:
    """Return the error of a request that the protocol does not know."""
    return WireError(f"there is no request {op!r:.80}", hint=f"one of {', '.join(REQUESTS)}")


class EnvSession:
    """Answers the requests to one environment."""

    def __init__(self, env: Env, told: list[Json]) -> None:
        """Begin with an environment whose tools the other side knows as ``told``."""
        self.env = env
        self._told: AnyToolset | None = None
        self._schemas = told
        self._ops: dict[str, Callable[[Any, Sequence[bytes]], Awaitable[Answer]]] = {
            "reset": self._reset,
            "step": self._step,
            "call_tool": self._call_tool,
            "score_group": self._score_group,
            "close": self._close,
        }

    async def answer(self, request: Json, blobs: Sequence[bytes]) -> Answer:
        """Validate one request, run it, and return the reply.

        Raises:
            WireError: It is not a request of the protocol.
            Exception: What the environment raised.
        """
        op = request.get("op")
        adapter = REQUESTS.get(op) if isinstance(op, str) else None
        if adapter is None:
            raise unknown_request(op)
        return await self._ops[op](wire.check(adapter, request, f"{op}"), blobs)  # type: ignore[index]

    async def _reset(self, request: Any, blobs: Sequence[bytes]) -> Answer:
        observation, info = await self.env.reset(
            seed=request.get("seed"), options=request.get("options")
        )
        media: Blobs = []
        reply = {
            "observation": wire.observation_to_wire(observation, media),
            "info": wire.plain_info("reset", info),
        }
        return self._with_tools(reply), media

    async def _step(self, request: Any, blobs: Sequence[bytes]) -> Answer:
        action = wire.action_from_wire(request["action"], blobs)
        observation, reward, terminated, truncated, info = await self.env.step(action)
        media: Blobs = []
        reply = {
            "observation": wire.observation_to_wire(observation, media),
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "info": wire.plain_info("step", info),
        }
        return self._with_tools(reply), media

    def _with_tools(self, reply: Json) -> Json:
        """Add the tools' schemas if they have changed since they were last told."""
        tools = self.env.tools
        if tools is not self._told:
            self._told = tools
            schemas = tools.schemas()
            if schemas != self._schemas:
                self._schemas = reply["tools"] = schemas
        return reply

    async def _call_tool(self, request: Any, blobs: Sequence[bytes]) -> Answer:
        call = wire.call_from_wire(request["call"])
        tools = self.env.tools
        running = getattr(self.env.unwrapped, "session", None) or tools  # an episode's own tools
        result = refuse(call, tools.names) or await running.call(call)
        media: Blobs = []
        return wire.tool_to_wire(result, media), media

    async def _score_group(self, request: Any, blobs: Sequence[bytes]) -> Answer:
        members = [wire.transcript_from_wire(item, blobs) for item in request["members"]]
        rewards = await self.env.score_group(request["task_id"], members)
        return {"rewards": [float(reward) for reward in rewards]}, []

    async def _close(self, request: Any, blobs: Sequence[bytes]) -> Answer:
        await self.env.close()
        return {}, []

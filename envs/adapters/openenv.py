"""``relax/OpenEnv-v0``: an environment behind an OpenEnv server.

    env = from_openenv("http://127.0.0.1:8000")
    env = from_openenv("ws://my-space.example", tasks=1000, prompt="Guess the number.")

The server says what its actions look like (``/schema``), and from that comes one tool, ``act``; an
environment of MCP tools brings those instead. Where an action is one text, a plain answer is an
action too. Calls of one message are done in order until the episode ends; their rewards add up.
What the server refuses is told to the model, and costs nothing but the turn.

One connection is one session of the server, from the first reset to ``close``. Observations become
text (the one text field, or JSON), pictures in data URLs become images. OpenEnv has no truncation:
its ``done`` is ``terminated``. Tested with openenv-core 0.3.0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import jsonschema

from relax_agent.envs.adapters.common import StepTools, choose, require, seed_tasks
from relax_agent.envs.core import Env, Info, StepResult, SyncEnv
from relax_agent.envs.registration import make
from relax_agent.errors import ConfigError, EnvError, MediaError, ToolErrorKind
from relax_agent.media import load_media
from relax_agent.messages import (
    AssistantMessage,
    Message,
    Observation,
    Part,
    Text,
    ToolCall,
    system,
    user,
)
from relax_agent.tools import ToolResult
from relax_agent.tools.toolset import refuse

_INSTALL = "openenv-core==0.3.0"
_MCP_ACTIONS = frozenset({"Action", "CallToolAction", "ListToolsAction"})
"""Titles of the action schemas of environments whose actions are calls of MCP tools."""
_MAX_CALLS = 16


class OpenEnvEnv(SyncEnv):
    """An environment behind an OpenEnv server. See the module's docstring."""

    def __init__(
        self,
        url: str,
        *,
        tool_name: str = "act",
        prompt: str = "",
        system_prompt: str = "",
        reset_args: Mapping[str, Any] | None = None,
        tasks: int | Sequence[int] | None = None,
        eval_tasks: int | Sequence[int] = 100,
        max_turns: int = 100,
        timeout_s: float = 60.0,
    ) -> None:
        """Ask the server what it is.

        Args:
            url: The server, ``http://…`` or ``ws://…``.
            tool_name: The name of the tool that acts.
            prompt: What to say before the first observation; the server's own description where
                nothing is given.
            system_prompt: A system message before everything.
            reset_args: More arguments for the server's reset.
            tasks: How many seeds to train on, or which; None leaves the seed to ``reset``.
            eval_tasks: How many other seeds to hold out, or which; only used with ``tasks``.
            max_turns: Messages after which an episode is truncated.
            timeout_s: Seconds for one answer of the server.

        Raises:
            MissingExtraError: OpenEnv is not installed.
            EnvError: The server cannot be reached, or is none.
        """
        if max_turns < 1 or timeout_s <= 0:
            raise ConfigError("max_turns and timeout_s must be positive")
        self._library = require("openenv.core", "openenv-core", install=_INSTALL)
        self.url, self.max_turns = url.rstrip("/"), max_turns
        self._timeout_s, self._reset_args = timeout_s, dict(reset_args or {})
        self._client: Any = None
        schema = self._ask_http("/schema")["action"]
        self._by_mcp = schema.get("title") in _MCP_ACTIONS
        self.tools = StepTools(self._mcp_tools() if self._by_mcp else [_tool(schema, tool_name)])
        self._text_field = None if self._by_mcp else _text_field(schema)
        self._opening = [system(system_prompt)] if system_prompt else []
        self._prompt = prompt or str(self._ask_http("/metadata").get("description") or "")
        self._turns, self._total, self._task_id = 0, 0.0, ""
        if tasks is not None:
            self.tasks = seed_tasks(tasks, eval_tasks)

    def _ask_http(self, path: str) -> dict[str, Any]:
        base = self.url.replace("ws://", "http://", 1).replace("wss://", "https://", 1)
        try:
            answer = httpx.get(base + path, timeout=min(self._timeout_s, 30.0))
            answer.raise_for_status()
            data: dict[str, Any] = answer.json()
            return data
        except (httpx.HTTPError, ValueError) as error:
            raise EnvError(
                f"no OpenEnv server answers at {self.url}: {type(error).__name__}: {error}",
                hint="is it running?",
            ) from error

    def _mcp_tools(self) -> list[dict[str, Any]]:
        found = self._send("step", {"type": "list_tools"}).observation.get("tools", [])
        return [
            _function(each["name"], each.get("description", ""), each.get("input_schema", {}))
            for each in found
        ]

    # -- an episode ----------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin an episode on the server.

        Args:
            seed: The server's seed; with tasks, what chooses a task if none is given.
            options: ``task`` and ``split``; everything else goes to the server's reset.
        """
        super().reset(seed=seed)
        given = dict(options or {})
        task = choose(self, given)
        self._task_id = "" if task is None else task.id
        wish = self._reset_args | given
        number = seed if task is None else int(task.data["seed"])
        if number is not None:
            wish["seed"] = number
        self._turns, self._total = 0, 0.0
        result = self._send("reset", wish)
        first = [Text(self._prompt)] if self._prompt else []
        shown = _parts(result.observation)
        if first and shown:
            first.append(Text("\n\n"))
        return [*self._opening, user([*first, *shown])], self._info()

    def step(self, action: AssistantMessage) -> StepResult:
        """Do the actions of a message."""
        self._turns += 1
        messages: list[Message] = []
        reward, done = 0.0, False
        for call, wish in self._wishes(action):
            if done:
                wish = _soft("the episode is over")
            if isinstance(wish, ToolResult):
                messages.append(_answer(call, wish.content))
                continue
            content, earned, done = self._do(wish)
            reward += earned
            messages.append(_answer(call, content))
        self._total += reward
        truncated = not done and self._turns >= self.max_turns
        info = self._info()
        if done or truncated:
            info["metrics"] = {"success": float(self._total >= 1), "turns": float(self._turns)}
        return messages, reward, done, truncated, info

    def _wishes(
        self, message: AssistantMessage
    ) -> Iterator[tuple[ToolCall | None, dict[str, Any] | ToolResult]]:
        """Yield what is to be done, or the failure that answers it."""
        if not message.tool_calls:
            if self._text_field is None:
                names = ", ".join(self.tools.names)
                yield None, _soft(f"nothing was done: call a tool ({names})")
            else:
                yield None, {self._text_field: message.text}
        for number, call in enumerate(message.tool_calls):
            yield call, self._wish(call, number)

    def _wish(self, call: ToolCall, number: int) -> dict[str, Any] | ToolResult:
        refused = refuse(call, self.tools.names)
        if refused is not None:
            return refused
        if number >= _MAX_CALLS:
            return _soft(f"only {_MAX_CALLS} calls of one message are done")
        assert isinstance(self.tools, StepTools)
        wrong = jsonschema.exceptions.best_match(
            jsonschema.Draft202012Validator(self.tools.parameters(call.name)).iter_errors(
                call.arguments
            )
        )
        if wrong is not None:
            where = ".".join(map(str, wrong.absolute_path)) or "arguments"
            return _soft(f"{call.name}: {where}: {wrong.message}", ToolErrorKind.INVALID_ARGUMENTS)
        if self._by_mcp:
            return {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
        return call.arguments

    def _do(self, wish: dict[str, Any]) -> tuple[Sequence[Part], float, bool]:
        try:
            result = self._send("step", wish)
        except _RefusedError as error:
            return _soft(str(error)).content, 0.0, False
        return _parts(result.observation) or [Text("done")], float(result.reward or 0), result.done

    def _info(self) -> Info:
        return {"task": self._task_id} if self._task_id else {}

    # -- the connection ------------------------------------------------------------------------

    def _send(self, call: str, wish: dict[str, Any]) -> Any:
        """Ask the server, over the session's one connection.

        Raises:
            _RefusedError: The server does not do it; the session goes on.
            EnvError: The connection is lost, or the server has failed.
        """
        if self._client is None:
            client = self._library.GenericEnvClient(self.url, message_timeout_s=self._timeout_s)
            self._client = client.sync()
        try:
            if call == "reset":
                return self._client.reset(**wish)
            return self._client.step(wish)
        except RuntimeError as error:
            words = " ".join(str(error).split()).removeprefix("Server error: ")
            if call == "step" and "VALIDATION_ERROR" in words:
                raise _RefusedError("the server refuses this action: it is not valid") from error
            raise EnvError(f"the OpenEnv server says: {words}") from error
        except Exception as error:
            self.close()
            raise EnvError(
                f"the connection to {self.url} is lost: {type(error).__name__}: {error}"
            ) from error

    def close(self) -> None:
        """End the session."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


class _RefusedError(Exception):
    """The server does not take an action. Internal."""


def from_openenv(url: str, **options: Any) -> Env:
    """Make what an OpenEnv server offers an environment for agents.

    Args:
        url: The server, ``http://…`` or ``ws://…``.
        **options: As of :class:`OpenEnvEnv`, e.g. ``tasks=1000``.
    """
    return make("relax/OpenEnv-v0", url=url, **options)


def _tool(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Turn the schema of an action into a tool, without what is not the model's business."""
    properties = {k: v for k, v in schema.get("properties", {}).items() if k != "metadata"}
    parameters = {**schema, "type": "object", "properties": properties}
    parameters["additionalProperties"] = False
    told = str(schema.get("description") or "Act in the environment.")
    return _function(name, told, parameters)


def _function(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    schema = {"properties": {}, **parameters, "type": "object"}
    function = {"name": name, "description": description or name, "parameters": schema}
    return {"type": "function", "function": function}


def _text_field(schema: Mapping[str, Any]) -> str | None:
    """Return the field that is all an action needs, if it is a text."""
    required = [name for name in schema.get("required", ()) if name != "metadata"]
    if len(required) != 1 or schema["properties"][required[0]].get("type") != "string":
        return None
    return str(required[0])


def _soft(words: str, kind: ToolErrorKind = ToolErrorKind.DENIED) -> ToolResult:
    return ToolResult.failure(kind, words)


def _answer(call: ToolCall | None, content: Sequence[Part]) -> Message:
    if call is None:
        return Message("user", tuple(content))
    return ToolResult(tuple(content)).to_message(call)


def _parts(observation: Mapping[str, Any]) -> list[Part]:
    """Return an observation as text and pictures."""
    plain = {name: value for name, value in observation.items() if value not in (None, "", [], {})}
    if "tool_name" in plain:
        return _tool_parts(plain)
    pictures: list[Part] = []
    for name, value in list(plain.items()):
        picture = _picture(value)
        if picture is not None:
            pictures.append(picture)
            del plain[name]
    texts = [value for value in plain.values() if isinstance(value, str)]
    if len(plain) == 1 and texts:
        return [Text(texts[0]), *pictures]
    return [Text(json.dumps(plain, ensure_ascii=False)), *pictures] if plain else pictures


def _tool_parts(observation: Mapping[str, Any]) -> list[Part]:
    """Return what an MCP tool gave: its data, or why it failed."""
    error = observation.get("error")
    if error:
        return list(_soft(str(error.get("message", error)), ToolErrorKind.CRASHED).content)
    result = observation.get("result")
    if isinstance(result, dict) and "data" in result:
        result = result["data"]
    return [Text(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False))]


def _picture(value: object) -> Part | None:
    if not isinstance(value, str) or not value.startswith("data:image/"):
        return None
    try:
        return load_media(value, "image")
    except MediaError:
        return None

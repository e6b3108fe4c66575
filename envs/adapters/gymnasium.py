"""``relax/Gymnasium-v0``: any Gymnasium environment as an environment for agents.

    env = from_gymnasium("FrozenLake-v1", env_args={"is_slippery": False})
    env = from_gymnasium("CartPole-v1", observation="image", tasks=1000)

*Observations* become text, with names where they are known, or a picture of what the environment
renders. *Actions* become one tool, ``act``, whose JSON schema comes from the action space; or plain
text (``actions="text"``). An action that cannot be read or lies outside the space is answered with
an error that the model can act on, and the environment is not stepped. The calls of one message are
done in order until the episode ends; their rewards add up.

*Seeds* go to Gymnasium as they are. Training visits tasks, so ``tasks=1000`` makes a set of seeds:
then the task is the seed, and held-out tasks are other seeds.

Gymnasium environments block, and pygame wants one thread: ``make`` gives each its own.
Works with Gymnasium 1.0 to 1.4.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from relax_agent.envs.adapters import gymnasium_names, gymnasium_spaces
from relax_agent.envs.adapters.common import choose, guarded, placed, require_no_more, seed_tasks
from relax_agent.envs.adapters.gymnasium_codec import decode_observation, encode_action
from relax_agent.envs.adapters.gymnasium_open import open_gymnasium, to_png
from relax_agent.envs.core import Env, Info, StepResult, SyncEnv
from relax_agent.envs.registration import make
from relax_agent.errors import ConfigError, ToolError, ToolErrorKind
from relax_agent.messages import (
    AssistantMessage,
    Message,
    Observation,
    Part,
    ToolCall,
    parts,
    user,
)
from relax_agent.tools import ToolResult, Toolset
from relax_agent.tools.toolset import refuse

if TYPE_CHECKING:
    import gymnasium

Shown: TypeAlias = Literal["text", "ansi", "image", "text+image"]
_RENDER_MODES: Mapping[str, str | None] = {
    "text": None,
    "ansi": "ansi",
    "image": "rgb_array",
    "text+image": "rgb_array",
}
_TAG = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_TURNS_WITHOUT_LIMIT = 100


@dataclass(slots=True)
class _Progress:
    """What one episode has come to."""

    task_id: str | None = None
    turns: int = 0
    steps: int = 0
    invalid: int = 0
    total: float = 0.0


class GymnasiumEnv(SyncEnv):
    """A Gymnasium environment for agents. See the module's docstring."""

    def __init__(
        self,
        env_id: str | gymnasium.Env[Any, Any],
        *,
        env_args: Mapping[str, Any] | None = None,
        observation: Shown = "text",
        actions: Literal["tool", "text"] = "tool",
        action_names: Sequence[str] | None = None,
        component_names: Sequence[str] | None = None,
        tool_name: str = "act",
        prompt: str | None = None,
        reply: str = "{observation}",
        tasks: int | Sequence[int] | None = None,
        eval_tasks: int | Sequence[int] = 100,
        max_turns: int | None = None,
        max_calls: int = 16,
        invalid_reward: float = 0.0,
    ) -> None:
        """Make the environment.

        Args:
            env_id: Gymnasium's id (``module:Name-v0`` imports the module first), or an environment.
            env_args: Arguments for ``gymnasium.make``.
            observation: ``text``, ``ansi`` (what it renders as text), ``image`` (what it renders
                as a picture) or ``text+image``.
            actions: ``tool``, or ``text``: the message itself is the action, all of it, its last
                line, or what stands between ``<action>`` and ``</action>``.
            action_names: Names for the actions of a Discrete space, in order.
            component_names: Names for the numbers of an observation, in order.
            tool_name: The name of the tool.
            prompt: The first message; ``{observation}`` stands for the first observation. By
                default it says what to do, as far as that is known.
            reply: The answer to an action, with ``{observation}``, ``{reward}`` and ``{step}``.
            tasks: How many seeds to train on, or which; None leaves the seed to ``reset``.
            eval_tasks: How many other seeds to hold out, or which; only used with ``tasks``.
            max_turns: Messages after which an episode is truncated; by default the environment's
                own limit of steps, or 100. Messages without a valid action count.
            max_calls: Actions of one message that are done; more are refused.
            invalid_reward: Reward of each action that is none, e.g. -0.1.
        """
        given = dict(locals())
        if observation not in _RENDER_MODES or actions not in ("tool", "text"):
            raise ConfigError(
                f"observation={observation!r}, actions={actions!r} is not known",
                hint=f"observation: {', '.join(_RENDER_MODES)}; actions: tool, text",
            )
        if min(max_calls, 1 if max_turns is None else max_turns) < 1:
            raise ConfigError(f"max_calls={max_calls} and max_turns={max_turns} must be ≥ 1")
        self._observation, self._by_text = observation, actions == "text"
        self.gym = open_gymnasium(env_id, dict(env_args or {}), _RENDER_MODES[observation])
        self._reply, self._max_calls, self._invalid_reward = reply, max_calls, invalid_reward
        self._now = _Progress()
        spec = self.gym.spec
        self._name = spec.name if spec is not None else type(self.gym.unwrapped).__name__
        steps = getattr(spec, "max_episode_steps", None)
        self.max_turns = max_turns or steps or _TURNS_WITHOUT_LIMIT
        self._agent = getattr(self.gym.unwrapped, "agent_env", None)
        if self._agent is not None:  # made by as_gymnasium: messages go through as they are
            _require_defaults(given)
            self.tools, self.tasks = self._agent.tools, self._agent.tasks
            return
        self._names_actions(action_names, tool_name)
        self._names_components(component_names)
        self._prompt = prompt if prompt is not None else self._default_prompt()
        if tasks is not None:
            self.tasks = seed_tasks(tasks, eval_tasks)

    def _names_actions(self, given: Sequence[str] | None, tool_name: str) -> None:
        space = self.gym.action_space
        self._action_names: Sequence[str] | None = None
        if gymnasium_spaces.kind_of(space) == "Discrete":
            count = int(space.n)  # type: ignore[attr-defined]
            self._action_names = given or gymnasium_names.action_names(self._name, self.gym, count)
            if given is not None and len(given) != count:
                raise ConfigError(f"{len(given)} action_names for {count} actions")
        elif given is not None:
            raise ConfigError("action_names are for a Discrete action space", hint=str(space))
        self._tool = gymnasium_spaces.action_tool(
            space, tool_name, "Act in the environment.", self._action_names
        )
        self.tools = Toolset([] if self._by_text else [self._tool])

    def _names_components(self, given: Sequence[str] | None) -> None:
        space = self.gym.observation_space
        count = _count(space)
        if given is not None and len(given) != count:
            raise ConfigError(f"{len(given)} component_names for {count} components")
        if given is not None and not self._observation.startswith("text"):
            raise ConfigError(f"component_names say nothing in observation={self._observation!r}")
        self._component_names = given or gymnasium_names.component_names(self._name, count)
        self._describe = None if given else gymnasium_names.describer(self._name, self.gym)
        if self._observation.startswith("text"):
            gymnasium_spaces.require_readable(space)

    def _default_prompt(self) -> str:
        task = gymnasium_names.TASKS.get(self._name, f"Act in the environment {self._name}.")
        space = self.gym.observation_space
        lines = [task, self._how()]
        if self._observation.startswith("text"):
            lines.append(gymnasium_names.scene(self._name, self.gym))
            if self._describe is None:
                lines.append(gymnasium_spaces.describe_observation(space, self._component_names))
        shown = [] if self._observation == "image" else ["", "{observation}"]
        return "\n".join([*filter(None, lines), *shown])

    def _how(self) -> str:
        if not self._by_text:
            return f"Call the tool {self._tool.name} for each step."
        if self._action_names is not None:
            return f"Answer with one action: {', '.join(self._action_names)}."
        schema = self._tool.parameters["properties"]
        if list(schema) == [gymnasium_spaces.ARGUMENT]:
            schema = schema[gymnasium_spaces.ARGUMENT]
        return f"Answer with one action as JSON: {json.dumps(schema)}"

    # -- an episode ----------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin an episode.

        Args:
            seed: Gymnasium's seed; with tasks, what chooses a task if none is given.
            options: ``task``, ``split``, and ``gymnasium``: the options for its own ``reset``.
        """
        super().reset(seed=seed)
        given = dict(options or {})
        self._now = _Progress()
        if self._agent is not None:
            observation, info = self.gym.reset(seed=seed, options=given)
            return decode_observation(observation), dict(info)
        own = given.pop("gymnasium", None)
        task = choose(self, given)
        require_no_more(given, "task, split or gymnasium")
        if task is not None:
            seed, self._now.task_id = task.data["seed"], task.id
        observation, info = self.gym.reset(seed=seed, options=own)
        text, pictures = self._show(observation)
        first = placed(self._prompt, observation=text)
        return [user([first, *pictures])], self._info(info)

    def step(self, action: AssistantMessage) -> StepResult:
        """Do the actions of a message."""
        if self._agent is not None:
            observation, reward, ended, cut, info = self.gym.step(encode_action(action))
            return decode_observation(observation), float(reward), bool(ended), bool(cut), info
        now = self._now
        now.turns += 1
        messages: list[Message] = []
        done = _Outcome()
        for call, read in self._actions(action):
            messages.append(self._act(call, read, done))
        truncated = done.truncated or (not done.terminated and now.turns >= self.max_turns)
        info = self._info(done.info)
        if done.terminated or truncated:
            info["metrics"] = self._metrics(done)
        return messages, done.reward, done.terminated, truncated, info

    def _actions(self, message: AssistantMessage) -> Iterator[tuple[ToolCall | None, Any]]:
        """Yield every call with its arguments, or with the failure that answers it."""
        for number, call in enumerate(message.tool_calls):
            yield call, refuse(call, self.tools.names) or self._read(call.arguments, number)
        if message.tool_calls:
            return
        if self._by_text:
            yield None, self._read_text(message.text)
        else:
            yield None, _failure(f"nothing was done: call the tool {self._tool.name}")

    def _read(self, arguments: Any, number: int = 0) -> Any:
        if number >= self._max_calls:
            return _failure(f"only {self._max_calls} actions of one message are done")
        try:
            values = self._tool.arguments.validate(arguments)
            return _Native(self._native(values))
        except ToolError as error:
            return _failure(str(error), error.kind)

    def _native(self, values: Mapping[str, Any]) -> Any:
        return gymnasium_spaces.to_action(self.gym.action_space, values, self._action_names)

    def _read_text(self, text: str) -> Any:
        failures = []
        for candidate in _candidates(text):
            for arguments in self._as_arguments(candidate):
                read = self._read(arguments)
                if isinstance(read, _Native):
                    return read
                failures.append(read)
        return failures[0] if failures else _failure("the message is empty; answer with an action")

    def _as_arguments(self, text: str) -> Iterator[dict[str, Any]]:
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(text)
            yield value if isinstance(value, dict) else {gymnasium_spaces.ARGUMENT: value}
        names = {name.lower(): name for name in self._action_names or ()}
        names |= {str(number): name for number, name in enumerate(self._action_names or ())}
        word = text.strip(" .!\"'`").lower()
        yield {gymnasium_spaces.ARGUMENT: names.get(word, text)}

    def _act(self, call: ToolCall | None, read: Any, done: _Outcome) -> Message:
        """Do one action, or say why it is none."""
        if done.terminated or done.truncated:
            read = _failure("the episode is over")
        elif not isinstance(read, _Native):
            self._now.invalid += 1
            done.reward += self._invalid_reward
        if not isinstance(read, _Native):
            return read.to_message(call) if call is not None else Message("user", read.content)
        observation, reward, terminated, truncated, info = self.gym.step(read.action)
        done.add(float(reward), bool(terminated), bool(truncated), info)
        self._now.steps += 1
        self._now.total += float(reward)
        text, pictures = self._show(observation)
        words = placed(self._reply, observation=text, reward=f"{float(reward):g}",
                       step=str(self._now.steps))  # fmt: skip
        content = parts([item for item in (words, *pictures) if item])
        return ToolResult(content).to_message(call) if call else Message("user", content)

    def _info(self, info: Mapping[str, Any]) -> Info:
        out: Info = {"gymnasium": gymnasium_spaces.plain_info(info)}
        if self._now.task_id is not None:
            out["task"] = self._now.task_id
        return out

    def _metrics(self, done: _Outcome) -> dict[str, float]:
        """Return the counts, and success as the environment defines it: told, or by threshold."""
        threshold = getattr(self.gym.spec, "reward_threshold", None)
        total = self._now.total
        success = total > 0 if threshold is None else total >= threshold
        return {
            "success": float(done.info.get("is_success", success)),
            "steps": float(self._now.steps),
            "turns": float(self._now.turns),
            "invalid_actions": float(self._now.invalid),
        }

    # -- what it shows -------------------------------------------------------------------------

    def _show(self, observation: Any) -> tuple[str, list[Part]]:
        """Return an observation as text and pictures."""
        text, pictures = "", list[Part]()
        if self._observation.startswith("text"):
            text = self._words(observation)
        if self._observation == "ansi":
            text = str(self.gym.render())
        if self._observation.endswith("image"):
            pictures.append(to_png(self.gym.render()))
        return text, pictures

    def _words(self, observation: Any) -> str:
        if self._describe is not None:
            return self._describe(observation)
        space = self.gym.observation_space
        return gymnasium_spaces.to_text(space, observation, self._component_names)

    def close(self) -> None:
        """Close the Gymnasium environment."""
        self.gym.close()


@dataclass(frozen=True, slots=True)
class _Native:
    """An action in the environment's own form."""

    action: Any


class _Outcome:
    """What the actions of one message came to."""

    def __init__(self) -> None:
        self.reward = 0.0
        self.terminated = self.truncated = False
        self.info: Mapping[str, Any] = {}

    def add(
        self, reward: float, terminated: bool, truncated: bool, info: Mapping[str, Any]
    ) -> None:
        self.reward += reward
        self.terminated, self.truncated, self.info = terminated, truncated, info


def _failure(words: str, kind: ToolErrorKind = ToolErrorKind.DENIED) -> ToolResult:
    return ToolResult.failure(kind, words)


def _candidates(text: str) -> list[str]:
    """Return the places of a message where an action may stand, the likeliest first."""
    tagged = _TAG.findall(text)
    lines = [line for line in text.splitlines() if line.strip()]
    found = [tagged[-1]] if tagged else [text, *lines[-1:]]
    return [each.strip() for each in found if each.strip()]


def _count(space: Any) -> int:
    """Return how many components an observation has that can have names."""
    kind = gymnasium_spaces.kind_of(space)
    if kind == "Tuple":
        return len(space.spaces)
    if kind in ("Box", "MultiDiscrete", "MultiBinary") and len(space.shape) == 1:
        return int(space.shape[0])
    return 0


def _require_defaults(given: Mapping[str, Any]) -> None:
    """Raise ConfigError if an option asks for what an environment of messages does not need."""
    for name, parameter in inspect.signature(GymnasiumEnv).parameters.items():
        if name not in ("env_id", "env_args") and given[name] != parameter.default:
            raise ConfigError(
                f"{name}=… is for environments of Gymnasium; this one speaks in messages already",
                hint="give it to the environment itself",
            )


def from_gymnasium(env: str | gymnasium.Env[Any, Any], **options: Any) -> Env:
    """Make a Gymnasium environment an environment for agents.

    Args:
        env: Gymnasium's id, or an environment. One that is given is stepped in another thread than
            it was made in.
        **options: As of :class:`GymnasiumEnv`, e.g. ``observation="image"``.
    """
    if isinstance(env, str):
        return make("relax/Gymnasium-v0", env_id=env, **options)
    return guarded(lambda: GymnasiumEnv(env, **options))

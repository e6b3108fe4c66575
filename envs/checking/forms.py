"""The form of what ``reset`` and ``step`` return, without anything else of the environment."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, get_args

from relax_agent.messages import (
    AssistantMessage,
    Audio,
    Image,
    Message,
    Rewrite,
    Role,
    Text,
    Video,
)

_MAX_INFO = 64 * 1024
_MAX_REWARD = 100.0
_MAX_MEDIA = 20 << 20


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with what was returned."""

    check: str
    """The row that it belongs to."""
    call: str
    """``reset`` or ``step``."""
    message: str
    fatal: bool = False
    """Whether the episode cannot go on with it."""
    warning: bool = False


def reset_problems(result: Any) -> list[Problem]:
    """Return what is wrong with what ``reset`` returned."""
    if not isinstance(result, tuple) or len(result) != 2:
        words = f"reset() returned {_shape(result)}; return (observation, info)"
        return [Problem("reset", "reset", words, fatal=True)]
    observation, info = result
    found = _observation_problems("reset", observation) + _info_problems("reset", info)
    if not found and not _messages(observation):
        words = "reset() returned no message: the model would have nothing to answer"
        found.append(Problem("observation", "reset", words, warning=True))
    return found


def step_problems(result: Any, action: AssistantMessage, first: Sequence[Message]) -> list[Problem]:
    """Return what is wrong with what ``step`` returned.

    Args:
        result: What it returned.
        action: What it was given.
        first: The messages that ``reset`` had returned.
    """
    if not isinstance(result, tuple) or len(result) != 5:
        words = (
            f"step() returned {_shape(result)};"
            " return (observation, reward, terminated, truncated, info)"
        )
        return [Problem("step", "step", words, fatal=True)]
    observation, reward, terminated, truncated, info = result
    found = _observation_problems("step", observation) + _info_problems("step", info)
    found += _reward_problems(reward)
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(_plain(value), bool):
            words = f"{name} is {value!r:.80}; return bool({name})"
            found.append(Problem("step", "step", words, fatal=True))
    if not any(problem.fatal for problem in found) and not isinstance(observation, Rewrite):
        ended = bool(terminated) or bool(truncated)
        found += _history_problems(observation, action, first)
        found += _answer_problems(observation, action, ended)
    return found


def _observation_problems(call: str, observation: Any) -> list[Problem]:
    messages = _messages(observation)
    if not isinstance(messages, (list, tuple)):
        what = "None" if observation is None else f"a {type(observation).__name__}"
        words = f"the observation of {call}() is {what}; return a list of Message"
        return [Problem("observation", call, f"{words}, e.g. [user('…')]", fatal=True)]
    found: list[Problem] = []
    for message in messages:
        if not isinstance(message, Message):
            words = f"the observation of {call}() holds a {type(message).__name__}"
            hint = "; return Message objects, e.g. user('…')"
            return [Problem("observation", call, words + hint, fatal=True)]
        found += _message_problems(call, message)
    return found


def _message_problems(call: str, message: Message) -> list[Problem]:
    found = []
    if message.role not in get_args(Role):
        words = f"a message of {call}() has the role {message.role!r}"
        hint = f"; use one of {', '.join(get_args(Role))}"
        found.append(Problem("observation", call, words + hint))
    for part in message.content if isinstance(message.content, tuple) else (message.content,):
        if not isinstance(part, (Text, Image, Audio, Video)):
            words = f"a message of {call}() holds a {type(part).__name__} as content"
            hint = "; make messages with user(…), system(…) or tool_message(…)"
            found.append(Problem("observation", call, words + hint, fatal=True))
        elif not isinstance(part, Text):
            found += media_problems(call, part)
    return found


def media_problems(call: str, part: Image | Audio | Video) -> list[Problem]:
    """Return what is wrong with a picture, a sound or a video, as far as its bytes tell."""
    kind = type(part).__name__.lower()
    if not isinstance(part.data, bytes) or not part.data:
        words = f"the {kind} of {call}() has no bytes; give the encoded file as bytes"
        return [Problem("media", call, words)]
    found = []
    if not str(part.mime).startswith(f"{kind}/"):
        words = f"the {kind} of {call}() calls itself {part.mime!r}; its type begins with {kind}/"
        found.append(Problem("media", call, words))
    if len(part.data) > _MAX_MEDIA:
        words = f"the {kind} of {call}() has {len(part.data) >> 20} MB; shrink it before it is sent"
        found.append(Problem("media", call, words, warning=True))
    return found


def _info_problems(call: str, info: Any) -> list[Problem]:
    if not isinstance(info, dict):
        words = f"the info of {call}() is a {type(info).__name__}; return a dict, {{}} if empty"
        return [Problem("info", call, words, fatal=True)]
    found = []
    for key, value in info.items():
        try:
            size = len(json.dumps({key: value}, allow_nan=False))
        except (TypeError, ValueError) as error:
            words = f"info[{key!r}] of {call}() is not JSON ({error}); return plain data"
            found.append(Problem("info", call, words))
            continue
        if not isinstance(key, str):
            words = f"the key {key!r} in the info of {call}() is no text"
            found.append(Problem("info", call, words))
        if size > _MAX_INFO:
            words = f"info[{key!r}] of {call}() has {size >> 10} kB, in every step; leave it out"
            found.append(Problem("info", call, words, warning=True))
    return found + _metric_problems(call, info.get("metrics"))


def _metric_problems(call: str, metrics: Any) -> list[Problem]:
    if metrics is None:
        return []
    if not isinstance(metrics, dict):
        words = f"info['metrics'] of {call}() is a {type(metrics).__name__}; return numbers by name"
        return [Problem("info", call, words)]
    return [
        Problem("info", call, f"the metric {name!r} is {value!r:.60}; metrics are finite numbers")
        for name, value in metrics.items()
        if not isinstance(_plain(value), Real) or not _is_finite(_plain(value))
    ]


def _reward_problems(reward: Any) -> list[Problem]:
    plain = _plain(reward)
    if isinstance(plain, bool) or not isinstance(plain, Real):
        words = f"the reward is {reward!r:.80}, no number; return a float"
        return [Problem("reward", "step", words, fatal=True)]
    if not _is_finite(plain):
        words = f"the reward is {plain!r:.40}; a reward must be finite: what was divided, or empty?"
        return [Problem("reward", "step", words, fatal=True)]
    if abs(float(plain)) > _MAX_REWARD:
        words = f"a reward of {float(plain):g} is large; scale it, e.g. RewardScale(env, 0.01)"
        return [Problem("reward", "step", words, warning=True)]
    return []


def _is_finite(number: Any) -> bool:
    try:
        return math.isfinite(float(number))
    except OverflowError:
        return False


def _history_problems(
    observation: Sequence[Message], action: AssistantMessage, first: Sequence[Message]
) -> list[Problem]:
    """An observation is what is new; who drives the environment keeps the conversation."""
    if any(message is action or message == action for message in observation):
        words = "the observation of step() repeats the action; return only what came back on it"
        return [Problem("observation", "step", words)]
    if first and len(observation) > len(first) and list(observation[: len(first)]) == list(first):
        words = "step() returned the whole conversation; return only the new messages"
        return [Problem("observation", "step", f"{words} (or a Rewrite, if history was edited)")]
    return []


def _answer_problems(
    observation: Sequence[Message], action: AssistantMessage, ended: bool
) -> list[Problem]:
    """Every tool message answers a call; every call is answered, unless the episode is over."""
    calls = [call.id for call in action.tool_calls]
    answers = [message.tool_call_id for message in observation if message.role == "tool"]
    strange = [each for each in answers if each not in calls]
    if strange:
        words = f"a tool message answers the call {strange[0]!r}, which was not made"
        return [Problem("tool messages", "step", f"{words}; use tool_message(content, call)")]
    if len(set(answers)) < len(answers):
        words = "a tool call is answered twice; send one tool message for each call"
        return [Problem("tool messages", "step", words)]
    if calls and len(answers) < len(calls) and not ended:
        words = (
            f"{len(calls)} tool call(s) got {len(answers)} tool message(s); answer each call with"
            " tool_message(content, call), also one that names no tool: chat formats need the pair"
        )
        return [Problem("tool messages", "step", words)]
    return []


def _messages(observation: Any) -> Any:
    return observation.messages if isinstance(observation, Rewrite) else observation


def _plain(value: Any) -> Any:
    """Return the plain number or flag in a scalar of an array library, as the guard does."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value


def _shape(result: Any) -> str:
    if isinstance(result, tuple):
        return f"{len(result)} values"
    return "None" if result is None else f"a {type(result).__name__}"

"""``Compaction``: a long conversation is shortened, as an explicit fork.

A conversation is seen as a head (the messages of ``reset``: system prompt and task) and blocks (an
assistant message with everything that came back on it). Blocks are never cut, so a tool message
always follows the call that it answers. Where the conversation has grown past a limit, its older
blocks give way in one of two manners:

    summary        head + one message that stands for the old blocks + the newest blocks
    tool_results   everything, with the contents of old tool results taken out; where that is not
                   enough, as ``summary``

The result is a :class:`~relax_agent.messages.Rewrite`, which every loop that drives environments
takes for a fork: what was sampled before stays in the log as it was. The environment inside knows
nothing of it; a ``ToolEnv`` scores the whole transcript.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from relax_agent.envs.core import Env, Info, StepResult, Wrapper
from relax_agent.envs.specs import WrapperSpec
from relax_agent.envs.wrappers.functions import function_name, load_function, plain_arguments
from relax_agent.envs.wrappers.tokens import estimated_tokens
from relax_agent.errors import ConfigError, EnvError
from relax_agent.messages import AssistantMessage, Message, Observation, Rewrite, Text, user

Summarizer: TypeAlias = Callable[[list[Message]], "str | Awaitable[str]"]
"""Gets the messages that go and returns the text that stands for them; may be ``async def``."""
Method: TypeAlias = Literal["summary", "tool_results"]
Block: TypeAlias = list[Message]

_SUMMARY = "[The {count} oldest messages after the task were removed to save room.]"


class Compaction(Wrapper):
    """Shortens the conversation when it is longer than a limit. See the module's docstring."""

    def __init__(
        self,
        env: Env,
        *,
        max_messages: int | None = None,
        max_tokens: int | None = None,
        keep_last: int = 6,
        method: Method = "summary",
        summary: str = _SUMMARY,
        summarizer: Summarizer | str | None = None,
    ) -> None:
        """Put the limit on.

        Args:
            env: The environment.
            max_messages: Messages that the conversation may have before it is shortened.
            max_tokens: Tokens that it may have, by the usage of the last assistant message;
                what came after it, and messages without usage, are estimated.
            keep_last: Newest messages that stay as they are; a block is kept whole or not at all,
                so they may be a few more, and the last block always stays.
            method: ``summary`` or ``tool_results``.
            summary: The text that stands for what was removed; ``{count}`` is how many messages.
            summarizer: A function, or its name ``module:function``, that makes this text from the
                removed messages; used instead of ``summary``.
        """
        super().__init__(env)
        limits = [limit for limit in (max_messages, max_tokens) if limit is not None]
        if not limits or min(limits) < 1:
            raise ConfigError(
                f"Compaction(max_messages={max_messages}, max_tokens={max_tokens}) limits nothing",
                hint="give at least one of them, each ≥ 1",
            )
        if keep_last < 0 or (max_messages is not None and keep_last >= max_messages):
            raise ConfigError(
                f"keep_last={keep_last} does not fit max_messages={max_messages}",
                hint="keep fewer messages than the limit",
            )
        if method not in ("summary", "tool_results"):
            raise ConfigError(f"method cannot be {method!r}", hint="summary or tool_results")
        self.max_messages = max_messages
        self.max_tokens = max_tokens
        self.keep_last = keep_last
        self.method = method
        self.summary = summary
        self._summarizer = None if summarizer is None else load_function(summarizer)
        if method == "tool_results" and max_tokens is None:
            raise ConfigError(
                "taking out tool results saves tokens, not messages", hint="give max_tokens"
            )
        self._head: list[Message] = []
        self._body: list[Message] = []
        self._forked_at = 0
        self._removed = 0
        self._stand_in: Message | None = None

    def wrapper_spec(self) -> WrapperSpec | None:
        """Describe this wrapper; a function goes by its name."""
        return plain_arguments(super().wrapper_spec())

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin an episode; its first messages are never removed."""
        observation, info = await self.env.reset(seed=seed, options=options)
        self._restart(observation)
        return observation, info

    async def step(self, action: AssistantMessage) -> StepResult:
        """Step, and return a shortened history where the conversation has grown too long."""
        observation, reward, terminated, truncated, info = await self.env.step(action)
        if isinstance(observation, Rewrite):
            self._restart(observation)
        else:
            self._body += [action, *observation]
        if not (terminated or truncated) and self._too_long():
            reason = await self._shorten()
            if reason is not None:
                observation = Rewrite((*self._head, *self._body), reason)
        return observation, reward, terminated, truncated, info

    def _restart(self, observation: Observation) -> None:
        """Take over a first observation, or a history that was rewritten inside."""
        self._forked_at, self._removed, self._stand_in = 0, 0, None
        if not isinstance(observation, Rewrite):
            self._head, self._body = list(observation), []
            return
        messages = list(observation.messages)
        first = next((i for i, message in enumerate(messages) if message.role != "system"), 0)
        self._head, self._body = messages[: first + 1], messages[first + 1 :]
        if self._head and isinstance(self._head[-1], AssistantMessage):
            self._body.insert(0, self._head.pop())
        self._forked_at = len(self._body)

    def _too_long(self) -> bool:
        if self.max_messages is not None and (
            len(self._head) + len(self._body) > self.max_messages
        ):
            return True
        return self.max_tokens is not None and self._tokens() > self.max_tokens

    def _tokens(self) -> int:
        """Tokens of the conversation: the newest usage that was told, and an estimate of the rest.

        The usage of a message from before the last fork tells of a history that is gone.
        """
        for index in range(len(self._body) - 1, self._forked_at - 1, -1):
            message = self._body[index]
            if isinstance(message, AssistantMessage) and message.usage.prompt_tokens:
                told = message.usage.prompt_tokens + message.usage.completion_tokens
                return told + sum(map(estimated_tokens, self._body[index + 1 :]))
        return sum(map(estimated_tokens, [*self._head, *self._body]))

    async def _shorten(self) -> str | None:
        """Shorten the body and say how; None if nothing can go."""
        old, new = _split(_blocks(self._body), self.keep_last)
        emptied = self._empty(old, new) if self.method == "tool_results" else 0
        if emptied and not self._too_long():
            return f"the results of {emptied} old tool calls were removed"
        gone = [message for block in old for message in block]
        if all(message is self._stand_in for message in gone):  # never a summary of a summary alone
            return f"the results of {emptied} old tool calls were removed" if emptied else None
        self._removed += sum(message is not self._stand_in for message in gone)
        self._stand_in = user(await self._words(gone))
        self._body = [self._stand_in, *new]
        self._forked_at = len(self._body)
        return f"{len(gone)} old messages were removed"

    def _empty(self, old: Sequence[Block], new: Sequence[Message]) -> int:
        """Take the contents out of old tool results and return how many that were."""
        before = [message for block in old for message in block]
        after = [_emptied(message) for message in before]
        self._body = [*after, *new]
        self._forked_at = len(self._body)
        return sum(one is not other for one, other in zip(before, after, strict=True))

    async def _words(self, gone: list[Message]) -> str:
        """Return what stands for the messages that go."""
        if self._summarizer is None:
            return self.summary.replace("{count}", str(self._removed))
        name = function_name(self._summarizer)
        try:
            answer = self._summarizer(gone)
            text: Any = await answer if inspect.isawaitable(answer) else answer
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise EnvError(f"the summarizer {name} raised {reason}") from error
        if not isinstance(text, str) or not text:
            raise EnvError(f"the summarizer {name} returned {text!r}", hint="return a text")
        return text


def _blocks(body: Sequence[Message]) -> list[Block]:
    """Cut a conversation before each assistant message."""
    blocks: list[Block] = []
    for message in body:
        if isinstance(message, AssistantMessage) or not blocks:
            blocks.append([])
        blocks[-1].append(message)
    return blocks


def _split(blocks: Sequence[Block], keep_last: int) -> tuple[list[Block], list[Message]]:
    """Return the old blocks, and the messages of the newest ones that stay."""
    kept, first = 0, len(blocks)
    while first > 0 and (kept < keep_last or first == len(blocks)):
        first -= 1
        kept += len(blocks[first])
    return list(blocks[:first]), [message for block in blocks[first:] for message in block]


def _emptied(message: Message) -> Message:
    """Return a tool message without its content, if that makes it shorter."""
    if message.role != "tool":
        return message
    note = f"[removed: {len(message.text):,} characters"
    if message.media:
        note += f", {len(message.media)} media"
    short = replace(message, content=(Text(f"{note}]"),))
    return short if estimated_tokens(short) < estimated_tokens(message) else message

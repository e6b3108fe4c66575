"""``FormatPenalty``: takes reward away for messages that do not keep to a form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from relax_agent.envs.core import Env, Info, StepResult, Wrapper
from relax_agent.errors import ConfigError
from relax_agent.messages import AssistantMessage, Observation

Scope: TypeAlias = Literal["answers", "all"]


class FormatPenalty(Wrapper):
    """Subtracts a penalty for each fault of form in a message, up to a cap per episode.

    The faults, by the names that ``info["format_faults"]`` uses:

    - ``bad_call``: a tool call that could not be read (each counts).
    - ``empty``: neither text nor a tool call.
    - ``tags``: one of ``tags`` is missing, empty, doubled, or out of order.
    - ``pattern``: the text does not match ``pattern`` (searched anywhere in it; anchor it with
      ``^`` and ``$`` for all of it; ``.`` matches line breaks too).

    ``tags`` and ``pattern`` are asked of answers (messages that call no tool) or of ``all``
    messages. What is looked at is a message's text, without its reasoning. A penalty of 0 counts
    faults without a price. The episode's sums are the metrics ``format_faults`` and
    ``format_penalty``.
    """

    def __init__(
        self,
        env: Env,
        *,
        bad_call: float = 0.1,
        empty: float = 0.1,
        tags: Sequence[str] = (),
        tag_penalty: float = 0.1,
        pattern: str | None = None,
        pattern_penalty: float = 0.1,
        applies_to: Scope = "answers",
        cap: float = 1.0,
    ) -> None:
        """Put the penalties on; all are given as positive amounts.

        Args:
            env: The environment.
            bad_call: For each tool call that could not be read.
            empty: For a message that says and calls nothing.
            tags: Names: ``("think", "answer")`` asks for ``<think>…</think><answer>…</answer>``.
            tag_penalty: For a message with any tag amiss.
            pattern: A regular expression.
            pattern_penalty: For a message that does not match it.
            applies_to: Which messages tags and pattern are asked of, ``answers`` or ``all``.
            cap: The most that one episode can lose.
        """
        super().__init__(env)
        self.penalties = {
            "bad_call": bad_call,
            "empty": empty,
            "tags": tag_penalty,
            "pattern": pattern_penalty,
        }
        self.cap = cap
        for name, amount in {**self.penalties, "cap": cap}.items():
            if not 0 <= amount < float("inf"):
                raise ConfigError(
                    f"FormatPenalty: {name} is {amount}", hint="give a positive amount"
                )
        if applies_to not in ("answers", "all"):
            raise ConfigError(f"applies_to cannot be {applies_to!r}", hint="answers or all")
        self.applies_to = applies_to
        self._tags = _tag_pattern(tags)
        self._tag_names = tuple(tags)
        self._pattern = _compiled(pattern)
        self._count = 0
        self._lost = 0.0

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin an episode without faults."""
        self._count, self._lost = 0, 0.0
        return await self.env.reset(seed=seed, options=options)

    async def step(self, action: AssistantMessage) -> StepResult:
        """Step, and take away what the message's faults cost."""
        observation, reward, terminated, truncated, info = await self.env.step(action)
        faults = self.faults(action)
        price = min(sum(self.penalties[fault] for fault in faults), self.cap - self._lost)
        self._count += len(faults)
        self._lost += price
        metrics = dict(info.get("metrics") or {})
        metrics |= {"format_faults": float(self._count), "format_penalty": self._lost}
        info = {"raw_reward": reward} | info | {"metrics": metrics, "format_faults": faults}
        return observation, reward - price, terminated, truncated, info

    def faults(self, action: AssistantMessage) -> list[str]:
        """Return the names of a message's faults."""
        text = action.text
        found = ["bad_call" for call in action.tool_calls if call.error is not None]
        if not action.tool_calls and not text.strip() and not action.media:
            found.append("empty")
        if action.tool_calls and self.applies_to == "answers":
            return found
        if self._tags is not None and not self._tags_fit(text):
            found.append("tags")
        if self._pattern is not None and self._pattern.search(text) is None:
            found.append("pattern")
        return found

    def _tags_fit(self, text: str) -> bool:
        once = all(text.count(f"<{name}>") == text.count(f"</{name}>") == 1 for name in
                   self._tag_names)  # fmt: skip
        return once and self._tags is not None and self._tags.search(text) is not None


def _tag_pattern(names: Sequence[str]) -> re.Pattern[str] | None:
    if isinstance(names, str):
        raise ConfigError(f"tags is the text {names!r}", hint=f"give a list: [{names!r}]")
    for name in names:
        if not re.fullmatch(r"[A-Za-z_][\w-]*", name):
            raise ConfigError(f"{name!r} cannot be a tag", hint="name it without < and >")
    if not names:
        return None
    return re.compile(".*".join(rf"<{n}>\s*\S.*?</{n}>" for n in names), re.DOTALL)


def _compiled(pattern: str | None) -> re.Pattern[str] | None:
    try:
        return None if pattern is None else re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"the pattern {pattern!r} cannot be read: {error}") from error

"""One reward function with its options, and how it is called.

A reward function takes ``(task, transcript)`` and returns a number or a
:class:`~relax_agent.envs.transcript.Score`; it may be ``async def``. :class:`Reward` states what
may happen around it. Whatever goes wrong inside (it raises, hangs, returns NaN or no number at
all) becomes the value that ``on_failure`` states and a line in the log; nothing else ever leaves.
"""

from __future__ import annotations

import inspect
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from relax_agent.envs.rewards.calling import FATAL, MAX_WORDS, Late, call_within, number
from relax_agent.envs.rewards.workers import call_in_process, named_target
from relax_agent.envs.tasks import Task
from relax_agent.envs.transcript import Score, Transcript
from relax_agent.errors import ConfigError, EnvError, one_line
from relax_agent.importing import import_named

logger = logging.getLogger(__name__)

Function: TypeAlias = Callable[..., Any] | str
OnFailure: TypeAlias = float | Literal["raise"]

_TIMEOUT_S = 10.0
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function and its options."""

    function: Function
    """Takes ``(task, transcript)``, in a group ``(task, transcripts)``; or ``"module:name"``."""
    weight: float = 1.0
    """What its value is multiplied with; 0 makes it a metric."""
    timeout_s: float | None = None
    """Seconds that one call may take. None: 10, or what the function says of itself."""
    name: str | None = None
    """The name of its metric; by default the function's own."""
    on_failure: OnFailure | None = None
    """Its value if it raises, hangs or returns no finite number; ``"raise"`` makes that a failure
    of the environment, whose episode is not trained on. None: 0, or what the function says.
    """
    isolation: Literal["process"] | None = None
    """``"process"`` runs it in a process that is killed when the time is over."""


Item: TypeAlias = Function | tuple[Function, float] | Reward
"""How a rubric may be given a function: bare, with its weight, or with all options."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one call gave."""

    name: str
    value: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the function reported by returning a Score."""
    failure: str | None = None
    """Why ``value`` is not the function's own."""


class Measure:
    """A :class:`Reward` that has been checked and can be called."""

    def __init__(self, reward: Reward, *, many: bool = False) -> None:
        """Check the options of ``reward``.

        Args:
            reward: The function and its options.
            many: Whether it judges all members of a group at once.

        Raises:
            ConfigError: An option makes no sense, or the function cannot be called like this.
        """
        function = reward.function
        if isinstance(function, str) and reward.isolation is None:
            function = _find(function)
        self.name = reward.name or _name(function)
        self.weight = reward.weight
        self.on_failure: OnFailure = _first(reward.on_failure, function, "on_failure", 0.0)
        self.failures = 0
        """Calls that failed so far."""
        self._function = function
        self._many = many
        self._check(reward)
        own = bool(getattr(function, "keeps_time", False))
        default = None if own else _first(None, function, "timeout_s", _TIMEOUT_S)
        self._limit_s: float | None = default if reward.timeout_s is None else reward.timeout_s
        self._target = named_target(function) if reward.isolation == "process" else None
        prepare = getattr(function, "prepare", None)
        if prepare is not None and not isinstance(function, str):
            prepare()

    def _check(self, reward: Reward) -> None:
        def refuse(words: str, hint: str | None = None) -> None:
            raise ConfigError(f"reward {self.name}: {words}", hint=hint)

        if not math.isfinite(self.weight):
            refuse(f"its weight is {self.weight}")
        if reward.timeout_s is not None and not 0 < reward.timeout_s < math.inf:
            refuse(f"timeout_s must be positive and finite, not {reward.timeout_s}")
        if self.on_failure != "raise" and not _is_finite(self.on_failure):
            refuse(f"on_failure must be a finite number or 'raise', not {self.on_failure!r}")
        if reward.isolation not in (None, "process"):
            refuse(f"isolation must be None or 'process', not {reward.isolation!r}")
        if isinstance(self._function, str):
            return
        if not callable(self._function):
            refuse(f"{self._function!r} is no function", "give it as it is, without calling it")
        if isinstance(self._function, type):
            refuse(f"{self._function.__name__} is a class", f"{self._function.__name__}()")
        if not _takes_two(self._function):
            arguments = "(task, transcripts)" if self._many else "(task, transcript)"
            refuse(f"it must take two arguments {arguments}")

    def __repr__(self) -> str:
        return f"{self.name}×{self.weight:g}"

    async def of(self, task: Task, transcript: Transcript) -> Outcome:
        """Judge one conversation. Raises only what says that nothing can be judged."""
        try:
            value = await self._call(task, transcript)
            if not isinstance(value, Score):
                return Outcome(self.name, number(value))
            metrics = {name: number(each) for name, each in value.metrics.items()}
            return Outcome(self.name, number(value.reward), metrics)
        except Exception as error:
            words = self._failed(error)
        assert self.on_failure != "raise"
        return Outcome(self.name, self.on_failure, failure=words)

    async def of_group(self, task: Task, members: Sequence[Transcript]) -> list[Outcome]:
        """Judge all members of a group at once; one outcome each."""
        try:
            values = list(await self._call(task, members))
            if len(values) != len(members):
                raise ValueError(f"it returned {len(values)} values for {len(members)} members")
            return [Outcome(self.name, number(value)) for value in values]
        except Exception as error:
            words = self._failed(error)
        assert self.on_failure != "raise"
        return [Outcome(self.name, self.on_failure, failure=words)] * len(members)

    async def _call(self, task: Task, subject: Transcript | Sequence[Transcript]) -> Any:
        if self._target is not None:
            return await call_in_process(self._target, task, subject, self._limit_s or _TIMEOUT_S)
        assert not isinstance(self._function, str)
        return await call_within(self._limit_s, self._function, task, subject)

    def _failed(self, error: Exception) -> str:
        """Count a failure and return it in words, or raise what is not to be scored."""
        if isinstance(error, FATAL):
            raise error
        limit = "" if self._limit_s is None else f" within {self._limit_s:g} s"
        words = f"no value{limit}" if isinstance(error, Late) else one_line(error, MAX_WORDS)
        if self.on_failure == "raise":
            raise EnvError(f"reward {self.name}: {words}") from error
        self.failures += 1
        if math.log10(self.failures).is_integer():  # the 1st, 10th, 100th …: enough to be seen
            logger.warning(
                "reward %s failed %d times; the last time: %s", self.name, self.failures, words
            )
        return words


def measures(items: Sequence[Item], *, many: bool = False) -> tuple[Measure, ...]:
    """Read the functions that a rubric was given, in any of their forms."""
    if isinstance(items, str) or not isinstance(items, Sequence):
        raise ConfigError(
            f"a rubric's step, group and metrics are lists, not {type(items).__name__}",
            hint="step=[progress]",
        )
    return tuple(Measure(_reward(item), many=many) for item in items)


def _reward(item: Item) -> Reward:
    if isinstance(item, Reward):
        return item
    if not isinstance(item, tuple):
        return Reward(item)
    if len(item) != 2 or isinstance(item[1], bool) or not isinstance(item[1], (int, float)):
        raise ConfigError(f"{item!r} is not (function, weight)", hint="(exact_match, 1.0)")
    return Reward(item[0], float(item[1]))


def _find(target: str) -> Callable[..., Any]:
    module, _, path = target.partition(":")
    if not module or not path:
        raise ConfigError(f"{target!r} names no function", hint="'package.module:function'")
    found: Any = import_named(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    if found is None:
        raise ConfigError(f"there is no {path} in {module}")
    return found


def _name(function: Function) -> str:
    if isinstance(function, str):
        return function.rpartition(":")[2]
    inner = getattr(function, "func", function)  # functools.partial
    name = getattr(function, "name", None) or getattr(inner, "__name__", None)
    if not isinstance(name, str):
        name = _CAMEL.sub("_", type(function).__name__).lower()
    return "reward" if name == "<lambda>" else name


def _first(given: Any, function: Function, attribute: str, default: Any) -> Any:
    if given is not None:
        return given
    own = getattr(function, attribute, None)
    return default if own is None else own


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True

"""Every error that Relax Agent raises on purpose.

    RelaxError
    ├── ConfigError            a recipe, a flag or a path is wrong; nothing was started
    │   ├── UnknownKeyError    a key that does not exist; names the nearest one that does
    │   └── ResumeError        a checkpoint that does not belong to this run
    ├── MissingExtraError      an optional dependency is not installed; names the pip install
    ├── EnvError               an environment broke its contract or raised
    │   ├── ResetNeeded        step() before reset(), or after the episode's end
    │   ├── InvalidAction      the action is not an AssistantMessage
    │   ├── EnvBusy            reset() or step() while another call of it still runs
    │   ├── EnvCheckFailed     an environment does not pass check_env; tells every failure
    │   └── UnknownEnv         no environment is registered under that id
    ├── RewardError            a reward gave no value: too slow, crashed, no verdict; is scored
    ├── PolicyError            a policy that is not a model failed, e.g. its script is over
    ├── ToolError              a tool call failed; carries a kind (see ToolErrorKind)
    │   └── ToolDeclarationError   a function cannot be declared as a tool
    ├── RenderError            messages cannot become tokens, or tokens messages
    │   └── PromptTooLong      the prompt does not fit the stated budget
    ├── MediaError             a picture, a sound or a video is missing, damaged or too large
    ├── EpisodeError           an invariant of the token log is broken; names it
    ├── EngineError            an inference engine failed
    │   ├── EngineUnavailable  cannot be reached, or ended
    │   ├── EngineRejected     answered with an error to this request
    │   └── MissingLogprobs    answered without the log-probs that training needs
    ├── QueueError             the trajectory queue cannot do what was asked
    │   ├── NoData             nothing arrived within the time limit
    │   ├── ProducerFailed     whoever fills the queue has died; carries the cause
    │   └── LeaseLost          the lease ran out or was never given
    ├── TrainerError           a training step cannot be done
    │   ├── BatchError         the batch is malformed; no weight was changed
    │   └── RouteError         routed experts do not fit the model or the tokens
    ├── WeightSyncError        new weights did not reach an engine
    ├── ChildDied              a process of this run ended by itself; carries its exit code
    ├── StorageError           a file cannot be written or read (full disk, permissions)
    ├── RunFailed              a run that ended without doing its job
    └── Interrupted            somebody ended the run: Ctrl-C or SIGTERM

Each message says what happened, why, and what to do, in one line; ``hint`` is the last part.
"""

from __future__ import annotations

import signal
import sysconfig
import traceback
from enum import StrEnum
from pathlib import Path

_SIGNALS = {each.value: each.name for each in signal.Signals} | {
    signal.SIGKILL.value: "SIGKILL: somebody's kill -9, or the system was out of memory"
}


class RelaxError(Exception):
    """The root of the tree. ``str(error)`` is one line: what happened, why, and what to do."""

    exit_code = 1
    """What the command line exits with when this error ends it."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} → {self.hint}"


class ConfigError(RelaxError):
    """A recipe, a flag or a path is wrong; nothing was started."""

    exit_code = 2


class UnknownKeyError(ConfigError):
    """A key that does not exist in a recipe."""


class ResumeError(ConfigError):
    """A checkpoint that does not belong to this run."""


class MissingExtraError(RelaxError):
    """An optional dependency is not installed."""

    exit_code = 2

    def __init__(self, package: str, extra: str, *, install: str | None = None) -> None:
        """Make the error.

        Args:
            package: What is missing.
            extra: The extra of this project that brings it; empty if none does.
            install: What to install where no extra brings it, e.g. ``gem-llm==0.1.0``.
        """
        wanted = install or f"relax-agent[{extra}]"
        super().__init__(f"{package} is not installed", hint=f"pip install '{wanted}'")


class EnvError(RelaxError):
    """An environment broke its contract or raised."""


class ResetNeeded(EnvError):
    """``step()`` was called before ``reset()`` or after the episode's end."""


class InvalidAction(EnvError):
    """The action is not an AssistantMessage."""


class EnvBusy(EnvError):
    """``reset()`` or ``step()`` was called while another call of the environment still runs."""


class EnvCheckFailed(EnvError):
    """An environment does not pass its check. ``str(error)`` has a line for each failure."""

    def __init__(self, env: str, failures: list[str]) -> None:
        count = f"{len(failures)} check{'s' if len(failures) != 1 else ''} failed"
        super().__init__("\n  ".join([f"{env}: {count}", *failures]))
        self.env = env
        self.failures = failures


class RewardError(RelaxError):
    """A reward gave no value; it counts with the value that its rubric states for that."""


class UnknownEnv(EnvError):
    """No environment is registered under that id."""

    exit_code = 2


class PolicyError(RelaxError):
    """A policy that is not a model failed: its script is over, or it said something unusable."""


class ToolErrorKind(StrEnum):
    """Why a tool call failed, in the terms that a caller can act on."""

    INVALID_ARGUMENTS = "invalid_arguments"
    NOT_FOUND = "not_found"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    TOO_LARGE = "too_large"
    DENIED = "denied"
    UNAVAILABLE = "unavailable"


class ToolError(RelaxError):
    """A tool call failed. A tool may raise it itself to choose the kind and the words."""

    def __init__(
        self, message: str, *, kind: ToolErrorKind = ToolErrorKind.CRASHED, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.kind = kind


class ToolDeclarationError(ToolError):
    """A function cannot be declared as a tool."""


class RenderError(RelaxError):
    """Messages cannot become tokens, or tokens messages."""


class PromptTooLong(RenderError):
    """The prompt does not fit the stated budget."""


class MediaError(RelaxError):
    """A picture, a sound or a video is missing, damaged or too large."""


class EpisodeError(RelaxError):
    """An invariant of the token log is broken."""


class EngineError(RelaxError):
    """An inference engine failed."""


class EngineUnavailable(EngineError):
    """The engine cannot be reached, or its process has ended."""


class EngineRejected(EngineError):
    """The engine answered this request with an error."""


class MissingLogprobs(EngineError):
    """The engine answered without the log-probs that training needs."""


class QueueError(RelaxError):
    """The trajectory queue cannot do what was asked."""


class NoData(QueueError):
    """Nothing arrived within the time limit."""


class ProducerFailed(QueueError):
    """Whoever fills the queue has died; ``__cause__`` or the message says why."""


class LeaseLost(QueueError):
    """The lease ran out or was never given."""


class TrainerError(RelaxError):
    """A training step cannot be done."""


class BatchError(TrainerError):
    """The batch is malformed; no weight was changed."""


class RouteError(TrainerError):
    """Routed experts do not fit the model or the tokens; no weight was changed."""


class WeightSyncError(RelaxError):
    """New weights did not reach an engine."""


class ChildDied(RelaxError):
    """A process of this run ended by itself."""

    def __init__(self, name: str, exit_code: int | None, *, hint: str | None = None) -> None:
        how = f"exit code {exit_code}"
        if exit_code is not None and exit_code < 0:
            how += f" ({_SIGNALS.get(-exit_code, 'a signal')})"
        super().__init__(f"{name} ended by itself with {how}", hint=hint)
        self.name = name
        self.child_exit_code = exit_code


class StorageError(RelaxError):
    """A file cannot be written or read."""


class RunFailed(RelaxError):
    """A run ended without doing its job."""


class Interrupted(RelaxError):
    """Somebody ended the run: Ctrl-C or SIGTERM."""

    def __init__(self, message: str, *, signum: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = 128 + signum


def one_line(error: BaseException, limit: int | None = 500) -> str:
    """Tell an exception in one line: the one inside a group of one, and one that cannot be told.

    Args:
        error: The exception.
        limit: Most characters; None does not cut.
    """
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    try:
        words = " ".join(str(error).split())
    except Exception:
        words = "(no message)"
    told = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return told if limit is None or len(told) <= limit else f"{told[: limit - 1]}…"


_HOME = Path(__file__).resolve().parent
_OWN = (_HOME, *(_HOME.parent / name for name in ("envs", "tools", "trainers")))
_LIBRARY = Path(sysconfig.get_paths()["stdlib"]).resolve()
_EXAMPLES = ("catalog", "adapters")
"""Parts of this project that stand where an author's code does."""


def at_line(error: BaseException) -> str:
    """Return `` (file.py:12)``: the innermost line of an author's code that an exception passed.

    Empty if there is none, and for this project's own errors: their words say what is wrong.
    """
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, RelaxError):
        return ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_authors(frame.filename):
            return f" ({Path(frame.filename).name}:{frame.lineno})"
    return ""


def _is_authors(file: str) -> bool:
    path = Path(file).resolve()
    if file.startswith("<") or "site-packages" in path.parts or path.is_relative_to(_LIBRARY):
        return False
    own = any(path.is_relative_to(folder) for folder in _OWN)
    return not own or not set(_EXAMPLES).isdisjoint(path.parts)

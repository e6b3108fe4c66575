"""The checks as functions for other people's tests: plain functions, with or without a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from relax_agent.envs.checking.answers import ANSWER_CHECKS
from relax_agent.envs.checking.cancellation import CANCELLATION_CHECKS
from relax_agent.envs.checking.contract import BEHAVIOUR_CHECKS, FORM_CHECKS
from relax_agent.envs.checking.gold import GOLD_CHECKS
from relax_agent.envs.checking.isolation import ISOLATION_CHECKS, RELEASE_CHECKS
from relax_agent.envs.checking.lab import Lab
from relax_agent.envs.checking.media import MEDIA_CHECKS
from relax_agent.envs.checking.report import Findings, Report
from relax_agent.envs.checking.running import Check, run_checks
from relax_agent.envs.checking.seeding import SEED_CHECKS
from relax_agent.envs.checking.subject import Checkable
from relax_agent.envs.checking.tasks import TASK_CHECKS
from relax_agent.envs.checking.tools import TOOL_CHECKS


async def _loop(lab: Lab, tell: Findings) -> None:
    """Found by the watcher, while the other checks run."""


_LOOP_CHECK = Check("event loop", "no call blocks the event loop", _loop)
ALL_CHECKS = [
    *FORM_CHECKS,
    *MEDIA_CHECKS,
    *TOOL_CHECKS,
    *TASK_CHECKS,
    *ANSWER_CHECKS,
    *GOLD_CHECKS,
    *SEED_CHECKS,
    *ISOLATION_CHECKS,
    *BEHAVIOUR_CHECKS,
    *CANCELLATION_CHECKS,
    *RELEASE_CHECKS,
    _LOOP_CHECK,
]


def check_env(
    env: Checkable,
    *,
    raises: bool = True,
    timeout_s: float = 30.0,
    seed: int = 7,
    on_check: Callable[[str], object] | None = None,
    **kwargs: Any,
) -> Report:
    """Check everything that an environment promises, and say what to change.

    May be called where no event loop runs, and inside one; the caller waits. In a test
    ``check_env("my/Name-v0")`` is enough: it fails with all that is wrong.

    Args:
        env: An id, a spec, a class, or a function that makes one: built anew as often as needed.
            A single environment is checked as far as one goes; with a spec it is built anew.
        raises: Whether to raise where something fails. Warnings never raise; see
            :meth:`Report.require`.
        timeout_s: Seconds that one call of the environment may take.
        seed: Seeds the episodes that are played.
        on_check: Called with the name of each check as it begins, from another thread.
        **kwargs: Arguments of the environment's constructor.

    Raises:
        EnvCheckFailed: Something failed. It has a line for each failure.
        UnknownEnv: No environment is registered under this id.
    """
    return run_checks(
        env,
        ALL_CHECKS,
        raises=raises,
        timeout_s=timeout_s,
        seed=seed,
        on_check=on_check,
        kwargs=kwargs,
    )


def check_seeding(env: Checkable, *, raises: bool = True, **options: Any) -> Report:
    """Check that equal seeds and actions give equal episodes; see :func:`check_env`."""
    return _some(env, SEED_CHECKS, raises, options)


def check_isolation(env: Checkable, *, raises: bool = True, **options: Any) -> Report:
    """Check that environments do not disturb each other; see :func:`check_env`."""
    return _some(env, [*ISOLATION_CHECKS, *RELEASE_CHECKS], raises, options)


def check_cancellation(env: Checkable, *, raises: bool = True, **options: Any) -> Report:
    """Check that a call may be cut off, and blocks nobody; see :func:`check_env`."""
    return _some(env, [*CANCELLATION_CHECKS, _LOOP_CHECK], raises, options)


def check_tools(env: Checkable, *, raises: bool = True, **options: Any) -> Report:
    """Check schemas, and that a tool called wrongly says so in words; see :func:`check_env`."""
    return _some(env, TOOL_CHECKS, raises, options)


def _some(env: Checkable, checks: Sequence[Check], raises: bool, options: dict[str, Any]) -> Report:
    timeout_s, seed = options.pop("timeout_s", 30.0), options.pop("seed", 7)
    return run_checks(env, checks, raises=raises, timeout_s=timeout_s, seed=seed, kwargs=options)

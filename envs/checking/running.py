"""Running checks from anywhere: where no event loop runs, inside one, in a notebook.

The checks run in an event loop of their own, in a daemon thread, while the caller waits. So a call
that blocks the loop can be seen from outside (the loop's heart stops beating, and the thread's
stack says at which line), and one that never comes back is left behind with its thread instead of
hanging the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from relax_agent.envs.checking.failures import Told, advice
from relax_agent.envs.checking.lab import BrokenForm, CallFailed, Hung, Lab, OutOfTime
from relax_agent.envs.checking.places import place_of_error, place_of_frame
from relax_agent.envs.checking.report import Findings, Report, Row, Status
from relax_agent.envs.checking.subject import Checkable, Subject
from relax_agent.errors import ConfigError, MissingExtraError

_BEAT_S = 0.01
_LOOK_S = 0.02
_WARN_S = 0.2
_FAIL_S = 0.5
_OFTEN = 3
"""As many shorter blocks are as bad as a long one."""
_BLOCKED_S = 15.0
"""Seconds for all checks together where a call is known to block the loop."""
_CONSTRUCTOR_S = 2.0
"""A constructor, with a module's first import, takes its time once in every program."""
_STUCK_AFTER_S = 5.0
"""Beyond a call's time limit: how long a loop may stand still before it is left behind."""

CheckFunction: TypeAlias = Callable[[Lab, Findings], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its name, what it says when all is well, and what it does."""

    name: str
    fine: str
    function: CheckFunction


def run_checks(
    env: Checkable,
    checks: Sequence[Check],
    *,
    raises: bool,
    timeout_s: float,
    seed: int,
    on_check: Callable[[str], object] | None = None,
    kwargs: dict[str, Any] | None = None,
) -> Report:
    """Run checks in a thread with an event loop of its own and wait for them.

    Raises:
        EnvCheckFailed: Something failed, and ``raises`` is set.
        RelaxError: There is no such environment, or it cannot be checked at all.
    """
    subject = Subject(env, kwargs)
    lab = Lab(subject, timeout_s=timeout_s, seed=seed)
    report = Report(subject.label)
    began = time.perf_counter()
    with kept_generators():
        _Watched(lab, checks, report, on_check).run()
    report.duration_s = time.perf_counter() - began
    return report.require() if raises else report


@dataclass(slots=True)
class _Block:
    """A time in which the event loop stood still within a call of the environment."""

    seconds: float
    call: str
    where: str
    looks: int = 1


class _Watched:
    """A thread that runs checks, and what its watcher knows of it."""

    def __init__(
        self,
        lab: Lab,
        checks: Sequence[Check],
        report: Report,
        on_check: Callable[[str], object] | None,
    ) -> None:
        self._on_check = on_check or (lambda name: None)
        self._lab = lab
        self._checks = checks
        self._report = report
        self._beat = time.monotonic()
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._blocks: list[_Block] = []
        self._told = Told()
        self._began = self._beat
        self._left_behind = False

    def run(self) -> None:
        """Run the checks; leave the thread behind if its loop never moves again."""
        thread = threading.Thread(target=self._thread, name="relax-check", daemon=True)
        thread.start()
        while not self._done.wait(_LOOK_S):
            if self._look(thread):
                self._leave()
                break
        if self._error is not None:
            raise self._error
        self._tell_blocks()

    # -- the watcher -------------------------------------------------------------------------

    def _look(self, thread: threading.Thread) -> bool:
        """Note whether the loop stands still; tell whether to give up."""
        now = time.monotonic()
        still = now - self._beat
        running = list(self._lab.running)
        if still < _WARN_S / 2 or not running:
            return False
        call, began = running[-1]
        frame = sys._current_frames().get(thread.ident or 0)
        last = self._blocks[-1] if self._blocks else None
        if last is not None and last.call == call and last.seconds < still:
            last.seconds, last.looks = still, last.looks + 1
            last.where = last.where or place_of_frame(frame)
        else:
            self._blocks.append(_Block(still, call, place_of_frame(frame)))
        if still >= _FAIL_S and call != "the constructor" and self._tells_blocks:
            self._lab.deadline = self._began + _BLOCKED_S
        return min(still, now - began) > self._lab.timeout_s + _STUCK_AFTER_S

    def _leave(self) -> None:
        self._left_behind = True
        block = self._blocks[-1]
        words = (
            f"{block.call} has blocked the event loop for {block.seconds:.0f} s and never came"
            " back; await what takes long, or write plain `def reset/step`, which run in a thread"
        )
        self._report.rows.append(Row("event loop", "fail", words, block.where))
        self._skip_rest(f"{block.call} hangs")

    @property
    def _tells_blocks(self) -> bool:
        return any(check.name == "event loop" for check in self._checks)

    def _tell_blocks(self) -> None:
        if self._left_behind or not self._tells_blocks:
            return
        seen = [
            block for block in self._blocks if block.looks > 1 and block.seconds >= _limit(block)
        ]
        rows: list[Row] = []
        for call in dict.fromkeys(block.call for block in seen):
            times = [block for block in seen if block.call == call]
            worst = max(times, key=lambda block: block.seconds)
            once = call == "the constructor"
            bad = worst.seconds >= _FAIL_S or len(times) >= _OFTEN
            status: Status = "fail" if bad and not once else "warn"
            words = f"{call} blocks the event loop for {worst.seconds:.2f} s"
            hint = "all episodes of a process wait meanwhile; await what takes long, or write"
            hint += " plain `def` functions, which run in a thread"
            if once:
                hint = "what takes long belongs into reset()"
            rows.append(Row("event loop", status, f"{words}: {hint}", worst.where))
        for index, row in enumerate(self._report.rows):
            if row.check == "event loop" and rows:
                self._report.rows[index : index + 1] = rows
                return

    # -- the watched thread ------------------------------------------------------------------

    def _thread(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    async def _main(self) -> None:
        heart = asyncio.create_task(self._heart())
        try:
            for check in self._checks:
                if self._left_behind or not await self._one(check):
                    break
            await self._lab.finish()
        finally:
            heart.cancel()

    async def _heart(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(_BEAT_S)

    async def _one(self, check: Check) -> bool:
        """Run one check; tell whether to go on."""
        self._on_check(check.name)
        findings = Findings(check.name, check.fine)
        goes_on = True
        try:
            await check.function(self._lab, findings)
        except CallFailed as failed:
            goes_on = failed.call != "the constructor"
            if not goes_on and isinstance(failed.error, (ConfigError, MissingExtraError)):
                raise failed.error from None  # what it was asked for is wrong, not the environment
            findings.fail("; ".join(filter(None, (str(failed), advice(failed)))), failed.where)
        except BrokenForm:
            findings.skip("what reset() or step() returns cannot be used, see above")
        except OutOfTime:
            findings.skip("it would take long: a call blocks the event loop, see 'event loop'")
        except Hung as hung:
            words = f"{hung}; give what it waits for a time limit"
            findings.fail(words, hung.where)
            goes_on = False
        except Exception as error:
            where = place_of_error(error)
            findings.fail(f"the check itself failed: {type(error).__name__}: {error}", where)
        if not self._left_behind:
            self._report.rows += self._told.shorten(findings.rows(), self._lab.failures)
            if not goes_on:
                self._skip_rest(f"after {findings.rows()[-1].message.partition(';')[0]!r}")
        return goes_on

    def _skip_rest(self, reason: str) -> None:
        done = {row.check for row in self._report.rows}
        left = [check.name for check in self._checks if check.name not in done]
        if left:
            words = f"{reason}: {', '.join(left)}"
            self._report.rows.append(Row("all others", "skip", words))


def _limit(block: _Block) -> float:
    return _CONSTRUCTOR_S if block.call == "the constructor" else _WARN_S


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Put the process's own random generators back to what they were, whatever is done to them."""
    numpy: Any = sys.modules.get("numpy")
    before = random.getstate()
    numpys = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(before)
        if numpys is not None:
            numpy.random.set_state(numpys)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep this project's warnings out of the way of a check that provokes them."""
    logger = logging.getLogger("relax_agent")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)

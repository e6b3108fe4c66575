"""Many episodes of one environment at once.

:class:`VectorEnv` has ``n`` slots with an environment each. There are two ways to use it:

* In lockstep, as in Gymnasium: ``reset`` and ``step`` take and return lists, one item per slot,
  and wait for all of them. An ended slot is skipped until it is reset.
* Each slot by itself: ``async for play in vec.run(policy, jobs)`` plays whole episodes, ``n`` at a
  time, and yields each as it ends.

Either way a slot has its own time limits. One that hangs, crashes or cannot be built ends its own
episode, with the reason in its info or its :class:`~relax_agent.envs.playing.Play`, and another
environment is made when the slot is used again. The others never wait longer than the limit for
it, and with ``run`` not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from relax_agent.closing import Closing
from relax_agent.envs.core import Env, Info, StepResult
from relax_agent.envs.guard import Guard
from relax_agent.envs.jobs import Job, Jobs, PolicySource, Run, policy_maker
from relax_agent.envs.playing import Play, PlayLimits, Policies, play
from relax_agent.envs.registration import make_async, planned
from relax_agent.envs.slots import Slot, SlotFailed, Slots
from relax_agent.envs.specs import EnvSpec, Isolation
from relax_agent.envs.threaded import START_TIMEOUT_S
from relax_agent.errors import ConfigError, EnvBusy, EnvError, InvalidAction, ResetNeeded, one_line
from relax_agent.limits import all_bounded
from relax_agent.messages import AssistantMessage, Observation
from relax_agent.status import EpisodeStatus
from relax_agent.tools import AnyToolset

__all__ = ["Job", "VectorEnv", "make_vec"]

VectorStep: TypeAlias = tuple[list[Observation], list[float], list[bool], list[bool], list[Info]]
Options: TypeAlias = dict[str, Any] | None

STEP_TIMEOUT_S = 300.0
"""Seconds for one reset or step of one slot where nothing else is said."""

_SPOILT = (EpisodeStatus.ENV_FAILURE, EpisodeStatus.TOOL_FAILURE, EpisodeStatus.CANCELLED)
"""Endings after which an environment is not used again."""


def make_vec(
    env: str | EnvSpec,
    n: int = 1,
    *,
    step_timeout_s: float = STEP_TIMEOUT_S,
    start_timeout_s: float | None = None,
    autoreset: bool = False,
    isolation: Isolation | None = None,
    **kwargs: Any,
) -> VectorEnv:
    """Put ``n`` environments of one kind side by side.

    Args:
        env: ``namespace/Name-v0``, a spec, or the address of a served environment.
        n: How many episodes run at once.
        step_timeout_s: Seconds for one reset or step of one slot.
        start_timeout_s: Seconds in which one environment must be built; see :func:`make`.
        autoreset: Begin a new episode in a slot in the very step that ended the last one.
        isolation: ``"process"`` gives each slot a process of its own.
        **kwargs: Arguments of the environment's constructor.
    """
    return VectorEnv(
        env,
        n,
        step_timeout_s=step_timeout_s,
        start_timeout_s=start_timeout_s,
        autoreset=autoreset,
        isolation=isolation,
        kwargs=kwargs,
    )


class VectorEnv(Closing):
    """``n`` environments side by side. Each is made when its slot is first used."""

    def __init__(
        self,
        env: str | EnvSpec,
        n: int,
        *,
        step_timeout_s: float = STEP_TIMEOUT_S,
        start_timeout_s: float | None = None,
        autoreset: bool = False,
        isolation: Isolation | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the arguments, which :func:`make_vec` explains, and prepare empty slots."""
        if n < 1:
            raise ConfigError(f"n must be ≥ 1, not {n}")
        if not (step_timeout_s > 0 and (start_timeout_s is None or start_timeout_s > 0)):
            raise ConfigError("step_timeout_s and start_timeout_s must be > 0")
        arguments = dict(kwargs or {})
        self.n = n
        self.spec: EnvSpec | None = planned(env, isolation, arguments)
        """What every slot runs; None for environments behind an address."""
        self._name = str(env) if self.spec is None else self.spec.id
        self._step_timeout_s = step_timeout_s
        self._autoreset = autoreset
        self._call: str | None = None
        self._closed = False
        self._run: Run | None = None

        async def build() -> Env:
            if self.spec is not None:
                return await make_async(self.spec, start_timeout_s=start_timeout_s)
            return await make_async(env, start_timeout_s=start_timeout_s, **arguments)

        self._slots = Slots(repr(self), n, build, start_timeout_s or START_TIMEOUT_S)

    @property
    def envs(self) -> list[Env | None]:
        """Each slot's environment; None where there is none yet, or no longer."""
        return [slot.made for slot in self._slots.all]

    @property
    def tools(self) -> list[AnyToolset | None]:
        """Each slot's tools."""
        return [None if env is None else env.tools for env in self.envs]

    @property
    def running(self) -> list[bool]:
        """Which slots have an episode that goes on."""
        return [slot.running for slot in self._slots.all]

    @property
    def replaced(self) -> int:
        """How many environments were given up after a failure."""
        return self._slots.replaced

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"<VectorEnv {self.n} × {self._name}>"

    # -- lockstep ----------------------------------------------------------------------------

    async def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: Options | Sequence[Options] = None,
        slots: Sequence[int] | None = None,
    ) -> tuple[list[Observation], list[Info]]:
        """Begin an episode in every slot, or in some; return one item for every slot.

        A slot whose environment fails here has ended: its info has ``status`` and ``detail``, and
        its next reset tries another environment. If all of them fail, that is an EnvError.

        Args:
            seed: A number seeds slot ``i`` with ``seed + i``, as in Gymnasium; or one per slot.
            options: For all slots, or one per slot; ``{"task": task_id}`` chooses the task.
            slots: The numbers of those to reset; the others go on and have ``[]`` and ``{}`` here.
        """
        chosen = self._chosen(slots)
        seeds, choices = self._seeds(seed), self._choices(options)
        with self._only("reset"):
            begun = await self._begin(chosen, seeds, choices)
        failures = [each for each in begun.values() if isinstance(each, SlotFailed)]
        if chosen and len(failures) == len(chosen):
            raise EnvError(f"no slot could be reset: {failures[0]}") from failures[0]
        observations: list[Observation] = [[] for _ in range(self.n)]
        infos: list[Info] = [{} for _ in range(self.n)]
        for slot, result in begun.items():
            if isinstance(result, SlotFailed):
                infos[slot.number] = result.info()
            else:
                observations[slot.number], infos[slot.number] = result
        return observations, infos

    async def step(self, actions: Sequence[AssistantMessage | None]) -> VectorStep:
        """Step every running slot; return one item for every slot.

        An ended slot takes None as its action; it keeps its flags, with reward 0, until it is
        reset. With ``autoreset`` an ended slot begins anew within the same step: what it returns is
        the first observation of the next episode, and its info has ``final_observation`` and
        ``final_info``. One that could not be reset stays ended (see ``running``) and is tried again
        at the next step.

        Args:
            actions: One message per slot, None for ended ones.
        """
        stepped = self._check_actions(actions)
        with self._only("step"):
            results = await all_bounded(
                [slot.env.step(action) for slot, action in stepped], self._step_timeout_s
            )
            rows = [_skipped(slot) for slot in self._slots.all]
            for (slot, _), result in zip(stepped, results, strict=True):
                rows[slot.number] = self._row(slot, result)
            if self._autoreset:
                await self._go_on(rows)
        observations, rewards, terminated, truncated, infos = zip(*rows, strict=True)
        return list(observations), list(rewards), list(terminated), list(truncated), list(infos)

    async def _begin(
        self, slots: Sequence[Slot], seeds: Sequence[int | None], options: Sequence[Options]
    ) -> dict[Slot, tuple[Observation, Info] | SlotFailed]:
        """Build what is missing and reset the slots; a failure is a value."""
        begun: dict[Slot, tuple[Observation, Info] | SlotFailed] = {}
        for slot in slots:
            slot.set(False, True)  # until it has begun
        begun.update(await self._slots.fill(slots))
        ready = [slot for slot in slots if slot not in begun]
        calls = [
            slot.env.reset(seed=seeds[slot.number], options=options[slot.number]) for slot in ready
        ]
        results = await all_bounded(calls, self._step_timeout_s)
        for slot, result in zip(ready, results, strict=True):
            if isinstance(result, Exception):
                begun[slot] = self._slots.failure(slot, "reset", result, self._step_timeout_s)
            else:
                begun[slot] = result
                slot.set(False, False)
        return begun

    def _row(self, slot: Slot, result: StepResult | Exception) -> StepResult:
        if isinstance(result, Exception):
            failed = self._slots.failure(slot, "step", result, self._step_timeout_s)
            result = [], 0.0, False, True, failed.info()
        slot.set(result[2], result[3])
        return result

    async def _go_on(self, rows: list[StepResult]) -> None:
        """Begin a new episode in every ended slot, and put its beginning into the slot's row."""
        ended = [slot for slot in self._slots.all if not slot.running]
        nothing: list[Any] = [None] * self.n
        for slot, result in (await self._begin(ended, nothing, nothing)).items():
            observation, reward, terminated, truncated, info = rows[slot.number]
            if isinstance(result, SlotFailed):
                info = info | {f"reset_{key}": value for key, value in result.info().items()}
            else:
                info = result[1] | {"final_observation": observation, "final_info": info}
                observation = result[0]
            rows[slot.number] = observation, reward, terminated, truncated, info

    # -- each slot by itself -----------------------------------------------------------------

    async def run(
        self, policy: PolicySource, jobs: Jobs, *, limits: PlayLimits | None = None
    ) -> AsyncGenerator[Play, None]:
        """Play one episode per job, at most ``n`` at a time, and yield each as it ends.

        A failure is the status of its :class:`~relax_agent.envs.playing.Play`, never an exception.
        Whoever leaves the loop early ends the episodes that still run; they have ended for sure
        only after ``aclose()`` (``contextlib.aclosing``) or :meth:`close`.

        Args:
            policy: Makes the policy of each episode (a function or a class without arguments); a
                policy, or a mapping of roles to policies, is shared by all.
            jobs: Task ids or :class:`Job` objects, also from an async generator; they are asked
                for only as slots become free.
            limits: Of each episode; by default :class:`PlayLimits` with this object's step limit.

        Raises:
            ConfigError: The environment cannot be made at all, e.g. for a wrong argument.
        """
        chosen = limits or PlayLimits(step_timeout_s=self._step_timeout_s)
        make_policy = policy_maker(policy)
        await self._previous_run()
        with self._only("run"):
            self._run = run = Run(
                self._slots.all, jobs, lambda slot, job: self._play(slot, job, make_policy, chosen)
            )
            try:
                async for record in run.plays():
                    yield record
            finally:
                await run.stop()
                await self._slots.settle()
                self._run = None

    async def _previous_run(self) -> None:
        """Let a run that was left early end: Python closes it in a task of its own, a bit later."""
        for _ in range(3):
            if self._run is not None:
                await asyncio.sleep(0)
        while self._run is not None and self._run.stopping:
            await self._run.ended.wait()
            await asyncio.sleep(0)

    async def _play(
        self, slot: Slot, job: Job, make_policy: Callable[[], Policies], limits: PlayLimits
    ) -> Play:
        record = Play(self._name, job.task, job.seed)
        failed = (await self._slots.fill([slot])).get(slot)
        if failed is not None:
            record.finish(failed.status, failed.detail)
            return record
        try:
            policy = make_policy()
        except Exception as error:
            record.finish(EpisodeStatus.ENGINE_FAILURE, f"policy: {one_line(error)}")
            return record
        try:
            await play(slot.env, policy, task=job.task, seed=job.seed, limits=limits, record=record)
        finally:
            slot.set(record.terminated, not record.terminated)
            closed = isinstance(slot.env, Guard) and slot.env.closed
            if closed or record.status in _SPOILT:
                self._slots.discard(slot)
        return record

    # -- both --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _only(self, call: str) -> Iterator[None]:
        if self._closed:
            raise ResetNeeded(f"{self!r} is closed", hint="make_vec() another one")
        if self._call is not None:
            raise EnvBusy(
                f"{self!r}: {call}() while its {self._call}() still runs", hint="one at a time"
            )
        self._call = call
        try:
            yield
        finally:
            self._call = None

    async def close(self) -> None:
        """End what runs and close all environments at once; each has a short time for it."""
        self._closed = True
        if self._run is not None:
            await self._run.stop()
        await self._slots.close()

    # -- arguments ---------------------------------------------------------------------------

    def _chosen(self, slots: Sequence[int] | None) -> list[Slot]:
        numbers = range(self.n) if slots is None else dict.fromkeys(slots)
        for number in numbers:
            if not 0 <= number < self.n:
                raise ConfigError(f"there is no slot {number}", hint=f"0 to {self.n - 1}")
        return [self._slots.all[number] for number in numbers]

    def _seeds(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        if seed is None:
            return [None] * self.n
        if isinstance(seed, int):
            return [seed + number for number in range(self.n)]
        return self._one_each("seeds", seed)

    def _choices(self, options: Options | Sequence[Options]) -> list[Options]:
        if options is None or isinstance(options, Mapping):
            return [None if options is None else dict(options) for _ in range(self.n)]
        return self._one_each("options", options)

    def _one_each(self, what: str, values: Sequence[Any]) -> list[Any]:
        if isinstance(values, str) or len(values) != self.n:
            raise ConfigError(f"{len(values)} {what} for {self.n} slots", hint="one for each slot")
        return list(values)

    def _check_actions(
        self, actions: Sequence[AssistantMessage | None]
    ) -> list[tuple[Slot, AssistantMessage]]:
        """Return who steps, or raise before anybody does."""
        if not isinstance(actions, (list, tuple)) or len(actions) != self.n:
            count = len(actions) if isinstance(actions, (list, tuple)) else "no list of"
            raise InvalidAction(
                f"{count} actions for {self.n} slots",
                hint="a list with one AssistantMessage for each slot, None for an ended one",
            )
        pairs = list(zip(self._slots.all, actions, strict=True))
        for slot, action in pairs:
            _check_action(slot, action)
        return [(slot, action) for slot, action in pairs if action is not None]


def _check_action(slot: Slot, action: object) -> None:
    if slot.running and not isinstance(action, AssistantMessage):
        raise InvalidAction(
            f"slot {slot.number} needs an AssistantMessage, not {type(action).__name__}",
            hint="relax_agent.messages.assistant('…') makes one",
        )
    if not slot.running and action is not None:
        raise ResetNeeded(
            f"slot {slot.number} has no episode that goes on",
            hint=f"give it None as its action, or reset(slots=[{slot.number}])",
        )


def _skipped(slot: Slot) -> StepResult:
    return [], 0.0, slot.terminated, slot.truncated, {}

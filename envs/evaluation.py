"""Evaluating a policy on an environment: many episodes at once, and what they say together.

    jobs = plan(make("relax/Calculator-v0").tasks, samples=4)
    report = await evaluate("relax/Calculator-v0", lambda: policy, jobs)
    print(report.success, report.pass_at)

Every task of a split is played ``samples`` times. With a folder, each episode is written as it ends
(:mod:`relax_agent.envs.evaluation_log`), and an evaluation that was interrupted goes on where it
was; episodes that the policy's endpoint failed are played again then.

What is not a success counts as none: an environment that fails, an answer that is cut. Only
episodes in which the *policy* could not be asked are left out of the means, and counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from relax_agent.envs.playing import Play, PlayLimits, Policies
from relax_agent.envs.specs import EnvSpec
from relax_agent.envs.statistics import Mean, clustered_mean, clustered_share, pass_all_k, pass_at_k
from relax_agent.envs.tasks import Split, TaskSet
from relax_agent.envs.vector import Job, make_vec
from relax_agent.errors import ConfigError, EngineUnavailable
from relax_agent.status import EpisodeStatus

if TYPE_CHECKING:
    from relax_agent.envs.evaluation_log import EvaluationLog

UNASKED = frozenset({EpisodeStatus.ENGINE_FAILURE, EpisodeStatus.CANCELLED})
"""The policy could not be asked: says nothing about it."""
_HOPELESS = 24
"""Episodes without any answer after which an evaluation is given up."""


@dataclass(frozen=True, slots=True)
class EvalJob:
    """One episode of an evaluation."""

    task: str | None
    """The task's id; None where the seed alone is the task."""
    sample: int
    seed: int
    """The environment's seed; the same for all samples of a task."""

    @property
    def name(self) -> str:
        """What its task is called in a report."""
        return f"seed {self.seed}" if self.task is None else self.task


def plan(
    tasks: TaskSet | None,
    *,
    split: Split = "eval",
    count: int | None = None,
    names: Sequence[str] = (),
    samples: int = 1,
    seed: int = 0,
) -> list[EvalJob]:
    """Return the episodes of an evaluation, every task's first sample before any second.

    Args:
        tasks: The environment's tasks; None plays ``count`` seeds.
        split: Which tasks.
        count: How many of them, in the order that ``seed`` gives; all by default.
        names: Just these tasks.
        samples: Episodes for each task.
        seed: Chooses the order, and is the environment's seed.

    Raises:
        ConfigError: There are no such tasks, or a number makes no sense.
    """
    if samples < 1 or (count is not None and count < 1):
        raise ConfigError("the numbers of tasks and samples must be ≥ 1")
    if tasks is None:
        if names:
            raise ConfigError("this environment has no tasks to name", hint="it goes by seeds")
        seeds = range(seed, seed + (count or 100))
        return [EvalJob(None, sample, each) for sample in range(samples) for each in seeds]
    chosen = list(names) or _chosen(tasks, split, count, seed)
    for name in chosen:
        if name not in tasks:
            raise ConfigError(
                f"there is no task {name!r}", hint=f"e.g. {next(iter(tasks.ids()), '')!r}"
            )
    return [EvalJob(name, sample, seed) for sample in range(samples) for name in chosen]


def _chosen(tasks: TaskSet, split: Split, count: int | None, seed: int) -> list[str]:
    ids = tasks.ids(split)
    if not ids:
        other = "train" if split == "eval" else "eval"
        raise ConfigError(f"there are no tasks in the {split} split", hint=f"try {other}")
    if count is None or count >= len(ids):
        return list(ids)
    order = tasks.sample_order(seed, split=split)
    return [next(order) for _ in range(count)]


@dataclass(slots=True)
class EvalReport:
    """What the episodes of an evaluation say together. Means count every task the same."""

    tasks: int = 0
    episodes: int = 0
    """Those that count: the policy could be asked."""
    unasked: int = 0
    """Episodes in which the policy could not be asked."""
    success: Mean | None = None
    reward: Mean | None = None
    pass_at: dict[int, float] = field(default_factory=dict)
    """Chance that one of k samples of a task succeeds."""
    pass_all: dict[int, float] = field(default_factory=dict)
    """Chance that all of k samples of a task succeed."""
    metrics: dict[str, Mean] = field(default_factory=dict)
    """What the environment reported beside the reward."""
    turns: float = 0.0
    prompt_tokens: float = 0.0
    """A mean over episodes, as ``turns`` and ``completion_tokens``."""
    completion_tokens: float = 0.0
    statuses: dict[str, int] = field(default_factory=dict)
    details: dict[str, int] = field(default_factory=dict)
    """Why episodes did not complete, with how often; the most common ones."""
    duration_s: float = 0.0
    """Seconds that this call played; what was on record already took none of them."""

    @classmethod
    def of(cls, plays: Mapping[EvalJob, Play], *, duration_s: float = 0.0) -> EvalReport:
        """Sum up the episodes."""
        counted = {job: play for job, play in plays.items() if play.status not in UNASKED}
        report = cls(
            tasks=len({job.name for job in counted}),
            episodes=len(counted),
            unasked=len(plays) - len(counted),
            statuses=dict(Counter(play.status.value for play in plays.values()).most_common()),
            details=_details(plays.values()),
            duration_s=duration_s,
        )
        if counted:
            report._measure(counted)
        return report

    def _measure(self, plays: Mapping[EvalJob, Play]) -> None:
        succeeded = _by_task(plays, lambda play: float(is_success(play)))
        self.success = clustered_share(succeeded)
        self.reward = clustered_mean(_by_task(plays, lambda play: play.reward))
        self.pass_at, self.pass_all = _passes(list(succeeded.values()))
        names = sorted({name for play in plays.values() for name in play.metrics} - {"success"})
        for name in names:
            mean = clustered_mean(_by_task(plays, partial(_metric, name)))
            if mean is not None:
                self.metrics[name] = mean
        self.turns = fmean(play.turns for play in plays.values())
        self.prompt_tokens = fmean(play.usage.prompt_tokens for play in plays.values())
        self.completion_tokens = fmean(play.usage.completion_tokens for play in plays.values())

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON data."""
        means = {"success": self.success, "reward": self.reward, **self.metrics}
        return {
            "tasks": self.tasks,
            "episodes": self.episodes,
            "unasked": self.unasked,
            "means": {name: None if mean is None else asdict(mean) for name, mean in means.items()},
            "pass_at": {str(k): value for k, value in self.pass_at.items()},
            "pass_all": {str(k): value for k, value in self.pass_all.items()},
            "turns": self.turns,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "statuses": self.statuses,
            "details": self.details,
            "duration_s": self.duration_s,
        }


def _metric(name: str, play: Play) -> float | None:
    return play.metrics.get(name)


def is_success(play: Play) -> bool:
    """Tell whether an episode succeeded: by its metric ``success``, else by a reward of 1."""
    return play.metrics.get("success", float(play.reward >= 1)) >= 1


async def evaluate(
    env: str | EnvSpec,
    policy: Callable[[], Policies],
    jobs: Sequence[EvalJob],
    *,
    concurrency: int = 16,
    limits: PlayLimits | None = None,
    log: EvaluationLog | None = None,
    on_play: Callable[[EvalJob, Play], None] = lambda job, play: None,
    **kwargs: Any,
) -> EvalReport:
    """Play all jobs and sum them up.

    Args:
        env: The environment's id or spec.
        policy: Makes who answers, for every episode; may give the same one each time.
        jobs: The episodes, see :func:`plan`.
        concurrency: Episodes at the same time.
        limits: What ends an episode from outside.
        log: Keeps what was played; what it holds already is not played again.
        on_play: Called with every episode that has ended, those on record first.
        **kwargs: Arguments of the environment's constructor.

    Raises:
        EngineUnavailable: The policy could be asked in none of the first episodes.
    """
    began = time.monotonic()
    known = [] if log is None else log.plays(jobs)
    plays = {job: play for job, play in known if play.status not in UNASKED}
    for job, play in plays.items():
        on_play(job, play)
    left = _Open(job for job in jobs if job not in plays)
    if left:
        async with make_vec(env, min(concurrency, len(left)), **kwargs) as envs:
            runs = envs.run(policy, left.wishes(), limits=limits)
            async with aclosing(runs) as finished:
                async for play in finished:
                    job = left.take(play)
                    plays[job] = play
                    if log is not None:
                        await log.add(job, play)
                    on_play(job, play)
                    _give_up_if_nobody_answers(plays)
    return EvalReport.of(plays, duration_s=time.monotonic() - began)


def _give_up_if_nobody_answers(plays: Mapping[EvalJob, Play]) -> None:
    """A server that is not there would otherwise cost hours of retries, one task after another."""
    if len(plays) == _HOPELESS and all(play.status in UNASKED for play in plays.values()):
        last = list(plays.values())[-1]
        raise EngineUnavailable(
            f"the policy could not be asked in any of {_HOPELESS} episodes; the last time"
            f" {last.detail}"
        )


class _Open:
    """Jobs that are not done. Samples of one task are alike: an episode does any one of them."""

    def __init__(self, jobs: Iterable[EvalJob]) -> None:
        self._jobs = list(jobs)
        self._by_wish: dict[tuple[str | None, int | None], list[EvalJob]] = {}
        for job in reversed(self._jobs):
            self._by_wish.setdefault((job.task, job.seed), []).append(job)

    def __len__(self) -> int:
        return len(self._jobs)

    def wishes(self) -> list[Job]:
        """Return what is to be played."""
        return [Job(job.task, job.seed) for job in self._jobs]

    def take(self, play: Play) -> EvalJob:
        """Return a job that the episode does."""
        wish = (play.task_id, play.seed)
        return self._by_wish[wish if wish in self._by_wish else (None, play.seed)].pop()


def _by_task(
    plays: Mapping[EvalJob, Play], value: Callable[[Play], float | None]
) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {}
    for job, play in plays.items():
        found = value(play)
        if found is not None:
            samples.setdefault(job.name, []).append(found)
    return samples


def _passes(samples: Sequence[Sequence[float]]) -> tuple[dict[int, float], dict[int, float]]:
    """Return pass@k and pass^k for k = 1, 2, 4, … up to what every task has."""
    least = min(map(len, samples))
    counts = [(len(values), int(sum(values))) for values in samples]
    ks = [k for k in (2**power for power in range(least.bit_length())) if k <= least]
    if least not in ks:
        ks.append(least)
    return (
        {k: fmean(pass_at_k(n, good, k) for n, good in counts) for k in ks},
        {k: fmean(pass_all_k(n, good, k) for n, good in counts) for k in ks},
    )


def _details(plays: Iterable[Play], most: int = 5) -> dict[str, int]:
    """Count why episodes did not complete; numbers differ, so the first words stand for a kind."""
    reasons = Counter(
        f"{play.status.value}: {play.detail}"[:240]
        for play in plays
        if play.status is not EpisodeStatus.COMPLETED
    )
    return dict(reasons.most_common(most))

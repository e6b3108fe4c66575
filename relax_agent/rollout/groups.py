"""One group: n episodes of one task, at the same time, with the same env seed.

A member that fails is run once more, from a clean copy with nothing of the first try in it. If it
fails again, the group goes on with the others as long as two remain, since rewards are compared
with each other. What failed is handed out beside the group: no trace is lost. Rewards that compare
members (:mod:`relax_agent.rollout.group_rewards`) come when all have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from relax_agent.engines.protocol import SamplingParams
from relax_agent.episode import Episode, EpisodeStatus, Group
from relax_agent.errors import EnvError
from relax_agent.rendering import Renderer
from relax_agent.rollout.env_pool import EnvPool
from relax_agent.rollout.episode_loop import EpisodeOptions, run_episode
from relax_agent.rollout.expert import ExpertSource
from relax_agent.rollout.fleet import Fleet
from relax_agent.rollout.group_rewards import add_group_rewards, scores_groups
from relax_agent.rollout.limits import EpisodeLimits
from relax_agent.rollout.sampling import PolicySource
from relax_agent.rollout.seeds import stable_seed
from relax_agent.rollout.settings import RolloutSettings

_REUSABLE = {
    EpisodeStatus.COMPLETED,
    EpisodeStatus.TRUNCATED_TURNS,
    EpisodeStatus.TRUNCATED_TOKENS,
    EpisodeStatus.PARSE_FAILURE,
}
"""After these an environment can be reset and used again."""

_TRIES = 2
_EQUAL = 1e-6
"""Rewards whose range is below this share of their size are equal up to rounding."""


@dataclass(slots=True)
class GroupOutcome:
    """How a group ended on the rollout's side."""

    group: Group
    """The members that can be trained, in the order of their numbers."""
    failed: list[Episode] = field(default_factory=list)
    """Every try that failed, with its partial trace."""
    reason: Literal["filtered", "dropped", "failed"] | None = None
    """Why it is not to be trained; None if it is."""
    detail: str = ""


def episode_options(
    settings: RolloutSettings,
    *,
    run_seed: int,
    return_routes: bool = False,
    temperature: float | None = None,
    paused: Callable[[], float] = lambda: 0.0,
) -> EpisodeOptions:
    """Take the options of episodes from a recipe; ``temperature`` overrides its own."""
    return EpisodeOptions(
        sampling=SamplingParams(
            max_new_tokens=settings.max_tokens_per_turn,
            temperature=settings.temperature if temperature is None else temperature,
        ),
        limits=EpisodeLimits.of(settings),
        run_seed=run_seed,
        return_routes=return_routes,
        on_abort=settings.on_abort,
        paused=paused,
    )


class EpisodeRunner:
    """Runs single episodes with environments from a pool."""

    def __init__(
        self,
        source: PolicySource | Callable[[], ExpertSource],
        renderer: Renderer,
        envs: EnvPool,
        options: EpisodeOptions,
        *,
        env_id: str,
        on_episode: Callable[[Episode], None] | None = None,
    ) -> None:
        """Put together what every episode needs.

        Args:
            source: A fleet or an engine, or a function that makes one scripted expert an episode.
            renderer: Messages to ids and back.
            envs: Where environments come from; its size bounds the episodes at a time.
            options: How to sample, and the limits.
            env_id: Written into every episode.
            on_episode: Called with every try that has ended, failed and cancelled ones included.
        """
        self._source = source
        self._renderer = renderer
        self._envs = envs
        self._on_episode = on_episode
        self._scores_groups = False
        self.options = options
        self.env_id = env_id

    async def run(
        self, task_id: str, group_id: str, seed: int, *, member: int = 0, attempt: int = 0
    ) -> Episode:
        """Run one episode; failures of env and engine are its status."""
        episode = Episode(self.env_id, task_id, group_id, seed)
        try:
            await self._play(episode, member, attempt)
        finally:
            if isinstance(self._source, Fleet):
                self._source.forget(episode.id)
            if self._on_episode is not None and episode.status is not EpisodeStatus.RUNNING:
                self._on_episode(episode)
        return episode

    async def _play(self, episode: Episode, member: int, attempt: int) -> None:
        try:
            async with self._envs.borrow() as borrowed:
                self._scores_groups = scores_groups(borrowed.env)
                source = self._source() if callable(self._source) else self._source
                await run_episode(
                    borrowed.env,
                    source,
                    self._renderer,
                    episode,
                    self.options,
                    member=member,
                    attempt=attempt,
                )
                borrowed.reusable = episode.status in _REUSABLE
        except EnvError as error:
            episode.finish(EpisodeStatus.ENV_FAILURE, str(error))

    async def score_group(self, group: Group) -> None:
        """Add the rewards that compare the members, if the environment gives any. Never fails."""
        if self._scores_groups:
            await add_group_rewards(self._envs, group, self.options.limits.env_timeout_s)


class GroupRunner:
    """Runs groups of episodes."""

    def __init__(
        self, episodes: EpisodeRunner, *, size: int, keep_equal_rewards: bool = True
    ) -> None:
        """Prepare to run groups.

        Args:
            episodes: Runs the members.
            size: Members of a group.
            keep_equal_rewards: False filters groups out whose rewards are all equal.
        """
        self._episodes = episodes
        self._keep_equal_rewards = keep_equal_rewards
        self.size = size

    async def run(
        self, group_id: str, task_id: str, *, on_member: Callable[[], None] = lambda: None
    ) -> GroupOutcome:
        """Run all members and say what is to become of the group.

        Args:
            group_id: Identity of the group; seeds depend on it.
            task_id: The task of all members.
            on_member: Called whenever a member has ended for good.
        """
        seed = stable_seed(self._episodes.options.run_seed, group_id)
        failed: list[Episode] = []

        async def member(number: int) -> Episode | None:
            try:
                return await self._member(group_id, task_id, seed, number, failed)
            finally:
                on_member()

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(member(number)) for number in range(self.size)]
        episodes = [episode for task in running if (episode := task.result()) is not None]
        group = Group(group_id, self._episodes.env_id, task_id, episodes)
        if len(episodes) >= self._fewest:
            await self._episodes.score_group(group)
        return self._judge(GroupOutcome(group, failed))

    @property
    def _fewest(self) -> int:
        """Members that make a group: rewards are compared."""
        return min(2, self.size)

    async def _member(
        self, group_id: str, task_id: str, seed: int, number: int, failed: list[Episode]
    ) -> Episode | None:
        for attempt in range(_TRIES):
            episode = await self._episodes.run(
                task_id, group_id, seed, member=number, attempt=attempt
            )
            if episode.status.trainable and episode.turns:
                return episode
            failed.append(episode)
        return None

    def _judge(self, outcome: GroupOutcome) -> GroupOutcome:
        left = outcome.group.episodes
        if len(left) < self._fewest:
            last = outcome.failed[-1]
            outcome.reason = "dropped" if left else "failed"
            outcome.detail = (
                f"{len(left)} of {self.size} episodes are left; {last.status}: {last.detail}"
            )
        elif not self._keep_equal_rewards and equal([episode.reward for episode in left]):
            outcome.reason, outcome.detail = "filtered", f"all rewards are {left[0].reward:g}"
        return outcome


def equal(rewards: list[float]) -> bool:
    """Tell whether rewards are the same up to rounding."""
    spread = max(rewards) - min(rewards)
    return spread <= _EQUAL * max(1.0, *map(abs, rewards))

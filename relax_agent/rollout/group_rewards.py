"""Rewards that compare the members of a group with each other.

When all members of a group have ended, one environment is asked, once, what each has earned beside
its own reward (``Env.score_group``). That is added to the reward of the member's last turn, where
the trainer finds it. An environment that fails here costs the group nothing but this reward: all
members get 0, the failure is a metric and a line in the log.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from relax_agent.envs import Env, SyncEnv, Transcript
from relax_agent.episode import Episode, Group
from relax_agent.errors import one_line
from relax_agent.rollout.env_pool import EnvPool
from relax_agent.rollout.limits import Overrun, TimeBudget, bounded

logger = logging.getLogger(__name__)

_OWN = "relax_agent.envs."
_DEFAULTS = (Env.score_group, SyncEnv.score_group)


def scores_groups(env: Any) -> bool:
    """Tell whether asking ``env`` for group rewards can give anything; so most are never asked.

    An environment may say so itself by an attribute of this name. The project's own wrappers only
    change what the inner environment gives.
    """
    inner = getattr(env, "unwrapped", env)
    while env is not inner and env is not None:
        if not type(env).__module__.startswith(_OWN) and _overrides(env):
            return True
        env = getattr(env, "env", None)
    said = getattr(inner, "scores_groups", None)
    return said if isinstance(said, bool) else _overrides(inner)


def _overrides(env: Any) -> bool:
    kind = next((each for each in type(env).__mro__ if "score_group" in vars(each)), None)
    return kind is not None and vars(kind)["score_group"] not in _DEFAULTS


async def add_group_rewards(envs: EnvPool, group: Group, timeout_s: float) -> None:
    """Ask for the group's rewards and add them to its members.

    Args:
        envs: Where the environment comes from.
        group: All its members have ended.
        timeout_s: Seconds that the environment may take.
    """
    members = [_transcript(episode) for episode in group.episodes]
    metrics = {"group_reward_failures": 0.0}
    try:
        async with envs.borrow() as borrowed:
            ask = partial(borrowed.env.score_group, group.task_id, members)
            given = await bounded(ask(), TimeBudget(timeout_s).left)
            borrowed.reusable = True
        extra = _checked(given, len(members))
    except Exception as error:
        words = _words(error, timeout_s)
        logger.warning("group %s gets no group reward; score_group(): %s", group.id, words)
        extra, metrics = [0.0] * len(members), {"group_reward_failures": 1.0}
        members = [_transcript(episode) for episode in group.episodes]
    for episode, member, reward in zip(group.episodes, members, extra, strict=True):
        episode.turns[-1].reward += reward
        episode.metrics.update(member.metrics)
        episode.metrics.update(metrics, group_reward=reward)


def _transcript(episode: Episode) -> Transcript:
    transcript = Transcript(episode.messages)
    transcript.reward, transcript.metrics = episode.reward, dict(episode.metrics)
    return transcript


def _checked(given: Sequence[Any], count: int) -> list[float]:
    values = [float(value) for value in given]
    if len(values) != count:
        raise ValueError(f"it returned {len(values)} rewards for {count} members")
    if not all(map(math.isfinite, values)):
        raise ValueError(f"it returned {values}")
    return values


def _words(error: Exception, timeout_s: float) -> str:
    if isinstance(error, Overrun):
        return f"no answer within {timeout_s:g} s"
    return one_line(error, None)

"""Rewards: what an episode was worth, from functions of the task and the conversation.

A reward function takes ``(task, transcript)`` and returns a number or a
:class:`~relax_agent.envs.transcript.Score`. :class:`Rubric` puts several together, with weights;
:class:`Reward` states the options of one: time limit, value on failure, a process of its own.
"""

from relax_agent.envs.rewards.reward import Reward
from relax_agent.envs.rewards.rubric import Rubric
from relax_agent.envs.rewards.workers import WorkerPool, close_workers

__all__ = ["Reward", "Rubric", "WorkerPool", "close_workers"]

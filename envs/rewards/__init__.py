"""Rewards: what an episode was worth, from functions of the task and the conversation.

A reward function takes ``(task, transcript)`` and returns a number or a
:class:`~relax_agent.envs.transcript.Score`. :class:`Rubric` puts several together, with weights;
:class:`Reward` states the options of one: time limit, value on failure, a process of its own.

Ready-made ones are objects that may be called like functions. Each comes with its usual options
under a name in lower case (``exact_match``), and as a class for others
(``ExactMatch(ignore_case=False)``). They compare the final answer with ``task.answer``.
"""

from relax_agent.envs.rewards.answers import AnswerReward, after, boxed, last_line, tagged
from relax_agent.envs.rewards.choices import MultipleChoice, multiple_choice
from relax_agent.envs.rewards.judge import JudgeFailed, JudgeUsage, LLMJudge
from relax_agent.envs.rewards.mathematics import MathEqual, math_equal
from relax_agent.envs.rewards.numeric import NumericMatch, numeric_match
from relax_agent.envs.rewards.reward import Reward
from relax_agent.envs.rewards.rubric import Rubric
from relax_agent.envs.rewards.structured import JsonMatch, json_match
from relax_agent.envs.rewards.texts import F1, ExactMatch, exact_match, f1
from relax_agent.envs.rewards.workers import WorkerFailed, WorkerPool, close_workers

__all__ = [
    "AnswerReward",
    "ExactMatch",
    "F1",
    "JsonMatch",
    "JudgeFailed",
    "JudgeUsage",
    "LLMJudge",
    "MathEqual",
    "MultipleChoice",
    "NumericMatch",
    "Reward",
    "Rubric",
    "WorkerFailed",
    "WorkerPool",
    "after",
    "boxed",
    "close_workers",
    "exact_match",
    "f1",
    "json_match",
    "last_line",
    "math_equal",
    "multiple_choice",
    "numeric_match",
    "tagged",
]

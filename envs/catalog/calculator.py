"""``relax/Calculator-v0``: questions of two operations, a calculator, and an answer to give.

Task: a question such as "What is (17+5)*3?" or, in words, "What is 17 plus 5, then times 3?", which
means the same. Words are the harder half: where the second operation binds tighter than the first,
the expression needs parentheses that the question does not have. Most second operations are
multiplications, so this is common. No held-out expression ever appears in training, in symbols or
in words.

Tools: ``calculator(expression)``. The model writes the expression into a call and then repeats the
result.

Reward: 1.0 for a right answer if the calculator helped, 0.3 if it did not; nothing for a wrong one.

Its ``expert`` (:mod:`relax_agent.envs.catalog.calculator_expert`) plays it for a warm start; the
expert's ``noise`` makes the mistakes that reinforcement learning shall remove, a systematic one
(forgotten parentheses) among them.
"""

from __future__ import annotations

import re

from relax_agent.envs.catalog.arithmetic import make_tasks
from relax_agent.envs.catalog.calculator_expert import CalculatorExpert
from relax_agent.envs.tasks import Task
from relax_agent.envs.tool_env import Score, ToolEnv, ToolSource, Transcript
from relax_agent.tools.calculator import calculator

_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,30}")
_REWARD_WITHOUT_CALL = 0.3


class CalculatorEnv(ToolEnv):
    """Two operations, one calculator. See the module's docstring."""

    tools = (calculator,)
    max_turns = 4
    system_prompt = "Use the calculator, then answer with the number alone."

    def __init__(
        self,
        *,
        max_operand: int = 20,
        word_share: float = 0.7,
        train_tasks: int = 4096,
        eval_tasks: int = 512,
        task_seed: int = 0,
        max_turns: int | None = None,
        tools: ToolSource | None = None,
    ) -> None:
        """Make the environment.

        Args:
            max_operand: Largest operand of a question; the smallest is 0.
            word_share: Share of questions that are asked in words.
            train_tasks: How many questions to train on.
            eval_tasks: How many questions to hold out.
            task_seed: Fixes the questions and the split.
            max_turns: Assistant messages after which an episode is cut.
            tools: Where the calculator runs, e.g. a ``RemoteToolset``; by default in this process.
        """
        tasks = make_tasks(max_operand, word_share, train_tasks, eval_tasks, task_seed)
        super().__init__(tools=tools, tasks=tasks, max_turns=max_turns)

    def score(self, task: Task, transcript: Transcript) -> Score:
        """Full reward for the right number after a call that worked; see the module."""
        right = bool(_WHOLE_NUMBER.fullmatch(transcript.answer)) and (
            int(transcript.answer) == task.answer
        )
        helped = bool(transcript.successful_calls)
        reward = (1.0 if helped else _REWARD_WITHOUT_CALL) if right else 0.0
        return Score(reward, {"success": float(right)})

    @staticmethod
    def expert(noise: float = 0.0, seed: int = 0) -> CalculatorExpert:
        """Return a policy that plays this environment; see :class:`CalculatorExpert`."""
        return CalculatorExpert(noise, seed)

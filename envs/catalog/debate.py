"""``relax/Debate-v0``: a proposer and a critic work on one question and share a calculator.

Task: the questions of ``relax/Calculator-v0`` with larger numbers. The proposer says "Answer: N",
the critic AGREE or DISAGREE and why. If it disagrees, the proposer answers anew, in up to
``rounds`` rounds; the last answer counts.

Tools: ``calculator``, for both roles.

Reward: 1.0 if the last answer is right and a calculator call worked, 0.3 if it is right without
one; both roles share it. ``info["rewards"]`` says what each did for it: the proposer's is that
reward, the critic's the share of its verdicts that were true.

Whose turn it is stands in ``info["role"]``. When that changes, the observation is a ``Rewrite``:
the other role's own view of the conversation. One policy may play both roles, or each its own:
``play(env, {"proposer": p, "critic": q})``.
"""

from __future__ import annotations

import re
from typing import Any

from relax_agent.envs.catalog.arithmetic import Question, make_tasks
from relax_agent.envs.catalog.shared import Expert, call, choose, within
from relax_agent.envs.core import Env, Info, StepResult
from relax_agent.envs.tasks import TaskSet
from relax_agent.errors import ResetNeeded
from relax_agent.messages import AssistantMessage, Message, Observation, Rewrite, system, user
from relax_agent.tools import Toolset
from relax_agent.tools.calculator import calculator

RULES = {
    "proposer": "You are the proposer. Use the calculator. End with a line `Answer: N`.",
    "critic": "You are the critic. Check the proposal with the calculator."
    " Begin your reply with AGREE or DISAGREE, then say why.",
}
_ANSWER = re.compile(r"answer: *(-?\d{1,30})", re.IGNORECASE)
_VERDICT = re.compile(r"\W*(agree|disagree)\b", re.IGNORECASE)


class DebateEnv(Env):
    """A proposer and a critic agree on an answer. See the module's docstring."""

    def __init__(
        self,
        *,
        rounds: int = 2,
        max_operand: int = 99,
        train_tasks: int = 4096,
        eval_tasks: int = 512,
        task_seed: int = 0,
    ) -> None:
        """Make the environment.

        Args:
            rounds: How often the critic is heard, at most.
            max_operand: Largest number of a question.
            train_tasks: How many questions to train on.
            eval_tasks: How many to hold out.
            task_seed: Other seeds give other questions.
        """
        within("rounds", rounds, 1)
        self.rounds, self.max_turns = rounds, 4 + 4 * rounds
        self.tools = Toolset([calculator])
        self.tasks: TaskSet = make_tasks(max_operand, 0.7, train_tasks, eval_tasks, task_seed)
        self._running = False

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Ask the proposer the question."""
        await super().reset(seed=seed)
        self.task = await choose(self.tasks, options, self.rng)
        asked = self.task.to_messages()
        self.views = {role: [system(rules), *asked] for role, rules in RULES.items()}
        self.role, self.turn, self.helped, self._running = "proposer", 0, False, True
        self.proposals, self.verdicts = list[bool](), list[bool]()
        return list(self.views["proposer"]), {"task": self.task.id, "role": self.role}

    async def step(self, action: AssistantMessage) -> StepResult:
        """Run tool calls, or pass what was said to the other role."""
        if not self._running:
            raise ResetNeeded("step() outside an episode", hint="await env.reset() first")
        self.turn += 1
        self.views[self.role].append(action)
        if action.tool_calls:
            ended, observation = False, await self._use_tools(action)
        else:
            ended = self._judge(action.text.strip())
            observation = [] if ended else self._hand_over(action.text.strip())
        truncated = not ended and self.turn >= self.max_turns
        self._running = not (ended or truncated)
        reward = (1.0 if self.helped else 0.3) * (ended and self.proposals[-1])
        info: Info = {"role": self.role} if self._running else self._account(reward)
        return observation, reward, ended, truncated, info

    async def _use_tools(self, action: AssistantMessage) -> Observation:
        messages = []
        for each in action.tool_calls:
            result = await self.tools.call(each)
            self.helped |= result.ok
            messages.append(result.to_message(each))
        self.views[self.role].extend(messages)
        return messages

    def _judge(self, text: str) -> bool:
        """Note whether a proposal or a verdict is true; say whether the debate ends with it."""
        if self.role == "proposer":
            answers = _ANSWER.findall(text)
            self.proposals.append(bool(answers) and int(answers[-1]) == self.task.answer)
            return len(self.verdicts) == self.rounds
        found = _VERDICT.match(text)
        agrees = found is not None and found[1].upper() == "AGREE"
        self.verdicts.append(found is not None and agrees == self.proposals[-1])
        return agrees

    def _hand_over(self, text: str) -> Rewrite:
        """Tell the other role what was said, and go on with that role's view."""
        words = user(f"The {self.role} says:\n{text}")
        self.role = "critic" if self.role == "proposer" else "proposer"
        self.views[self.role].append(words)
        return Rewrite(tuple(self.views[self.role]), f"role: {self.role}")

    def _account(self, reward: float) -> Info:
        """Say what each role did for the reward."""
        share = sum(self.verdicts) / max(1, len(self.verdicts))
        metrics = {"success": float(reward > 0), "turns": float(self.turn), "verdicts_right": share}
        metrics["first_right"] = float(self.proposals[:1] == [True])
        return {"rewards": {"proposer": reward, "critic": share}, "metrics": metrics}

    @staticmethod
    def expert(noise: float = 0.0, seed: int = 0) -> Expert:
        """Return a policy that plays both roles: it computes, and compares."""
        return Expert(_plan, noise, seed)


def _plan(messages: list[Message], tools: list[dict[str, Any]]) -> AssistantMessage | str:
    """Compute the question anew in every round, then propose or compare."""
    question = Question.parse(messages[1].text)
    assert question is not None
    result = messages[-1].text
    if messages[-1].role != "tool" or result.startswith("Error"):
        return call("calculator", expression=question.expression)
    if "You are the proposer" in messages[0].text:
        return f"Answer: {result}"
    proposal = next(m.text for m in reversed(messages) if m.role == "user")
    agrees = _ANSWER.findall(proposal)[-1:] == [result]
    return "AGREE" if agrees else f"DISAGREE: the calculator gives {result}"

"""``relax/PythonInterpreter-v0``: questions that take a few lines of Python.

Task: a question whose answer has to be computed: sums over primes, divisors, dates, letters of a
long string, small simulations. Numbers and strings are drawn anew for each task, gold answers are
computed by trusted code, and half of all that can be drawn is held out.

Tools: ``python`` runs code in a sandbox that keeps its variables for the episode; see
:mod:`relax_agent.tools.python`. It needs bubblewrap, because a model's code is run.

Reward: 1.0 for the right answer if code that ran without an error has shown it; 0.2 if it was right
without that; nothing for a wrong one.
"""

from __future__ import annotations

import random
import re
from typing import Any

from relax_agent.envs.catalog.computations import KINDS
from relax_agent.envs.catalog.shared import DrawnTasks, Expert, call
from relax_agent.envs.tasks import Task
from relax_agent.envs.tool_env import Score, ToolEnv, Transcript
from relax_agent.messages import AssistantMessage, Message
from relax_agent.tools.python import PythonSession
from relax_agent.tools.sandbox import Limits


def draw(rng: random.Random) -> Task:
    """Draw a question with its gold answer."""
    kind = rng.choice(KINDS)
    values = kind.draw(rng)
    return Task("", kind.text.format(**values), answer=str(kind.answer(*values.values())))


class PythonInterpreterEnv(ToolEnv):
    """Questions to be computed. See the module's docstring."""

    max_turns = 8
    system_prompt = "Compute with Python. Then answer with the number or the word alone."

    def __init__(
        self,
        *,
        train_tasks: int = 4096,
        eval_tasks: int = 512,
        task_seed: int = 0,
        timeout_s: float = 10.0,
        memory_mb: int = 1024,
        max_turns: int | None = None,
    ) -> None:
        """Make the environment.

        Args:
            train_tasks: How many questions to train on.
            eval_tasks: How many to hold out.
            task_seed: Other seeds give other questions.
            timeout_s: Seconds that one call of the tool may take.
            memory_mb: Megabytes that the code of an episode may use.
            max_turns: Messages after which an episode is cut.
        """
        self.python = PythonSession(limits=Limits(timeout_s=timeout_s, memory_mb=memory_mb))
        tasks = DrawnTasks(draw, train_tasks, eval_tasks, task_seed)
        super().__init__(tools=[self.python.python], tasks=tasks, max_turns=max_turns)

    async def setup(self, task: Task) -> None:
        """Begin with a session in which nothing has run."""
        await self.python.restart()
        await self.python.session()  # where code cannot be held, the episode does not begin

    async def teardown(self) -> None:
        """End the session."""
        await self.python.close()

    async def score(self, task: Task, transcript: Transcript) -> Score:
        """Compare the answer, and look for it in what the code has shown."""
        right = transcript.answer.strip(" .").casefold() == str(task.answer).casefold()
        shown = any(
            re.search(rf"(?<!\w){re.escape(task.answer)}(?!\w)", result.text)
            for _, result in transcript.successful_calls
        )
        reward = (1.0 if shown else 0.2) if right else 0.0
        return Score(reward, {"success": float(reward == 1.0), "right": float(right)})

    @staticmethod
    def expert(noise: float = 0.0, seed: int = 0) -> Expert:
        """Return a policy that writes the code, runs it, and answers with what it shows."""
        return Expert(_plan, noise, seed)


def _plan(messages: list[Message], tools: list[dict[str, Any]]) -> AssistantMessage | str:
    """Run the code of the question's kind, answer with its last line."""
    asked = next(i for i, message in enumerate(messages) if message.role == "user")
    if results := [m.text for m in messages[asked:] if m.role == "tool"]:
        return results[-1].strip().splitlines()[-1]
    for kind in KINDS:
        pattern = re.escape(kind.text)
        for name in set(re.findall(r"{(\w+)}", kind.text)):
            pattern = pattern.replace(re.escape(f"{{{name}}}"), rf"(?P<{name}>[\w-]+?)")
        if found := re.fullmatch(pattern, messages[asked].text):
            return call("python", code=kind.code.format(**found.groupdict()))
    return "I do not know such questions."

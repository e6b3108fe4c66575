"""``relax/SQL-v0``: questions about a shop that only queries of its database can answer.

Task: every task has an SQLite database of its own, with about 150 rows in four tables, and a
question of up to four joined tables: "Which customer from Brill spent the most in all?" What tables
and columns are called differs from task to task. Half of all that can be drawn is held out.

Tools: ``schema`` shows the tables, ``sql`` runs one SELECT; see :mod:`relax_agent.tools.sql`.

Reward: 1.0 for the right number or name if a query's result shows it, so that the database did the
work; 0.2 if it was worked out from other rows; nothing for a wrong answer, or one without a query.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from relax_agent.envs.catalog.ledger import QUESTIONS, WORDS, Ledger, draw
from relax_agent.envs.catalog.shared import DrawnTasks, Expert, call, within
from relax_agent.envs.tasks import Task
from relax_agent.envs.tool_env import Score, ToolEnv, Transcript
from relax_agent.messages import AssistantMessage, Message
from relax_agent.tools.sql import SqlDatabase


class SqlEnv(ToolEnv):
    """A question that takes queries of an unknown database. See the module's docstring."""

    max_turns = 8
    system_prompt = "Query the database. Then answer with the number or the name alone."

    def __init__(
        self,
        *,
        level: int = 4,
        train_tasks: int = 4096,
        eval_tasks: int = 512,
        task_seed: int = 0,
        max_turns: int | None = None,
    ) -> None:
        """Make the environment.

        Args:
            level: Most tables that a question joins, from 1 to 4.
            train_tasks: How many databases to train on.
            eval_tasks: How many to hold out.
            task_seed: Other seeds give other databases.
            max_turns: Messages after which an episode is cut.
        """
        within("level", level, 1, 4)
        make = partial(draw, level=level)
        self.database = SqlDatabase.build(lambda empty: None)
        super().__init__(
            tools=self.database.toolset(),
            tasks=DrawnTasks(make, train_tasks, eval_tasks, task_seed, level),
            max_turns=max_turns,
        )

    async def setup(self, task: Task) -> None:
        """Fill a database for the task."""
        ledger: Ledger = task.data["ledger"]
        await self.database.rebuild(ledger.build)

    async def teardown(self) -> None:
        """Let the database and its thread go."""
        await self.database.close()

    async def score(self, task: Task, transcript: Transcript) -> Score:
        """Compare the answer, and look for it in what the queries gave."""
        results = [r.text for query, r in transcript.successful_calls if query.name == "sql"]
        cells = {
            _plain(cell)
            for text in results
            for line in text.splitlines()[1:]
            for cell in line.split(" | ")
        }
        right = _plain(transcript.answer) == _plain(task.answer)
        shown = _plain(task.answer) in cells
        reward = (1.0 if shown else 0.2) if right and results else 0.0
        return Score(reward, {"success": float(reward == 1.0), "right": float(right)})

    @staticmethod
    def expert(noise: float = 0.0, seed: int = 0) -> Expert:
        """Return a policy that reads the schema and writes the one query that it takes."""
        return Expert(_plan, noise, seed)


def _plain(value: object) -> str:
    return str(value).strip(" .\n").replace(",", "").casefold()


def _plan(messages: list[Message], tools: list[dict[str, Any]]) -> AssistantMessage | str:
    """Read the schema, query, answer with the first cell."""
    asked = next(i for i, m in enumerate(messages) if m.role == "user")
    results = [m.text for m in messages[asked:] if m.role == "tool"]
    if not results:
        return call("schema")
    if len(results) > 1 and not results[-1].startswith("Error"):
        return results[-1].splitlines()[1]
    names = set(re.findall(r"\w+", results[0]))
    words = {word: next(n for n in choices if n in names) for word, choices in WORDS.items()}
    for question in QUESTIONS:
        pattern = re.escape(question.text).replace(re.escape("{it}"), r"(\w+)")
        if found := re.fullmatch(pattern, messages[asked].text):
            return call("sql", query=question.sql.format(it=found[1], **words))
    return "I do not know such questions."

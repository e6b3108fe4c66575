"""``relax/Search-v0``: questions about a small world that only its encyclopedia can answer.

Task: a question of one or two hops, such as "Name the river that flows through the town where
Ivjor Kaslim was born.", about an invented world of a few hundred pages. Questions that begin at one
quarter of the names are held out.

Tools: ``search`` ranks the pages by BM25, ``open_page`` reads one.

Reward: 1.0 for the exact answer; up to 0.5 for one that shares words with it, fewer the more it
lists; nothing unless the page that states the answer was opened, so neither memory nor a guess
from a snippet counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from relax_agent.envs.catalog.shared import Expert, call, is_held_out, within
from relax_agent.envs.catalog.world import KINDS, RELATIONS, Relation, World
from relax_agent.envs.tasks import Task, TaskSet
from relax_agent.envs.tool_env import Score, ToolEnv, Transcript
from relax_agent.messages import AssistantMessage, Message
from relax_agent.tools.search import SearchIndex, words


class SearchEnv(ToolEnv):
    """Questions about a small world: find pages, read, answer. See the module's docstring."""

    max_turns = 10
    system_prompt = "Search the encyclopedia and read its pages. Then answer with the name alone."

    def __init__(
        self, *, hops: int = 2, pages: int = 260, task_seed: int = 0, max_turns: int | None = None
    ) -> None:
        """Make the environment.

        Args:
            hops: Most facts that a question chains; every length from 1 on is asked.
            pages: About how many pages the encyclopedia has.
            task_seed: Other seeds give other worlds.
            max_turns: Assistant messages after which an episode is cut.
        """
        within("hops", hops, 1, 6)
        within("pages", pages, 20)
        self.index, tasks = _encyclopedia(hops, pages, task_seed)
        super().__init__(tools=self.index.toolset(), tasks=tasks, max_turns=max_turns)

    def setup(self, task: Task) -> None:
        """Index the pages, in a thread; the first episode of a process waits for it."""
        self.index.build()

    def score(self, task: Task, transcript: Transcript) -> Score:
        """Compare the answer with the gold one, if the page that states it was read."""
        read = [str(call.arguments["id"]).strip() for call, result in transcript.calls
                if call.name == "open_page" and result.ok]  # fmt: skip
        evidence = float(task.data["page"] in read)
        given, gold = words(transcript.answer), words(task.answer)
        reward = evidence if given == gold else evidence * 0.5 * _f1(given, gold)
        return Score(reward, {"success": float(reward == 1.0), "evidence": evidence})

    @staticmethod
    def expert(noise: float = 0.0, seed: int = 0) -> Expert:
        """Return a policy that follows the question from page to page."""
        return Expert(_plan, noise, seed)


@lru_cache(maxsize=4)
def _encyclopedia(hops: int, pages: int, seed: int) -> tuple[SearchIndex, TaskSet]:
    """Return the index and the questions, which environments with equal arguments share."""
    world = World(pages, seed)
    ids = {page.title: page.id for page in world.pages}
    splits: dict[bool, list[Task]] = {False: [], True: []}
    for start, phrase, last, answer in _chains(world, hops):
        side = splits[is_held_out(start, one_in=4)]
        name = "eval" if side is splits[True] else "train"
        prompt = f"Name {phrase}."
        side.append(Task(f"{name}-{len(side):05}", prompt, answer, {"page": ids[last]}))
    return SearchIndex(world.pages, lazy=True), TaskSet(splits[False], splits[True])


def _chains(world: World, hops: int) -> Iterator[tuple[str, str, str, str]]:
    """Yield (first name, phrase, last page, answer) for every chain of facts."""
    ends = [(name, name, kind, name) for kind in KINDS for name in world.names[kind]]
    for _ in range(hops):
        longer = []
        for start, phrase, kind, name in ends:
            for key, relation in RELATIONS.items():
                if relation.subject == kind:
                    object = world.facts[key, name]
                    longer.append((start, relation.phrase.format(phrase), relation.object, object))
                    yield start, relation.phrase.format(phrase), name, object
        ends = longer


def _f1(given: list[str], gold: list[str]) -> float:
    shared = len(set(given) & set(gold))
    return 2 * shared / (len(given) + len(gold)) if shared else 0.0


def _plan(messages: list[Message], tools: list[dict[str, Any]]) -> AssistantMessage | str:
    """Resolve the innermost name first: search its page, open it, read the fact, go on."""
    question = next(m.text for m in reversed(messages) if m.role == "user")
    subject, relations = _parse(question.removeprefix("Name ").removesuffix("."))
    pages = {m.text.partition("\n")[0]: m.text for m in messages if m.name == "open_page"}
    for relation in relations:
        if subject not in pages:
            return _look_up(subject, messages[-1])
        found = _read(relation, subject, pages[subject])
        if found is None:
            return "I cannot find that."
        subject = found
    return subject


def _look_up(title: str, last: Message) -> AssistantMessage | str:
    if last.name == "search" and last.text.startswith("["):
        for result in json.loads(last.text):
            if result["title"] == title:
                return call("open_page", id=result["id"])
        return call("search", query=title, count=20)
    return call("search", query=title)


def _parse(phrase: str) -> tuple[str, list[Relation]]:
    """Split a question into the name that it begins with and the facts to follow, in order."""
    for relation in RELATIONS.values():
        before, after = relation.phrase.split("{}")
        if phrase.startswith(before) and phrase.endswith(after):
            name, relations = _parse(phrase[len(before) : len(phrase) - len(after)])
            return name, [*relations, relation]
    return phrase, []


def _read(relation: Relation, subject: str, page: str) -> str | None:
    """Find the fact in whichever wording the page has it."""
    for wording in relation.wordings:
        pattern = re.escape(wording.format(s=subject, o="@")).replace("@", r"([^.\n]+?)")
        if found := re.search(rf"(?:^|\. |\n){pattern}", page):
            return found[1]
    return None

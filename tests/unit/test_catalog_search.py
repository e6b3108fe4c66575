"""Search: an answer counts only after its page was read; every fact is told exactly once."""

import asyncio
import re

import pytest

from relax_agent.envs import ScriptedPolicy, make, play
from relax_agent.envs.catalog.world import RELATIONS, World
from relax_agent.messages import ToolCall


def answers(*replies):
    """Play the replies on one two-hop question; return the record."""
    env = make("relax/Search-v0")
    task = two_hops(env)
    values = {
        "right": task.answer,
        "evidence": ToolCall("open_page", {"id": task.data["page"]}),
        "other page": ToolCall(
            "open_page", {"id": "p000" if task.data["page"] != "p000" else "p001"}
        ),
        "search": ToolCall("search", {"query": task.answer}),
        "spaced": f"  {task.answer.upper()}.\n",
        "among many": ", ".join([task.answer, *(f"Town{i} Name{i}" for i in range(20))]),
        "all of the world": " ".join(page.text for page in World(260, 0).pages),
        "a part": f"{task.answer.split()[0]} or so",
    }
    script = ScriptedPolicy([values.get(reply, reply) for reply in replies])
    return asyncio.run(play(env, script, task=task.id))


def two_hops(env):
    """Return the first question about a person's name that chains two facts."""
    tasks = (env.unwrapped.tasks[task] for task in env.tasks.ids())
    return next(t for t in tasks if t.prompt.startswith("Name the mayor of the town"))


@pytest.mark.parametrize(
    ("replies", "reward"),
    [
        (["evidence", "right"], 1.0),
        (["search", "evidence", "spaced"], 1.0),
        (["right"], 0.0),
        (["search", "right"], 0.0),
        (["other page", "right"], 0.0),
        (["evidence", ""], 0.0),
        (["evidence", "nobody"], 0.0),
    ],
)
def test_the_right_answer_counts_once_its_page_was_read(replies, reward):
    record = answers(*replies)
    assert record.reward == reward
    assert record.metrics["success"] == reward
    assert record.metrics["evidence"] == ("evidence" in replies)


def test_a_list_of_answers_earns_less_the_longer_it_is():
    assert 0.0 < answers("evidence", "among many").reward < 0.05
    assert answers("evidence", "all of the world").reward < 0.01
    assert 0.0 < answers("evidence", "a part").reward < 0.5


def test_a_failed_call_is_no_evidence():
    env = make("relax/Search-v0")
    task = two_hops(env)
    broken = ToolCall("open_page", {"id": task.data["page"], "page": 9})
    assert asyncio.run(play(env, ScriptedPolicy([broken, task.answer]), task=task.id)).reward == 0.0


def test_arguments_that_are_no_page_do_not_break_the_score():
    env = make("relax/Search-v0")
    odd = [ToolCall("open_page", {}), ToolCall("open_page", {"id": 7}), ToolCall("nothing", {})]
    record = asyncio.run(play(env, ScriptedPolicy([odd, "x"]), task=env.tasks.ids()[0]))
    assert (record.reward, record.metrics["tool_errors"]) == (0.0, 3.0)


def test_every_fact_is_told_on_its_subjects_page_in_one_of_its_wordings():
    world = World(60, 3)
    pages = {page.title: page.text for page in world.pages}
    for (key, subject), object in world.facts.items():
        wordings = [w.format(s=subject, o=object) for w in RELATIONS[key].wordings]
        assert sum(words in pages[subject] for words in wordings) == 1


def test_names_are_unique_and_wordings_differ_between_pages():
    world = World(260, 0)
    titles = [page.title for page in world.pages]
    assert len({*titles}) == len(titles) > 240
    told = re.findall(r"(came into the world|Church books)", " ".join(p.text for p in world.pages))
    assert 0.3 < told.count("Church books") / len(told) < 0.7


def test_questions_that_begin_at_a_held_out_name_are_all_held_out():
    env = make("relax/Search-v0")
    names = [page.title for page in World(260, 0).pages]

    def starts(split):
        prompts = " ".join(env.tasks[task].prompt for task in env.tasks.ids(split))
        return {name for name in names if re.search(rf"\b{re.escape(name)}\b", prompts)}

    train, held_out = starts("train"), starts("eval")
    assert not train & held_out
    assert 0.15 < len(held_out) / len(train | held_out) < 0.35


def test_hops_bound_the_length_of_questions():
    short, long = make("relax/Search-v0", hops=1), make("relax/Search-v0", hops=3)
    assert not any(" of the " in task.prompt for task in short.tasks)
    assert any(
        task.prompt.startswith("Name the river that flows through the town where the mayor of")
        for task in long.tasks
    )


def test_environments_with_equal_arguments_share_one_index():
    one, two = make("relax/Search-v0"), make("relax/Search-v0")
    assert one.tasks is two.tasks

"""Tasks: splits that share nothing, an order that resumes, answers that do not leak."""

import dataclasses
import itertools
import json
import pickle
import pprint

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_agent.envs import Task, TaskSet
from relax_agent.errors import ConfigError, EnvError


def numbered(count, prefix="t"):
    return [Task(f"{prefix}{n}", f"question {n}", answer=f"secret {n}") for n in range(count)]


def take(order, count):
    return list(itertools.islice(order, count))


@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 10))
def test_an_order_resumed_anywhere_goes_on_as_if_never_stopped(size, position, seed):
    """U10, U11: the position is all that a checkpoint keeps, also exactly at an epoch's end."""
    tasks = TaskSet(numbered(size))
    whole = take(tasks.sample_order(seed), position + 20)
    resumed = tasks.sample_order(seed, position=position)
    assert take(resumed, 20) == whole[position:]
    assert resumed.position == position + 20


def test_every_pass_visits_every_task_once_in_another_order():
    tasks = TaskSet(numbered(50))
    order = tasks.sample_order(3)
    passes = [take(order, 50) for _ in range(3)]
    assert all(sorted(ids) == sorted(tasks.ids()) for ids in passes)
    assert passes[0] != passes[1] != passes[2]
    assert take(tasks.sample_order(4), 50) != passes[0]


def test_the_order_is_the_same_in_every_process():
    tasks = TaskSet(numbered(5))
    assert take(tasks.sample_order(7), 10) == [f"t{n}" for n in (1, 4, 3, 0, 2, 2, 3, 4, 1, 0)]


def test_splits_share_no_id():
    with pytest.raises(ConfigError, match="two tasks have the id 't0'"):
        TaskSet(numbered(2), numbered(1))
    tasks = TaskSet(numbered(2), numbered(3, "e"))
    assert tasks.ids("train") == ("t0", "t1")
    assert tasks.ids("eval") == ("e0", "e1", "e2")
    with pytest.raises(ConfigError, match="no split 'test'"):
        tasks.ids("test")


def test_a_task_stays_in_its_split_when_others_come():
    few = TaskSet.split(numbered(200), eval_share=0.2)
    many = TaskSet.split(numbered(400), eval_share=0.2)
    assert set(few.ids("eval")) == set(many.ids("eval")) & {t.id for t in numbered(200)}
    assert 20 < len(few.ids("eval")) < 60


def test_the_fingerprint_changes_with_any_task():
    prints = {
        TaskSet(numbered(3)).fingerprint(),
        TaskSet(numbered(4)).fingerprint(),
        TaskSet(numbered(3)[::-1]).fingerprint(),
        TaskSet(numbered(2), numbered(3)[2:]).fingerprint(),
        TaskSet([*numbered(2), Task("t2", "question 2", "another")]).fingerprint(),
    }
    assert len(prints) == 5
    assert TaskSet(numbered(3)).fingerprint() in prints


def test_a_printed_task_hides_its_answer():
    assert "secret" not in repr(numbered(1)[0])
    assert "secret" not in repr(TaskSet(numbered(1)))


def test_an_unknown_task_and_an_empty_split_are_named():
    tasks = TaskSet(numbered(1))
    with pytest.raises(EnvError, match="there is no task 'x' → "):
        tasks["x"]
    with pytest.raises(ConfigError, match="no tasks"):
        tasks.sample_order(0, split="eval")


HIDING = [
    repr,
    str,
    dataclasses.asdict,
    dataclasses.astuple,
    pprint.pformat,
    lambda task: json.dumps(dataclasses.asdict(task)),
    lambda task: json.dumps(task, default=str),
    lambda task: f"{task} {task!r}",
]


@pytest.mark.parametrize("show", HIDING)
def test_nothing_that_prints_or_saves_a_task_shows_what_is_the_environments(show):
    task = Task("a", "2+2?", answer="secret", data={"tests": "secret"})
    assert "2+2?" in str(show(task))
    assert "secret" not in str(show(task))
    with pytest.raises((TypeError, AttributeError)):
        vars(task)


def test_a_copied_replaced_or_pickled_task_keeps_its_answer():
    task = Task("a", "2+2?", answer="4", data={"level": 1})
    assert pickle.loads(pickle.dumps(task)) == task
    other = dataclasses.replace(task, prompt="what is 2+2?")
    assert (other.answer, other.data, other.prompt) == ("4", {"level": 1}, "what is 2+2?")
    assert other != task
    assert Task("a", "2+2?", answer="5", data={"level": 1}) != task


def test_a_set_of_ids_orders_as_the_set_it_stands_for_and_has_no_answers():
    real = TaskSet(numbered(5), numbered(2, "e"))
    known = TaskSet.of_ids(real.ids(), real.ids("eval"), real.fingerprint())
    assert known.ids_only
    assert not real.ids_only
    assert known.fingerprint() == real.fingerprint()
    assert take(known.sample_order(3), 12) == take(real.sample_order(3), 12)
    assert "t3" in known
    assert (len(known), repr(known)) == (7, repr(real))
    with pytest.raises(EnvError, match=r"only the id of task 't3' is known here.*another process"):
        known["t3"]
    with pytest.raises(EnvError, match="only the id"):
        next(iter(known))
    with pytest.raises(EnvError, match="there is no task 'x'"):
        known["x"]
    with pytest.raises(ConfigError, match="two tasks have the id 'a'"):
        TaskSet.of_ids(["a"], ["a"])

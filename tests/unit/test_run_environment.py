"""The environment of a run: where it runs, its tasks and its expert."""

import asyncio

import pytest

from relax_agent.envs import Env, EnvSpec, TaskSet, make, registry
from relax_agent.envs.catalog.calculator_expert import CalculatorExpert
from relax_agent.errors import ConfigError
from relax_agent.run import environment
from relax_agent.run.environment import (
    EnvMaker,
    find_expert,
    require_expert,
    require_tasks,
    require_tools_argument,
)


class Elsewhere(Env):
    """Stands for an environment in another process: ids of tasks, nothing else."""

    def __init__(self, spec):
        self.spec = spec
        self.tasks = TaskSet.of_ids(["a"], ["b"], "f")


def test_isolation_reaches_make(monkeypatch):
    made = []

    async def make_async(env_id, **kwargs):
        return made.append((env_id, kwargs))

    monkeypatch.setattr(environment, "make", lambda env_id, **kw: made.append((env_id, kw)))
    monkeypatch.setattr(environment, "make_async", make_async)
    maker = EnvMaker("x/Y-v0", {"a": 1}, "process")
    maker()
    asyncio.run(maker.build())
    assert made == [("x/Y-v0", {"isolation": "process", "a": 1})] * 2


def test_the_expert_of_an_environment_that_runs_elsewhere_is_its_classes():
    env = Elsewhere(registry["relax/Calculator-v0"])
    assert isinstance(find_expert(env, noise=0.5, seed=3), CalculatorExpert)
    assert isinstance(find_expert(make("relax/Calculator-v0")), CalculatorExpert)
    assert list(require_tasks(env).ids("train")) == ["a"]


class WithMethod(Env):
    def expert(self, *, noise, seed):
        raise AssertionError("needs an environment")


@pytest.mark.parametrize("kind", [Env, WithMethod])
def test_no_expert_is_none(kind):
    env = Elsewhere(EnvSpec("test/None-v0", kind))
    assert find_expert(env) is None
    with pytest.raises(ConfigError, match="test/None-v0 has no expert"):
        require_expert(env, noise=0, seed=0)


def test_tools_of_a_recipe_need_an_environment_that_takes_them():
    """Else it would be told only when the servers and the models are up."""
    require_tools_argument(make("relax/Calculator-v0"))
    with pytest.raises(ConfigError, match=r"tools section.*relax/Sudoku-v0 takes no tools"):
        require_tools_argument(make("relax/Sudoku-v0"))

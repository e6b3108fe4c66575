"""``docs/recipes.md``: its recipe parses, and its expert plays the environment that it is for."""

import asyncio
import re
import sys
import types
from pathlib import Path

import yaml

from relax_agent.envs import play
from relax_agent.run.recipe import parse_recipe

DOCS = Path(__file__).parents[2] / "docs"


def block(page, language):
    return re.search(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.S)[1]


def test_the_recipe_of_the_page_is_a_recipe():
    settings = parse_recipe(yaml.safe_load(block("recipes.md", "yaml")), "docs/recipes.md")
    assert settings.trainer.warm_start.enabled and settings.env.modules == ["shop"]


def test_the_expert_of_the_page_solves_every_task_of_the_first_environment(monkeypatch):
    shop = types.ModuleType("shop")
    monkeypatch.setitem(sys.modules, "shop", shop)
    exec(block("first-environment.md", "python"), shop.__dict__)
    exec(block("recipes.md", "python"), {})
    env = shop.Fruit()

    async def rewards():
        tasks = [*env.tasks.ids("train"), *env.tasks.ids("eval")]
        return [(await play(env, env.expert(), task=task)).reward for task in tasks]

    assert set(asyncio.run(rewards())) == {1.0}

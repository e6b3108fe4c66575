"""Recipes whose numbers cannot work together are refused before anything starts."""

import pytest
from run_support import recipe

from relax_agent.errors import ConfigError
from relax_agent.run.goal import judge
from relax_agent.run.recipe import GoalSettings, parse_recipe

MEGATRON = {"kind": "megatron", "warm_start": {"steps": 0}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout": {"max_context": 5000}}, "max_context=5000.*micro_batch_tokens=4096"),
        ({"trainer": {"micro_batch_tokens": 200}}, "max_context=256.*micro_batch_tokens=200"),
        (
            {
                "rollout": {"max_context": 600},
                "engine": {"max_total_tokens": 512},
            },
            "max_context=600.*max_total_tokens=512",
        ),
        ({"rollout": {"group_size": 1}}, "group_size=1"),
        ({"engine": {"count": 0}}, "engine.count"),
        ({"trainer": {"ranks": 2}}, "torch runs on one rank"),
        (
            {"trainer": MEGATRON | {"ranks": 3, "parallel": {"tensor": 2}}},
            "3 is not a multiple of tensor × pipeline = 2",
        ),
        (
            {"trainer": MEGATRON | {"ranks": 2, "parallel": {"expert": 4}}},
            "ranks / pipeline = 2 is not a multiple of expert = 4",
        ),
        ({"trainer": {"warm_start": {"episodes": 8}}}, "episodes=8 is less than one batch.*=16"),
    ],
)
def test_numbers_that_do_not_fit_are_named_with_the_arithmetic(changes, words):
    """U22: no hang and no failure an hour later."""
    with pytest.raises(ConfigError, match=words):
        parse_recipe(recipe(**changes), "recipe")


def test_a_run_without_an_optimizer_step_is_no_success():
    """U23: every step was skipped, everything else went well."""
    line = {"success": 1.0, "skipped": "every advantage is zero", "routes_replayed": 1.0}
    goal = GoalSettings(success_last=0.5)
    outcome = judge([line] * 20, goal, greedy_before=1.0, greedy_after=1.0, replay=True)
    assert any("optimizer steps: 0, wanted at least 1" in missed for missed in outcome.missed)
    made = line | {"skipped": None}
    assert not judge([made], goal, greedy_before=1.0, greedy_after=1.0, replay=True).missed

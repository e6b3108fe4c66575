"""A run is judged by its own figures, and says which one it missed."""

import pytest

from relax_agent.run.goal import judge
from relax_agent.run.recipe import GoalSettings


def metrics(*successes, **more):
    line = {"skipped": None, "routes_replayed": 1.0, **more}
    return [line | {"success": value} for value in successes]


def missed(lines, before=None, after=None, replay=False, **goal):
    goal = GoalSettings(**goal)
    return judge(lines, goal, greedy_before=before, greedy_after=after, replay=replay).missed


def test_success_is_the_mean_of_the_first_three_and_the_last_ten_steps():
    lines = metrics(*[0.0] * 3, *[0.9] * 5, *[0.5] * 10)
    outcome = judge(lines, GoalSettings(), greedy_before=0.1, greedy_after=0.4, replay=False)
    assert (outcome.success_first, outcome.success_last) == (0.0, 0.5)
    assert (outcome.steps, outcome.missed) == (18, [])
    assert outcome.to_json()["greedy_after"] == 0.4


@pytest.mark.parametrize(
    ("goal", "words"),
    [
        ({"success_last": 0.8}, "sampled success of the last 10 steps: 0.7, wanted at least 0.8"),
        ({"success_rise": 0.6}, "rise of sampled success over the first 3 steps: 0.5, wanted"),
        ({"greedy_rise": 0.4}, "rise of greedy held-out success: 0.3, wanted at least 0.4"),
    ],
)
def test_every_figure_that_falls_short_is_named(goal, words):
    lines = metrics(*[0.2] * 3, *[0.7] * 10)
    (said,) = missed(lines, 0.5, 0.8, **goal)
    assert said.startswith(words)


def test_figures_that_are_just_reached_are_enough():
    lines = metrics(*[0.25] * 3, *[0.75] * 10)
    assert missed(lines, 0.25, 0.5, success_last=0.75, success_rise=0.5, greedy_rise=0.25) == []


def test_a_figure_that_was_never_measured_is_missed():
    assert missed(metrics(0.5), greedy_rise=0.1) == [
        "rise of greedy held-out success: none, wanted at least 0.1"
    ]


def test_the_step_with_the_fewest_replayed_routes_counts_where_there_is_replay():
    lines = metrics(0.5) + metrics(0.5, routes_replayed=0.9)
    assert missed(lines, replay=False) == []
    assert missed(lines, replay=True) == ["share of routes replayed: 0.9, wanted at least 0.99"]
    assert missed(lines, replay=True, routes_replayed=0.9) == []


def test_a_skipped_step_replays_nothing_and_counts_as_none():
    lines = metrics(0.5) + metrics(0.5, skipped="why", routes_replayed=0.0)
    outcome = judge(lines, GoalSettings(), greedy_before=0, greedy_after=0, replay=True)
    assert (outcome.steps, outcome.routes_replayed, outcome.missed) == (1, 1.0, [])

"""Wrappers of rewards, prompts and form: what they change, and that they change nothing else."""

import asyncio
import math

import pytest

from relax_agent.envs import Env, EnvSpec, make
from relax_agent.envs.wrappers import (
    FormatPenalty,
    RewardClip,
    RewardScale,
    RewardShaping,
    SystemPrompt,
)
from relax_agent.errors import ConfigError, EnvError
from relax_agent.messages import Image, Rewrite, ToolCall, assistant, system, user


class Giving(Env):
    """Gives the stated rewards, one a step."""

    def __init__(self, *rewards, first=(), observation=(), info=None):
        self.rewards = list(rewards)
        self.first, self.observation, self.info = first, observation, info or {}

    async def reset(self, *, seed=None, options=None):
        self.left = list(self.rewards)
        return self.first if isinstance(self.first, Rewrite) else list(self.first), {}

    async def step(self, action):
        seen = self.observation
        seen = seen if isinstance(seen, Rewrite) else list(seen)
        return seen, self.left.pop(0), not self.left, False, dict(self.info)

    async def score_group(self, task_id, members):
        return [1.0, -3.0]


def steps(env, *actions):
    async def main():
        await env.reset(seed=1)
        return [await env.step(action) for action in actions]

    return asyncio.run(main())


def rewards(env, *actions):
    count = len(env.unwrapped.rewards)
    return [step[1] for step in steps(env, *(actions or [assistant("x")] * count))]


def doubled(reward, action, observation, info):
    return reward * 2 + len(action.text)


async def slowly(reward, action, observation, info):
    await asyncio.sleep(0)
    return 7


def test_scale_and_clip_change_every_reward_and_keep_the_raw_one():
    assert rewards(RewardScale(Giving(1, -2, 0.5), 10)) == [10, -20, 5]
    assert rewards(RewardClip(Giving(3, -2, 0.5))) == [1, -1, 0.5]
    assert steps(RewardClip(RewardScale(Giving(3), 10)), assistant("x"))[0][4]["raw_reward"] == 3


def test_the_outer_wrapper_acts_last():
    assert rewards(RewardClip(RewardScale(Giving(0.5), 10))) == [1.0]
    assert rewards(RewardScale(RewardClip(Giving(5)), 10)) == [10.0]


def test_group_rewards_are_changed_like_the_others():
    assert asyncio.run(RewardScale(Giving(), 10).score_group("t", [])) == [10.0, -30.0]
    assert asyncio.run(RewardClip(Giving()).score_group("t", [])) == [1.0, -1.0]


@pytest.mark.parametrize("function", [doubled, f"{__name__}:doubled"])
def test_shaping_asks_a_function_given_as_such_or_by_name(function):
    assert rewards(RewardShaping(Giving(1, 2), function)) == [3, 5]


def test_shaping_may_be_async():
    assert rewards(RewardShaping(Giving(1), slowly)) == [7.0]


@pytest.mark.parametrize(
    "value", [float("nan"), math.inf, "1", None, True, 10**400, [1.0]], ids=repr
)
def test_a_shaped_reward_that_is_no_finite_number_is_named(value):
    env = RewardShaping(Giving(1), lambda *_: value)
    with pytest.raises(EnvError, match=r"lambda.*returned"):
        rewards(env)


def test_a_shaping_function_that_raises_is_named():
    def broken(reward, action, observation, info):
        raise ZeroDivisionError("oh")

    with pytest.raises(EnvError, match=r"broken raised ZeroDivisionError: oh"):
        rewards(RewardShaping(Giving(1), broken))


@pytest.mark.parametrize(
    "bad",
    [
        lambda e: RewardScale(e, float("nan")),
        lambda e: RewardClip(e, 1, 1),
        lambda e: RewardClip(e, float("nan"), 1),
        lambda e: RewardShaping(e, "nofunction"),
        lambda e: RewardShaping(e, "math:nothing"),
        lambda e: RewardShaping(e, "math:pi"),
        lambda e: RewardShaping(e, "no_such_module_here:f"),
        lambda e: RewardShaping(e, 3),
        lambda e: SystemPrompt(e, "x", mode="before"),
        lambda e: SystemPrompt(e, "", mode="append"),
        lambda e: FormatPenalty(e, empty=-0.1),
        lambda e: FormatPenalty(e, cap=float("nan")),
        lambda e: FormatPenalty(e, pattern="("),
        lambda e: FormatPenalty(e, tags="answer"),
        lambda e: FormatPenalty(e, tags=["<answer>"]),
        lambda e: FormatPenalty(e, applies_to="some"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(bad):
    with pytest.raises(ConfigError):
        bad(Giving())


# -- the system prompt -----------------------------------------------------------------------------


def first(env):
    observation, _ = asyncio.run(env.reset())
    return observation


OLD = [system("old"), user("question")]


@pytest.mark.parametrize(
    ("mode", "text"), [("replace", "new"), ("prepend", "new\n\nold"), ("append", "old\n\nnew")]
)
def test_a_system_prompt_is_replaced_or_added_to(mode, text):
    messages = first(SystemPrompt(Giving(first=OLD), "new", mode))
    assert [(m.role, m.text) for m in messages] == [("system", text), ("user", "question")]


@pytest.mark.parametrize("mode", ["replace", "prepend", "append"])
def test_an_environment_without_a_system_prompt_gets_one(mode):
    messages = first(SystemPrompt(Giving(first=OLD[1:]), "new", mode))
    assert [(m.role, m.text) for m in messages] == [("system", "new"), ("user", "question")]


def test_an_empty_text_takes_the_system_prompt_away():
    assert first(SystemPrompt(Giving(first=OLD), "")) == OLD[1:]


def test_pictures_in_a_system_prompt_stay():
    old = [system(["look", Image(b"x")]), user("question")]
    (message, _) = first(SystemPrompt(Giving(first=old), "new", "append"))
    assert (message.text, len(message.media)) == ("look\n\nnew", 1)


def test_a_rewritten_history_gets_the_prompt_as_well():
    env = SystemPrompt(Giving(0, 0, observation=Rewrite(tuple(OLD), "why")), "new")
    observation = steps(env, assistant("x"))[0][0]
    assert observation == Rewrite((system("new"), OLD[1]), "why")
    assert first(SystemPrompt(Giving(first=Rewrite(tuple(OLD), "w")), "new")).messages[0].text == (
        "new"
    )


def test_the_prompt_leaves_later_messages_alone():
    env = SystemPrompt(Giving(0, 0, observation=[system("late")]), "new")
    assert steps(env, assistant("x"))[0][0] == [system("late")]


# -- form ------------------------------------------------------------------------------------------

BAD_CALL = ToolCall("f", {}, "c", "no closing brace")
GOOD_CALL = ToolCall("f", {}, "d")


@pytest.mark.parametrize(
    ("action", "options", "faults"),
    [
        (assistant("fine"), {}, []),
        (assistant(""), {}, ["empty"]),
        (assistant(" \n"), {}, ["empty"]),
        (assistant(tool_calls=[GOOD_CALL]), {}, []),
        (assistant(tool_calls=[BAD_CALL, BAD_CALL, GOOD_CALL]), {}, ["bad_call"] * 2),
        (assistant("42"), {"tags": ["answer"]}, ["tags"]),
        (assistant("<answer>42</answer>"), {"tags": ["answer"]}, []),
        (assistant("<answer> </answer>"), {"tags": ["answer"]}, ["tags"]),
        (assistant("<answer>1</answer><answer>2</answer>"), {"tags": ["answer"]}, ["tags"]),
        (assistant("<a>1</a> <b>\n2</b>"), {"tags": ["a", "b"]}, []),
        (assistant("<b>1</b> <a>2</a>"), {"tags": ["a", "b"]}, ["tags"]),
        (assistant("<a>1<b>2</a></b>"), {"tags": ["a", "b"]}, ["tags"]),
        (assistant("x", tool_calls=[GOOD_CALL]), {"tags": ["a"]}, []),
        (assistant("x", tool_calls=[GOOD_CALL]), {"tags": ["a"], "applies_to": "all"}, ["tags"]),
        (assistant("a\nb"), {"pattern": "^a.b$"}, []),
        (assistant("ab"), {"pattern": r"\d"}, ["pattern"]),
        (assistant(""), {"pattern": r"\d"}, ["empty", "pattern"]),
    ],
)
def test_each_fault_of_form_is_found_and_priced(action, options, faults):
    env = FormatPenalty(Giving(1.0, 0.0), **options)
    ((_, reward, _, _, info),) = steps(env, action)
    assert info["format_faults"] == faults
    assert reward == pytest.approx(1.0 - 0.1 * len(faults))
    assert info["raw_reward"] == 1.0
    assert info["metrics"]["format_faults"] == len(faults)
    assert info["metrics"]["format_penalty"] == pytest.approx(0.1 * len(faults))


def test_an_episode_loses_no_more_than_the_cap_and_the_next_begins_anew():
    env = FormatPenalty(Giving(0, 0, 0, 0, info={"metrics": {"own": 1.0}}), empty=0.4, cap=1.0)
    for _ in range(2):
        out = steps(env, *[assistant("")] * 4)
        assert [step[1] for step in out] == pytest.approx([-0.4, -0.4, -0.2, 0.0])
        assert out[-1][4]["metrics"] == {"own": 1.0, "format_faults": 4.0, "format_penalty": 1.0}


# -- specs -----------------------------------------------------------------------------------------


def test_all_of_them_round_trip_through_a_spec():
    env = make("relax/Calculator-v0", train_tasks=9, eval_tasks=3)
    env = SystemPrompt(env, "Be brief.", mode="append")
    env = FormatPenalty(env, tags=("answer",), cap=0.5)
    env = RewardClip(RewardScale(RewardShaping(env, doubled), 0.5), low=-2, high=2)
    text = env.spec.to_json()
    again = EnvSpec.from_json(text).make()
    assert again.spec.to_json() == text

    async def episode(one):
        observation, _ = await one.reset(seed=3)
        return observation, (await one.step(assistant("forty")))[1]

    assert asyncio.run(episode(again)) == asyncio.run(episode(env))


def test_a_lambda_works_here_and_its_spec_says_why_not_elsewhere():
    env = RewardShaping(make("relax/Calculator-v0"), lambda r, *_: r)
    with pytest.raises(ConfigError, match="function"):
        env.spec.to_json()

"""Gymnasium, both ways, against the real package."""

import asyncio
import gc
import io
import json
import pickle
import subprocess
import sys
import threading
import time
import warnings
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from peer_support import run_snippets
from PIL import Image as Picture

from relax_agent.envs import Env, EnvSpec, RandomPolicy, SyncEnv, make, play, register
from relax_agent.envs.adapters import as_gymnasium, from_gymnasium
from relax_agent.envs.checking import check_env as check_agent_env
from relax_agent.errors import (
    ConfigError,
    EnvError,
    InvalidAction,
    MissingExtraError,
    ResetNeeded,
    UnknownEnv,
)
from relax_agent.gymnasium import (
    decode_action,
    decode_observation,
    encode_action,
    encode_observation,
)
from relax_agent.messages import (
    AssistantMessage,
    Image,
    Rewrite,
    Text,
    ToolCall,
    Usage,
    assistant,
    user,
)


def act(*actions, name="act"):
    """A message that calls the tool once for each action."""
    calls = [
        ToolCall(name, each if isinstance(each, dict) else {"action": each}, f"call_{i}")
        for i, each in enumerate(actions)
    ]
    return assistant(tool_calls=calls)


async def episode(env, *messages, seed=0, options=None):
    """Reset, step until the end, close; return the first observation and all results."""
    observation, info = await env.reset(seed=seed, options=options)
    results = []
    for message in messages:
        results.append(await env.step(message))
        if results[-1][2] or results[-1][3]:
            break
    await env.close()
    return (observation, info), results


def run(env, *messages, **how):
    return asyncio.run(episode(env, *messages, **how))


def texts(results):
    return [message.text for result in results for message in result[0]]


class Custom(gymnasium.Env):
    """Whatever spaces a test wants; remembers what it was given."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 1}

    def __init__(self, action=None, observation=None, value=0, render_mode=None):
        self.action_space = action or spaces.Discrete(2)
        self.observation_space = observation or spaces.Discrete(3)
        self.render_mode = render_mode
        self.value = value
        self.given = []
        self.threads = set()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.threads.add(threading.get_ident())
        self.options = options
        return self.value, {}

    def step(self, action):
        self.threads.add(threading.get_ident())
        self.given.append(action)
        return self.value, 1.0, False, False, {"array": np.arange(2), "what": object()}

    def render(self):
        self.threads.add(threading.get_ident())
        return np.zeros((2, 3, 3), np.uint8)


# -- from Gymnasium --------------------------------------------------------------------------------


def test_the_way_over_a_lake_that_is_not_slippery_reaches_the_goal():
    env = from_gymnasium("FrozenLake-v1", env_args={"is_slippery": False})
    (tool,) = env.tools.schemas()
    assert tool["function"]["parameters"]["properties"]["action"]["enum"] == [
        "left", "down", "right", "up",
    ]  # fmt: skip
    way = ["down", "down", "right", "right", "down", "right"]
    (first, info), results = run(env, *(act(step) for step in way))
    assert "SFFF\nFHFH\nFFFH\nHFFG" in first[0].text
    assert first[0].text.endswith("you are at row 0, column 0")
    assert "task" not in info
    messages, reward, terminated, truncated, info = results[-1]
    assert messages[0].role == "tool" and messages[0].tool_call_id == "call_0"
    assert messages[0].text == "you are at row 3, column 3"
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info["metrics"] == {"success": 1.0, "steps": 6.0, "turns": 6.0, "invalid_actions": 0.0}


def test_equal_seeds_give_equal_episodes_however_they_are_interleaved():
    """T161: each environment has its own generator, on slippery ice too."""
    messages = [act(step) for step in ["right", "down"] * 10]

    async def together():
        one, two = (from_gymnasium("FrozenLake-v1") for _ in range(2))
        return await asyncio.gather(
            episode(one, *messages, seed=5), episode(two, *messages, seed=5)
        )

    one, two = asyncio.run(together())
    alone = run(from_gymnasium("FrozenLake-v1"), *messages, seed=5)
    assert one == two == alone
    others = [run(from_gymnasium("FrozenLake-v1"), *messages, seed=s) for s in range(4)]
    assert any(texts(other[1]) != texts(alone[1]) for other in others)


def test_blackjack_names_what_its_numbers_mean():
    (first, _), results = run(from_gymnasium("Blackjack-v1"), act("stick"), seed=1)
    lines = dict(line.split(": ") for line in first[0].text.splitlines()[-3:])
    assert lines.keys() == {"your sum", "dealer shows", "usable ace"}
    assert results[-1][1] in (-1.0, 0.0, 1.0) and results[-1][2] is True


def test_cartpole_as_text_and_as_a_picture():
    (first, _), _ = run(from_gymnasium("CartPole-v1"), seed=3)
    assert "pole angle: 0.0" in first[0].text
    env = from_gymnasium("CartPole-v1", observation="image")
    (first, _), results = run(env, *[act("right")] * 8, seed=3)
    seen = [first[0], *(result[0][0] for result in results)]
    assert [len(message.media) for message in seen] == [1] * 9
    picture = Picture.open(io.BytesIO(seen[-1].media[0].data))
    assert picture.format == "PNG" and picture.size == (600, 400)
    assert seen[0].media != seen[-1].media and "cart position" not in seen[0].text


def test_text_and_picture_together_and_what_an_environment_renders_as_text():
    both = from_gymnasium(Custom(render_mode="rgb_array"), observation="text+image")
    (first, _), results = run(both, act(1))
    assert first[0].text.endswith("\n\n0") and len(first[0].media) == 1
    assert results[0][0][0].text == "0" and isinstance(results[0][0][0].content[1], Image)
    ansi = from_gymnasium("FrozenLake-v1", observation="ansi")
    assert "HFFG" in run(ansi)[0][0][0].text


def test_a_taxi_is_described_in_words():
    taxi = "Taxi-v4" if "Taxi-v4" in gymnasium.registry else "Taxi-v3"
    (first, info), results = run(from_gymnasium(taxi), act("pickup"), seed=0)
    assert "the passenger is at" in first[0].text and "wants to go to" in first[0].text
    assert info["gymnasium"]["action_mask"] and results[0][1] == -10.0


def test_a_box_is_a_list_within_bounds():
    env = from_gymnasium("MountainCarContinuous-v0")
    (first, _), results = run(env, act([0.5]), act([1.5]), act(0.5), act(["nan"]))
    assert first[0].text.splitlines()[-1] == "velocity: 0.0"
    assert [result[1] < 0 for result in results] == [True, False, False, False]
    assert ["Error" in text for text in texts(results)] == [False, True, True, True]


SPACES = [
    (spaces.Discrete(3, start=5), {"action": 7}, 7, {"action": 4}),
    (spaces.MultiBinary(3), {"action": [1, 0, 1]}, [1, 0, 1], {"action": [1, 0]}),
    (spaces.MultiDiscrete([2, 5]), {"action": [1, 4]}, [1, 4], {"action": [4, 1]}),
    (spaces.Box(-1, 1, (2, 2)), {"action": [[0, 1], [1, 0]]}, [[0, 1], [1, 0]], {"action": [0]}),
    (spaces.Box(0, 9, (), int), {"action": 9}, 9, {"action": 10}),
    (
        spaces.Box(np.array([0, -5], np.float32), np.array([1, 5], np.float32)),
        {"action": [0.5, -4.5]}, [0.5, -4.5], {"action": [-4.5, 0.5]},
    ),
    (spaces.Text(3, charset="ab"), {"action": "abba"[:3]}, "abb", {"action": "xyz"}),
    (spaces.Sequence(spaces.Discrete(3)), {"action": [2, 0]}, (2, 0), {"action": [3]}),
    (
        spaces.Dict(move=spaces.Discrete(4), force=spaces.Box(0, 1, ())),
        {"move": 3, "force": 0.5}, {"move": 3, "force": 0.5}, {"move": 4, "force": 0.5},
    ),
    (
        spaces.Dict(arm=spaces.Dict(x=spaces.Discrete(2)), both=spaces.Tuple([spaces.Discrete(2)])),
        {"arm": {"x": 1}, "both": {"item_0": 0}}, {"arm": {"x": 1}, "both": (0,)},
        {"arm": {"x": 1}},
    ),
    (
        spaces.Tuple([spaces.Discrete(2), spaces.Discrete(2)]),
        {"item_0": 1, "item_1": 0}, (1, 0), {"item_0": 1},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("space", "arguments", "native", "wrong"), SPACES, ids=str)
def test_every_action_space_is_a_tool_whose_arguments_are_checked(space, arguments, native, wrong):
    inner = Custom(space)
    env = from_gymnasium(inner)
    _, results = run(env, act(arguments), act(wrong), act({"nonsense": 1}))
    assert [result[1] for result in results] == [1.0, 0.0, 0.0]
    assert ["Error" in text for text in texts(results)] == [False, True, True]
    (given,) = inner.given
    assert space.contains(given)
    assert json.dumps(given, default=lambda each: each.tolist()) == json.dumps(
        native, default=lambda each: each.tolist()
    ) or np.array_equal(given, native)
    json.dumps(env.tools.schemas())


def test_random_calls_of_the_tool_are_mostly_actions():
    env = from_gymnasium("FrozenLake-v1", max_turns=30)
    record = asyncio.run(play(env, RandomPolicy(1, call_share=1.0), seed=1))
    assert record.metrics["invalid_actions"] == 0 and record.metrics["steps"] > 1


OBSERVATIONS = [
    (spaces.Discrete(3, start=1), 2, "2"),
    (spaces.MultiDiscrete([2, 5]), np.array([1, 4]), "[1, 4]"),
    (spaces.Box(-9, 9, (2, 2)), np.array([[1 / 3, -0.0], [2, 3]], np.float32),
     "[[0.33333, 0.0], [2.0, 3.0]]"),
    (spaces.Text(5), "hello", "hello"),
    (spaces.Tuple([spaces.Discrete(2), spaces.Text(5)]), (1, "xyz"), "0: 1\n1: xyz"),
    (spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(0, 1, (1,))),
     {"a": 1, "b": np.array([0.5], np.float32)}, "a: 1\nb: [0.5]"),
    (spaces.Sequence(spaces.Discrete(3)), (1, 2), "[1, 2]"),
]  # fmt: skip


@pytest.mark.parametrize(("space", "value", "text"), OBSERVATIONS, ids=str)
def test_every_observation_is_a_readable_text(space, value, text):
    env = from_gymnasium(Custom(observation=space, value=value))
    (first, _), results = run(env, act(0))
    assert first[0].text.endswith("\n\n" + text)
    assert results[0][0][0].text == text


def test_names_and_templates_of_ones_own():
    env = from_gymnasium(
        Custom(observation=spaces.Box(0, 1, (2,)), value=np.zeros(2, np.float32)),
        action_names=["wait", "go"],
        component_names=["heat", "light"],
        tool_name="do",
        prompt='Say {"what"}: {observation}',
        reply="{step}. {observation} ({reward})",
    )
    (first, _), results = run(env, act("go", name="do"))
    assert first[0].text == 'Say {"what"}: heat: 0.0\nlight: 0.0'
    assert texts(results) == ["1. heat: 0.0\nlight: 0.0 (1)"]


def test_the_calls_of_one_message_are_done_in_order_until_the_episode_ends():
    env = from_gymnasium("FrozenLake-v1", env_args={"is_slippery": False}, max_calls=4)
    _, results = run(env, act("right", "north", "down", "down", "left"))
    (result,) = results
    first, wrong, hole, after, refused = texts(results)
    assert first == "you are at row 0, column 1" and "input should be 'left'" in wrong
    assert hole == "you are at row 1, column 1" and result[2]
    assert after == refused == "Error: the episode is over"
    assert [message.tool_call_id for message in result[0]] == [f"call_{i}" for i in range(5)]
    assert result[4]["metrics"]["steps"] == 2
    inner = Custom()
    _, results = run(from_gymnasium(inner, max_calls=2), act(0, 1, 0))
    assert inner.given == [0, 1] and results[0][1] == 2.0
    assert "only 2 actions of one message are done" in texts(results)[-1]


def test_what_is_no_action_is_answered_and_not_done():
    inner = Custom()
    broken = assistant(tool_calls=[ToolCall("act", {}, "c", error="no JSON")])
    env = from_gymnasium(inner, invalid_reward=-0.5, max_turns=4)
    _, results = run(env, assistant("hello"), broken, act(0, name="move"), act(9))
    words = texts(results)
    assert "call the tool act" in words[0] and results[0][0][0].role == "user"
    assert "could not be read" in words[1] and "there is no tool 'move'" in words[2]
    assert [result[1] for result in results] == [-0.5] * 4
    assert inner.given == [] and results[-1][2:4] == (False, True)
    assert results[-1][4]["metrics"]["invalid_actions"] == 4


def test_plain_text_can_be_the_action():
    env = from_gymnasium("CartPole-v1", actions="text")
    assert env.tools.schemas() == []
    said = ["left", "RIGHT.", "I think so:\n\nleft", "so <action> right </action>", "1", "up", ""]
    (first, _), results = run(env, *map(assistant, said))
    assert "Answer with one action: left, right." in first[0].text
    assert [result[1] for result in results] == [1.0] * 5 + [0.0] * 2
    assert all(result[0][0].role == "user" for result in results)
    inner = Custom(spaces.Dict(x=spaces.Box(0, 1, (2,))))
    env = from_gymnasium(inner, actions="text")
    (first, _), results = run(env, assistant('{"x": [0, 1]}'), assistant("[0, 1]"), act([1]))
    assert '"x"' in first[0].text and len(inner.given) == 1
    assert "there is no tool" in texts(results)[-1]


def test_tasks_are_seeds_that_decide_the_episode():
    env = from_gymnasium("CartPole-v1", tasks=20, eval_tasks=[99, 98])
    assert len(env.tasks.ids("train")) == 20 and len(env.tasks.ids("eval")) == 2

    async def first(options, seed):
        observation, info = await env.reset(seed=seed, options=options)
        return observation[0].text, info["task"]

    async def main():
        named = [await first({"task": "train-7"}, seed) for seed in (1, 2)]
        drawn = [await first({"split": "eval"}, seed) for seed in range(8)]
        with pytest.raises(EnvError, match="no task 'train-99'"):
            await env.reset(options={"task": "train-99"})
        await env.close()
        return named, drawn

    named, drawn = asyncio.run(main())
    assert named[0] == named[1] and named[0][1] == "train-7"
    assert {task for _, task in drawn} == {"eval-99", "eval-98"}
    plain, _ = asyncio.run(episode(from_gymnasium("CartPole-v1"), seed=7))
    assert plain[0][0].text == named[0][0]


def test_gymnasiums_own_reset_options_have_a_place_and_others_none():
    inner = Custom()
    run(from_gymnasium(inner), options={"gymnasium": {"low": 0.1}, "task": None})
    assert inner.options == {"low": 0.1}
    with pytest.raises(EnvError, match="unknown reset option 'low'"):
        run(from_gymnasium(Custom()), options={"low": 0.1})
    with pytest.raises(EnvError, match="tasks=1000"):
        run(from_gymnasium(Custom()), options={"task": "x"})


def test_an_environment_is_stepped_and_rendered_in_one_thread():
    """T151: pygame and browsers insist on it."""
    inner = Custom(render_mode="rgb_array")
    run(from_gymnasium(inner, observation="image"), act(0), act(1))
    assert len(inner.threads) == 1 and threading.get_ident() not in inner.threads


def test_limits_of_gymnasium_truncate():
    env = from_gymnasium("CartPole-v1", env_args={"max_episode_steps": 2})
    _, results = run(env, act("left"), act("right"), act("left"))
    assert [result[2:4] for result in results] == [(False, False), (False, True)]
    assert results[-1][4]["metrics"]["success"] == 0.0


def test_the_spec_rebuilds_the_environment_and_its_arguments():
    env = make("relax/Gymnasium-v0", env_id="FrozenLake-v1", env_args={"is_slippery": False})
    again = make(EnvSpec.from_json(env.spec.to_json()))
    way = [act("right"), act("down")]
    assert run(env, *way) == run(again, *way)


def test_an_id_that_does_not_exist_names_the_nearest():
    with pytest.raises(UnknownEnv, match=r"did you mean .*FrozenLake-v1"):
        from_gymnasium("FrozenLaek-v1")
    with pytest.raises(UnknownEnv, match=r"did you mean .*CartPole-v1"):
        from_gymnasium("CartPole-v77")
    with pytest.raises(ConfigError, match="nowhere"):
        from_gymnasium("nowhere.at_all:Env-v0")
    with pytest.raises(ConfigError, match="not an id of Gymnasium"):
        from_gymnasium("what is this")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"observation": "smell"}, "observation='smell'"),
        ({"actions": "dance"}, "actions='dance'"),
        ({"action_names": ["a"]}, "1 action_names for 2 actions"),
        ({"component_names": ["a"]}, "1 component_names for 4"),
        ({"observation": "image", "component_names": ["a"] * 4}, "say nothing"),
        ({"observation": "ansi"}, "does not render as ansi, only as human, rgb_array"),
        ({"env_args": {"colour": "red"}}, "colour"),
        ({"tasks": [1, 2], "eval_tasks": [2]}, "seed 2 is both"),
        ({"tasks": 0}, "no tasks"),
        ({"max_turns": 0}, "must be ≥ 1"),
        ({"max_calls": 0}, "must be ≥ 1"),
        ({"is_slippery": False}, "is_slippery.*env_args"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_arguments_that_make_no_sense_say_so(options, words):
    with pytest.raises((ConfigError, EnvError), match=words):
        from_gymnasium("CartPole-v1", **options)


def test_what_cannot_be_shown_or_done_is_refused_when_it_is_made():
    with pytest.raises(ConfigError, match=r"too many for a text.*image"):
        from_gymnasium(Custom(observation=spaces.Box(0, 1, (64, 64))))
    with pytest.raises(ConfigError, match="Graph cannot be a tool"):
        from_gymnasium(Custom(spaces.Graph(spaces.Box(0, 1, (1,)), None)))
    with pytest.raises(ConfigError, match="cannot be an argument's name"):
        from_gymnasium(Custom(spaces.Dict({"a b": spaces.Discrete(2)})))
    with pytest.raises(ConfigError, match="neither an id nor"):
        from_gymnasium(17)


def test_a_package_that_is_missing_is_named_with_its_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'relax-agent\[envs\]'"):
        from_gymnasium("CartPole-v1")
    with pytest.raises(MissingExtraError, match=r"pip install 'relax-agent\[envs\]'"):
        as_gymnasium("relax/Calculator-v0")


def test_a_picture_without_pillow_names_its_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'relax-agent\[media\]'"):
        run(from_gymnasium(Custom(render_mode="rgb_array"), observation="image"))


def test_an_environment_that_raises_is_an_env_error_with_its_cause():
    class Broken(Custom):
        def step(self, action):
            raise ZeroDivisionError("by design")

    with pytest.raises(EnvError, match="ZeroDivisionError: by design") as caught:
        run(from_gymnasium(Broken()), act(0))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_reward_that_is_no_number_is_refused():
    class Mad(Custom):
        def step(self, action):
            return 0, float("nan"), False, False, {}

    with pytest.raises(EnvError, match="the reward is nan"):
        run(from_gymnasium(Mad()), act(0))


@pytest.mark.parametrize(
    "arguments",
    [{"env_id": "FrozenLake-v1"}, {"env_id": "Blackjack-v1", "actions": "text", "tasks": 9}],
)
def test_our_own_checker_has_nothing_to_say(arguments):
    check_agent_env("relax/Gymnasium-v0", **arguments).require(warnings=True)


# -- as Gymnasium ----------------------------------------------------------------------------------


class Echo(SyncEnv):
    """Says what it is told; ends on "end"."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return [user([f"é {self.rng.random()}", Image(b"\x89PNG")])], {"options": options}

    def step(self, action):
        return [user(action.text)], 0.5, action.text == "end", False, {}


@pytest.mark.parametrize(
    "make_one",
    [
        lambda: as_gymnasium("relax/Calculator-v0"),
        lambda: as_gymnasium("relax/Calculator-v0", max_operand=9, render_mode="ansi"),
        lambda: as_gymnasium(from_gymnasium("FrozenLake-v1")),
        lambda: gymnasium.make("relax_agent.gymnasium:relax/Calculator-v0").unwrapped,
    ],
)
def test_gymnasiums_own_checker_has_nothing_to_say(make_one):
    env = make_one()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env)
    env.close()


def test_an_instance_without_a_spec_passes_the_checker():
    with warnings.catch_warnings():
        warnings.filterwarnings("error")
        warnings.filterwarnings("ignore", ".*not having a spec.*")
        check_env(as_gymnasium(Echo()))


def test_messages_of_every_kind_survive_the_codec():
    observation = [user(["é\n", Image(b"\x00\xff")]), user("")]
    for each in (observation, Rewrite(tuple(observation), "why"), []):
        encoded = encode_observation(each)
        assert decode_observation(encoded) == each and encoded.isascii() and encoded.isprintable()
    call = ToolCall("act", {"x": [1, "ß"]}, "c0", error="why")
    said = [
        assistant("plain"),
        assistant("é"),
        assistant(""),
        assistant('{"role": "assistant"}'),
        assistant("see", tool_calls=[call], reasoning="so"),
        AssistantMessage(content=(Text("x"),), usage=Usage(1, 2, 3), finish_reason="length"),
    ]
    for message in said:
        assert decode_action(encode_action(message)) == message
    for text in ("42", "é", '{"role": "assistant", "content": "x"}', '{"a": ', "{}", "[1]", "5"):
        assert decode_action(encode_action(text)) == assistant(text)
    dialect = {"role": "assistant", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "act", "arguments": '{"a": 1}'}}
    ]}  # fmt: skip
    assert decode_action(json.dumps(dialect)).tool_calls == (ToolCall("act", {"a": 1}, "c"),)
    for odd in ('{"role": "assistant", "tool_calls": [5]}', '{"role": "assistant", "content": 5}'):
        assert decode_action(odd).role == "assistant"


def test_gymnasium_makes_any_registered_environment():
    env = gymnasium.make("relax_agent.gymnasium:relax/Calculator-v0", max_operand=9)
    observation, info = env.reset(seed=7, options={"task": "train-00001"})
    assert info["task"] == "train-00001" and observation in env.observation_space
    question = decode_observation(observation)[-1].text
    expected = env.unwrapped.agent_env.tasks["train-00001"]
    assert question == expected.prompt
    answer = str(env.unwrapped.agent_env.unwrapped.task.answer)
    observation, reward, terminated, truncated, info = env.step(answer)
    assert (observation, reward, terminated, truncated) == ("[]", 0.3, True, False)
    assert info["metrics"]["success"] == 1.0
    env.close()
    env.close()


def test_gymnasiums_specs_travel_and_its_wrappers_fit():
    env = gymnasium.make("relax_agent.gymnasium:relax/Calculator-v0", max_operand=9)
    for spec in (
        pickle.loads(pickle.dumps(env.spec)),
        gymnasium.envs.registration.EnvSpec.from_json(env.spec.to_json()),
        as_gymnasium("relax/Calculator-v0", max_operand=9).spec,
    ):
        assert spec.make().reset(seed=3) == env.reset(seed=3)
    short = gymnasium.make("relax_agent.gymnasium:relax/Calculator-v0", max_episode_steps=1)
    short.reset(seed=0)
    assert short.step('{"role": "assistant", "tool_calls": [{"name": "x"}]}')[3] is True


def test_what_is_registered_later_can_be_made_too():
    register("here/Echo-v0", Echo)
    env = gymnasium.make("relax_agent.gymnasium:here/Echo-v0")
    assert "é" in decode_observation(env.reset(seed=1)[0])[0].text


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_vectors_of_them_work_in_one_process_and_in_many(mode):
    vector = gymnasium.make_vec(
        "relax_agent.gymnasium:relax/Calculator-v0", num_envs=2, vectorization_mode=mode
    )
    single = gymnasium.make("relax_agent.gymnasium:relax/Calculator-v0")
    observations, infos = vector.reset(seed=5)
    assert list(observations) == [single.reset(seed=seed)[0] for seed in (5, 6)]
    assert len(infos["task"]) == 2
    call = encode_action(assistant(tool_calls=[ToolCall("calculator", {"expression": "6*7"}, "c")]))
    observations, rewards, ended, _, _ = vector.step((call, "42"))
    assert decode_observation(observations[0])[0].text == "42" and observations[1] == "[]"
    assert ended.tolist() == [False, True] and rewards.shape == (2,)
    before = observations
    observations, *_ = vector.step((call, "42"))
    assert before[1] == "[]" != observations[1]  # the second one was reset
    vector.close()


def test_it_works_where_an_event_loop_runs_already():
    """T151: a sync call inside a running loop waits for a loop in another thread."""

    async def main():
        env = as_gymnasium(Echo())
        env.reset(seed=1)
        observation, *_ = env.step("hello")
        await asyncio.sleep(0)
        return decode_observation(observation)[0].text

    assert asyncio.run(main()) == "hello"


def test_one_inside_another_waits_for_nobody():
    """T151: a call from the loop that it would need says so; what is made there gets another."""

    class Outer(Env):
        async def reset(self, *, seed=None, options=None):
            inner = as_gymnasium(Echo())
            return decode_observation(inner.reset(seed=seed)[0]), {}

        async def step(self, action):
            outside.reset(seed=1)

    outside = as_gymnasium(Echo())
    env = as_gymnasium(Outer())
    assert env.reset(seed=4)[0] == as_gymnasium(Echo()).reset(seed=4)[0]
    with pytest.raises(EnvError, match="from inside its own event loop"):
        env.step("x")


def test_an_environment_of_a_process_of_its_own_can_be_exported():
    env = as_gymnasium("relax/Gymnasium-v0", isolation="process", env_id="FrozenLake-v1")
    plain = as_gymnasium("relax/Gymnasium-v0", env_id="FrozenLake-v1")
    assert env.reset(seed=3)[0] == plain.reset(seed=3)[0]
    move = encode_action(act("down"))
    assert env.step(move)[:4] == plain.step(move)[:4]
    env.close()


def test_there_and_back_again_is_the_same_environment():
    async def both(env):
        return await episode(
            env,
            assistant(tool_calls=[ToolCall("calculator", {"expression": "1+1"}, "c")]),
            assistant("2"),
            seed=9,
            options={"task": "eval-00003"},
        )

    plain = asyncio.run(both(make("relax/Calculator-v0")))
    back = from_gymnasium(as_gymnasium("relax/Calculator-v0"))
    assert back.tools.names == ("calculator",) and len(back.tasks.ids("eval")) == 512
    assert asyncio.run(both(back)) == plain
    with pytest.raises(ConfigError, match="tasks=… is for environments of Gymnasium"):
        from_gymnasium(as_gymnasium("relax/Calculator-v0"), tasks=3)
    by_id = make("relax/Gymnasium-v0", env_id="relax_agent.gymnasium:relax/Calculator-v0")
    assert asyncio.run(both(by_id)) == plain


def test_the_other_way_round_is_the_same_lake():
    lake = as_gymnasium(from_gymnasium("FrozenLake-v1", env_args={"is_slippery": False}))
    lake.reset(seed=0)
    way = ["down", "down", "right", "right", "down", "right"]
    result = [lake.step(encode_action(act(step))) for step in way]
    assert decode_observation(result[-1][0])[0].text == "you are at row 3, column 3"
    assert result[-1][1:4] == (1.0, True, False)


def test_mistakes_of_a_caller_are_named():
    env = as_gymnasium(Echo())
    with pytest.raises(ResetNeeded):
        env.step("x")
    env.reset(seed=1)
    with pytest.raises(InvalidAction, match="a string, not int"):
        env.step(3)
    env.step("end")
    with pytest.raises(ResetNeeded):
        env.step("x")
    with pytest.raises(UnknownEnv, match="Calculator"):
        as_gymnasium("relax/Calculater-v0")
    with pytest.raises(ConfigError, match="max_operand"):
        as_gymnasium(Echo(), max_operand=9)
    with pytest.raises(ConfigError, match="not an environment for agents"):
        as_gymnasium(gymnasium.make("CartPole-v1"))
    with pytest.raises(ConfigError, match="render_mode"):
        as_gymnasium(Echo(), render_mode="human")


def test_a_call_that_never_returns_ends_at_its_limit():
    class Hung(Env):
        async def reset(self, *, seed=None, options=None):
            await asyncio.sleep(3600)

    env = as_gymnasium(Hung(), timeout_s=0.05)
    with pytest.raises(EnvError, match=r"no answer within 0.05 s"):
        env.reset(seed=1)


def test_the_conversation_is_what_it_renders():
    env = as_gymnasium(Echo(), render_mode="ansi")
    env.reset(seed=1)
    env.step("hello")
    assert env.render().count("hello") == 2
    assert as_gymnasium(Echo()).render() is None


def test_an_environment_that_is_dropped_closes_without_blocking():
    """T155: a finaliser only asks for the close, it does not wait for it."""
    closed = threading.Event()

    class Slow(Env):
        async def close(self):
            await asyncio.sleep(0.01)
            closed.set()

    env = as_gymnasium(Slow())
    started = time.perf_counter()
    del env
    gc.collect()
    assert time.perf_counter() - started < 5
    assert closed.wait(30)


def test_importing_the_project_imports_no_gymnasium_and_shadows_none():
    code = (
        "import sys, relax_agent, relax_agent.envs.adapters; assert 'gymnasium' not in sys.modules;"
        "import relax_agent.gymnasium, gymnasium; assert gymnasium is not relax_agent.gymnasium;"
        "assert gymnasium.__version__"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_the_page_on_neighbours_shows_runs():
    run_snippets("Gymnasium")


def test_texts_in_a_shared_memory_are_those_that_were_written_last():
    """Gymnasium itself makes the memory: nothing here needs to know how processes share it."""
    utils = gymnasium.vector.utils
    env = as_gymnasium("relax/Calculator-v0", max_chars=100)
    space = env.observation_space
    memory = utils.create_shared_memory(space, n=2)
    texts = utils.read_from_shared_memory(space, memory, n=2)
    for index, text in [(0, "first"), (1, "second" * 16), (0, "x")]:
        utils.write_to_shared_memory(space, index, text, memory)
    assert tuple(texts) == ("x", "second" * 16)
    with pytest.raises(EnvError, match="does not fit"):
        utils.write_to_shared_memory(space, 0, "y" * 101, memory)
    env.close()

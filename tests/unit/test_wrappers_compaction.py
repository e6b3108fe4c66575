"""A long conversation is shortened by a fork that every loop understands, pairs of calls kept."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_support import FakeEngine, FakeRenderer, ids_of, options, replies, run

from relax_agent.envs import Env, EnvSpec, ScriptedPolicy, Task, ToolEnv, make, play
from relax_agent.envs.wrappers import Compaction, TokenLimit
from relax_agent.episode import Episode, EpisodeStatus
from relax_agent.errors import ConfigError, EnvError
from relax_agent.messages import (
    Image,
    Rewrite,
    ToolCall,
    Usage,
    assistant,
    system,
    tool_message,
    user,
)
from relax_agent.rollout import run_episode
from relax_agent.tools import tool


class Replying(Env):
    """Answers each call of a message with a tool message of ``size`` characters."""

    def __init__(self, *, size=10, last=None, first=None, media=False):
        self.size, self.last, self.media = size, last, media
        self.first = first or [system("s"), user("task")]
        self.steps = 0

    async def reset(self, *, seed=None, options=None):
        self.steps = 0
        return list(self.first), {}

    async def step(self, action):
        self.steps += 1
        body = ["r" * self.size, Image(b"x")] if self.media else "r" * self.size
        results = [tool_message(body, call) for call in action.tool_calls]
        done = self.steps == self.last
        return results or [user("go on")], 1.0, done, False, {}


def calling(number, count=1, usage=None):
    calls = [ToolCall("f", {}, f"c{number}.{i}") for i in range(count)]
    return replace(assistant(f"turn {number}", tool_calls=calls), usage=usage or Usage())


def converse(env, actions):
    """Play the actions; return what the model sees at the end, and every rewrite."""

    async def main():
        seen, _ = await env.reset()
        rewrites = []
        for action in actions:
            observation, _, terminated, truncated, _ = await env.step(action)
            if isinstance(observation, Rewrite):
                rewrites.append(observation)
                seen = list(observation.messages)
            else:
                seen = [*seen, action, *observation]
            assert_paired(seen)
            if terminated or truncated:
                break
        return seen, rewrites

    return asyncio.run(main())


def assert_paired(messages):
    """Every tool message follows the call it answers; every call that is shown is answered."""
    open_calls = []
    for message in messages:
        if message.role == "tool":
            assert message.tool_call_id in open_calls
            open_calls.remove(message.tool_call_id)
        else:
            assert open_calls == []
            open_calls = [call.id for call in getattr(message, "tool_calls", ())]
    assert open_calls == []


def test_the_head_a_stand_in_and_the_newest_messages_remain():
    env = Compaction(Replying(), max_messages=8, keep_last=4)
    seen, rewrites = converse(env, [calling(i) for i in range(4)])
    texts = [message.text for message in seen]
    assert texts[:2] == ["s", "task"]
    assert texts[2] == "[The 4 oldest messages after the task were removed to save room.]"
    assert [text for text in texts[3:] if "turn" in text] == ["turn 2", "turn 3"]
    assert [rewrite.reason for rewrite in rewrites] == ["4 old messages were removed"]


def test_nothing_happens_below_the_limit():
    seen, rewrites = converse(
        Compaction(Replying(), max_messages=8), [calling(i) for i in range(3)]
    )
    assert (len(seen), rewrites) == (8, [])


def test_the_count_grows_and_there_is_only_ever_one_stand_in():
    env = Compaction(Replying(), max_messages=8, keep_last=2, summary="gone: {count} {x}")
    seen, rewrites = converse(env, [calling(i) for i in range(20)])
    assert len(rewrites) > 3
    stand_ins = [message.text for message in seen if message.text.startswith("gone")]
    removed = 2 + 40 + 1 - len(seen)
    assert stand_ins == [f"gone: {removed} {{x}}"]


@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=25),
    limit=st.integers(2, 12),
    keep=st.integers(0, 11),
    method=st.sampled_from(["summary", "tool_results"]),
    tokens=st.none() | st.integers(1, 400),
)
@settings(max_examples=60, deadline=None)
def test_calls_and_their_results_are_never_parted(counts, limit, keep, method, tokens):
    if method == "tool_results" and tokens is None:
        tokens = 100
    env = Compaction(
        Replying(size=90),
        max_messages=limit,
        max_tokens=tokens,
        keep_last=min(keep, limit - 1),
        method=method,
    )
    actions = [calling(i, count) for i, count in enumerate(counts)]
    seen, _ = converse(env, actions)
    assert seen[:2] == [system("s"), user("task")]
    assert actions[-1] in seen


def test_a_last_message_too_long_for_the_limit_is_not_rewritten_for_ever():
    env = Compaction(Replying(), max_messages=4, keep_last=1)
    _, rewrites = converse(env, [calling(i, count=5) for i in range(6)])
    assert len(rewrites) == 5  # each removes the block before; the first had none


def test_an_episode_that_ends_is_left_as_it_is():
    env = Compaction(Replying(last=3), max_messages=4, keep_last=0)
    _, rewrites = converse(env, [calling(i) for i in range(9)])
    assert len(rewrites) == 1


# -- tokens ----------------------------------------------------------------------------------------


def test_the_usage_of_the_last_message_counts():
    env = Compaction(Replying(), max_tokens=1000, keep_last=2)
    low = [calling(i, usage=Usage(100, 10)) for i in range(3)]
    high = calling(3, usage=Usage(1500, 10))
    assert converse(env, low)[1] == []
    seen, rewrites = converse(env, [*low, high])
    assert (len(rewrites), len(seen)) == (1, 5)


def test_usage_from_before_a_fork_does_not_make_another():
    env = Compaction(Replying(), max_tokens=1000, keep_last=2)
    actions = [calling(i, usage=Usage(1500 if i == 3 else 200, 10)) for i in range(8)]
    assert len(converse(env, actions)[1]) == 1


def test_old_tool_results_are_emptied_and_the_rest_stays():
    env = Compaction(
        Replying(size=4000, media=True), max_tokens=4500, keep_last=2, method="tool_results"
    )
    seen, rewrites = converse(env, [calling(i) for i in range(4)])
    results = [message for message in seen if message.role == "tool"]
    assert [bool(message.media) for message in results] == [False, False, False, True]
    assert results[0].text == "[removed: 4,000 characters, 1 media]"
    assert [message.text for message in seen if "turn" in message.text] == [
        f"turn {i}" for i in range(4)
    ]
    assert rewrites[0].reason == "the results of 3 old tool calls were removed"


def test_where_emptied_results_do_not_save_enough_old_messages_go_too():
    env = Compaction(Replying(size=400), max_tokens=300, keep_last=2, method="tool_results")
    seen, rewrites = converse(env, [calling(i) for i in range(12)])
    assert any("messages were removed" in rewrite.reason for rewrite in rewrites)
    assert len(seen) < 20


# -- summaries -------------------------------------------------------------------------------------


def tell(messages):
    return f"{len(messages)}: {messages[0].text}"


@pytest.mark.parametrize("function", [tell, f"{__name__}:tell"])
def test_a_summarizer_gets_what_goes_its_own_last_summary_included(function):
    env = Compaction(Replying(), max_messages=6, keep_last=2, summarizer=function)
    _, rewrites = converse(env, [calling(i) for i in range(5)])
    assert [rewrite.messages[2].text for rewrite in rewrites][:2] == ["4: turn 0", "3: 4: turn 0"]


def test_a_summarizer_may_be_async():
    async def slowly(messages):
        await asyncio.sleep(0)
        return "short"

    env = Compaction(Replying(), max_messages=4, keep_last=1, summarizer=slowly)
    assert converse(env, [calling(0), calling(1)])[0][2] == user("short")


@pytest.mark.parametrize("answer", [None, "", 3])
def test_a_summarizer_that_returns_no_text_is_named(answer):
    env = Compaction(Replying(), max_messages=4, keep_last=1, summarizer=lambda m: answer)
    with pytest.raises(EnvError, match=r"summarizer.*lambda.*returned"):
        converse(env, [calling(0), calling(1)])


def test_a_summarizer_that_raises_is_named():
    def broken(messages):
        raise OSError("no server")

    env = Compaction(Replying(), max_messages=4, keep_last=1, summarizer=broken)
    with pytest.raises(EnvError, match=r"broken raised OSError: no server"):
        converse(env, [calling(0), calling(1)])


# -- from inside, and in the loops -----------------------------------------------------------------


def test_a_history_rewritten_inside_is_taken_over():
    class Forking(Replying):
        async def step(self, action):
            result = await super().step(action)
            if self.steps != 2:
                return result
            return (Rewrite((system("t"), user("new task"), user("so far")), "own"), *result[1:])

    env = Compaction(Forking(), max_messages=7, keep_last=2)
    seen, rewrites = converse(env, [calling(i) for i in range(5)])
    assert [rewrite.reason for rewrite in rewrites] == ["own", "5 old messages were removed"]
    assert [message.text for message in seen[:3]] == [
        "t",
        "new task",
        "[The 5 oldest messages after the task were removed to save room.]",
    ]


def test_a_rewrite_that_begins_with_an_assistant_message_keeps_its_pairs():
    class Forking(Replying):
        async def step(self, action):
            result = await super().step(action)
            if self.steps != 1:
                return result
            return (Rewrite((system("t"), action, *result[0]), "own"), *result[1:])

    seen, _ = converse(Compaction(Forking(), max_messages=5, keep_last=1), map(calling, range(6)))
    assert seen[0] == system("t")


@tool(inline=True)
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Adding(ToolEnv):
    """Add."""

    tools = (add,)
    tasks = (Task("t1", "add", 42),)
    max_turns = 20

    async def score(self, task, transcript):
        self.scored = len(transcript)
        return float(transcript.answer == "42")


def test_the_rollout_loop_forks_and_the_score_sees_the_whole_transcript():
    """Token in, token out: what was sampled before a fork stays as it was sampled."""
    inner = Adding()
    env = Compaction(inner, max_messages=6, keep_last=2)
    said = [f'call {{"a": {i}, "b": 1}}' for i in range(6)] + ["42"]
    engine = FakeEngine(replies(*said))
    episode = Episode("toy", "t1", "g", 7)
    run(run_episode(env, engine, FakeRenderer(), episode, options(max_turns=20)))
    episode.validate()
    assert (episode.status, episode.reward) == (EpisodeStatus.COMPLETED, 1.0)
    assert len(episode.segments) > 2
    assert {segment.reason for segment in episode.segments[1:]} <= {
        "4 old messages were removed",
        "3 old messages were removed",
        "5 old messages were removed",
    }
    outputs = [
        list(episode.segments[turn.segment].token_ids[turn.start : turn.end])
        for turn in episode.turns
    ]
    assert outputs == [ids_of(text) for text in said]
    last = "".join(chr(i) for i in engine.requests[-1].input_ids if i > 1)
    assert "oldest messages after the task" in last
    assert inner.scored == 1 + 2 * 6 + 1


def test_a_policy_that_plays_sees_the_shortened_history():
    lengths = []

    def act(messages, tools):
        lengths.append(len(messages))
        assert_paired(messages)
        if len(lengths) == 9:
            return assistant("42")
        return assistant(tool_calls=[ToolCall("add", {"a": 1, "b": 1}, f"c{len(lengths)}")])

    env = Compaction(Adding(), max_messages=6, keep_last=2)
    record = asyncio.run(play(env, ScriptedPolicy(act)))
    assert (record.reward, record.turns) == (1.0, 9)
    assert max(lengths) <= 6
    assert record.rewrites


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"max_messages": 0},
        {"max_messages": 5, "keep_last": 5},
        {"max_messages": 5, "keep_last": -1},
        {"max_tokens": 0},
        {"max_tokens": 9, "method": "forget"},
        {"max_messages": 9, "method": "tool_results"},
        {"max_tokens": 9, "summarizer": "nowhere"},
    ],
)
def test_arguments_that_make_no_sense_are_refused(bad):
    with pytest.raises(ConfigError):
        Compaction(Replying(), **bad)


def test_it_round_trips_through_a_spec():
    env = Compaction(make("relax/Calculator-v0"), max_messages=9, summarizer=tell)
    again = EnvSpec.from_json(env.spec.to_json()).make()
    assert again.spec.to_json() == env.spec.to_json()


def test_the_rollout_loop_takes_the_status_of_the_limit_that_ended_an_episode():
    env = TokenLimit(Adding(), max_tokens=30)
    engine = FakeEngine(replies(*['call {"a": 1, "b": 1}'] * 9))
    episode = Episode("toy", "t1", "g", 7)
    run(run_episode(env, engine, FakeRenderer(), episode, options(max_turns=20)))
    assert (episode.status, episode.detail) == (
        EpisodeStatus.TRUNCATED_TOKENS,
        "no tokens are left",
    )
    assert len(episode.turns) == 2

"""Faults of other systems: the episode's token log, its limits and its identity."""

import asyncio
from dataclasses import replace

import pytest
from rollout_support import (
    FakeEngine,
    FakeEnv,
    FakeRenderer,
    ids_of,
    options,
    replies,
    result,
    run,
    runner,
)

from relax_agent.engines.protocol import GenerateRequest, GenerateResult, SamplingParams
from relax_agent.envs import SyncEnv, Task, TaskSet, ToolEnv, make_async, register, registry
from relax_agent.episode import Episode, EpisodeStatus
from relax_agent.messages import AssistantMessage, Rewrite, ToolCall, assistant, parts, user
from relax_agent.rollout import EnvPool, run_episode
from relax_agent.rollout.fleet import Fleet
from relax_agent.tools import tool


def play(env, engine, renderer=None, **changes) -> Episode:
    episode = Episode("toy", "t", "g", 7)
    renderer = renderer or FakeRenderer()
    run(run_episode(env, engine, renderer, episode, options(**changes)))
    episode.validate()
    return episode


class Opening(FakeEnv):
    """Begins with messages of one's choice."""

    def __init__(self, *messages, **more):
        super().__init__(**more)
        self.messages = messages

    async def reset(self, *, seed=None, options=None):
        await super().reset(seed=seed, options=options)
        return list(self.messages), {}


@pytest.mark.parametrize("turns", [1, 3])
def test_assistant_messages_of_the_prompt_are_never_trained(turns):
    """T34: the mask follows what was sampled, not the role."""
    env = Opening(
        user("a"), assistant("good"), user("c"), assistant("good"), user("e"), turns=turns
    )
    (row,) = play(env, FakeEngine("good")).rows()
    assert row.loss_mask.sum() == turns * len(ids_of("good"))
    assert not row.loss_mask[: len(FakeRenderer().start(env.messages, []).ids)].any()


def test_the_cap_of_one_message_is_not_a_cap_of_the_episode():
    """T38: three messages of 100 tokens under a cap of 128 keep 300 and what came between."""
    episode = play(FakeEnv(turns=3), FakeEngine("x" * 99), max_tokens_per_turn=128)
    (row,) = episode.rows()
    assert (episode.status, int(row.loss_mask.sum())) == (EpisodeStatus.COMPLETED, 300)
    assert len(row.token_ids) > 300


def test_limits_count_tokens_not_characters():
    """T40: four tokens that stand for forty characters are within a limit of ten."""

    class Wordy(FakeRenderer):
        def parse(self, output_ids, tools):
            return AssistantMessage(content=parts("ten chars " * len(output_ids)))

    engine = FakeEngine(lambda request: result([50, 51, 52, 0], request=request))
    episode = play(FakeEnv(), engine, Wordy(), max_tokens_per_turn=10)
    assert (episode.status, len(episode.turns[0].message.text)) == (EpisodeStatus.COMPLETED, 40)


def test_an_answer_longer_than_asked_for_never_enters_the_log():
    """T41: cutting it here would lose why it ended; it is the engine's fault."""
    engine = FakeEngine(lambda request: result(ids_of("x" * 11), request=request))
    episode = play(FakeEnv(), engine, max_tokens_per_turn=10)
    assert (episode.status, episode.sampled_tokens) == (EpisodeStatus.ENGINE_FAILURE, 0)
    assert "12 tokens came, at most 10" in episode.detail


@pytest.mark.parametrize("sampled", [0, 1, 3])
@pytest.mark.parametrize("known", [None, 0, 1, 5])
def test_an_interrupted_request_may_return_fewer_routes(sampled, known):
    """T98: segments without new tokens, without routes, and with some of them."""

    def interrupted(request):
        whole = result(ids_of("good")[:sampled], finish="abort", request=request)
        return replace(whole, routes=None if known is None else whole.routes[:known])

    engine = FakeEngine(replies(interrupted, interrupted, lambda request: "d"))
    episode = play(FakeEnv(), engine, return_routes=True, max_tokens_per_turn=64)
    assert episode.status is EpisodeStatus.COMPLETED
    (row,) = episode.rows()
    assert row.has_route.tolist() == [True] * (len(row.token_ids) - 1) + [False]
    assert (row.routes[:-1, 0, 0] == [i % 8 for i in range(len(row.token_ids) - 1)]).all()


def test_too_many_routes_are_refused_also_from_an_interrupted_request():
    """T97"""

    def interrupted(request):
        whole = result([50], finish="abort", request=request)
        return replace(whole, routes=whole.routes.repeat(2, 0))

    episode = play(FakeEnv(), FakeEngine(interrupted), return_routes=True)
    assert episode.status is EpisodeStatus.ENGINE_FAILURE


@tool
async def read(name: str) -> str:
    """Read a file."""
    return f"<{name}>"


class Files(ToolEnv):
    """Two calls a message at most; ends on an answer."""

    tools = (read,)
    tasks = TaskSet([Task("t", "q")])
    max_calls = 2

    def score(self, task, transcript):
        return 1.0


def reads(*names):
    return assistant(tool_calls=[ToolCall("read", {"name": name}, f"c{name}") for name in names])


def test_the_limit_of_calls_counts_the_calls_of_one_message_and_not_turns():
    """T49, T22: every message has its full allowance, and every call is answered once."""

    async def main():
        env = Files()
        await env.reset(options={"task": "t"})
        steps = [await env.step(reads(f"{n}a", f"{n}b")) for n in range(3)]
        return [message.text for step in steps for message in step[0]]

    assert asyncio.run(main()) == ["<0a>", "<0b>", "<1a>", "<1b>", "<2a>", "<2b>"]


def test_what_a_tool_says_is_in_the_prompt_once():
    """T22"""

    class Calls(FakeRenderer):
        def parse(self, output_ids, tools):
            text = "".join(map(chr, output_ids[:-1]))
            return reads(text[5:]) if text.startswith("read ") else assistant(text)

    episode = play(Files(), FakeEngine(replies("read x", "read y", "good")), Calls())
    said = "".join(map(chr, episode.rows()[0].token_ids))
    assert (said.count("<x>"), said.count("<y>")) == (1, 1)
    assert [m.text for m in episode.messages if m.role == "tool"] == ["<x>", "<y>"]


def rewriting(change):
    """An env whose second observation is the whole history again."""

    async def on_step(env, action):
        if len(env.seen) > 1:
            return None
        history = (user("task t"), change(action), user("more"))
        return Rewrite(history, "again"), 0.0, False, False, {}

    return FakeEnv(turns=2, on_step=on_step)


def test_history_that_renders_to_what_was_sampled_is_shared_and_other_history_forks():
    """T4, T10: a call that is lost on the way makes another text, and that is on record."""
    same = play(rewriting(lambda action: action), FakeEngine("good"))
    other = play(rewriting(lambda action: assistant("gone")), FakeEngine("good"))
    asked = len(FakeRenderer().start([user("task t")], []).ids)
    assert same.segments[1].shared >= asked - 1
    for episode in (same, other):
        assert episode.status is EpisodeStatus.COMPLETED
        assert sum(row.loss_mask.sum() for row in episode.rows()) == 2 * len(ids_of("good"))
        prompt = episode.token_ids()[: episode.segments[1].shared]
        assert prompt == list(episode.segments[0].token_ids[: len(prompt)])
    assert other.segments[1].shared < asked + len(ids_of("good"))


@pytest.mark.parametrize("ids", [("v1.5", "v1.6"), ("s", "s.1"), ("a.0000.00", "a.0000.01")])
def test_episodes_are_told_apart_whatever_their_ids_look_like(ids):
    """T148: matched as a whole, dots included."""

    async def main():
        fleet = Fleet([FakeEngine(name="a"), FakeEngine(name="b")])
        for episode in ids:
            request = GenerateRequest([1], SamplingParams(8), f"{episode}.0003.00")
            await fleet.generate(request)
        held = [load.episodes for load in fleet.loads()]
        for episode in ids:
            fleet.forget(episode)
        return held, [load.episodes for load in fleet.loads()]

    assert run(main()) == ([1, 1], [0, 0])


# -- environments that boot ----------------------------------------------------------------------


@pytest.fixture
def slow_boot():
    """An environment whose constructor waits for a gate."""
    import threading

    gate = threading.Event()

    class Boot(SyncEnv):
        def __init__(self):
            gate.wait(30)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return [user("hi")], {}

        def step(self, action):
            return [], 1.0, True, False, {}

    register("cases/Boot-v0", Boot)
    yield gate
    gate.set()
    del registry["cases/Boot-v0"]


def test_a_constructor_that_boots_something_holds_nobody_up(slow_boot):
    """T152: the event loop goes on; the gate is opened from inside it."""

    async def main():
        episodes = runner(FakeEngine("good"), lambda: make_async("cases/Boot-v0"))
        running = asyncio.ensure_future(episodes.run("t", "g", 1))
        await asyncio.sleep(0.05)
        slow_boot.set()
        return await running

    assert asyncio.run(main()).status is EpisodeStatus.COMPLETED


def test_a_constructor_that_never_returns_fails_at_the_limit(slow_boot):
    """T152: and the place in the pool is free again."""

    async def main():
        episodes = runner(FakeEngine("good"))
        episodes._envs = EnvPool(lambda: make_async("cases/Boot-v0"), 1, timeout_s=0.05)
        return [await episodes.run("t", "g", 1), await episodes.run("t", "g", 1)]

    for episode in asyncio.run(main()):
        assert episode.status is EpisodeStatus.ENV_FAILURE
        assert "not built within" in episode.detail


def test_an_aborted_answer_without_a_token_is_asked_for_again():
    """T98, T118: the prompt had not been read; nothing is lost, nothing is twice."""
    nothing = GenerateResult([], [], "abort", [], None)
    episode = play(FakeEnv(), FakeEngine(replies(nothing, "good")), return_routes=True)
    assert (episode.status, episode.sampled_tokens) == (EpisodeStatus.COMPLETED, 5)

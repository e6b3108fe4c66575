"""The loop of one episode: token in, token out, and a status for whatever happens."""

import asyncio
import sys

import numpy as np
import pytest
from rollout_support import (
    STOP,
    FakeEngine,
    FakeEnv,
    FakeRenderer,
    dead,
    ids_of,
    now,
    options,
    replies,
    result,
    run,
)

from relax_agent.engines.protocol import SamplingParams
from relax_agent.engines.script import Reply
from relax_agent.engines.scripted import ScriptedEngine
from relax_agent.engines.wire import RouteShape
from relax_agent.envs import Task, TaskSet, ToolEnv, Wrapper
from relax_agent.episode import NOT_SAMPLED, Episode, EpisodeStatus
from relax_agent.errors import (
    EngineRejected,
    EnvError,
    MissingLogprobs,
    PromptTooLong,
    RenderError,
    ToolError,
)
from relax_agent.messages import Rewrite, ToolCall, assistant, system, user
from relax_agent.rendering import Rendered
from relax_agent.rollout import ExpertSource, run_episode
from relax_agent.rollout.limits import GRACE_S
from relax_agent.tools import tool

HOUR = 3600.0


def play(env, engine, *, renderer=None, episode=None, member=0, attempt=0, **changes) -> Episode:
    """Run one episode under a clock that jumps, and check the invariants of the log."""

    async def main():
        log = Episode("toy", "t1", "g", 7) if episode is None else episode
        return await run_episode(
            env,
            engine,
            renderer or FakeRenderer(),
            log,
            options(**changes),
            member=member,
            attempt=attempt,
        )

    log = run(main())
    check(log)
    return log


def check(episode: Episode) -> None:
    episode.validate()
    for segment in episode.segments:
        for id_, mask, version in zip(
            segment.token_ids, segment.loss_mask, segment.weight_versions, strict=True
        ):
            assert (version == NOT_SAMPLED) == (mask == 0), id_


def sampled(episode: Episode) -> list[list[int]]:
    return [list(episode.segments[t.segment].token_ids[t.start : t.end]) for t in episode.turns]


# -- token in, token out -------------------------------------------------------------------------


def test_each_prompt_is_the_last_one_with_what_was_sampled_and_what_came_back():
    engine = FakeEngine(replies("a", "bb", "good"))
    episode = play(FakeEnv(turns=3), engine)
    prompts = [list(request.input_ids) for request in engine.requests]
    outputs = sampled(episode)
    assert outputs == [ids_of("a"), ids_of("bb"), ids_of("good")]
    for before, output, after in zip(prompts, outputs, prompts[1:], strict=False):
        assert after[: len(before) + len(output)] == before + output
    assert episode.token_ids() == prompts[-1] + outputs[-1]
    assert episode.status is EpisodeStatus.COMPLETED
    assert episode.reward == 1.0
    assert episode.metrics == {"success": 1.0, "turns": 3.0}
    assert [message.role for message in episode.messages] == ["user", "assistant"] * 3


def test_the_env_gets_the_task_the_seed_and_the_usage():
    env = FakeEnv(turns=1)
    episode = play(env, FakeEngine("good"), max_context=100)
    assert env.tasks_seen == [(7, "t1")]
    usage = env.seen[0].usage
    assert usage.completion_tokens == 5
    assert usage.prompt_tokens == len(episode) - 5
    assert usage.tokens_left == 100 - len(episode)


def test_a_turn_cut_by_the_limit_goes_on_with_a_stop_token_that_is_not_trained():
    """T13: finish_reason length in turn 1, then a message; the stop token has mask 0."""
    engine = FakeEngine(replies("abcdef", "good"))
    episode = play(FakeEnv(turns=2), engine, max_tokens_per_turn=5)
    segment = episode.segments[0]
    end = episode.turns[0].end
    assert [turn.finish_reason for turn in episode.turns] == ["length", "stop"]
    assert (segment.token_ids[end], segment.loss_mask[end]) == (STOP, 0)
    assert episode.status is EpisodeStatus.COMPLETED


def test_a_last_message_that_was_cut_makes_the_episode_truncated():
    """T41: twelve tokens, a cap of ten: truncated, although the env took it for an answer."""
    env = FakeEnv(turns=1)
    episode = play(env, FakeEngine("x" * 11), max_tokens_per_turn=10)
    assert episode.status is EpisodeStatus.TRUNCATED_TOKENS
    assert env.seen[0].finish_reason == "length"
    assert len(sampled(episode)[0]) == 10


@pytest.mark.parametrize("concurrent", [1, 4])
def test_a_cut_turn_leads_to_the_same_trajectory_on_every_path(concurrent):
    """T46: alone or beside others, a turn cut by max_tokens goes on by the env's own rule."""

    async def main():
        logs = [Episode("toy", "t1", "g", 7) for _ in range(concurrent)]
        async with asyncio.TaskGroup() as tasks:
            for log in logs:
                engine = FakeEngine(replies("abcdef", "good"))
                tasks.create_task(
                    run_episode(
                        FakeEnv(2), engine, FakeRenderer(), log, options(max_tokens_per_turn=5)
                    )
                )
        return logs

    alone = play(FakeEnv(2), FakeEngine(replies("abcdef", "good")), max_tokens_per_turn=5)
    for log in run(main()):
        assert log.token_ids() == alone.token_ids()
        assert log.status is alone.status


def test_no_room_for_another_message_truncates_and_the_engine_is_not_asked():
    engine = FakeEngine("a")
    episode = play(FakeEnv(turns=99), engine, max_context=40, max_turns=50)
    assert episode.status is EpisodeStatus.TRUNCATED_TOKENS
    assert all(
        len(request.input_ids) + request.sampling.max_new_tokens <= 40
        for request in engine.requests
    )
    assert "of 40 tokens" in episode.detail


def test_the_turn_limit_truncates_after_the_env_has_seen_the_last_message():
    env = FakeEnv(turns=99)
    episode = play(env, FakeEngine("a"), max_turns=3)
    assert episode.status is EpisodeStatus.TRUNCATED_TURNS
    assert len(env.seen) == len(episode.turns) == 3


def test_a_truncation_by_the_env_is_not_a_completion():
    async def on_step(env, action):
        return [], 0.5, False, True, {}

    episode = play(FakeEnv(on_step=on_step), FakeEngine("a"))
    assert episode.status is EpisodeStatus.TRUNCATED_TURNS
    assert episode.reward == 0.5


def test_rewards_of_all_turns_add_up():
    async def on_step(env, action):
        done = len(env.seen) == 3
        return [] if done else [user("more")], 0.25, done, False, {}

    episode = play(FakeEnv(on_step=on_step), FakeEngine("a"))
    assert [turn.reward for turn in episode.turns] == [0.25] * 3
    assert episode.reward == 0.75


# -- rewriting history ---------------------------------------------------------------------------


def test_a_rewrite_forks_where_the_new_prompt_leaves_the_old_one():
    async def on_step(env, action):
        if len(env.seen) == 1:
            return Rewrite((user("task t1"), system("summary")), "compaction"), 0, False, False, {}
        return None

    engine = FakeEngine(replies("long thought", "good"))
    episode = play(FakeEnv(turns=2, on_step=on_step), engine)
    first, second = (list(request.input_ids) for request in engine.requests)
    fork = episode.segments[1]
    assert fork.reason == "compaction"
    assert first[: fork.shared] == second[: fork.shared]
    assert fork.shared >= len("u:task t1") + 2
    assert second == FakeRenderer().start((user("task t1"), system("summary")), []).ids
    rows = episode.rows()
    assert [int(row.loss_mask.sum()) for row in rows] == [13, 5]
    assert list(rows[1].token_ids) == second + ids_of("good")


# -- limits of time ------------------------------------------------------------------------------


async def hang(*_):
    await asyncio.sleep(1000 * HOUR)


@pytest.mark.parametrize("where", ["reset", "step"])
def test_an_env_that_hangs_fails_at_its_own_limit(where):
    """T152, T154: a boot or a reward that never returns ends at the limit, and is counted."""
    env = FakeEnv(**{f"on_{where}": hang})

    async def main():
        start = now()
        log = Episode("toy", "t", "g", 7)
        await run_episode(
            env,
            FakeEngine("a"),
            FakeRenderer(),
            log,
            options(env_timeout_s=60, timeout_s=HOUR),
        )
        return log, now() - start

    log, took = run(main())
    assert log.status is EpisodeStatus.ENV_FAILURE
    assert f"{where}: no answer within 60 s" in log.detail
    assert took == pytest.approx(60)


def test_an_env_that_raises_is_a_failure_that_names_the_authors_line():
    async def wrong(env, action):
        return {}["anwser"]

    log = Episode("toy", "t", "g", 7)
    run(run_episode(FakeEnv(on_step=wrong), FakeEngine("a"), FakeRenderer(), log, options()))
    line = wrong.__code__.co_firstlineno + 1
    assert log.status is EpisodeStatus.ENV_FAILURE
    assert log.detail == f"step: KeyError: 'anwser' (test_rollout_loop.py:{line})"


def test_an_env_that_swallows_its_cancellation_cannot_hold_the_episode():
    async def stubborn(*_):
        while True:
            try:
                await asyncio.sleep(1000 * HOUR)
            except asyncio.CancelledError:
                continue

    async def main():
        before = now()
        log = Episode("toy", "t", "g", 7)
        await run_episode(
            FakeEnv(on_step=stubborn),
            FakeEngine("a"),
            FakeRenderer(),
            log,
            options(env_timeout_s=60),
        )
        assert now() - before <= 60 + GRACE_S
        assert log.status is EpisodeStatus.ENV_FAILURE
        assert len(log.turns) == 1, "the trace is kept"
        stuck = asyncio.all_tasks() - {asyncio.current_task()}
        assert len(stuck) == 1
        raise StuckTask from None

    with pytest.raises(StuckTask):
        run_and_abandon(main())


class StuckTask(Exception):
    """Ends the test's loop although a task cannot be ended."""


def run_and_abandon(main):
    from rollout_support import JumpingLoop

    loop = JumpingLoop()
    try:
        loop.run_until_complete(main)
    finally:
        loop.close()


def test_the_episodes_time_limit_truncates_and_keeps_what_was_sampled():
    async def slow(request):
        await asyncio.sleep(50)
        return result(ids_of("a"), request=request)

    episode = play(FakeEnv(turns=99), FakeEngine(slow), timeout_s=120, max_turns=99)
    assert episode.status is EpisodeStatus.TRUNCATED_TIME
    assert len(episode.turns) == 2


def test_a_request_that_is_cut_by_time_gives_its_partial_answer():
    class Abortable(FakeEngine):
        async def abort(self, rid=None):
            self.aborted.append(rid)
            self.go.set()

    engine = Abortable()

    async def script(request):
        engine.go = asyncio.Event()
        await engine.go.wait()
        return result([65, 66], finish="abort", request=request)

    engine.script = script
    for on_abort in ("resume", "retry"):
        engine.requests.clear()
        episode = play(FakeEnv(), engine, timeout_s=100, on_abort=on_abort)
        assert episode.status is EpisodeStatus.TRUNCATED_TIME
        assert sampled(episode) == [[65, 66]]
        assert episode.turns[0].finish_reason == "abort"
        assert engine.aborted[-1] == engine.requests[0].rid
        assert len(engine.requests) == 1


def test_an_engine_that_stays_silent_ends_with_the_episodes_time():
    episode = play(FakeEnv(), FakeEngine(hang), timeout_s=10 * HOUR)
    assert episode.status is EpisodeStatus.TRUNCATED_TIME


def test_time_in_which_the_engines_are_paused_does_not_count():
    """T143: a freeze for new weights is not the episode's fault."""
    paused = 0.0

    async def through_a_pause(request):
        nonlocal paused
        await asyncio.sleep(30)
        for _ in range(10):  # ten pauses of 22 s while the request waits
            await asyncio.sleep(22)
            paused += 22
        return result(ids_of("good"), request=request)

    episode = play(FakeEnv(), FakeEngine(through_a_pause), timeout_s=60, paused=lambda: paused)
    assert episode.status is EpisodeStatus.COMPLETED


# -- failures ------------------------------------------------------------------------------------


class OddEnv(FakeEnv):
    """Answers the first step with anything."""

    def __init__(self, answer):
        async def on_step(env, action):
            if isinstance(answer, BaseException):
                raise answer
            return answer

        super().__init__(on_step=on_step)


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (ValueError("boom"), EpisodeStatus.ENV_FAILURE),
        (EnvError("broken"), EpisodeStatus.ENV_FAILURE),
        (ToolError("server is down"), EpisodeStatus.TOOL_FAILURE),
        (TimeoutError("its own"), EpisodeStatus.ENV_FAILURE),
        (asyncio.CancelledError(), EpisodeStatus.ENV_FAILURE),
        (SystemExit(0), EpisodeStatus.ENV_FAILURE),
        (([], 0.0, True), EpisodeStatus.ENV_FAILURE),
        (("text", 0.0, True, False, {}), EpisodeStatus.ENV_FAILURE),
        ((["text"], 0.0, False, False, {}), EpisodeStatus.ENV_FAILURE),
        (([], float("nan"), True, False, {}), EpisodeStatus.ENV_FAILURE),
        (([], "high", True, False, {}), EpisodeStatus.ENV_FAILURE),
        (([], 0.0, True, False, {"metrics": {"x": "y"}}), EpisodeStatus.ENV_FAILURE),
        (([], 0.0, True, False, None), EpisodeStatus.ENV_FAILURE),
        (([], 0.0, False, False, {}), EpisodeStatus.ENV_FAILURE),
    ],
)
def test_whatever_the_env_does_wrong_becomes_a_status_and_the_trace_is_kept(answer, status):
    renderer = FakeRenderer()
    start = renderer.start

    def strict(messages, tools):
        if not messages:
            raise RenderError("there is nothing to render")
        return start(messages, tools)

    renderer.start = strict
    episode = play(OddEnv(answer), FakeEngine("a"), renderer=renderer)
    assert episode.status is status
    assert not episode.status.trainable
    assert len(episode.turns) == 1
    assert episode.detail


def test_sys_exit_in_an_engine_or_policy_is_an_error_that_nobody_can_miss():
    """T109: sys.exit in a task is neither ignored nor a quiet end with status 0."""

    async def leave(request):
        sys.exit(0)

    with pytest.raises(RuntimeError, match=r"sys\.exit"):
        play(FakeEnv(), FakeEngine(leave))


@pytest.mark.parametrize("error", [dead(None), EngineRejected("400"), MissingLogprobs("none")])
def test_an_engines_failure_is_a_status_and_the_turns_before_are_kept(error):
    """T92: missing log-probs are a hard error, never a quiet mask of zeros."""
    episode = play(FakeEnv(turns=2), FakeEngine(replies("a", lambda request: error)))
    assert episode.status is EpisodeStatus.ENGINE_FAILURE
    assert type(error).__name__ in episode.detail
    assert sampled(episode) == [ids_of("a")]


@pytest.mark.parametrize(
    "answer",
    [
        lambda request: result([1, 2], logprob=float("nan")),
        lambda request: result([1, 2], logprob=float("-inf")),
        lambda request: replaced(result([1, 2]), logprobs=[-1.0]),
        lambda request: replaced(result([1, 2]), versions=[]),
    ],
)
def test_an_answer_without_proper_logprobs_never_enters_the_log(answer):
    episode = play(FakeEnv(), FakeEngine(answer))
    assert episode.status is EpisodeStatus.ENGINE_FAILURE
    assert episode.sampled_tokens == 0


def replaced(answer, **changes):
    from dataclasses import replace

    return replace(answer, **changes)


def test_a_format_that_rewrites_history_forks_the_log_by_name_and_is_counted():
    """T4, T10: the new prompt is rendered whole, and shared only as far as it is equal."""
    renderer = FakeRenderer()
    whole = []

    def rewrites(_sampled, new_messages, tools, history):
        ids = renderer.start([*history[:1], *new_messages], tools).ids
        whole.append(ids)
        return Rendered(ids, fork="it drops earlier answers")

    renderer.extend = rewrites
    episode = play(FakeEnv(turns=3), FakeEngine("a"), renderer=renderer)
    episode.validate()
    assert episode.metrics["template_forks"] == 2
    assert [s.reason for s in episode.segments[1:]] == ["it drops earlier answers"] * 2
    forked = zip(episode.rows()[1:], whole, strict=True)
    assert all(list(row.token_ids[: len(ids)]) == ids for row, ids in forked)


def test_a_prompt_that_does_not_fit_truncates():
    renderer = FakeRenderer()

    def too_long(*_):
        raise PromptTooLong("5000 tokens do not fit")

    renderer.extend = too_long
    episode = play(FakeEnv(turns=2), FakeEngine("a"), renderer=renderer)
    assert episode.status is EpisodeStatus.TRUNCATED_TOKENS


def test_a_defect_of_the_program_is_raised_and_the_trace_ends_as_cancelled():
    renderer = FakeRenderer()

    def broken(*_):
        raise KeyError("bug")

    renderer.parse = broken
    log = Episode("toy", "t", "g", 7)
    with pytest.raises(KeyError):
        play(FakeEnv(), FakeEngine("a"), renderer=renderer, episode=log)
    assert log.status is EpisodeStatus.CANCELLED


@pytest.mark.parametrize("where", ["reset", "step", "engine"])
def test_cancellation_ends_the_episode_and_everything_that_it_waits_for(where):
    stopped = []

    async def wait(*_):
        try:
            await asyncio.sleep(HOUR)
        finally:
            stopped.append(where)

    async def main():
        env = FakeEnv(**({f"on_{where}": wait} if where != "engine" else {}))
        log = Episode("toy", "t", "g", 7)
        engine = FakeEngine(wait if where == "engine" else "a")
        task = asyncio.create_task(run_episode(env, engine, FakeRenderer(), log, options()))
        await asyncio.sleep(10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stopped == [where]
        assert log.status is EpisodeStatus.CANCELLED
        assert len(asyncio.all_tasks()) == 1
        return log

    check(run(main()))


# -- aborted answers -----------------------------------------------------------------------------


def test_an_aborted_answer_goes_on_behind_its_own_tokens_with_the_tokens_that_are_left():
    """T118: an abort is no stop; the message is one turn, with versions and routes per token."""
    engine = FakeEngine(
        replies(
            lambda request: result([65, 66], finish="abort", version=1, request=request),
            lambda request: result([], finish="abort", version=1, request=request),
            lambda request: result([67, STOP], version=2, request=request),
        )
    )
    env = FakeEnv()
    episode = play(env, engine, max_tokens_per_turn=6, return_routes=True)
    first, second, third = engine.requests
    assert list(second.input_ids) == [*first.input_ids, 65, 66]
    assert [r.sampling.max_new_tokens for r in engine.requests] == [6, 4, 4]
    assert len({r.rid for r in engine.requests}) == 3
    assert env.seen[0].text == "ABC"
    assert sampled(episode) == [[65, 66, 67, STOP]]
    assert list(episode.segments[0].weight_versions[-4:]) == [1, 1, 2, 2]
    assert episode.turns[0].finish_reason == "stop"
    assert episode.status is EpisodeStatus.COMPLETED
    assert third.routes_start == len(first.input_ids) + 1, "routes of the abort are not lost"


def test_an_abort_at_the_last_token_is_a_cut_message_not_another_request():
    engine = FakeEngine(replies(lambda request: result([65] * 4, finish="abort")))
    episode = play(FakeEnv(), engine, max_tokens_per_turn=4)
    assert episode.turns[0].finish_reason == "length"
    assert episode.status is EpisodeStatus.TRUNCATED_TOKENS


def test_with_retry_an_aborted_episode_is_cancelled_and_never_scored():
    """T115, T118: never scored, never trained as complete."""
    env = FakeEnv()
    episode = play(
        env,
        FakeEngine(lambda request: result([65], finish="abort", request=request)),
        on_abort="retry",
    )
    assert episode.status is EpisodeStatus.CANCELLED
    assert not episode.status.trainable
    assert env.seen == []
    assert sampled(episode) == [[65]]


def test_an_engine_that_aborts_for_ever_is_not_asked_for_ever():
    engine = FakeEngine(lambda request: result([], finish="abort", request=request))
    episode = play(FakeEnv(), engine, max_resumes=3)
    assert episode.status is EpisodeStatus.CANCELLED
    assert len(engine.requests) == 4


def test_a_failure_behind_an_abort_keeps_the_tokens_that_are_there():
    engine = FakeEngine(
        replies(lambda request: result([65, 66], finish="abort", request=request), dead)
    )
    episode = play(FakeEnv(), engine)
    assert episode.status is EpisodeStatus.ENGINE_FAILURE
    assert sampled(episode) == [[65, 66]]
    assert episode.turns[0].message is None


# -- routes --------------------------------------------------------------------------------------


def test_routes_cover_every_position_but_the_last_sampled_token_exactly_once():
    """T97, T98, T101: routes are asked from the first position without one, turn after turn."""
    engine = ScriptedEngine(
        lambda request: Reply([65, 66, STOP]), route_shape=RouteShape(3, 2, 8), context_length=4096
    )
    episode = play(FakeEnv(turns=3), engine, return_routes=True)
    starts = [request.routes_start for request in engine.requests]
    lengths = [len(request.input_ids) for request in engine.requests]
    assert starts == [0, *(length + 2 for length in lengths[:-1])]
    (row,) = episode.rows()
    assert row.has_route[:-1].all()
    assert not row.has_route[-1]
    assert row.routes.shape == (len(episode), 3, 2)
    assert row.routes.dtype == np.uint8


def test_routes_of_another_length_than_the_tokens_are_refused():
    """T97: 18,057 tokens against 17,804 routes."""

    def short(request):
        answer = result(ids_of("a"), request=request)
        return replaced(answer, routes=answer.routes[:-1])

    for script in (short, lambda request: result(ids_of("a"))):
        episode = play(FakeEnv(), FakeEngine(script), return_routes=True)
        assert episode.status is EpisodeStatus.ENGINE_FAILURE
        assert "routes" in episode.detail


def test_routes_survive_a_rewrite():
    async def on_step(env, action):
        if len(env.seen) == 1:
            return Rewrite((user("task t1"), system("s")), "compaction"), 0, False, False, {}
        return None

    engine = FakeEngine(lambda request: result(ids_of("ab"), request=request))
    episode = play(FakeEnv(turns=2, on_step=on_step), engine, return_routes=True)
    assert engine.requests[1].routes_start == episode.segments[1].shared
    for row in episode.rows():
        assert row.has_route[:-1].all()
        expected = np.arange(len(row.token_ids) - 1) % 8
        np.testing.assert_array_equal(row.routes[:-1, 0, 0], expected)


# -- identity and seeds --------------------------------------------------------------------------


def test_request_ids_are_unique_and_none_is_a_prefix_of_another():
    """T148: SGLang aborts by prefix, so session-1 must not begin session-12."""
    engine = FakeEngine("a")
    for _ in range(3):
        play(FakeEnv(turns=12), engine, max_turns=20, max_context=100_000)
    ids = [request.rid for request in engine.requests]
    assert len(set(ids)) == 36
    assert not any(a != b and b.startswith(a) for a in ids for b in ids)


def test_sampling_seeds_depend_on_run_group_member_attempt_and_turn_only():
    def seeds(group="g", **changes):
        engine = FakeEngine("a")
        play(FakeEnv(turns=2), engine, episode=Episode("toy", "t", group, 7), **changes)
        return tuple(request.sampling.seed for request in engine.requests)

    assert seeds() == seeds()
    different = [
        seeds(),
        seeds("h"),
        seeds(member=1),
        seeds(attempt=1),
        seeds(run_seed=1),
    ]
    assert len({seed for pair in different for seed in pair}) == 10


def test_the_recipes_sampling_reaches_the_engine():
    engine = FakeEngine("a")
    play(FakeEnv(), engine, sampling=SamplingParams(1, temperature=0.7, logit_bias={3: -1.0}))
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.logit_bias) == (0.7, {3: -1.0})
    assert sampling.stop_token_ids == [STOP]


# -- tools and experts ---------------------------------------------------------------------------


@tool
async def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


class AddEnv(ToolEnv):
    """Asks for a sum."""

    tools = (add,)
    tasks = TaskSet([Task("t1", "2+3", "5")])

    async def score(self, task, transcript):
        return float(transcript.answer == task.answer)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_broken_tool_call_is_answered_with_an_error_that_the_model_sees(wrapped):
    """T58: soft everywhere: same status, same number of turns, with and without a wrapper."""
    env = Wrapper(AddEnv()) if wrapped else AddEnv()
    episode = play(env, FakeEngine(replies("call {oops", 'call {"a": 2, "b": 3}', "5")))
    roles = [message.role for message in episode.messages]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert "could not be read" in episode.messages[2].text
    assert episode.messages[4].text == "5"
    assert episode.status is EpisodeStatus.COMPLETED
    assert episode.reward == 1.0
    assert episode.metrics["tool_errors"] == 1


class AddExpert:
    """Calls the tool, then says what it said."""

    def act(self, messages, tools):
        assert tools[0]["function"]["name"] == "add"
        if messages[-1].role == "user":
            return assistant(tool_calls=[ToolCall("add", {"a": 2, "b": 3}, "c0")])
        return assistant(messages[-1].text)


def test_an_expert_plays_through_the_same_loop_and_leaves_a_log_like_a_models():
    renderer = FakeRenderer()
    expert = play(AddEnv(), ExpertSource(AddExpert(), renderer), return_routes=True)
    model = play(AddEnv(), FakeEngine(replies('call {"a": 2, "b": 3}', "5")))
    assert expert.token_ids() == model.token_ids()
    assert expert.segments[0].loss_mask == model.segments[0].loss_mask
    assert expert.status is EpisodeStatus.COMPLETED
    assert set(expert.segments[0].logprobs) == {0.0}
    assert expert.reward == 1.0


def test_an_async_expert_is_awaited_and_cut_like_a_model():
    class Slow:
        async def act(self, messages, tools):
            await asyncio.sleep(1)
            return assistant("much too long")

    episode = play(FakeEnv(), ExpertSource(Slow(), FakeRenderer()), max_tokens_per_turn=4)
    assert sampled(episode) == [ids_of("much too long")[:4]]
    assert episode.status is EpisodeStatus.TRUNCATED_TOKENS

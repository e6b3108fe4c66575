"""Budgets of an episode: tokens of a message, of the whole episode, of the context."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_support import FakeEngine, FakeEnv, FakeRenderer, ids_of, options, result, run

from relax_agent.episode import Episode, EpisodeStatus
from relax_agent.messages import Image, user
from relax_agent.rendering import Rendered
from relax_agent.rollout import EpisodeLimits, RolloutSettings, run_episode


def play(env, engine, renderer=None, **changes) -> Episode:
    episode = Episode("toy", "t", "g", 7)
    run(run_episode(env, engine, renderer or FakeRenderer(), episode, options(**changes)))
    episode.validate()
    return episode


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_a_resumed_message_never_samples_more_than_its_budget(pieces, budget):
    """T29, T41: old and new tokens are one message, all of them sampled, with the rest asked for"""
    left = list(pieces)

    def script(request):
        room = request.sampling.max_new_tokens
        assert room == budget - (len(request.input_ids) - first)
        if left:
            return result([65] * min(left.pop(0), room), finish="abort", request=request)
        ids = ids_of("x" * 20)
        return result(ids[:room], finish="stop" if len(ids) <= room else "length", request=request)

    first = len(FakeRenderer().start([user("task t")], []).ids)
    episode = play(FakeEnv(), FakeEngine(script), max_tokens_per_turn=budget)
    (row,) = episode.rows()
    assert int(row.loss_mask.sum()) == episode.sampled_tokens <= budget
    assert row.loss_mask[first : first + episode.sampled_tokens].all()


@pytest.mark.parametrize("budget, turns, sampled", [(12, 2, 12), (10, 2, 10), (13, 3, 13)])
def test_the_episodes_own_budget_ends_it_wherever_it_is_used_up(budget, turns, sampled):
    episode = play(FakeEnv(turns=9), FakeEngine("x" * 5), max_tokens_per_episode=budget)
    assert (len(episode.turns), episode.sampled_tokens) == (turns, sampled)
    assert episode.status is EpisodeStatus.TRUNCATED_TOKENS
    assert episode.detail == f"{budget} of {budget} sampled tokens are used"


def test_what_tools_say_is_not_counted_against_the_episodes_budget():
    """T40: only what was sampled."""
    episode = play(FakeEnv(turns=3), FakeEngine("x" * 5), max_tokens_per_episode=18)
    assert (episode.status, episode.sampled_tokens) == (EpisodeStatus.COMPLETED, 18)


def test_an_aborted_message_goes_on_with_what_the_episode_has_left():
    answers = [result([65] * 3, finish="abort"), result(ids_of("BCDEFG")[:4], finish="length")]
    engine = FakeEngine(lambda request: answers.pop(0))
    play(FakeEnv(), engine, max_tokens_per_episode=7)
    assert [request.sampling.max_new_tokens for request in engine.requests] == [7, 4]


# -- a conversation that does not fit ------------------------------------------------------------


def long_talk(**changes):
    return play(
        FakeEnv(turns=6),
        FakeEngine("x" * 9),
        **{"max_context": 64, "max_tokens_per_turn": 10, **changes},
    )


def test_by_default_an_episode_without_room_ends():
    episode = long_talk()
    assert episode.status is EpisodeStatus.TRUNCATED_TOKENS
    assert len(episode.segments) == 1


def test_leaving_out_the_oldest_forks_the_log_and_lets_the_episode_end_by_itself():
    episode = long_talk(on_overflow="drop_oldest")
    assert (episode.status, len(episode.turns)) == (EpisodeStatus.COMPLETED, 6)
    assert all(segment.reason.endswith("messages left out") for segment in episode.segments[1:])
    assert len(episode.segments) > 1 and episode.metrics["dropped_messages"] > 0
    rows = episode.rows()
    assert all(len(row.token_ids) <= 64 for row in rows)
    assert sum(int(row.loss_mask.sum()) for row in rows) == episode.sampled_tokens == 60


def test_only_whole_messages_are_left_out_and_the_task_stays():
    prompts = []

    def script(request):
        prompts.append("".join(map(chr, request.input_ids)))
        return "x" * 9

    play(
        FakeEnv(turns=6), FakeEngine(script), max_context=64, max_tokens_per_turn=10,
        on_overflow="drop_oldest",
    )  # fmt: skip
    for prompt in prompts:
        assert len(prompt) + 10 <= 64
        assert prompt.startswith("u:task t\0\n") and prompt.endswith("\1")
        _, *rounds = prompt.removesuffix("\1").rstrip("\n").rstrip("\0").split("\0\n")
        assert all(each.lstrip("\1") in {"x" * 9, "a:" + "x" * 9, "u:more"} for each in rounds)


def test_a_last_round_that_does_not_fit_ends_the_episode():
    async def says_much(env, action):
        return [user("y" * 60)], 0.0, False, False, {}

    episode = play(
        FakeEnv(turns=9, on_step=says_much), FakeEngine("x" * 9), max_context=64,
        max_tokens_per_turn=10, on_overflow="drop_oldest",
    )  # fmt: skip
    assert (episode.status, len(episode.turns)) == (EpisodeStatus.TRUNCATED_TOKENS, 1)


def test_a_task_that_does_not_fit_ends_before_anything_is_sampled():
    engine = FakeEngine("good")
    episode = play(FakeEnv(), engine, max_context=6, on_overflow="drop_oldest")
    assert (episode.status, engine.requests) == (EpisodeStatus.TRUNCATED_TOKENS, [])


def test_media_go_with_their_messages_and_are_never_cut():
    """Placeholders are counted, and the engine gets just the media that are left."""

    class Sees(FakeRenderer):
        def start(self, messages, tools):
            ids, media = [], []
            for message in messages:
                for each in message.media:
                    media.append((len(ids), 8, each))
                    ids += [7] * 8
                ids += super().start([message], tools).ids[:-1]
            return Rendered([*ids, 1], tuple(media))

        def extend(self, sampled_ids, new_messages, tools, history=()):
            more = self.start(new_messages, tools)
            return Rendered([10, *more.ids], tuple((at + 1, n, m) for at, n, m in more.media))

    async def shows(env, action):
        picture = Image(bytes([len(env.seen)]) * 9, "image/png")
        done = len(env.seen) == 5
        return [user(["see", picture])], 0.0, done, False, {}

    engine = FakeEngine("x" * 9)
    episode = play(
        FakeEnv(on_step=shows), engine, Sees(), max_context=80, max_tokens_per_turn=10,
        on_overflow="drop_oldest",
    )  # fmt: skip
    assert (episode.status, len(episode.turns)) == (EpisodeStatus.COMPLETED, 5)
    assert len(episode.segments) > 1
    for request in engine.requests:
        assert request.input_ids.count(7) == 8 * len(request.media)
    for row in episode.rows():
        assert [span.count for span in row.media] == [8] * (list(row.token_ids).count(7) // 8)


def test_limits_of_a_recipe_reach_the_episode():
    limits = EpisodeLimits.of(
        RolloutSettings(max_tokens_per_episode=99, on_overflow="drop_oldest", max_context=77)
    )
    assert (limits.max_tokens_per_episode, limits.on_overflow, limits.max_context) == (
        99,
        "drop_oldest",
        77,
    )

"""The debate: whose turn it is, two views of one conversation, and what a critic is good for."""

import asyncio
import json
import statistics

import pytest
from rollout_support import STOP, FakeRenderer, ids_of, options, run

from relax_agent.envs import ScriptedPolicy, make, play
from relax_agent.episode import Episode, EpisodeStatus
from relax_agent.messages import AssistantMessage, Rewrite, ToolCall, assistant, parts
from relax_agent.rollout import ExpertSource, run_episode

CALL = ToolCall("calculator", {"expression": "1+1"}, "c")


@pytest.fixture
def env():
    return make("relax/Debate-v0")


def gold(env, task):
    return env.unwrapped.tasks[task].answer


async def say(env, *messages, task="eval-00000"):
    """Play fixed messages; return all steps."""
    await env.reset(options={"task": task})
    return [
        await env.step(m if isinstance(m, AssistantMessage) else assistant(m)) for m in messages
    ]


def test_the_roles_take_turns_and_each_has_its_own_view(env):
    right = gold(env, "eval-00000")
    steps = asyncio.run(say(env, "Answer: 0", "DISAGREE, it is more", f"Answer: {right}", "AGREE"))
    views = [step[0] for step in steps]
    assert [step[4].get("role") for step in steps] == ["critic", "proposer", "critic", None]
    assert [view.reason for view in views[:3]] == ["role: critic", "role: proposer", "role: critic"]
    assert all(isinstance(view, Rewrite) for view in views[:3]) and views[3] == []
    roles = [[m.role for m in view.messages] for view in views[:3]]
    assert roles[0] == ["system", "user", "user"]
    assert roles[1] == ["system", "user", "assistant", "user"]
    assert roles[2] == ["system", "user", "user", "assistant", "user"]
    assert views[0].messages[-1].text == "The proposer says:\nAnswer: 0"
    assert views[1].messages[-1].text == "The critic says:\nDISAGREE, it is more"
    assert views[0].messages[0].text != views[1].messages[0].text


@pytest.mark.parametrize(
    ("messages", "reward", "critic"),
    [
        (["call", "right", "AGREE"], 1.0, 1.0),
        (["right", "call", "AGREE"], 1.0, 1.0),
        (["right", "AGREE"], 0.3, 1.0),
        (["call", "wrong", "AGREE"], 0.0, 0.0),
        (["call", "wrong", "**Disagree**: no", "right", "agree."], 1.0, 1.0),
        (["call", "right", "DISAGREE", "wrong", "AGREE"], 0.0, 0.0),
        (["call", "wrong", "Well, hm", "right", "AGREE"], 1.0, 0.5),
        (["call", "wrong", "DISAGREE", "wrong", "DISAGREE", "right"], 1.0, 1.0),
        (["call", "all of them", "AGREE"], 0.0, 0.0),
    ],
)
def test_the_last_answer_is_scored_and_each_role_gets_its_account(env, messages, reward, critic):
    right = gold(env, "eval-00000")
    words = {
        "call": assistant(tool_calls=[CALL]),
        "right": f"I think so. Answer: {right}",
        "wrong": f"Answer: {right + 1}",
        "all of them": f"Answer: {right}\nAnswer: {right + 1}",
    }
    steps = asyncio.run(say(env, *[words.get(m, m) for m in messages]))
    assert [step[2] for step in steps] == [False] * (len(steps) - 1) + [True]
    assert [step[1] for step in steps[:-1]] == [0.0] * (len(steps) - 1)
    assert steps[-1][1] == reward
    assert steps[-1][4]["rewards"] == {"proposer": reward, "critic": critic}


def test_a_debate_without_an_end_is_cut_and_earns_nothing(env):
    steps = asyncio.run(say(env, *[assistant(tool_calls=[CALL])] * 12))
    assert [step[3] for step in steps] == [False] * 11 + [True]
    assert sum(step[1] for step in steps) == 0.0


def test_two_policies_may_play_and_a_good_critic_mends_a_bad_proposer(env):
    bad, good = env.unwrapped.expert(noise=0.5, seed=1), env.unwrapped.expert()

    async def main(critic):
        roles = {"proposer": bad, "critic": critic}
        tasks = env.tasks.ids("eval")[:40]
        return [await play(env, roles, task=task, seed=0) for task in tasks]

    helped = asyncio.run(main(good))
    nodded = asyncio.run(main(ScriptedPolicy(lambda messages, tools: "AGREE")))
    first = statistics.mean(record.metrics["first_right"] for record in helped)
    assert all(record.status is EpisodeStatus.COMPLETED for record in helped)
    assert statistics.mean(r.metrics["success"] for r in helped) > first + 0.15
    assert statistics.mean(r.metrics["success"] for r in nodded) < first + 0.15


def test_a_role_that_nobody_plays_is_told(env):
    record = asyncio.run(play(env, {"proposer": ScriptedPolicy(["Answer: 1"])}))
    assert record.status is EpisodeStatus.ENGINE_FAILURE
    assert "critic" in record.detail


class Renderer(FakeRenderer):
    """Writes calls of the calculator in the fake format."""

    def parse(self, output_ids, tools):
        text = "".join(chr(i) for i in output_ids if i != STOP)
        if not text.startswith("call "):
            return AssistantMessage(content=parts(text))
        return AssistantMessage(tool_calls=(ToolCall("calculator", json.loads(text[5:]), "c0"),))


def test_in_training_every_change_of_roles_forks_the_token_log(env):
    renderer = Renderer()
    script = ["Answer: 0", "DISAGREE", "Answer: 1", "AGREE"]
    said = iter(script)
    source = ExpertSource(ScriptedPolicy(lambda messages, tools: next(said)), renderer)
    log = Episode("relax/Debate-v0", "eval-00000", "g", 7)
    episode = run(run_episode(env, source, renderer, log, options(max_context=100_000)))
    episode.validate()
    assert episode.status is EpisodeStatus.COMPLETED
    reasons = [segment.reason for segment in episode.segments]
    assert reasons[1:] == ["role: critic", "role: proposer", "role: critic"]
    rows = episode.rows()
    assert [sum(row.loss_mask) for row in rows] == [len(ids_of(text)) for text in script]


def test_an_expert_in_the_training_loop_earns_the_shared_reward(env):
    renderer = Renderer()
    source = ExpertSource(env.unwrapped.expert(), renderer)
    log = Episode("relax/Debate-v0", "eval-00001", "g", 7)
    episode = run(run_episode(env, source, renderer, log, options(max_context=100_000)))
    assert (episode.status, episode.reward) == (EpisodeStatus.COMPLETED, 1.0)
    assert len(episode.segments) == 2 and episode.metrics["verdicts_right"] == 1.0

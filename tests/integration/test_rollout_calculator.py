"""The real environment, renderer, tool and queue in one loop; only the model is a script."""

import asyncio
import itertools

import pytest
from rollout_support import options

from relax_agent.engines.protocol import SamplingParams
from relax_agent.engines.script import Reply
from relax_agent.engines.scripted import ScriptedEngine
from relax_agent.engines.wire import RouteShape
from relax_agent.envs import make
from relax_agent.episode import EpisodeStatus
from relax_agent.messages import ToolCall, assistant, tool_message, user
from relax_agent.models import ModelSettings, TinySettings, chat_texts, resolve_model
from relax_agent.queue import LocalQueue, QueueSettings, load_group
from relax_agent.rendering import RendererSettings, load_renderer
from relax_agent.rollout import (
    EnvPool,
    EpisodeRunner,
    ExpertSource,
    Fleet,
    GroupRunner,
    Producer,
    evaluate,
)

CALL = ToolCall("calculator", {"expression": "(1+2)*3"}, "call_0")


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    env = make("relax/Calculator-v0")
    texts = chat_texts(
        [
            [user(f"What is {n}?"), assistant(tool_calls=[CALL]), tool_message(str(n), CALL)]
            for n in range(30)
        ],
        env.tools.schemas(),
    )
    tiny = TinySettings(hidden=16, layers=1, head_dim=8, expert_hidden=16, experts=2)
    folder = resolve_model(ModelSettings(tiny=tiny), tmp_path_factory.mktemp("model"), texts)
    return load_renderer(folder, RendererSettings())


def calculator():
    return make("relax/Calculator-v0")


def episodes(source, renderer, **changes) -> EpisodeRunner:
    sampling = SamplingParams(256)
    return EpisodeRunner(
        source,
        renderer,
        EnvPool(calculator, 8),
        options(sampling=sampling, max_tokens_per_turn=256, **changes),
        env_id="relax/Calculator-v0",
    )


def test_a_flawless_expert_solves_every_task_and_its_logs_are_sound(renderer):
    async def main():
        env = calculator()
        expert = env.unwrapped.expert(noise=0.0)
        tasks = list(env.tasks.ids("eval"))[:40]
        source = episodes(lambda: ExpertSource(expert, renderer), renderer)
        return await evaluate(tasks, source, name="expert")

    report = asyncio.run(main())
    assert (report.success, report.reward, report.failures) == (1.0, 1.0, 0)
    assert report.statuses == {"completed": 40}
    for episode in report.episodes:
        episode.validate()
        assert len(episode.segments) == 1, "nothing was ever rendered again"
        stops = [episode.segments[0].token_ids[turn.end - 1] for turn in episode.turns]
        assert set(stops) <= set(renderer.stop_token_ids)


def test_groups_go_through_the_real_queue_with_routes(tmp_path, renderer):
    """A scripted model that calls the tool, then answers 7 (wrong) or what the tool said."""

    def model(request):
        turns = request.rid.split(".")[1]
        if turns == "0000":
            return Reply(renderer.completion(assistant(tool_calls=[CALL])))
        answer = "9" if request.sampling.seed % 2 else "7"
        return Reply(renderer.completion(assistant(answer)))

    async def main():
        shape = RouteShape(2, 2, 8)
        engines = [
            ScriptedEngine(
                model, name=f"e{i}", route_shape=shape, context_length=4096, vocab_size=4096
            )
            for i in range(2)
        ]
        queue = LocalQueue(tmp_path / "queue", QueueSettings(), groups_per_step=2)
        await queue.restore(0)
        groups = GroupRunner(episodes(Fleet(engines), renderer, return_routes=True), size=4)
        order = calculator().tasks.sample_order(0)
        producer = Producer(queue, groups, order, max_episodes=8)
        producing = asyncio.create_task(producer.run())
        found = []
        for step in range(1, 4):
            lease = await queue.lease(2, step=step, timeout=60)
            found += [load_group(path) for path in lease.paths]
            await queue.ack(lease, step)
        producing.cancel()
        await asyncio.gather(producing, return_exceptions=True)
        stats = await queue.stats()
        await queue.close()
        return found, stats

    found, stats = asyncio.run(main())
    assert (stats.trained, stats.reserved) == (6, 0)
    expected = list(itertools.islice(calculator().tasks.sample_order(0), 6))
    assert sorted(group.task_id for group in found) == sorted(expected)
    for episode in (episode for group in found for episode in group.episodes):
        episode.validate()
        assert episode.status is EpisodeStatus.COMPLETED
        assert episode.metrics["tool_calls"] == 1
        (row,) = episode.rows()
        assert row.has_route[:-1].all()
        assert not row.has_route[-1]

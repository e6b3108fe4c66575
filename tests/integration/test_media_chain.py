"""Media from a tool through renderer, engine and token log into one step of the trainer."""

import asyncio
from dataclasses import dataclass, field

import pytest
from media_support import KINDS, clip, film, picture, processor, tiny

from relax_agent.engines.protocol import GenerateRequest, SamplingParams
from relax_agent.envs import Env
from relax_agent.episode import Episode, EpisodeStatus, Group
from relax_agent.errors import BatchError
from relax_agent.messages import Audio, Image, ToolCall, Video, user
from relax_agent.queue.payload import load_group, save_group
from relax_agent.rendering import RendererSettings, load_renderer
from relax_agent.rollout.episode_loop import EpisodeLimits, EpisodeOptions, run_episode
from relax_agent.tools import Toolset, tool
from relax_agent.trainers.algorithms import AlgorithmSettings
from relax_agent.trainers.building import build_batch
from relax_agent.trainers.protocol import BatchLayout
from relax_agent.trainers.settings import TrainerSettings
from relax_agent.trainers.torch_trainer import TorchTrainer


@tool
def photo() -> list[str | Image]:
    """Take a picture."""
    return ["Here it is:", picture(3)]


@tool
def record() -> Audio:
    """Record a sound."""
    return clip(0.7)


@tool
def shoot() -> Video:
    """Make a short film."""
    return film(2)


TOOLS = {"image": photo, "audio": record, "video": shoot}


class Studio(Env):
    """Calls one tool a turn, whatever a random model says, and rewards odd answers."""

    tasks = None

    def __init__(self, kinds):
        self.tools = Toolset([TOOLS[kind] for kind in kinds])
        self.kinds = kinds

    async def reset(self, *, seed=None, options=None):
        self.left = list(self.kinds)
        return [user(["What do you see?", picture(9)])], {}

    async def step(self, action):
        reward = float(action.usage.completion_tokens % 2)
        if not self.left:
            return [], reward + len(action.text) % 3, True, False, {}
        call = ToolCall(TOOLS[self.left.pop(0)].name, {}, "call_0")
        result = await self.tools.call(call)
        return [result.to_message(call)], reward, False, False, {}


@dataclass
class Spy:
    """An engine, and all that it was asked."""

    engine: object
    seen: list[GenerateRequest] = field(default_factory=list)

    async def generate(self, request):
        self.seen.append(request)
        return await self.engine.generate(request)

    async def abort(self, rid=None):
        await self.engine.abort(rid)


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def played(kind):
    """A group of four episodes that a tiny model has played, and the requests."""
    from aiohttp.test_utils import TestServer

    from relax_agent.engines.client import EngineClient
    from relax_agent.engines.embedded.__main__ import build_server
    from relax_agent.engines.embedded.settings import EmbeddedSettings

    server = build_server(EmbeddedSettings(model_path=tiny(kind), random_seed=0))
    renderer = load_renderer(tiny(kind), RendererSettings(name="qwen3"))
    routes = kind == "qwen3_omni"
    options = EpisodeOptions(
        SamplingParams(8), EpisodeLimits(max_tokens_per_turn=8, max_context=4096), 0, routes
    )

    async def main():
        async with TestServer(server.app()) as http, EngineClient(str(http.make_url(""))) as client:
            spy = Spy(client)
            episodes = [Episode("studio", "t", "g", 0) for _ in range(4)]
            runs = (
                run_episode(Studio(KINDS[kind]), spy, renderer, each, options, member=number)
                for number, each in enumerate(episodes)
            )
            await asyncio.wait_for(asyncio.gather(*runs), 120)
            return Group("g", "studio", "t", episodes), spy.seen

    group, seen = asyncio.run(main())
    server.scheduler.stop()
    return group, seen


def test_every_turn_reaches_its_end_and_the_log_is_whole(kind, played):
    for episode in played[0].episodes:
        assert episode.status in (EpisodeStatus.COMPLETED, EpisodeStatus.TRUNCATED_TOKENS)
        assert len(episode.turns) == 1 + len(KINDS[kind])
        episode.validate()


def test_the_engine_gets_all_media_in_every_turn(kind, played):
    """T67, T68: the picture of the question is still there when the model answers the last tool."""
    group, seen = played
    made = [TOOLS[each].name for each in KINDS[kind]]
    for episode in group.episodes:
        asked = sorted(
            (each for each in seen if each.rid.startswith(episode.id)), key=lambda each: each.rid
        )
        assert [len(each.media) for each in asked] == list(range(1, 2 + len(made)))
        assert asked[-1].media[0] == picture(9) and picture(3) in asked[-1].media


def test_log_engine_and_trainer_count_the_same_placeholders(kind, played):
    """T71: sizes come from the model's own processor, in one place."""
    group, seen = played
    pads = set(processor(kind).placeholder_ids.values())
    for episode in group.episodes:
        spans = episode.media_spans()
        assert [each.kind for each in spans] == ["image", *KINDS[kind]]
        for span in spans:
            medium = episode.media[span.digest]
            assert span.count == processor(kind).layout(medium).count
        ids = episode.token_ids()
        covered = {at for span in spans for at in range(span.start, span.start + span.count)}
        assert {at for at, token in enumerate(ids) if token in pads} <= covered
        asked = [each for each in seen if each.rid.startswith(episode.id)]
        assert (
            max((each.input_ids for each in asked), key=len)
            == ids[: len(ids) - (episode.turns[-1].end - episode.turns[-1].start)]
        )


def test_a_group_with_media_survives_its_file(played, tmp_path):
    save_group(tmp_path / "g.safetensors", played[0])
    again = load_group(tmp_path / "g.safetensors")
    for old, new in zip(played[0].episodes, again.episodes, strict=True):
        new.validate()
        assert (new.media, new.media_spans()) == (old.media, old.media_spans())
        (row,), (other,) = old.rows(), new.rows()
        assert row.media == other.media and (row.token_ids == other.token_ids).all()


@pytest.fixture(scope="module")
def trained(kind, played):
    """One step of the trainer on the group, beside an episode of text alone."""
    trainer = TorchTrainer(
        TrainerSettings(kind="torch", lr=1e-3, micro_batch_tokens=4096),
        AlgorithmSettings(),
        tiny(kind),
    )
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    batch = build_batch([played[0]], AlgorithmSettings(), trainer.layout, version=0)
    report = trainer.step(batch)
    moved = {
        name
        for name, value in trainer.model.named_parameters()
        if (value - before[name]).abs().max() > 0
    }
    return report, moved, batch


def test_engine_and_trainer_agree_on_the_log_probs(kind, trained):
    """T73, T74: rows of different lengths with media lie packed in one micro-batch."""
    report, _, batch = trained
    assert report.skipped is None and report.sequences == 4
    assert report.logprob_mismatch <= 1e-4
    assert sum(len(micro.media) for micro in batch.micro_batches) == 4 * (1 + len(KINDS[kind]))
    if kind == "qwen3_omni":
        assert report.routes_replayed >= 0.99


def test_gradients_reach_every_tower(kind, trained):
    _, moved, _ = trained
    towers = ["visual", "language_model"] + ["audio_tower"] * (kind == "qwen3_omni")
    for tower in towers:
        assert any(tower in name for name in moved), tower


def test_a_trainer_of_text_alone_says_that_it_takes_no_media(played):
    text_alone = BatchLayout(4096, 100_000, None)
    with pytest.raises(BatchError, match="it holds media, which this trainer does not take"):
        build_batch([played[0]], AlgorithmSettings(), text_alone, version=0)

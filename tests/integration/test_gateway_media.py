"""A picture through the gateway to a real model: what the program shows is what the engine sees."""

import asyncio

import openai
from media_support import picture, processor, tiny

from relax_agent.engines.client import EngineClient
from relax_agent.engines.protocol import SamplingParams
from relax_agent.episode import Episode
from relax_agent.gateway import Gateway
from relax_agent.rendering import RendererSettings, load_renderer
from relax_agent.rollout.episode_loop import EpisodeLimits, EpisodeOptions


def test_a_program_shows_a_picture_and_asks_again_about_it():
    from aiohttp.test_utils import TestServer

    from relax_agent.engines.embedded.__main__ import build_server
    from relax_agent.engines.embedded.settings import EmbeddedSettings

    server = build_server(EmbeddedSettings(model_path=tiny("qwen3_vl"), random_seed=0))
    renderer = load_renderer(tiny("qwen3_vl"), RendererSettings(name="qwen3"))
    limits = EpisodeLimits(max_context=4096, max_tokens_per_turn=8)
    episode = Episode("env", "t", "g", 0)

    async def talk(client):
        shown = {"type": "image_url", "image_url": {"url": picture().data_url()}}
        messages = [{"role": "user", "content": [{"type": "text", "text": "see"}, shown]}]
        for question in ("and now?", "and then?"):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            said = reply.choices[0].message
            messages += [said.model_dump(exclude_none=True), {"role": "user", "content": question}]
        await client.chat.completions.create(model="policy", messages=messages)

    async def main():
        async with (
            asyncio.timeout(60),
            TestServer(server.app()) as http,
            EngineClient(str(http.make_url(""))) as engine,
        ):
            gateway = Gateway()
            async with gateway.serve() as url:
                options = EpisodeOptions(SamplingParams(8), limits)
                key = gateway.start(episode, engine, renderer, options)
                async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:
                    await talk(client)

    asyncio.run(main())
    server.scheduler.stop()
    episode.validate()
    assert len(episode.segments) == 1 and len(episode.turns) == 3
    (span,) = episode.media_spans()
    assert episode.media[span.digest] == picture()
    assert span.count == processor("qwen3_vl").layout(picture()).count

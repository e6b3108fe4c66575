"""A gateway with one episode, and an engine with a script, for programs that tests play."""

from __future__ import annotations

import asyncio
import contextlib

from rollout_support import FakeRenderer, ids_of

from relax_agent.engines.protocol import SamplingParams
from relax_agent.engines.script import Reply
from relax_agent.engines.scripted import ScriptedEngine
from relax_agent.episode import Episode
from relax_agent.gateway import Gateway
from relax_agent.rollout.episode_loop import EpisodeLimits, EpisodeOptions


def said(*texts):
    """An engine that says one text after the other."""
    return ScriptedEngine([Reply(ids_of(text)) for text in texts])


@contextlib.asynccontextmanager
async def open_episode(engine, renderer=None, **limits):
    """Serve one episode; yields the gateway's URL, the episode's key and the episode."""
    gateway, episode = Gateway(), Episode("env", "t", "g", 0)
    bounds = EpisodeLimits(**{"max_context": 4096, "max_tokens_per_turn": 64} | limits)
    async with gateway.serve() as url, asyncio.timeout(30):
        options = EpisodeOptions(SamplingParams(64), bounds)
        key = gateway.start(episode, engine, renderer or FakeRenderer(), options)
        yield url, key, episode
        assert gateway.close(key) is episode

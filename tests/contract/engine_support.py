"""Engines under test and the tiny mixture-of-experts model that they serve."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from relax_agent.engines import GenerateRequest, SamplingParams
from relax_agent.engines.client import EngineClient
from relax_agent.engines.folder import read_model_facts
from relax_agent.engines.launch import running_engine
from relax_agent.engines.scripted import ScriptedEngine
from relax_agent.engines.scripted_server import ScriptedServer
from relax_agent.engines.settings import EngineSettings

PROMPT = [10, 20, 30, 40, 50, 60]
ALL_KINDS = [
    "scripted",
    "scripted-http",
    "embedded",
    pytest.param("sglang", marks=pytest.mark.sglang),
]
MODEL_KINDS = ["embedded", pytest.param("sglang", marks=pytest.mark.sglang)]


@dataclass
class Models:
    """Folders of one architecture with different weights, good and bad."""

    base: Path
    other: Path
    missing: Path
    unknown: Path
    misshapen: Path


@dataclass
class Subject:
    """One engine and what is known about it."""

    kind: str
    engine: object
    models: Models
    run: object
    """Runs a coroutine on the loop that the engine's connections belong to."""
    url: str | None = None
    versions: itertools.count = field(default_factory=lambda: itertools.count(1))
    rids: itertools.count = field(default_factory=itertools.count)

    @property
    def honours_seeds(self):
        """SGLang does only in its deterministic mode, which no CPU attention backend supports."""
        return self.kind != "sglang"

    @property
    def takes_tensors(self):
        return self.kind != "sglang"

    def request(self, ids=None, tokens=8, *, rid=None, routes=False, start=0, **sampling):
        sampling.setdefault("ignore_eos", True)
        rid = rid or f"{self.kind}-{next(self.rids)}"
        params = SamplingParams(tokens, **sampling)
        return GenerateRequest(list(ids or PROMPT), params, rid, routes, start)

    async def ask(self, ids=None, tokens=8, **options):
        return await self.engine.generate(self.request(ids, tokens, **options))

    async def greedy(self, ids=None, tokens=8, **options):
        return await self.ask(ids, tokens, temperature=0.0, **options)

    async def start_long(self, count=1, tokens=300, **options):
        """Start requests and return once each has sampled some tokens: later ones have too."""
        tasks = [
            asyncio.ensure_future(self.ask([100 + n, *PROMPT], tokens, **options))
            for n in range(count)
        ]
        await asyncio.sleep(0)
        await self.ask([7, 8, 9], 16)
        assert not any(task.done() for task in tasks)
        return tasks

    async def load(self, folder, mode="retract"):
        """Bring other weights in, with nothing but the engine's own calls."""
        version = next(self.versions)
        await self.engine.pause(mode)
        try:
            await self.engine.begin_weight_update()
            try:
                await self.engine.update_weights_from_disk(str(folder), version)
            finally:
                await self.engine.end_weight_update()
            if mode == "retract":
                await self.engine.flush_cache()
        finally:
            await self.engine.resume()
        return version


def save_model(folder, seed):
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.1,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
    )
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)


def change_model(source, target, change):
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    file = target / "model.safetensors"
    tensors = {name: tensor * 2 for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@contextlib.asynccontextmanager
async def serve(kind, models, log):
    facts = read_model_facts(models.base)
    if kind.startswith("scripted"):
        engine = ScriptedEngine(
            model_path=models.base,
            route_shape=facts.routes,
            context_length=facts.context_length,
            # As slow as a real engine: else an answer may end before an update reaches it.
            step=lambda: asyncio.sleep(0.001),
        )
        if kind == "scripted":
            yield engine, None
            return
        async with ScriptedServer(engine) as server, EngineClient(server.url) as client:
            yield client, server.url
        return
    python = {}
    if kind == "sglang" and "RELAX_SGLANG_PYTHON" in os.environ:
        python["python"] = Path(os.environ["RELAX_SGLANG_PYTHON"])
    settings = EngineSettings(
        kind=kind, max_total_tokens=16384, max_running_requests=16, control_timeout_s=30, **python
    )
    async with running_engine(settings, models.base, log) as running:
        yield running.client, running.client.url

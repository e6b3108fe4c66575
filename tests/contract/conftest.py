"""Fixtures of the engine contract: each kind of engine is started once in a session."""

from __future__ import annotations

import asyncio

import pytest
from engine_support import Models, Subject, change_model, save_model, serve


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    import torch

    root = tmp_path_factory.mktemp("models")
    names = Models(*(root / name for name in ("base", "other", "missing", "unknown", "misshapen")))
    save_model(names.base, 0)
    save_model(names.other, 1)
    norm = "model.norm.weight"
    change_model(names.base, names.missing, lambda t: t.pop("model.layers.1.mlp.gate.weight"))
    change_model(names.base, names.unknown, lambda t: t.update({"model.extra": torch.ones(3)}))
    change_model(names.base, names.misshapen, lambda t: t.update({norm: torch.ones(32)}))
    return names


@pytest.fixture(scope="session")
def reference(models):
    """The same models in transformers, on whole sequences."""
    from transformers import AutoModelForCausalLM

    return {
        folder: AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
        for folder in (models.base, models.other)
    }


@pytest.fixture(scope="session")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def subject(request, models, runner, tmp_path_factory):
    log = tmp_path_factory.mktemp("logs") / f"{request.param}.log"
    server = serve(request.param, models, log)
    engine, url = runner.run(server.__aenter__())
    yield Subject(request.param, engine, models, runner.run, url)
    runner.run(server.__aexit__(None, None, None))

"""What a model's folder says, and how two sets of weights differ."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from relax_agent.engines.folder import (
    manifest_difference,
    read_manifest,
    read_model_facts,
    weight_files,
)
from relax_agent.engines.wire import RouteShape
from relax_agent.errors import ConfigError, StorageError

BASE = {"vocab_size": 512, "max_position_embeddings": 2048, "num_hidden_layers": 4}


def facts(folder, **config):
    (folder / "config.json").write_text(json.dumps(config))
    return read_model_facts(folder)


def test_a_dense_model_has_no_routes(tmp_path):
    found = facts(tmp_path, **BASE)
    assert (found.vocab_size, found.context_length, found.routes) == (512, 2048, None)


@pytest.mark.parametrize("key", ["num_experts", "n_routed_experts", "num_local_experts"])
def test_experts_are_found_under_every_name(tmp_path, key):
    """T100: all layers count, dense ones too."""
    found = facts(tmp_path, **BASE, **{key: 8, "num_experts_per_tok": 2})
    assert found.routes == RouteShape(4, 2, 8)


def test_the_text_part_of_an_omni_model_counts(tmp_path):
    assert facts(tmp_path, text_config=BASE).vocab_size == 512


@pytest.mark.parametrize("text", ["{", "{}", None])
def test_an_unreadable_config_is_named(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model_facts(tmp_path)


def test_the_manifest_joins_all_files(tmp_path):
    save_file({"a": np.zeros((2, 3), np.float32)}, tmp_path / "model-1.safetensors")
    save_file({"b": np.zeros(4, np.float16)}, tmp_path / "model-2.safetensors")
    assert read_manifest(tmp_path) == {"a": (2, 3), "b": (4,)}
    assert [file.name for file in weight_files(tmp_path)] == [
        "model-1.safetensors",
        "model-2.safetensors",
    ]


def test_a_tensor_in_two_files_is_an_error(tmp_path):
    for name in ("x", "y"):
        save_file({"a": np.zeros(1, np.float32)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(StorageError, match="second time"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x00" * 8, b"\xff" * 16, b"\x04\0\0\0\0\0\0\0nope"])
def test_a_file_that_is_not_safetensors_is_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(StorageError, match=r"model\.safetensors"):
        read_manifest(tmp_path)


def test_a_folder_without_weights_is_an_error(tmp_path):
    with pytest.raises(StorageError, match=r"no \.safetensors"):
        read_manifest(tmp_path)


def test_differences_are_told_in_one_line():
    """T145"""
    served = {"a": (1,), "b": (2,), "c": (3,)}
    assert manifest_difference(dict(served), served) is None
    text = manifest_difference({"a": (1,), "b": (9,), "d": (4,)}, served)
    assert text == "1 missing, first c; 1 unknown, first d; 1 of wrong shape, first b: [9] for [2]"

"""Megatron's model against transformers: numbers, conversion, packing, and the CPU layer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trainer_support import VOCAB, dense_model, moe_model

from relax_agent.errors import ConfigError, TrainerError
from relax_agent.trainers.batch import MicroBatch
from relax_agent.trainers.megatron import device

torch.set_num_threads(1)
LENGTHS = [7, 13, 1, 13, 4]
ROOT = Path(__file__).parents[2]
NEXT = ROOT / "build/peers/megatron-0.17.1"
KINDS = {
    "moe": moe_model,
    "all_experts": lambda folder: moe_model(folder, mlp_only_layers=[], norm_topk_prob=False),
    "tied_experts": lambda folder: moe_model(folder, tie_word_embeddings=True),
    "dense": dense_model,
}


@pytest.fixture(scope="module", autouse=True)
def groups_of_ranks():
    owner = device.start("cpu")
    yield
    if owner:
        device.stop()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    for kind, make in KINDS.items():
        make(base / kind)
    return base


def packed(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    empty = torch.empty(0)
    return MicroBatch(
        token_ids=torch.randint(0, VOCAB, (tokens,), generator=generator),
        positions=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32),
        predictors=torch.arange(tokens),
        targets=torch.randint(0, VOCAB, (tokens,), generator=generator),
        advantages=empty,
        behaviour_logprobs=empty,
        weights=empty,
        routes=None,
        has_route=torch.zeros(tokens, dtype=torch.bool),
    )


def megatron(folder, tensors=None):
    from relax_agent.trainers.megatron import convert, model

    built = model.build_model(model.read_config(folder))
    convert.load_hf(built, tensors if tensors is not None else folder)
    return built.eval()


def logits(model, micro):
    from relax_agent.trainers.megatron.attention import PackedRows

    with torch.no_grad():
        return model.logits(model.hidden_states(micro, PackedRows.of(micro)))[:, 0]


def transformers_logits(model, micro):
    """Row by row, with transformers' own attention."""
    rows = micro.token_ids.split(micro.lengths)
    with torch.no_grad():
        return torch.cat([model(row[None]).logits[0] for row in rows])


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_packed_rows_equal_transformers_row_by_row(folders, kind):
    from transformers import AutoModelForCausalLM

    micro = packed(LENGTHS)
    reference = AutoModelForCausalLM.from_pretrained(folders / kind).eval()
    expected = transformers_logits(reference, micro)
    got = logits(megatron(folders / kind), micro)
    assert expected.abs().max() > 1
    assert (got - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_exported_weights_are_the_checkpoint_and_load_in_transformers(folders, tmp_path, kind):
    """T145: names, shapes and values; then the same logits, all from an exported folder."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from relax_agent.trainers.hf_folder import write_hf_folder
    from relax_agent.trainers.megatron.convert import hf_weights

    model = megatron(folders / kind)
    disk = load_file(folders / kind / "model.safetensors")
    out = dict(hf_weights(model))
    assert out.keys() == disk.keys()
    assert all(torch.equal(out[name], disk[name]) for name in disk)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    write_hf_folder(hf_weights(model), folders / kind, tmp_path / "out", shard_bytes=20_000)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    micro = packed(LENGTHS, 1)
    assert (logits(model, micro) - transformers_logits(loaded, micro)).abs().max() <= 1e-5
    again = megatron(tmp_path / "out")
    assert torch.equal(logits(again, micro), logits(model, micro))


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_a_state_dict_of_transformers_loads_like_its_checkpoint(folders, kind):
    """In memory experts are fused, on disk they are not."""
    from transformers import AutoModelForCausalLM

    state = AutoModelForCausalLM.from_pretrained(folders / kind).state_dict()
    micro = packed(LENGTHS)
    from_memory = logits(megatron(folders / kind, state), micro)
    assert torch.equal(from_memory, logits(megatron(folders / kind), micro))


def test_rows_do_not_see_each_other(folders):
    """Changing one row's first token changes no other row, and all of that row."""
    model, micro = megatron(folders / "moe"), packed(LENGTHS)
    before = logits(model, micro)
    start = LENGTHS[0]
    micro.token_ids[start] = (micro.token_ids[start] + 1) % VOCAB
    changed = (logits(model, micro) != before).any(-1)
    inside = torch.zeros_like(changed)
    inside[start : start + LENGTHS[1]] = True
    assert torch.equal(changed, inside)


def test_positions_restart_in_every_row(folders):
    """The same tokens give the same logits wherever their row stands."""
    model, micro = megatron(folders / "moe"), packed([9, 9, 30, 9])
    rows = micro.token_ids.split(micro.lengths)
    rows[1].copy_(rows[0])
    rows[3].copy_(rows[0])
    parts = logits(model, micro).split(micro.lengths)
    assert (parts[0] - parts[1]).abs().max() <= 1e-5
    assert (parts[0] - parts[3]).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "llama"}, r"no layer spec and no weight table for the family 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act: gelu"),
        ({"attention_bias": True}, "attention_bias: True"),
        ({"use_sliding_window": True}, "use_sliding_window: True"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type: yarn"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(folders, changes, complaint):
    from relax_agent.trainers.megatron.model import check_supported, read_config

    config = read_config(folders / "moe")
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=complaint):
        check_supported(config)


def test_a_folder_without_weights_is_named(folders, tmp_path):
    (tmp_path / "config.json").write_bytes((folders / "moe" / "config.json").read_bytes())
    with pytest.raises(TrainerError, match=r"no model\.safetensors"):
        megatron(tmp_path)


def test_the_cpu_layer_is_refused_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(TrainerError, match="machine with a GPU"):
        device.install_cpu_layer()


def run_alone(code, **environment):
    """Run in a process of its own: what is tested here is global to a process."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_cpu_layer_changes_megatrons_view_of_torch_and_nothing_else():
    code = """
import torch
from relax_agent.trainers.megatron import device
device.import_megatron()
before = {k: v for k, v in vars(torch).items() if callable(v)}
cuda = dict(vars(torch.cuda))
import megatron.core.utils as utils
from megatron.core.transformer.moe.router import TopKRouter
untouched = TopKRouter._apply_expert_bias
device.start("cpu")
assert utils.torch is not torch and utils.torch.cuda.current_device() == torch.device("cpu")
assert utils.torch.zeros(2, device="cuda").device.type == "cpu"
assert all(getattr(torch, k) is v for k, v in before.items())
assert all(vars(torch.cuda)[k] is v for k, v in cuda.items())
device.install_cpu_layer()
device.stop()
assert utils.torch is torch and TopKRouter._apply_expert_bias is untouched
assert not device.cpu_layer_installed() and not torch.distributed.is_initialized()
device.start("cpu")
device.stop()
device.stop()
print("good")
"""
    done = run_alone(code)
    assert done.stdout.strip() == "good", done.stderr


def test_the_next_version_of_megatron_passes_the_same_tests():
    """The trainer's whole suite, on the version after the pinned one."""
    if not NEXT.is_dir():
        pytest.skip(f"{NEXT.relative_to(ROOT)} is absent: make peers")
    suite = Path(__file__).with_name("test_megatron_trainer.py")
    code = (
        "import megatron.core, pytest, sys; assert megatron.core.__version__ == '0.17.1';"
        f"sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', {str(suite)!r}]))"
    )
    done = run_alone(code, PYTHONPATH=os.pathsep.join([str(NEXT), str(ROOT / "tests")]))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "[100%]" in done.stdout

"""The table between Hugging Face's weights and Megatron's, without a model or process groups."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from relax_agent.errors import TrainerError
from relax_agent.trainers.megatron.convert import Source, hf_weights, load_hf, rule_of

QKV = rule_of("decoder.layers.0.self_attention.linear_qkv.weight")
GATE_UP = rule_of("decoder.layers.0.mlp.linear_fc1.weight")
sizes = st.integers(1, 4)


@given(groups=sizes, queries=sizes, head=sizes, width=sizes, seed=st.integers(0, 99))
def test_query_key_value_survive_the_round_trip(groups, queries, head, width, seed):
    torch.manual_seed(seed)
    parts = [torch.randn(groups * n * head, width) for n in (queries, 1, 1)]
    back = QKV.split(QKV.join(parts, groups), groups, head)
    assert all(torch.equal(a, b) for a, b in zip(parts, back, strict=True))


def test_a_head_groups_query_key_and_value_stand_together():
    """Head dimension 1, two groups of two queries: rows are q0 q1 k0 v0, then q2 q3 k1 v1."""
    query = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    key, value = torch.tensor([[10.0], [11.0]]), torch.tensor([[20.0], [21.0]])
    joined = QKV.join([query, key, value], 2)[:, 0].tolist()
    assert joined == [0, 1, 10, 20, 2, 3, 11, 21]


def test_gate_stands_above_up():
    gate, up = torch.zeros(3, 2), torch.ones(3, 2)
    joined = GATE_UP.join([gate, up], 1)
    assert torch.equal(joined, torch.cat([gate, up]))
    assert torch.equal(GATE_UP.split(joined, 1, 1)[1], up)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "name",
    [
        "embedding.word_embeddings.weight",
        "output_layer.weight",
        "decoder.final_layernorm.weight",
        "decoder.layers.3.self_attention.linear_qkv.weight",
        "decoder.layers.3.self_attention.linear_proj.weight",
        "decoder.layers.3.mlp.linear_fc1.weight",
        "decoder.layers.3.mlp.experts.local_experts.1.linear_fc2.weight",
        "decoder.layers.3.mlp.router.weight",
    ],
)
def test_shards_of_all_ranks_make_the_whole_tensor(name, ranks):
    rule = rule_of(name)
    whole = torch.randn(8, 8)
    shards = [rule.shard(whole, rank, ranks) for rank in range(ranks)]
    assert torch.equal(rule.unshard(shards), whole)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ranks_slice_of_the_fused_tensor_is_the_fusion_of_its_shards(ranks):
    """What Megatron's column-parallel layer holds of ``linear_qkv``: whole head groups."""
    groups, head = 4, 2
    parts = [torch.randn(groups * n * head, 3) for n in (3, 1, 1)]
    whole = QKV.join(parts, groups)
    for rank in range(ranks):
        shards = [QKV.shard(part, rank, ranks) for part in parts]
        assert torch.equal(QKV.join(shards, groups // ranks), whole.chunk(ranks)[rank])


def test_a_tensor_that_ranks_cannot_share_is_named():
    with pytest.raises(TrainerError, match=r"embed_tokens.*7 cannot be shared by 2"):
        rule_of("embedding.word_embeddings.weight").shard(torch.zeros(7, 2), 0, 2)


def test_offsets_make_names_global():
    rule = rule_of("decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight", 4, 8)
    stem = "model.layers.5.mlp.experts.10."
    assert rule.names == (f"{stem}gate_proj.weight", f"{stem}up_proj.weight")


def test_an_unknown_parameter_is_named():
    with pytest.raises(TrainerError, match="shared_experts"):
        rule_of("decoder.layers.0.mlp.shared_experts.gate_weight")


def fused_and_per_expert():
    gate_up, down = torch.randn(3, 8, 4), torch.randn(3, 4, 4)
    stem = "model.layers.0.mlp.experts."
    fused = {f"{stem}gate_up_proj": gate_up, f"{stem}down_proj": down}
    single = {}
    for expert in range(3):
        gate, up = gate_up[expert].chunk(2)
        single[f"{stem}{expert}.gate_proj.weight"] = gate.contiguous()
        single[f"{stem}{expert}.up_proj.weight"] = up.contiguous()
        single[f"{stem}{expert}.down_proj.weight"] = down[expert].contiguous()
    return fused, single


@pytest.mark.parametrize("on_disk", [True, False])
def test_experts_are_found_fused_and_one_by_one(tmp_path, on_disk):
    fused, single = fused_and_per_expert()
    for number, tensors in enumerate((fused, single)):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        source = Source(folder if on_disk else tensors)
        assert all(torch.equal(source[name], tensor) for name, tensor in single.items())
        assert source.unread == set()


def test_a_missing_weight_is_named():
    with pytest.raises(TrainerError, match=r"lack model\.norm\.weight"):
        Source({})["model.norm.weight"]


def tiny_model(**changes):
    """The smallest thing with a Megatron model's surface."""
    names = {
        "embedding.word_embeddings.weight": (6, 4),
        "decoder.final_layernorm.weight": (4,),
        "output_layer.weight": (6, 4),
        "decoder.layers.0.self_attention.linear_qkv.weight": (2 * 4, 4),
    }
    parameters = {n: torch.nn.Parameter(torch.randn(shape)) for n, shape in names.items()}
    place = SimpleNamespace(
        tensor=(0, 1), expert_tensor=(0, 1), first_layer=0, first_expert=0, holds_all=True
    )
    values = {
        "place": place,
        "config": SimpleNamespace(num_query_groups=2, kv_channels=1),
        "share_embeddings_and_output_weights": False,
        "named_parameters": parameters.items,
        **changes,
    }
    return SimpleNamespace(**values)


def test_a_models_weights_survive_the_round_trip():
    one, two = tiny_model(), tiny_model()
    load_hf(two, dict(hf_weights(one)))
    left, right = dict(one.named_parameters()), dict(two.named_parameters())
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_weight_without_a_place_is_an_error_and_not_lost():
    model = tiny_model()
    weights = {**dict(hf_weights(model)), "model.layers.0.self_attn.q_proj.bias": torch.ones(1)}
    with pytest.raises(TrainerError, match=r"no place for .*q_proj\.bias"):
        load_hf(model, weights)


def test_a_weight_of_another_shape_is_an_error():
    model = tiny_model()
    weights = {**dict(hf_weights(model)), "model.norm.weight": torch.ones(5)}
    with pytest.raises(TrainerError, match=r"makes \(5,\)"):
        load_hf(model, weights)


def test_moments_travel_through_the_same_table():
    model = tiny_model()
    moments = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    out = {name: t.clone() for name, t in hf_weights(model, lambda name, _: moments[name])}
    back = {name: torch.empty_like(t) for name, t in moments.items()}
    load_hf(model, out, lambda name, _: back[name])
    assert all(torch.equal(moments[name], back[name]) for name in moments)

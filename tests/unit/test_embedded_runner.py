"""One forward over rows of different length equals transformers' forward of each alone."""

import numpy as np
import pytest
import torch
from embedded_support import (
    EXPERTS,
    LAYERS,
    TOP_K,
    Reference,
    dense_config,
    moe_config,
    prompt,
    save_model,
)

from relax_agent.engines.embedded.attention import make_step
from relax_agent.engines.embedded.kv import Pool, Slots
from relax_agent.engines.embedded.routes import plain_experts
from relax_agent.engines.embedded.runner import ModelRunner, load_model
from relax_agent.errors import ConfigError


def mixtral_config():
    from transformers import MixtralConfig

    sizes = dense_config().to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
             "num_attention_heads", "num_key_value_heads", "initializer_range")  # fmt: skip
    return MixtralConfig(num_local_experts=4, **{name: sizes[name] for name in names})


def deepseek_config():
    """Keys and values of different width, a first dense layer, a shared expert."""
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        vocab_size=512, hidden_size=64, intermediate_size=96, moe_intermediate_size=32,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8,
        num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=24,
        initializer_range=0.05, max_position_embeddings=1024, pad_token_id=0,
    )  # fmt: skip


@pytest.fixture(scope="module", params=["moe", "dense", "sliding", "tied", "mixtral", "deepseek"])
def folder(request, tmp_path_factory):
    config = {
        "moe": moe_config,
        "dense": dense_config,
        "mixtral": mixtral_config,
        "deepseek": deepseek_config,
        "sliding": lambda: dense_config(
            use_sliding_window=True, sliding_window=8, max_window_layers=1
        ),
        "tied": lambda: dense_config(tie_word_embeddings=True),
    }[request.param]()
    return save_model(tmp_path_factory.mktemp(request.param), config)


def read(runner, prompts, lengths=None):
    longest = max(map(len, prompts)) + 40
    runner.slots.reserve(len(prompts), longest, 0)
    return runner.forward(prompts, lengths or [0] * len(prompts))[0]


def test_logits_of_mixed_lengths_equal_those_of_each_row_alone(folder):
    runner, reference = ModelRunner(load_model(folder, "float32")), Reference(folder)
    rows = [prompt(n, seed=n) for n in (1, 1, 4, 9, 10, 40, 70, 300)]
    logits = read(runner, rows)
    for _ in range(4):
        for row, got in zip(rows, logits, strict=True):
            expected = reference.logits(row)[-1].log_softmax(-1)
            assert got.log_softmax(-1) == pytest.approx(expected, abs=1e-5)
        new = [[int(token)] for token in logits.argmax(-1)]
        lengths = [len(row) for row in rows]
        for row, tokens in zip(rows, new, strict=True):
            row += tokens
        logits = runner.forward(new, lengths)[0]


def test_a_row_may_go_on_from_a_filled_start_by_any_number_of_tokens(folder):
    runner, reference = ModelRunner(load_model(folder, "float32")), Reference(folder)
    ids = prompt(600)
    read(runner, [ids[:1], ids[:2], ids[:3], ids[:20]])
    known, counts = [1, 2, 3, 20], [1, 30, 31, 560]
    new = [ids[start : start + count] for start, count in zip(known, counts, strict=True)]
    runner.slots.reserve(4, 600, 4)
    logits = runner.forward(new, known)[0]
    expected = reference.logits(ids).log_softmax(-1)
    for got, start, count in zip(logits, known, counts, strict=True):
        assert got.log_softmax(-1) == pytest.approx(expected[start + count - 1], abs=1e-5)


def test_all_logits_of_a_row_can_be_had(folder):
    runner, reference = ModelRunner(load_model(folder, "float32")), Reference(folder)
    rows = [prompt(3), prompt(17)]
    runner.slots.reserve(2, 64, 0)
    last, full = runner.forward(rows, [0, 0], full=[1])
    assert full[0].log_softmax(-1) == pytest.approx(
        reference.logits(rows[1]).log_softmax(-1), abs=1e-5
    )
    assert torch.equal(full[0][-1], last[1])


def test_routes_equal_the_routers_and_dense_layers_are_zero(tmp_path):
    folder = save_model(tmp_path, moe_config())
    runner, reference = ModelRunner(load_model(folder, "float32")), Reference(folder)
    rows = [prompt(n) for n in (2, 30, 31)]
    read(runner, rows)
    for at, row in enumerate(rows):
        routes = runner.row_routes(at, len(row))
        assert routes.shape == (len(row), LAYERS, TOP_K)
        assert not routes[:, 1].any()
        assert np.array_equal(routes, reference.routes(row))


@pytest.mark.parametrize("tokens", [1, 2, 7, 64])
def test_experts_give_what_those_of_transformers_give(tmp_path, tokens):
    from transformers.integrations.moe import grouped_mm_experts_forward

    experts = load_model(save_model(tmp_path, moe_config()), "float32").model.layers[0].mlp.experts
    hidden = torch.randn(tokens, 64)
    weights, chosen = torch.rand(tokens, EXPERTS).topk(TOP_K)
    ours = plain_experts(experts, hidden, chosen, weights)
    assert torch.equal(ours, grouped_mm_experts_forward(experts, hidden, chosen, weights))


def test_rows_of_one_token_share_a_block_and_long_rows_are_cut(folder):
    runner = ModelRunner(load_model(folder, "float32"))
    runner.slots.reserve(8, 700, 0)
    counts = [1, 1, 1, 12, 13, 14, 100, 600]
    step = make_step(runner.slots, [prompt(n) for n in counts], [5] * len(counts))
    assert [(b.first, b.count) for b in step.blocks[:3]] == [(0, 3), (3, 3), (6, 1)]
    assert [b.width for b in step.blocks[3:]] == [256, 256, 88]
    assert sum(b.stop - b.start for b in step.blocks) == sum(counts)


def test_slots_keep_rows_while_they_grow_move_and_pass_through_the_pool(folder):
    shape = ModelRunner(load_model(folder, "float32")).slots.shape
    slots, pool = Slots(shape, 4096), Pool(shape, 32)
    slots.reserve(2, 50, 0)
    slots.keys[:, 1, :, :50] = torch.randn(shape.layers, shape.heads, 50, shape.key_dim)
    slots.routes[1, :50] = torch.randint(0, 99, (50, shape.routes), dtype=torch.int16)
    keys, routes = slots.keys[:, 1, :, :50].clone(), slots.routes[1, :50].clone()
    slots.reserve(5, 300, 2)
    assert torch.equal(slots.keys[:, 1, :, :50], keys)
    slots.move(1, 0, 50)
    indices = np.random.default_rng(0).permutation(32)
    slots.store(0, 10, pool, indices)
    slots.load(4, pool, indices)
    assert torch.equal(slots.keys[:, 4, :, :32], keys[:, :, 10:42])
    assert torch.equal(slots.routes[4, :32], routes[10:42])


def test_slots_never_take_more_than_their_limit(folder):
    shape = ModelRunner(load_model(folder, "float32")).slots.shape
    slots = Slots(shape, 1000)
    slots.reserve(8, 100, 0)
    assert slots.rows * slots.capacity <= 1000
    assert (slots.rows >= 8, slots.capacity >= 100) == (True, True)
    slots.reserve(1, 1000, 0)
    assert (slots.rows, slots.capacity) == (1, 1000)
    assert not slots.fits(2, 501)


def test_bfloat16_stays_near_float32(tmp_path):
    folder = save_model(tmp_path, moe_config())
    runner, reference = ModelRunner(load_model(folder, "bfloat16")), Reference(folder)
    rows = [prompt(n) for n in (1, 9, 10, 40)]
    logits = read(runner, rows)
    assert runner.slots.keys.dtype == torch.bfloat16
    for row, got in zip(rows, logits, strict=True):
        expected = reference.logits(row)[-1].log_softmax(-1)
        assert got.dtype == torch.float32
        assert got.log_softmax(-1) == pytest.approx(expected, abs=0.1)


def test_a_folder_without_a_model_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        load_model(tmp_path, "float32")


def test_a_model_whose_attention_we_cannot_reproduce_is_refused(tmp_path):
    from transformers import GptOssConfig  # its attention has sinks

    config = GptOssConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_local_experts=4,
        max_position_embeddings=128, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    folder = save_model(tmp_path, config)
    with pytest.raises(ConfigError, match="s_aux"):
        ModelRunner(load_model(folder, "float32"))

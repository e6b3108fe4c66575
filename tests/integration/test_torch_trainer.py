"""The torch trainer against transformers run row by row, and against its own restarts."""

import itertools
import json
import os

import numpy as np
import pytest
import torch
from safetensors import safe_open
from trainer_support import EXPERTS, LAYERS, SHAPE, TOP_K, dense_model, group, moe_model

from relax_agent.errors import ConfigError, ResumeError, StorageError, TrainerError
from relax_agent.timeline import Timeline
from relax_agent.trainers.algorithms.grpo import policy_loss
from relax_agent.trainers.algorithms.settings import GrpoSettings
from relax_agent.trainers.building import build_batch, build_sft_batch
from relax_agent.trainers.hf_folder import write_hf_folder
from relax_agent.trainers.packed_attention import Packing
from relax_agent.trainers.settings import TrainerSettings, WarmStartSettings
from relax_agent.trainers.torch_trainer import TorchTrainer

torch.set_num_threads(1)
GRPO = GrpoSettings()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    moe_model(base / "moe")
    dense_model(base / "dense")
    return base


def trainer(folders, kind="moe", algorithm=GRPO, **settings):
    values = {"kind": "torch", "lr": 1e-3, "micro_batch_tokens": 64, **settings}
    return TorchTrainer(TrainerSettings(**values), algorithm, folders / kind)


def moe_groups(count=2):
    return [group([1.0, 0.0, 0.5], id=f"g{i}", routes=True) for i in range(count)]


def batch_for(subject, groups, **kwargs):
    return build_batch(groups, subject.algorithm, subject.layout, version=0, **kwargs)


def gradients(subject, batch):
    """Gradients of the whole batch by name, without moving a weight."""
    from relax_agent.trainers.losses import policy_micro_loss

    subject.optimizer.zero_grad()
    for micro in batch.micro_batches:
        subject._forward_backward(micro, lambda m, x: policy_micro_loss(m, x, subject.algorithm))
    return {name: p.grad.clone() for name, p in subject.names.items()}


def force(model, row):
    """Make transformers' own routers return the row's experts, as an independent reference."""
    for index, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            wanted = torch.from_numpy(row.routes[:, index].astype(np.int64))
            known = torch.from_numpy(row.has_route)

            def gate(x, router=layer.mlp.gate, wanted=wanted, known=known):
                logits = torch.nn.functional.linear(x, router.weight)
                scores = logits.softmax(-1)
                live = scores.topk(TOP_K, -1).indices
                chosen = torch.where(known[: len(x), None], wanted[: len(x)], live)
                picked = scores.gather(-1, chosen)
                return logits, picked / picked.sum(-1, keepdim=True), chosen

            layer.mlp.gate.forward = gate


def reference_gradients(folder, groups, batch, algorithm, routed):
    """Row by row with transformers' own attention and dense logits: nothing of ours."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    total = 0.0
    for members in groups:
        rewards = np.array([e.reward for e in members.episodes])
        advantages = (rewards - rewards.mean()) / rewards.std()
        for episode, advantage in zip(members.episodes, advantages, strict=True):
            (row,) = episode.rows()
            if routed:
                force(model, row)
            ids = torch.from_numpy(row.token_ids.astype(np.int64))
            logits = model(ids[None]).logits[0]
            logprobs = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
            mask = torch.from_numpy(row.loss_mask[1:] != 0)
            old = torch.from_numpy(row.logprobs[1:])[mask]
            signal = torch.full_like(old, float(advantage))
            total = total + policy_loss(logprobs[mask], old, signal, algorithm).loss.sum()
    (total / batch.tokens).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_close(got, expected, tolerance=2e-5):
    assert got.keys() == expected.keys()
    for name in expected:
        difference = (got[name] - expected[name]).abs().max()
        assert difference <= tolerance * (1 + expected[name].abs().max()), name


@pytest.mark.parametrize("kind", ["moe", "dense"])
@pytest.mark.parametrize("budget", [24, 200])
def test_gradients_equal_transformers_row_by_row(folders, kind, budget):
    """Packing, replay, the shift and the denominators, all at once, against a plain loop."""
    subject = trainer(folders, kind, micro_batch_tokens=budget)
    groups = moe_groups()
    batch = batch_for(subject, groups)
    assert (len(batch.micro_batches) > 1) == (budget == 24)
    reference = reference_gradients(folders / kind, groups, batch, GRPO, kind == "moe")
    assert_close(gradients(subject, batch), reference)


def test_tokens_without_a_route_use_the_live_router(folders):
    """T101: the reference keeps its live choice there too."""
    groups = [group([1.0, 0.0])]
    for member in groups[0].episodes:
        rng = np.random.default_rng(3)
        order = rng.random((6, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K]
        member.segments[0].add_routes(0, order.astype(np.uint8))
    subject = trainer(folders)
    batch = batch_for(subject, groups)
    reference = reference_gradients(folders / "moe", groups, batch, GRPO, True)
    assert_close(gradients(subject, batch), reference)
    report = subject.step(batch)
    assert report.routes_replayed == pytest.approx(12 / batch.forward_tokens)


def test_corrupting_one_route_changes_the_gradient(folders):
    subject = trainer(folders)
    groups = moe_groups(1)
    before = gradients(subject, batch_for(subject, groups))
    routes = groups[0].episodes[0].segments[0].routes
    old = routes[3, 1].tolist()
    routes[3, 1] = [next(e for e in range(EXPERTS) if e not in old), old[1]]
    after = gradients(subject, batch_for(subject, groups))
    assert any(not torch.allclose(before[name], after[name], atol=1e-7) for name in before)


def test_routers_get_gradients_under_replay(folders):
    subject = trainer(folders)
    grads = gradients(subject, batch_for(subject, moe_groups()))
    routers = [g for name, g in grads.items() if name.endswith("mlp.gate.weight")]
    assert len(routers) == 2
    assert all(g.abs().max() > 0 for g in routers)


def test_replaying_the_live_choice_differs_nowhere(folders):
    subject = trainer(folders)
    groups = moe_groups(1)
    for member in groups[0].episodes:
        record_live_routes(folders, member)
    batch = batch_for(subject, groups)
    replayed = gradients(subject, batch)
    live = gradients(trainer(folders, routing_replay=False), batch)
    assert_close(replayed, live, 1e-6)
    report = subject.step(batch)
    assert (report.routes_replayed, report.routes_differ) == (1.0, 0.0)


def record_live_routes(folders, member):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders / "moe")
    ids = torch.tensor(member.token_ids())
    with torch.no_grad():
        logits = model(ids[None], output_router_logits=True).router_logits
    routes = member.segments[0].routes
    for layer, each in zip((1, 2), logits, strict=True):
        routes[:, layer] = each.topk(TOP_K, -1).indices[: len(routes)].numpy()


@pytest.mark.parametrize("budget", [24, 200])
def test_recomputation_gives_the_same_gradients_and_counts(folders, budget):
    """T104: the routes of a recomputed micro-batch are its own."""
    plain = trainer(folders, micro_batch_tokens=budget)
    again = trainer(folders, micro_batch_tokens=budget, recompute="full")
    batch = batch_for(plain, moe_groups())
    assert_close(gradients(again, batch), gradients(plain, batch), 1e-6)
    first, second = plain.step(batch), again.step(batch)
    assert second.routes_differ == first.routes_differ > 0
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)


def test_fillers_and_padding_change_nothing(folders):
    subject = trainer(folders)
    groups = [group([1.0, 0.0], routes=True)]
    plain = batch_for(subject, groups)
    from dataclasses import replace

    filled = build_batch(groups, GRPO, replace(subject.layout, multiple=4), version=0)
    assert any(micro.filler for micro in filled.micro_batches)
    expected = gradients(subject, plain)
    assert_close(gradients(subject, filled), expected, 1e-6)
    filled.micro_batches = [micro.padded(50) for micro in filled.micro_batches]
    assert_close(gradients(subject, filled), expected, 1e-6)


def test_a_step_reports_what_it_did(folders):
    subject = trainer(folders, warmup_steps=4)
    batch = batch_for(subject, moe_groups())
    report = subject.step(batch)
    assert report.skipped is None
    assert (report.step, report.lr) == (1, pytest.approx(1e-3 / 4))
    assert report.tokens == batch.tokens
    assert report.grad_norm > 0
    assert report.logprob_mismatch > 0
    assert report.mismatch_kl >= 0
    assert report.routes_replayed == 1.0
    assert 0 < report.routes_differ < 1
    assert {"forward", "backward", "optimizer", "other"} <= report.time_s.keys()
    assert json.loads(json.dumps(report.to_json()))["tokens"] == batch.tokens


def test_reported_seconds_sum_to_the_wall(folders):
    ticks = itertools.count()
    timeline = Timeline(lambda: float(next(ticks)))
    settings = TrainerSettings(kind="torch", micro_batch_tokens=64)
    subject = TorchTrainer(settings, GRPO, folders / "moe", timeline=timeline)
    batch = batch_for(subject, moe_groups())
    total = sum(sum(subject.step(batch).time_s.values()) for _ in range(3))
    assert total == next(ticks) - 1


def test_mismatch_is_zero_for_the_trainers_own_logprobs(folders):
    """The log-prob is the one of the sampled token, under the stated temperature (T47)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders / "dense")
    groups = [group([1.0, 0.0])]
    for member in groups[0].episodes:
        ids = torch.tensor(member.token_ids())
        with torch.no_grad():
            logprobs = (model(ids[None]).logits[0] / 0.5).log_softmax(-1)
        for turn in member.turns:
            for at in range(turn.start, turn.end):
                member.segments[0].logprobs[at] = float(logprobs[at - 1, ids[at]])
    subject = trainer(folders, "dense", temperature=0.5)
    report = subject.step(batch_for(subject, groups))
    assert report.logprob_mismatch < 1e-5
    assert report.ratio_mean == pytest.approx(1.0, abs=1e-5)
    other = trainer(folders, "dense")
    assert other.step(batch_for(other, groups)).logprob_mismatch > 0.1


def test_a_batch_without_signal_moves_nothing(folders):
    """U5: skipped, reported, and the learning-rate schedule stands still."""
    subject = trainer(folders, warmup_steps=2)
    before = {name: p.detach().clone() for name, p in subject.names.items()}
    report = subject.step(batch_for(subject, [group([1.0, 1.0], routes=True)]))
    assert "every advantage is zero" in report.skipped
    assert (report.step, report.grad_norm) == (0, 0.0)
    assert all(torch.equal(before[name], p) for name, p in subject.names.items())


def test_the_policy_moves_towards_the_reward(folders):
    subject = trainer(folders, "dense", lr=3e-3)
    batch = batch_for(subject, [group([1.0, 0.0, 0.0, 1.0])])

    def gap():
        (micro,) = batch.micro_batches
        with torch.no_grad():
            return float((subject._logprobs(micro) * micro.advantages).sum())

    before = gap()
    for _ in range(5):
        subject.step(batch)
    assert gap() > before + 1.0


def test_sft_raises_the_likelihood_and_rl_then_starts_with_fresh_moments(folders):
    warm = WarmStartSettings(steps=20, lr=3e-3)
    subject = trainer(folders, warm_start=warm)
    batch = build_sft_batch(moe_groups(), subject.layout)
    losses = [subject.sft_step(batch).loss for _ in range(8)]
    assert losses[-1] < losses[0] - 0.5
    assert (subject.steps, subject.sft_steps) == (0, 8)
    subject.step(batch_for(subject, moe_groups()))
    assert {int(s["step"]) for s in subject.optimizer.state.values()} == {1}


def test_a_gradient_that_is_not_finite_changes_no_weight(folders):
    subject = trainer(folders, "dense")
    batch = batch_for(subject, [group([1.0, 0.0])])
    batch.micro_batches[0].weights[:] = float("nan")
    before = {name: p.detach().clone() for name, p in subject.names.items()}
    with pytest.raises(TrainerError, match="no weight was changed"):
        subject.step(batch)
    assert all(torch.equal(before[name], p) for name, p in subject.names.items())


def test_a_resumed_run_takes_exactly_the_same_steps(folders, tmp_path):
    """U14, and the optimizer's step count: the first step after a restart is the same number."""
    one = trainer(folders, warmup_steps=6)
    batches = [batch_for(one, moe_groups(n)) for n in (1, 2, 3)]
    one.sft_step(build_sft_batch(moe_groups(), one.layout))
    for batch in batches[:2]:
        one.step(batch)
    one.save(tmp_path / "ck")
    drawn = torch.rand(3)
    two = trainer(folders, warmup_steps=6, seed=9)
    two.restore(tmp_path / "ck")
    assert torch.equal(torch.rand(3), drawn)
    for batch in batches:
        first, second = one.step(batch), two.step(batch)
        for name in ("step", "loss", "grad_norm", "lr", "logprob_mismatch"):
            assert getattr(first, name) == getattr(second, name)
    for name, parameter in one.names.items():
        assert torch.equal(parameter, two.names[name])


def test_a_checkpoint_holds_no_pickle_and_replaces_as_a_whole(folders, tmp_path, monkeypatch):
    """U16: a failure while saving leaves the checkpoint before it."""
    subject = trainer(folders, "dense")
    subject.save(tmp_path / "ck")
    assert {p.suffix for p in (tmp_path / "ck").iterdir()} == {".safetensors", ".json"}
    subject.step(batch_for(subject, [group([1.0, 0.0])]))

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("relax_agent.trainers.torch_trainer.save_file", full_disk)
        with pytest.raises(StorageError, match="No space left"):
            subject.save(tmp_path / "ck")
    assert os.listdir(tmp_path) == ["ck"]
    fresh = trainer(folders, "dense")
    fresh.restore(tmp_path / "ck")
    assert fresh.steps == 0
    subject.save(tmp_path / "ck")
    fresh.restore(tmp_path / "ck")
    assert (fresh.steps, os.listdir(tmp_path)) == (1, ["ck"])


def test_a_foreign_checkpoint_is_refused(folders, tmp_path):
    trainer(folders, "dense").save(tmp_path / "ck")
    with pytest.raises(ResumeError, match="another model"):
        trainer(folders).restore(tmp_path / "ck")
    with pytest.raises(ResumeError, match="not a whole trainer checkpoint"):
        trainer(folders).restore(tmp_path)


def tensors_of(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return found


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_weights_carry_the_names_that_save_pretrained_writes(folders, kind):
    """T145: name set, shapes and values agree, tensor by tensor; one tensor per expert."""
    disk = tensors_of(folders / kind)
    yielded = dict(trainer(folders, kind).weights())
    assert yielded.keys() == disk.keys()
    assert all(torch.equal(yielded[name], disk[name]) for name in disk)
    experts = [name for name in yielded if ".experts." in name]
    assert len(experts) == (2 * EXPERTS * 3 if kind == "moe" else 0)


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_a_published_folder_loads_as_the_trained_model(folders, tmp_path, kind):
    from transformers import AutoModelForCausalLM

    (folders / kind / "tokenizer.json").write_text("{}")
    subject = trainer(folders, kind)
    subject.step(batch_for(subject, moe_groups()))
    target = tmp_path / "v1"
    write_hf_folder(subject.weights(), folders / kind, target, shard_bytes=20_000)
    (folders / kind / "tokenizer.json").unlink()
    index = json.loads((target / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 1
    assert shards == sorted(p.name for p in target.glob("*.safetensors"))
    assert all((target / shard).stat().st_size < 30_000 for shard in shards)
    assert (target / "tokenizer.json").read_text() == "{}"
    loaded = AutoModelForCausalLM.from_pretrained(target)
    assert subject.names.keys() == {name for name, _ in loaded.named_parameters()}
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, subject.names[name])


def test_bfloat16_trains_float32_weights_and_publishes_bfloat16(folders):
    subject = trainer(folders, dtype="bfloat16")
    assert subject.step(batch_for(subject, moe_groups())).grad_norm > 0
    assert {p.dtype for p in subject.names.values()} == {torch.float32}
    assert {tensor.dtype for _, tensor in subject.weights()} == {torch.bfloat16}


def test_dense_models_have_no_routes_and_moe_models_global_layers(folders):
    assert trainer(folders, "dense").layout.routes is None
    assert trainer(folders).layout.routes == SHAPE
    assert trainer(folders, routing_replay=False).layout.routes is None


def test_routers_that_replay_cannot_reach_are_refused_at_the_start(folders, monkeypatch):
    from transformers.models.qwen3_moe import modeling_qwen3_moe as module

    def by_sorting(self, hidden_states):
        logits = torch.nn.functional.linear(hidden_states, self.weight)
        values, indices = logits.softmax(-1).sort(-1, descending=True)
        return logits, values[:, : self.top_k], indices[:, : self.top_k]

    monkeypatch.setattr(module.Qwen3MoeTopKRouter, "forward", by_sorting)
    with pytest.raises(ConfigError, match="does not reach the routers"):
        trainer(folders)


def test_a_missing_model_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"no model in .*config\.json cannot be read"):
        trainer(tmp_path, "nothing")


def test_sliding_windows_hold_within_rows():
    from relax_agent.trainers.packed_attention import packed_attention

    torch.manual_seed(0)
    lengths, window = [5, 9, 3, 8], 4
    q, k, v = torch.randn(3, 1, 2, sum(lengths), 8)
    out, _ = packed_attention(
        torch.nn.Identity(), q, k, v, None, 0.3, packing=Packing.of(lengths), sliding_window=window
    )
    start = 0
    for length in lengths:
        part = [x[:, :, start : start + length] for x in (q, k, v)]
        back = torch.arange(length)[:, None] - torch.arange(length)
        mask = (back >= 0) & (back < window)
        expected = torch.nn.functional.scaled_dot_product_attention(
            *part, attn_mask=mask, scale=0.3
        )
        assert torch.allclose(out[:, start : start + length].transpose(1, 2), expected, atol=1e-6)
        start += length


ROUTERS = {
    "Mixtral": {"num_local_experts": 4},
    "GraniteMoe": {"num_local_experts": 4},
    "DeepseekV3": {
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
}


@pytest.mark.parametrize("family", ROUTERS)
def test_replay_reaches_routers_of_every_kind(tmp_path, family):
    """Softmax before or after the choice, sigmoid with a bias and groups of experts."""
    subject = trainer(tmp_path, small_model(tmp_path, family))
    replay, ids, tokens = subject.replay, torch.arange(9), 9
    live = torch.zeros(tokens, LAYERS, TOP_K, dtype=torch.uint8)
    choose = replay.choose

    def record(layer, indices):
        live[:, layer] = indices
        return choose(layer, indices)

    replay.choose = record
    with torch.no_grad(), replay.replaying(live.clone(), torch.zeros(tokens, dtype=torch.bool)):
        expected = subject._probe(ids)
    replay.choose = choose
    everywhere = torch.ones(tokens, dtype=torch.bool)
    with torch.no_grad(), replay.replaying(live, everywhere):
        assert torch.equal(subject._probe(ids), expected)
        assert replay.differing == 0
    with torch.no_grad(), replay.replaying((live + 1) % EXPERTS, everywhere):
        assert not torch.allclose(subject._probe(ids), expected, atol=1e-4)


def small_model(folder, family):
    import transformers

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": TOP_K,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        **ROUTERS[family],
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder / family)
    return family

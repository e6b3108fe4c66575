"""The Megatron trainer against transformers run row by row, and against its own restarts."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from megatron_support import reference_gradients, worst
from trainer_support import EXPERTS, LAYERS, SHAPE, TOP_K, dense_model, group, moe_model

from relax_agent.errors import ConfigError, ResumeError, TrainerError
from relax_agent.trainers.algorithms.settings import GrpoSettings
from relax_agent.trainers.building import build_batch, build_sft_batch
from relax_agent.trainers.losses import policy_micro_loss
from relax_agent.trainers.megatron import device
from relax_agent.trainers.megatron.trainer import MegatronTrainer
from relax_agent.trainers.settings import ParallelSettings, TrainerSettings, WarmStartSettings

torch.set_num_threads(1)
GRPO = GrpoSettings()
TOLERANCE = 1e-5
"""Of a gradient, relative to the largest entry of its tensor; measured: 3e-6."""


@pytest.fixture(scope="module", autouse=True)
def groups_of_ranks():
    """One process group for the module, so that each trainer is built in milliseconds."""
    owner = device.start("cpu")
    yield
    if owner:
        device.stop()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    moe_model(base / "moe")
    moe_model(base / "unnormalised", norm_topk_prob=False)
    dense_model(base / "dense")
    return base


def trainer(folders, kind="moe", **settings):
    values = {"kind": "megatron", "lr": 1e-3, "micro_batch_tokens": 64, **settings}
    return MegatronTrainer(TrainerSettings(**values), GRPO, folders / kind)


def some_groups(count=2):
    return [group([1.0, 0.0, 0.5], id=f"g{i}", routes=True) for i in range(count)]


def batch_for(subject, groups, **kwargs):
    return build_batch(groups, subject.algorithm, subject.layout, version=0, **kwargs)


def gradients(subject, batch):
    """The step's gradient by Hugging Face name, without moving a weight."""
    from relax_agent.trainers.megatron.convert import hf_weights

    subject.accumulate(batch, lambda m, x: policy_micro_loss(m, x, GRPO))
    return {n: t.clone() for n, t in hf_weights(subject.model, lambda _, p: p.main_grad)}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("budget", [24, 200])
@pytest.mark.parametrize("kind", ["moe", "unnormalised", "dense"])
def test_gradients_equal_transformers_row_by_row(folders, kind, budget, recompute):
    """T104, T100: packing, replay (also recomputed), conversion and denominators at once.

    Several micro-batches of equal lengths are what makes a queue of routes fail in silence.
    """
    subject = trainer(folders, kind, micro_batch_tokens=budget, recompute=recompute)
    groups = some_groups()
    batch = batch_for(subject, groups)
    assert (len(batch.micro_batches) > 1) == (budget == 24)
    expected = reference_gradients(folders / kind, groups, GRPO, routed=kind != "dense")
    assert worst(gradients(subject, batch), expected) <= TOLERANCE


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_tokens_without_a_route_use_the_live_router(folders, recompute):
    """T101: in the reference they keep their own choice too."""
    groups = [group([1.0, 0.0])]
    for member in groups[0].episodes:
        order = np.random.default_rng(3).random((6, LAYERS, EXPERTS)).argsort(-1)
        member.segments[0].add_routes(0, order[..., :TOP_K].astype(np.uint8))
    subject = trainer(folders, recompute=recompute)
    batch = batch_for(subject, groups)
    expected = reference_gradients(folders / "moe", groups, GRPO, routed=True)
    assert worst(gradients(subject, batch), expected) <= TOLERANCE
    assert subject.step(batch).routes_replayed == pytest.approx(12 / batch.forward_tokens)


def test_a_forward_without_a_backward_leaves_no_routes_behind(folders):
    """T104: a queue of routes would now be one micro-batch late."""
    from relax_agent.trainers.megatron.attention import PackedRows

    subject = trainer(folders, micro_batch_tokens=24, recompute="full")
    batch = batch_for(subject, some_groups())
    expected = gradients(subject, batch)
    with torch.no_grad():
        for micro in reversed(batch.micro_batches):
            subject.model(micro, PackedRows.of(micro))
    assert worst(gradients(subject, batch), expected) == 0.0


def test_two_models_of_one_process_do_not_share_routes(folders):
    one, two = trainer(folders, recompute="full"), trainer(folders, recompute="full")
    first, second = batch_for(one, some_groups(1)), batch_for(two, some_groups(2))
    expected = gradients(one, first)

    def loss(micro, logprobs):
        gradients(two, second)  # the other model runs between forward and recomputation
        return policy_micro_loss(micro, logprobs, GRPO)

    from relax_agent.trainers.megatron.convert import hf_weights

    one.accumulate(first, loss)
    got = dict(hf_weights(one.model, lambda _, p: p.main_grad))
    assert worst(got, expected) == 0.0


def test_corrupting_one_route_changes_the_gradient(folders):
    subject = trainer(folders)
    groups = some_groups(1)
    before = gradients(subject, batch_for(subject, groups))
    routes = groups[0].episodes[0].segments[0].routes
    old = routes[3, 1].tolist()
    routes[3, 1] = [next(e for e in range(EXPERTS) if e not in old), old[1]]
    after = gradients(subject, batch_for(subject, groups))
    assert worst(after, before) > 100 * TOLERANCE


def test_routers_get_gradients_under_replay(folders):
    subject = trainer(folders)
    found = gradients(subject, batch_for(subject, some_groups()))
    routers = [g for name, g in found.items() if name.endswith("mlp.gate.weight")]
    assert len(routers) == 2
    assert all(g.abs().max() > 0 for g in routers)


def test_replaying_the_live_choice_differs_nowhere(folders):
    from transformers import AutoModelForCausalLM

    groups = some_groups(1)
    model = AutoModelForCausalLM.from_pretrained(folders / "moe")
    for member in groups[0].episodes:
        ids = torch.tensor(member.token_ids())
        with torch.no_grad():
            logits = model(ids[None], output_router_logits=True).router_logits
        routes = member.segments[0].routes
        for layer, each in zip((1, 2), logits, strict=True):
            routes[:, layer] = each.topk(TOP_K, -1).indices[: len(routes)].numpy()
    subject, live = trainer(folders), trainer(folders, routing_replay=False)
    batch = batch_for(subject, groups)
    assert worst(gradients(subject, batch), gradients(live, batch)) <= 1e-6
    report = subject.step(batch)
    assert (report.routes_replayed, report.routes_differ) == (1.0, 0.0)
    assert live.step(batch).routes_replayed == 0.0


def test_recomputation_counts_each_choice_once(folders):
    plain, again = trainer(folders), trainer(folders, recompute="full")
    batch = batch_for(plain, some_groups())
    first, second = plain.step(batch), again.step(batch)
    assert second.routes_differ == first.routes_differ > 0
    assert second.routes_replayed == first.routes_replayed == 1.0


def test_fillers_and_padding_change_nothing(folders):
    subject = trainer(folders)
    groups = [group([1.0, 0.0], routes=True)]
    expected = gradients(subject, batch_for(subject, groups))
    filled = build_batch(groups, GRPO, replace(subject.layout, multiple=4), version=0)
    assert any(micro.filler for micro in filled.micro_batches)
    assert worst(gradients(subject, filled), expected) <= 1e-6
    filled.micro_batches = [micro.padded(50) for micro in filled.micro_batches]
    assert worst(gradients(subject, filled), expected) <= 1e-6


def test_chunked_logits_give_the_same_gradients(folders, monkeypatch):
    subject = trainer(folders)
    batch = batch_for(subject, some_groups())
    expected = gradients(subject, batch)
    monkeypatch.setattr("relax_agent.trainers.megatron.model.LOGITS_PER_CHUNK", 5 * 64)
    assert worst(gradients(subject, batch), expected) <= 1e-6


def test_temperature_divides_the_logits(folders):
    """T47: the trainer applies what the engine sampled with."""
    subject = trainer(folders, temperature=0.5)
    groups = some_groups(1)
    expected = reference_gradients(folders / "moe", groups, GRPO, routed=True, temperature=0.5)
    assert worst(gradients(subject, batch_for(subject, groups)), expected) <= TOLERANCE


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_both_trainers_take_the_same_step(folders, kind):
    """One recipe word chooses the implementation; the numbers must not care."""
    from relax_agent.trainers.torch_trainer import TorchTrainer

    # A larger eps: Adam would blow rounding up to a full step where the gradient is almost 0.
    settings = {"lr": 1e-3, "weight_decay": 0.1, "clip_grad": 0.05, "eps": 1e-3}
    mine = trainer(folders, kind, **settings)
    other = TorchTrainer(TrainerSettings(kind="torch", **settings), GRPO, folders / kind)
    for _ in range(3):
        batch = batch_for(mine, some_groups())
        first, second = mine.step(batch), other.step(batch)
        assert first.grad_norm == pytest.approx(second.grad_norm, rel=1e-5)
        assert first.loss == pytest.approx(second.loss, abs=1e-6)
        assert first.logprob_mismatch == pytest.approx(second.logprob_mismatch, rel=1e-5)
        assert first.routes_differ == pytest.approx(second.routes_differ, abs=0.02)
    moved, expected = dict(mine.weights()), dict(other.weights())
    assert moved.keys() == expected.keys()
    assert max(float((moved[n] - expected[n]).abs().max()) for n in expected) < 1e-6


def test_a_step_reports_what_it_did(folders):
    subject = trainer(folders, warmup_steps=4)
    batch = batch_for(subject, some_groups())
    report = subject.step(batch)
    assert report.skipped is None
    assert (report.step, report.lr) == (1, pytest.approx(1e-3 / 4))
    assert report.tokens == batch.tokens
    assert report.grad_norm > 0
    assert report.logprob_mismatch > 0
    assert 0 < report.routes_differ < 1
    assert {"forward", "backward", "optimizer", "other"} <= report.time_s.keys()
    assert json.loads(json.dumps(report.to_json()))["tokens"] == batch.tokens


def test_a_batch_without_signal_moves_nothing(folders):
    """U5: skipped, reported, and the learning-rate schedule stands still."""
    subject = trainer(folders, warmup_steps=2)
    before = {name: t.clone() for name, t in subject.weights()}
    report = subject.step(batch_for(subject, [group([1.0, 1.0], routes=True)]))
    assert "every advantage is zero" in report.skipped
    assert (report.step, report.grad_norm) == (0, 0.0)
    assert all(torch.equal(before[name], t) for name, t in subject.weights())


def test_a_gradient_that_is_not_finite_changes_no_weight(folders):
    subject = trainer(folders)
    batch = batch_for(subject, some_groups(1))
    batch.micro_batches[0].weights[:] = float("nan")
    before = {name: t.clone() for name, t in subject.weights()}
    with pytest.raises(TrainerError, match="no weight was changed"):
        subject.step(batch)
    assert all(torch.equal(before[name], t) for name, t in subject.weights())
    assert subject.steps == 0


def test_sft_raises_the_likelihood_and_rl_then_starts_with_fresh_moments(folders):
    subject = trainer(folders, warm_start=WarmStartSettings(steps=20, lr=3e-3))
    batch = build_sft_batch(some_groups(), subject.layout)
    losses = [subject.sft_step(batch).loss for _ in range(8)]
    assert losses[-1] < losses[0] - 0.5
    assert (subject.steps, subject.sft_steps) == (0, 8)
    subject.step(batch_for(subject, some_groups()))
    assert adam_steps(subject) == {1}


def adam_steps(subject):
    from relax_agent.trainers.megatron.checkpoint import inner_optimizers

    return {
        int(state["step"])
        for inner in inner_optimizers(subject.optimizer)
        for state in inner.state.values()
    }


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_a_resumed_run_takes_exactly_the_same_steps(folders, tmp_path, kind):
    """U14, and Adam's step count: the steps after a restart are the same numbers."""
    one = trainer(folders, kind, warmup_steps=6)
    batches = [batch_for(one, some_groups(n)) for n in (1, 2, 3)]
    one.sft_step(build_sft_batch(some_groups(), one.layout))
    for batch in batches[:2]:
        one.step(batch)
    one.save(tmp_path / "ck")
    drawn = torch.rand(3)
    two = trainer(folders, kind, warmup_steps=6, seed=9)
    two.restore(tmp_path / "ck")
    assert torch.equal(torch.rand(3), drawn)
    assert adam_steps(two) == {2}
    for batch in batches:
        first, second = one.step(batch), two.step(batch)
        for name in ("step", "loss", "grad_norm", "lr", "logprob_mismatch"):
            assert getattr(first, name) == getattr(second, name)
    assert adam_steps(two) == {5}
    left, right = dict(one.weights()), dict(two.weights())
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_checkpoint_before_the_first_step_can_be_restored(folders, tmp_path):
    one, two = trainer(folders), trainer(folders)
    two.step(batch_for(two, some_groups()))
    one.save(tmp_path / "ck")
    two.restore(tmp_path / "ck")
    batch = batch_for(one, some_groups())
    assert one.step(batch).grad_norm == two.step(batch).grad_norm
    left, right = dict(one.weights()), dict(two.weights())
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_checkpoint_holds_no_pickle_and_replaces_as_a_whole(folders, tmp_path, monkeypatch):
    """U16: a failure while saving leaves the checkpoint before it."""
    subject = trainer(folders)
    subject.save(tmp_path / "ck")
    assert {p.suffix for p in (tmp_path / "ck").iterdir()} == {".safetensors", ".json"}
    subject.step(batch_for(subject, some_groups()))

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("relax_agent.trainers.megatron.checkpoint.save_file", full_disk)
        with pytest.raises(Exception, match="No space left"):
            subject.save(tmp_path / "ck")
    assert os.listdir(tmp_path) == ["ck"]
    fresh = trainer(folders)
    fresh.restore(tmp_path / "ck")
    assert fresh.steps == 0


def test_a_foreign_checkpoint_is_refused(folders, tmp_path):
    trainer(folders, "dense").save(tmp_path / "ck")
    with pytest.raises(ResumeError, match="does not fit this model"):
        trainer(folders).restore(tmp_path / "ck")
    with pytest.raises(ResumeError, match="not a whole trainer checkpoint"):
        trainer(folders).restore(tmp_path)
    (tmp_path / "ck" / "trainer.json").write_text('{"kind": "torch"}')
    with pytest.raises(ResumeError, match="kind: torch"):
        trainer(folders).restore(tmp_path / "ck")


def test_the_layout_names_global_layers(folders):
    """T100: a dense first layer shifts nothing."""
    assert trainer(folders).layout.routes == SHAPE
    assert trainer(folders, "dense").layout.routes is None
    assert trainer(folders, routing_replay=False).layout.routes is None


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"dtype": "bfloat16"}, "float32 on the CPU"),
        ({"device": "cuda"}, "this machine has none"),
        ({"ranks": 2, "parallel": ParallelSettings(tensor=2)}, "not yet the model"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(folders, settings, complaint):
    if settings.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match=complaint):
        trainer(folders, **settings)

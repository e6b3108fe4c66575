"""A run from the recipe to the exported model, for both trainers and both kinds of model.

Everything is on policy here, so engine and trainer must agree on every log-prob.
"""

import json
from types import SimpleNamespace

import pytest
from run_support import lines, train, trained_groups, write_recipe

from relax_agent.run.recipe import load_recipe

STEPS = 2
KEYS = {
    "step", "version", "success", "reward", "loss", "grad_norm", "lr", "tokens", "tokens_per_s",
    "trained_tokens", "episodes", "turns", "statuses", "skipped", "wall_s", "time_s",
    "trainer_time_s", "staleness_mean", "staleness_max", "logprob_mismatch", "mismatch_kl",
    "ratio_mean", "clip_share", "routes_differ", "routes_replayed", "excluded", "tool_failures",
}  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[("torch", "qwen3_moe"), ("megatron", "qwen3_moe"), ("torch", "qwen3"),
            ("megatron", "qwen3")],
    ids="-".join,
)  # fmt: skip
def finished(request, runs, tmp_path_factory):
    """A run that has ended well."""
    kind, model = request.param
    recipe = write_recipe(
        tmp_path_factory.mktemp("recipe"),
        runs,
        name=f"{kind}-{model}",
        steps=STEPS,
        model={"tiny": {"kind": model}},
        trainer={"kind": kind},
        queue={"max_staleness": 0},
        tools={"trace": True},
    )
    with train(recipe) as process:
        process.finish()
        assert (process.status, process.left()) == (0, {}), process.err
    folder = runs / f"{kind}-{model}"
    return SimpleNamespace(
        folder=folder,
        recipe=load_recipe(recipe),
        out=process.out,
        metrics=lines(folder / "metrics.jsonl"),
        experts=model == "qwen3_moe",
        model=next((runs / ".models").glob(f"{model}-*")),
    )


def test_every_step_is_a_line_with_every_figure(finished):
    assert [line["step"] for line in finished.metrics] == list(range(1, STEPS + 1))
    for line in finished.metrics:
        assert line.keys() >= KEYS
        assert line["skipped"] is None and line["grad_norm"] > 0 and line["tokens"] > 0
        assert line["tool_failures"] == 0
    assert finished.metrics[-1]["version"] == 1 + STEPS  # one for the warm start


def test_on_policy_engine_and_trainer_agree_on_every_token(finished):
    for line in finished.metrics:
        assert (line["staleness_mean"], line["staleness_max"]) == (0, 0)
        assert line["logprob_mismatch"] <= 1e-3
        assert line["ratio_mean"] == pytest.approx(1, abs=1e-3)
        assert line["routes_replayed"] == (1 if finished.experts else 0)


def test_the_parts_of_a_step_are_its_whole_time(finished):
    for line in finished.metrics:
        parts = line["time_s"]
        assert {"wait_data", "train", "publish", "acknowledge", "record"} <= parts.keys()
        assert sum(parts.values()) == pytest.approx(line["wall_s"])
        assert parts["other"] <= 0.1 * line["wall_s"] + 0.05
    assert "checkpoint" not in finished.metrics[0]["time_s"]


def test_every_tool_call_of_a_trained_episode_is_in_the_trace(finished):
    calls = lines(finished.folder / "tool_calls.jsonl")
    assert {"tool", "arguments", "started_at", "duration_s", "outcome"} <= calls[0].keys()
    traced = [call["episode"] for call in calls]
    for episode in lines(finished.folder / "episodes.jsonl"):
        made = sum(message["role"] == "tool" for message in episode["messages"])
        unread = [
            call
            for message in episode["messages"]
            for call in message.get("tool_calls") or ()
            if call["error"] is not None
        ]
        assert traced.count(episode["id"]) >= made - len(unread)


def test_tensorboard_has_the_same_figures(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished.folder / "tensorboard"))
    events.Reload()
    assert {"success", "reward", "loss", "time_s/train", "eval/success"} <= set(
        events.Tags()["scalars"]
    )
    told = [(each.step, each.value) for each in events.Scalars("loss")]
    assert told == [(line["step"], pytest.approx(line["loss"])) for line in finished.metrics]
    assert [each.step for each in events.Scalars("eval/success")] == [0, STEPS]


def test_the_curves_are_drawn(finished):
    assert (finished.folder / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_every_trained_episode_can_be_read(finished):
    episodes = lines(finished.folder / "episodes.jsonl")
    assert len(episodes) == sum(line["episodes"] for line in finished.metrics)
    groups = trained_groups(finished.folder)
    size = finished.recipe.rollout.group_size
    for step, ids in groups.items():
        told = [episode["group_id"] for episode in episodes if episode["step"] == step]
        assert told == [group_id for group_id in ids for _ in range(size)]
    answers = [m for e in episodes for m in e["messages"] if m["role"] == "tool"]
    assert answers, "the model has called a tool"
    for step in (0, STEPS):
        evaluated = lines(finished.folder / f"eval-{step:06d}.jsonl")
        assert len(evaluated) == finished.recipe.eval.tasks


def test_the_last_line_says_where_everything_is_and_what_was_reached(finished):
    told = json.loads(finished.out.splitlines()[-1])
    assert told["run"] == str(finished.folder)
    assert (told["step"], told["steps"], told["missed"]) == (STEPS, STEPS, [])
    evals = lines(finished.folder / "evals.jsonl")
    assert [told["greedy_before"], told["greedy_after"]] == [each["success"] for each in evals]


def test_the_export_is_the_model_that_the_checkpoint_holds(finished, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from relax_agent.trainers.hf_folder import write_hf_folder
    from relax_agent.trainers.worker import load_trainer

    exported = finished.folder / "export"
    trainer = load_trainer(finished.recipe.trainer, finished.recipe.algorithm, finished.model)
    try:
        trainer.restore(finished.folder / "checkpoints" / f"step-{STEPS:06d}")
        assert trainer.steps == STEPS
        write_hf_folder(trainer.weights(), finished.model, tmp_path / "again")
    finally:
        trainer.close()
    ids = torch.arange(40)[None] % len(AutoTokenizer.from_pretrained(exported))
    logits = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
        for folder in (exported, tmp_path / "again", finished.model)
    ]
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2]), "nothing was trained"


def test_only_the_newest_weights_stay(finished):
    assert [path.name for path in (finished.folder / "weights").iterdir()] == [f"v{1 + STEPS:06d}"]

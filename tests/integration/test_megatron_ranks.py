"""Several ranks of the Megatron trainer that share the data (gloo, processes of this machine)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from trainer_support import moe_model

RANK = """
import json, sys
from pathlib import Path
from safetensors.torch import save_file
from trainer_support import group
from relax_agent.trainers.algorithms.settings import GrpoSettings
from relax_agent.trainers.building import build_batch
from relax_agent.trainers.megatron.trainer import MegatronTrainer
from relax_agent.trainers.settings import TrainerSettings

rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
settings = TrainerSettings(ranks=ranks, lr=1e-3, eps=1e-3, micro_batch_tokens=24, recompute="full")
meet = None if ranks == 1 else (folder / f"meet-{ranks}").as_uri()
trainer = MegatronTrainer(settings, GrpoSettings(), folder / "moe", rank=rank, init_method=meet)
reports = []
for step in range(2):
    groups = [group([1.0, 0.0, 0.5], id=f"{step}-{i}", routes=True) for i in range(2)]
    batch = build_batch(groups, GrpoSettings(), trainer.layout, version=0)
    reports.append(trainer.step(batch).to_json())
trainer.save(folder / f"checkpoint-{ranks}")
trainer.restore(folder / f"checkpoint-{ranks}")
(folder / f"reports-{ranks}-{rank}.json").write_text(json.dumps(reports))
trainer.close()
"""


def run(folder, ranks):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    environment["OMP_NUM_THREADS"] = "1"
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, str(rank), str(ranks), str(folder)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        errors = [child.communicate(timeout=240)[1] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0] * ranks, errors
    return [json.loads((folder / f"reports-{ranks}-{r}.json").read_text()) for r in range(ranks)]


def test_two_ranks_take_the_same_steps_as_one(tmp_path):
    """U7: gradients are summed over ranks, and every rank reports the whole step."""
    moe_model(tmp_path / "moe")
    (alone,) = run(tmp_path, 1)
    together = run(tmp_path, 2)
    for reports in together:
        for got, expected in zip(reports, alone, strict=True):
            for name in ("loss", "grad_norm", "logprob_mismatch", "routes_differ", "tokens"):
                assert got[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    one, two = (load_file(tmp_path / f"checkpoint-{n}" / "model.safetensors") for n in (1, 2))
    assert one.keys() == two.keys()
    assert max(float((one[name] - two[name]).abs().max()) for name in one) <= 1e-6

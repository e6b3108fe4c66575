"""Every program in ``examples/`` runs as its docstring says."""

import json
import os
import subprocess
import sys

from run_support import ROOT, write_recipe


def test_the_control_with_permuted_rewards_trains_and_reports_every_seed(tmp_path):
    recipe = write_recipe(tmp_path, tmp_path / "runs")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "examples.shuffled_reward_control"),
            *("--recipe", str(recipe), "--seeds", "5"),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == (1 if figures["rose"] else 0), done.stderr
    assert set(figures["control"]) == {"5"}
    (folder,) = (tmp_path / "runs").glob("shuffled-reward-control*")
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [1, 2]
    assert "shuffle_rewards: true" in (folder / "recipe.yaml").read_text()

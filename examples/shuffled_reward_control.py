"""The control of a learning curve: the same run with its rewards permuted must not learn.

    python -m examples.shuffled_reward_control                # three seeds
    python -m examples.shuffled_reward_control --seeds 0 --set steps=20

Every batch's rewards are permuted over the whole batch before advantages are computed. All else is
the demo: model, warm start, rollout, loss, optimizer. If success rises all the same, something
other than the rewards teaches the model, and a rising curve of the real run would prove nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean

from relax_agent.monitor import read_metrics
from relax_agent.run.recipe import load_recipe
from relax_agent.run.start import run

MOST_RISE = 0.05
"""By so much the mean of the last 10 steps may lie above that of the first 3."""


def control(recipe: Path, seed: int, overrides: list[str]) -> tuple[float, float]:
    """Run the control for one seed; return sampled success of the first 3 and last 10 steps."""
    settings = load_recipe(
        recipe,
        [
            "name=shuffled-reward-control",
            "algorithm.shuffle_rewards=true",
            "goal={}",
            "eval.tasks=32",
            f"seed={seed}",
            *overrides,
        ],
    )
    before = set(settings.runs.glob("*"))
    run(settings, quiet=True)
    (folder,) = {
        path for path in set(settings.runs.glob("*")) - before if not path.name.startswith(".")
    }
    success = [float(line["success"]) for line in read_metrics(folder / "metrics.jsonl")]
    return fmean(success[:3]), fmean(success[-10:])


def main() -> int:
    """Run all seeds, print a line each and one JSON line, and fail if a curve rises."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", type=Path, default=Path("configs/calculator-moe.yaml"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    curves = {}
    for seed in arguments.seeds:
        first, last = control(arguments.recipe, seed, arguments.overrides)
        curves[seed] = {"first_3": round(first, 3), "last_10": round(last, 3)}
        print(f"seed {seed}: first 3 steps {first:.3f}, last 10 steps {last:.3f}", flush=True)
    rose = [seed for seed, c in curves.items() if c["last_10"] > c["first_3"] + MOST_RISE]
    print(json.dumps({"control": curves, "rose": rose}))
    return 1 if rose else 0


if __name__ == "__main__":
    sys.exit(main())

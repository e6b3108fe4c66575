"""What a run would start, for ``--dry-run``: one line a process."""

from __future__ import annotations

from relax_agent.run.recipe import Recipe


def process_plan(recipe: Recipe) -> str:
    """Return the processes of a run and how work flows between them, as plain lines."""
    engine, trainer, rollout = recipe.engine, recipe.trainer, recipe.rollout
    lines = [
        "conductor: environments, rollout, queue",
        f"engine x{engine.count}: {engine.kind}, {engine.threads} thread(s) each",
        f"trainer x{trainer.ranks}: {trainer.kind} on {trainer.device},"
        f" {trainer.threads} thread(s) each",
    ]
    if recipe.tools.serve:
        lines.append(f"tools: {recipe.tools.serve} over HTTP")
    elif recipe.tools.url:
        lines.append(f"tools: already served at {recipe.tools.url}")
    group = f"{rollout.groups_per_step} groups x {rollout.group_size} episodes"
    lines.append(
        f"{recipe.steps} steps of {group}, staleness at most {recipe.queue.max_staleness},"
        f" weights by {recipe.weights.kind}"
    )
    return "\n".join(f"# {line}" for line in lines)

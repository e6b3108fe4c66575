"""What a tiny model's tokenizer is trained on: conversations of the environment it will play."""

from __future__ import annotations

from itertools import islice

from relax_agent.envs import Env, Policy, RandomPolicy, play
from relax_agent.errors import EnvError
from relax_agent.models.tokenizer import chat_texts


async def environment_texts(
    env: Env, policy: Policy | None = None, episodes: int = 256
) -> list[str]:
    """Play training tasks and return the conversations as text, tool header included.

    Equal environments and policies give equal texts, so a run finds its tiny model again.

    Args:
        env: The environment; it stays open.
        policy: Who plays, best an expert; by default random play.
        episodes: How many tasks are played, from the first on.
    """
    who = policy if policy is not None else RandomPolicy(0)
    tasks: list[str | None] = [None] * episodes
    if env.tasks is not None:
        tasks = list(islice(env.tasks.ids("train"), episodes))
    plays = [await play(env, who, task=task, seed=seed) for seed, task in enumerate(tasks)]
    if plays and not any(record.status.trainable for record in plays):
        raise EnvError(f"{env!r}: no episode could be played: {plays[0].detail}")
    return chat_texts((record.messages for record in plays), env.tools.schemas())

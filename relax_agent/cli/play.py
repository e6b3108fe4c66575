"""``relax-agent play``: be the model yourself, or watch a policy play."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from relax_agent.cli.options import EnvArguments, EnvId, Modules, import_modules, read_arguments
from relax_agent.cli.person import HELP, PersonPolicy, completing_input, describe_tools
from relax_agent.cli.policies import PolicyName, named_policy
from relax_agent.envs import Env, Play, PlayLimits, make_async
from relax_agent.envs import play as play_episode
from relax_agent.pages import conversation_text


@dataclass(frozen=True, slots=True)
class _Wish:
    """What a person asked for."""

    env_id: str
    arguments: dict[str, Any]
    policy: str
    task: str | None
    seed: int | None
    max_turns: int
    record: Path | None


def play(
    env_id: EnvId,
    task: Annotated[str | None, typer.Option(help="The task; by default the seed chooses.")] = None,
    seed: Annotated[int | None, typer.Option(help="The environment's seed.")] = None,
    policy: PolicyName = "person",
    max_turns: Annotated[int, typer.Option(help="Messages after which it ends.", min=1)] = 100,
    record: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the episode there, as a page too.")
    ] = None,
    arg: EnvArguments = None,
    module: Modules = None,
) -> int:
    """Play an environment in the terminal: you are the model, tool calls included.

    Type an answer, or /tool name=value to call a tool; /help says more.
    With --policy expert or --policy random you watch instead.
    """
    import_modules(module)
    wish = _Wish(env_id, read_arguments(arg), policy, task, seed, max_turns, record)
    played, left = asyncio.run(_play(wish))
    typer.echo("\n" + ("you left" if left else _ending(played)))
    return 0 if left or not played.status.value.endswith("_failure") else 1


async def _play(wish: _Wish) -> tuple[Play, bool]:
    env = await make_async(wish.env_id, **wish.arguments)
    async with _recording(env, wish.record) as env:
        limits = PlayLimits(max_turns=wish.max_turns, timeout_s=math.inf, policy_timeout_s=math.inf)
        options: dict[str, Any] = {"task": wish.task, "seed": wish.seed, "limits": limits}
        if wish.policy != "person":
            played = await play_episode(env, named_policy(wish.policy, env)(), **options)
            typer.echo(conversation_text(played.messages).rstrip())
            return played, False
        schemas = env.tools.schemas()
        typer.echo(f"{HELP}\n\ntools:\n{describe_tools(schemas)}")
        person = PersonPolicy(ask=completing_input(schemas), show=typer.echo)
        played = await play_episode(env, person, **options)
        if not person.left:
            _show_last(played)
        return played, person.left


def _recording(env: Env, folder: Path | None) -> Env:
    if folder is None:
        return env
    from relax_agent.envs.wrappers import RecordEpisode

    return RecordEpisode(env, folder)


def _show_last(played: Play) -> None:
    """Print what came after the last action; nobody was asked about it."""
    last = played.messages[played.actions[-1] + 1 :] if played.actions else []
    if last:
        typer.echo("\n" + conversation_text(last).rstrip())


def _ending(played: Play) -> str:
    ended = played.status.value.replace("_", " ")
    because = f" ({played.detail})" if played.detail else ""
    lines = [f"{ended}{because}", f"reward {played.reward:g} in {played.turns} turns"]
    if played.metrics:
        lines.append("  ".join(f"{name}: {value:g}" for name, value in played.metrics.items()))
    return "\n".join(lines)

"""``relax-agent envs``: what is registered, and what an environment looks like."""

from __future__ import annotations

import asyncio
import inspect
from typing import Annotated

import typer

from relax_agent.cli.env_server import serve
from relax_agent.envs import Env, make, pprint_registry
from relax_agent.messages import Message, Rewrite

app = typer.Typer(help="Environments: list and show them.", no_args_is_help=True)
app.command()(serve)


@app.command("list")
def list_() -> None:
    """List every registered environment, plugins included."""
    pprint_registry()


@app.command()
def show(
    env_id: Annotated[str, typer.Argument(metavar="ENV", help="namespace/Name-v0.")],
    task: Annotated[str | None, typer.Option(help="The task to show; by default by seed.")] = None,
    seed: Annotated[int, typer.Option(help="The environment's seed.")] = 0,
) -> None:
    """Show an environment: what it is, its tools, and the first messages of one task."""
    asyncio.run(_show(env_id, task, seed))


async def _show(env_id: str, task: str | None, seed: int) -> None:
    async with make(env_id) as env:
        _show_description(env)
        observation, info = await env.reset(
            seed=seed, options=None if task is None else {"task": task}
        )
        typer.echo(f"\nfirst messages of task {info.get('task', '-')} (seed {seed}):")
        messages = observation.messages if isinstance(observation, Rewrite) else observation
        for message in messages:
            typer.echo(_line(message))


def _show_description(env: Env) -> None:
    kind = type(env.unwrapped)
    typer.echo(f"{env.spec.id if env.spec else kind.__name__}  ({kind.__module__}:{kind.__name__})")
    description = (inspect.getdoc(kind) or "").split("\n\n")[0]
    if description:
        typer.echo(f"  {description}")
    if env.tasks is not None:
        train, held_out = len(env.tasks.ids("train")), len(env.tasks.ids("eval"))
        typer.echo(f"  tasks: {train} to train on, {held_out} held out")
    for item in env.tools.schemas():
        function = item["function"]
        names = ", ".join(function["parameters"]["properties"])
        first_line = function["description"].splitlines()[0]
        typer.echo(f"  tool: {function['name']}({names})  {first_line}")


def _line(message: Message) -> str:
    media = "".join(f" [{part.mime}, {len(part.data):,} bytes]" for part in message.media)
    return f"  {message.role}: {message.text}{media}"

"""The tree of commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relax_agent.cli import envs, tools
from relax_agent.cli.evaluate import eval_
from relax_agent.cli.gateway import gateway
from relax_agent.cli.play import play
from relax_agent.cli.view import view

app = typer.Typer(
    help="Train agents that use tools: environments, rollouts, queue and trainer in one.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(envs.app, name="envs")
app.add_typer(tools.app, name="tools")
app.command()(play)
app.command("eval")(eval_)
app.command()(view)
app.command()(gateway)

RecipePath = Annotated[Path, typer.Argument(help="The recipe: a YAML file, see configs/.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting: trainer.lr=1e-4."),
]


@app.command()
def train(
    recipe: RecipePath,
    set_: Overrides = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with this run folder from its newest checkpoint.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the resolved recipe and the processes."),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print nothing but the result; for scripts.")
    ] = False,
) -> int:
    """Train a model on an environment, as a recipe says."""
    from relax_agent.run.recipe import dump_recipe, load_recipe

    settings = load_recipe(recipe, set_ or [])
    if dry_run:
        from relax_agent.run.plan import process_plan

        typer.echo(dump_recipe(settings), nl=False)
        typer.echo(process_plan(settings))
        return 0
    from relax_agent.run.start import run

    return run(settings, resume=resume, quiet=quiet)


@app.command(
    "serve-engine",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def serve_engine(context: typer.Context) -> int:
    """Serve a model with the embedded engine (all options are the engine's own; try --help)."""
    from relax_agent.engines.embedded.__main__ import main as serve

    return serve(context.args) or 0

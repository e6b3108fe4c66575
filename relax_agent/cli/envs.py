"""``relax-agent envs``: list, show, check, begin and serve environments."""

from __future__ import annotations

import asyncio
import inspect
import json
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import typer

from relax_agent.cli.env_new import new
from relax_agent.cli.env_server import serve
from relax_agent.cli.options import EnvArguments, EnvId, Modules, import_modules, read_arguments
from relax_agent.envs import Env, make, spec
from relax_agent.envs.listing import plain_words
from relax_agent.envs.registration import load_entry_point
from relax_agent.envs.specs import label_of
from relax_agent.messages import Message, Rewrite
from relax_agent.pages import plain

app = typer.Typer(
    help="Environments: list, show and check them, begin a new one, serve one.",
    no_args_is_help=True,
)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_(modules: Modules = None, as_json: AsJson = False) -> None:
    """List every registered environment: those of plugins, and of --module, included."""
    from relax_agent.cli import env_table

    import_modules(modules)
    found = env_table.rows()
    if as_json:
        typer.echo(json.dumps(env_table.to_json(found), indent=2, ensure_ascii=False))
    else:
        env_table.print_table(found)


@app.command()
def show(
    env_id: EnvId,
    task: Annotated[str | None, typer.Option(help="The task to show; by default by seed.")] = None,
    seed: Annotated[int, typer.Option(help="The environment's seed.")] = 0,
    arguments: EnvArguments = None,
    modules: Modules = None,
) -> None:
    """Show an environment: what it is, its tools, and the first messages of one task."""
    import_modules(modules)
    asyncio.run(_show(env_id, task, seed, read_arguments(arguments)))


@app.command()
def check(
    env_id: EnvId,
    seed: Annotated[int, typer.Option(help="Seeds the episodes that are played.")] = 7,
    timeout: Annotated[float, typer.Option(help="Seconds that one call may take.")] = 30.0,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail, too.")] = False,
    arguments: EnvArguments = None,
    modules: Modules = None,
    as_json: AsJson = False,
) -> int:
    """Check all that an environment promises and say what to change; status 1 if something fails.

    In a test the same is: from relax_agent.envs import check_env; check_env("my/Env-v0").
    """
    from relax_agent.cli.env_report import print_report, progress
    from relax_agent.envs.checking import check_env

    import_modules(modules)
    subject = _with_arguments(env_id, read_arguments(arguments))
    with progress() as on_check:
        report = check_env(subject, raises=False, timeout_s=timeout, seed=seed, on_check=on_check)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2, ensure_ascii=False))
    else:
        print_report(report)
    return int(not report.ok or (strict and bool(report.warnings)))


app.command()(new)
app.command()(serve)


def _with_arguments(env_id: str, arguments: dict[str, Any]) -> Any:
    """Return what is to be checked; an argument may be called like an option of the check."""
    if env_id.startswith(("ws://", "wss://")):
        return partial(make, env_id, **arguments) if arguments else env_id
    known = spec(env_id)
    return replace(known, kwargs={**known.kwargs, **arguments})


async def _show(env_id: str, task: str | None, seed: int, arguments: dict[str, Any]) -> None:
    async with make(env_id, **arguments) as env:
        _show_description(env)
        observation, info = await env.reset(
            seed=seed, options=None if task is None else {"task": task}
        )
        typer.echo(f"\nfirst messages of task {info.get('task', '-')} (seed {seed}):")
        messages = observation.messages if isinstance(observation, Rewrite) else observation
        for message in messages:
            typer.echo(_line(message))


def _show_description(env: Env) -> None:
    from relax_agent.envs.serving.proxies import about_env

    kind, place = _source(env)
    typer.echo(f"{env.spec.id if env.spec else type(env.unwrapped).__name__}  ({place})")
    description = about_env(env)
    if description:
        typer.echo(f"  {plain(description)}")
    for wrapper in env.spec.wrappers if env.spec else ():
        typer.echo(f"  wrapper: {label_of(wrapper.entry_point)}({_values(wrapper.kwargs)})")
    if env.tasks is not None:
        train, held_out = len(env.tasks.ids("train")), len(env.tasks.ids("eval"))
        typer.echo(f"  tasks: {train} to train on, {held_out} held out")
    for item in env.tools.schemas():
        function = item["function"]
        names = ", ".join(function["parameters"].get("properties") or ())
        first_line = (function.get("description") or "").partition("\n")[0]
        typer.echo(f"  tool: {function['name']}({names})  {first_line}")
    for line in _arguments(kind) if kind else ():
        typer.echo(f"  argument: {line}")


def _source(env: Env) -> tuple[Any, str]:
    """Return what an environment is built by, and where that is; None if it runs elsewhere."""
    from relax_agent.envs.serving.proxies import ProxyEnv

    inner, known = env.unwrapped, env.spec
    if not isinstance(inner, ProxyEnv) or known is None:
        return type(inner), label_of(type(inner))
    if "url" in known.kwargs:
        return None, str(known.kwargs["url"])
    return load_entry_point(known), label_of(known.entry_point)


def _values(arguments: Any) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _arguments(kind: Any) -> list[str]:
    """Return what the constructor takes, with what its docstring says of it."""
    from docstring_parser import parse

    try:
        parameters = list(inspect.signature(kind).parameters.values())
    except (TypeError, ValueError):
        return []
    docs = inspect.getdoc(getattr(kind, "__init__", None)) or ""
    told = {item.arg_name: item.description for item in parse(docs).params}
    many = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    lines = []
    for each in parameters:
        if each.kind in many:
            continue
        default = "" if each.default is each.empty else f"={each.default!r}"
        lines.append(f"{each.name}{default}  {_said(told.get(each.name))}".rstrip())
    return lines


def _said(text: str | None) -> str:
    return plain_words(" ".join((text or "").split()))


def _line(message: Message) -> str:
    media = "".join(f" [{part.mime}, {len(part.data):,} bytes]" for part in message.media)
    return plain(f"  {message.role}: {message.text}{media}")

"""``relax-agent tools``: list, call and serve a module of tools."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from relax_agent.errors import ConfigError
from relax_agent.messages import Text, ToolCall
from relax_agent.tools import AnyToolset, ToolResult
from relax_agent.tools.loading import load_toolset

app = typer.Typer(help="Tools: list, call and serve them.", no_args_is_help=True)

Module = Annotated[
    str,
    typer.Argument(metavar="MODULE", help="module, module:attribute, or a server's http:// URL."),
]
TokenEnv = Annotated[
    str | None, typer.Option(metavar="NAME", help="The variable that holds the bearer token.")
]


@app.command("list")
def list_(
    module: Module = "relax_agent.tools.calculator",
    token_env: TokenEnv = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON schemas.")] = False,
) -> None:
    """List a module's or a server's tools."""
    schemas = asyncio.run(_schemas(module, token_env))
    if as_json:
        typer.echo(json.dumps(schemas, indent=2, ensure_ascii=False))
        return
    for item in schemas:
        function = item["function"]
        names = ", ".join(function["parameters"]["properties"])
        typer.echo(f"{function['name']}({names})  {function['description'].splitlines()[0]}")


@app.command()
def call(
    module: Module,
    tool: Annotated[str, typer.Argument(help="The tool's name.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ARGUMENT=VALUE]...", help='Values are JSON or text: count=3 query="a b".'
        ),
    ] = None,
    token_env: TokenEnv = None,
) -> int:
    """Call one tool, as a model would, and print its result."""
    values = dict(_argument(item) for item in arguments or [])
    result = asyncio.run(_call(module, token_env, ToolCall(tool, values)))
    for part in result.content:
        shown = part.text if isinstance(part, Text) else f"[{part.mime}, {len(part.data):,} bytes]"
        typer.echo(shown, err=not result.ok)
    return 0 if result.ok else 1


@app.command()
def serve(
    module: Annotated[str, typer.Argument(metavar="MODULE", help="module or module:attribute.")],
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8100,
    port_file: Annotated[Path | None, typer.Option(help="Gets the real port when ready.")] = None,
    token_env: TokenEnv = None,
) -> None:
    """Serve a module of tools over HTTP until Ctrl-C."""
    from relax_agent.tools.server import serve as run_server
    from relax_agent.tools.server import token_from

    toolset = load_toolset(module)
    names = ", ".join(toolset.names)
    run_server(
        toolset,
        host=host,
        port=port,
        port_file=port_file,
        token=token_from(token_env),
        announce=lambda url: typer.echo(f"serving {names} at {url}", err=True),
    )


def _argument(item: str) -> tuple[str, Any]:
    name, equals, text = item.partition("=")
    if not equals:
        raise ConfigError(f"{item!r} is not an argument", hint="write name=value")
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text


async def _open(module: str, token_env: str | None) -> AnyToolset:
    if not module.startswith(("http://", "https://")):
        return load_toolset(module)
    import os

    from relax_agent.tools.client import RemoteToolset

    return await RemoteToolset.connect(module, os.environ.get(token_env) if token_env else None)


async def _schemas(module: str, token_env: str | None) -> list[dict[str, Any]]:
    toolset = await _open(module, token_env)
    await toolset.close()
    return toolset.schemas()


async def _call(module: str, token_env: str | None, request: ToolCall) -> ToolResult:
    toolset = await _open(module, token_env)
    try:
        return await toolset.call(request)
    finally:
        await toolset.close()

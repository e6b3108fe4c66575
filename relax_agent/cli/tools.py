"""``relax-agent tools``: list, call and serve a module of tools."""

from __future__ import annotations

import asyncio
import contextlib
import json
import mimetypes
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from relax_agent.cli.env_server import bearer_token
from relax_agent.errors import ConfigError, StorageError
from relax_agent.messages import Part, Text, ToolCall
from relax_agent.tools import AnyToolset, ToolResult
from relax_agent.tools.loading import load_toolset

app = typer.Typer(help="Tools: list, call and serve them.", no_args_is_help=True)

Module = Annotated[
    str,
    typer.Argument(
        metavar="MODULE",
        help="module, module:attribute, a server's http:// URL, or mcp:URL and mcp:'COMMAND …' for"
        " any MCP server.",
    ),
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
            metavar="[ARGUMENT=VALUE]...",
            help='Values are JSON or text: count=3 query="a b". image=@photo.png takes a file.',
        ),
    ] = None,
    token_env: TokenEnv = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where pictures, sounds and videos go."),
    ] = None,
) -> int:
    """Call one tool, as a model would, and print its result.

    A tool with state gets a session for this call alone.
    """
    values = dict(_argument(item) for item in arguments or [])
    result = asyncio.run(_call(module, token_env, ToolCall(tool, values)))
    for number, part in enumerate(result.content, 1):
        typer.echo(_shown(part, number, save), err=not result.ok)
    return 0 if result.ok else 1


@app.command()
def serve(
    module: Annotated[str, typer.Argument(metavar="MODULE", help="module or module:attribute.")],
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 is everywhere.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8100,
    workers: Annotated[
        int, typer.Option(help="Processes that share the port; sessions stay in theirs.", min=1)
    ] = 1,
    port_file: Annotated[Path | None, typer.Option(help="Gets the real port when ready.")] = None,
    token_env: TokenEnv = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="The file with the bearer token; made, with a new one, if it is absent."),
    ] = None,
    drain: Annotated[
        float, typer.Option(metavar="SECONDS", help="What running calls get after SIGTERM.")
    ] = 10.0,
    lease: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="After how long an unused session is closed."),
    ] = 60.0,
    max_sessions: Annotated[
        int, typer.Option(help="Sessions at the same time, in each process.", min=1)
    ] = 4096,
    trace: Annotated[
        Path | None, typer.Option(help="A file that gets one line of JSON for each call.")
    ] = None,
    log_level: Annotated[
        str, typer.Option(help="info: one line for each call, on standard error.")
    ] = "warning",
) -> None:
    """Serve a module of tools over HTTP, and over MCP at /mcp, until Ctrl-C.

    Beyond the loopback a bearer token is needed; one is made and printed if you name none.
    """
    from relax_agent.tools.server import LOG_LEVELS, run

    if log_level not in LOG_LEVELS:
        raise ConfigError(f"--log-level {log_level}", hint=f"one of {', '.join(LOG_LEVELS)}")
    token, told = bearer_token(host, token_env, token_file)
    names = ", ".join(load_toolset(module).names)

    def announce(url: str) -> None:
        typer.echo(f"serving {names} at {url}", err=True)
        if told not in ("none", "known"):
            typer.echo(f"its callers need the token {told}", err=True)

    options = SimpleNamespace(
        module=module,
        host=host,
        port=port,
        workers=workers,
        port_file=port_file,
        token=token,
        parent_pid=None,
        drain=drain,
        lease=lease,
        max_sessions=max_sessions,
        trace=trace,
        log_level=log_level,
    )
    run(options, announce)


def _argument(item: str) -> tuple[str, Any]:
    name, equals, text = item.partition("=")
    if not equals:
        raise ConfigError(f"{item!r} is not an argument", hint="write name=value")
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text


def _shown(part: Part, number: int, folder: Path | None) -> str:
    if isinstance(part, Text):
        return part.text
    told = f"[{part.mime}, {len(part.data):,} bytes]"
    if folder is None:
        return told
    path = folder / f"{number}{mimetypes.guess_extension(part.mime) or '.bin'}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(part.data)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error
    return f"{told} {path}"


@contextlib.asynccontextmanager
async def _opened(module: str, token_env: str | None) -> AsyncIterator[AnyToolset]:
    toolset = await _open(module, token_env)
    try:
        yield toolset
    finally:
        await toolset.close()


async def _open(module: str, token_env: str | None) -> AnyToolset:
    from relax_agent.tools.serving import token_from

    if module.startswith("mcp:"):
        from relax_agent.tools.mcp_toolset import McpToolset

        return await McpToolset.connect(module.removeprefix("mcp:"), token=token_from(token_env))
    if not module.startswith(("http://", "https://")):
        return load_toolset(module)
    from relax_agent.tools.client import RemoteToolset

    return await RemoteToolset.connect(module, token_from(token_env))


async def _schemas(module: str, token_env: str | None) -> list[dict[str, Any]]:
    async with _opened(module, token_env) as toolset:
        return toolset.schemas()


async def _call(module: str, token_env: str | None, request: ToolCall) -> ToolResult:
    async with _opened(module, token_env) as toolset:
        _load_files(toolset, request)
        if not getattr(toolset, "has_sessions", False):
            return await toolset.call(request)
        async with toolset.session() as session:  # type: ignore[attr-defined]
            answer: ToolResult = await session.call(request)
            return answer


def _load_files(toolset: AnyToolset, request: ToolCall) -> None:
    """Read the files that stand for media arguments: ``image=@photo.png``."""
    from relax_agent.media import load_media
    from relax_agent.tools.wire import with_media

    def read(text: str, kind: Any) -> Any:
        return load_media(Path(text[1:]), kind) if text.startswith("@") else text

    for item in toolset.schemas():
        if item["function"]["name"] == request.name:
            schema = item["function"]["parameters"]
            request.arguments.update(with_media(request.arguments, schema, read))

"""``relax-agent envs serve``: an environment as a service, for programs on other machines."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from relax_agent.cli.options import EnvArguments, Modules, import_modules, read_arguments
from relax_agent.envs import EnvSpec
from relax_agent.envs import spec as find_spec
from relax_agent.errors import ConfigError, StorageError

_LOOPBACK = ("localhost", "127.", "::1")


def serve(
    env_id: Annotated[
        str,
        typer.Argument(metavar="ENV", help="namespace/Name-v0, or module:namespace/Name-v0."),
    ],
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 is everywhere.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8200,
    slots: Annotated[int, typer.Option(help="Environments at the same time.", min=1)] = 64,
    token_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="The variable that holds the bearer token.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="The file with the bearer token; made, with a new one, if it is absent."),
    ] = None,
    isolation: Annotated[
        str | None,
        typer.Option(
            help="process: each environment in a process of its own, which can be killed."
        ),
    ] = None,
    step_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long one reset or step may take.")
    ] = 300.0,
    idle_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="After how long an idle client loses its environment."
        ),
    ] = 600.0,
    drain: Annotated[
        float, typer.Option(metavar="SECONDS", help="What running episodes get after SIGTERM.")
    ] = 30.0,
    port_file: Annotated[Path | None, typer.Option(help="Gets the real port when ready.")] = None,
    arg: EnvArguments = None,
    module: Modules = None,
) -> None:
    """Serve an environment over WebSocket and HTTP until Ctrl-C.

    Each connection gets an environment of its own. On the other side it is
    used as if it were there: relax_agent.make("ws://HOST:PORT"). Beyond the
    loopback a bearer token is needed; one is made and printed if you name none.
    """
    from relax_agent.envs.serving.leases import ServingLimits
    from relax_agent.envs.serving.server import serve as run_server

    import_modules(module)
    spec = _spec(env_id, read_arguments(arg), isolation)
    token, told = bearer_token(host, token_env, token_file)
    run_server(
        spec,
        host=host,
        port=port,
        token=token,
        limits=ServingLimits(slots=slots, step_timeout_s=step_timeout, idle_timeout_s=idle_timeout),
        drain_s=drain,
        port_file=port_file,
        announce=lambda url: typer.echo(_announcement(spec.id, url, slots, told), err=True),
    )


def _spec(env_id: str, arguments: dict[str, Any], isolation: str | None) -> EnvSpec:
    found = find_spec(env_id)
    return replace(
        found,
        kwargs={**found.kwargs, **arguments},
        isolation=isolation or found.isolation,  # type: ignore[arg-type]
    )


def bearer_token(host: str, variable: str | None, path: Path | None) -> tuple[str | None, str]:
    """Return the token, and what to tell of it: where it is, or, if it was just made, itself."""
    from relax_agent.tools.serving import token_from

    if variable is not None and path is not None:
        raise ConfigError("--token-env and --token-file are two tokens", hint="name one")
    if variable is not None:
        return token_from(variable), "known"
    if path is not None:
        return _file_token(path), f"$(cat {path})"
    if host.startswith(_LOOPBACK):
        return None, "none"
    token = secrets.token_urlsafe(24)
    return token, token


def _file_token(path: Path) -> str:
    try:
        if not path.exists():
            # Made with its permissions, so that nobody reads it in between.
            made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(made, "w") as file:
                file.write(secrets.token_urlsafe(24) + "\n")
        token = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"cannot use the token file {path}: {error}") from error
    if not token:
        raise ConfigError(f"the token file {path} is empty", hint="delete it, and one is made")
    return token


def _announcement(env_id: str, url: str, slots: int, told: str) -> str:
    """Say what to type on the other side."""
    if "//0.0.0.0" in url or "//[::]" in url:
        import socket

        url = url.replace("0.0.0.0", socket.gethostname()).replace("[::]", socket.gethostname())
    lines = [f"serving {env_id} at {url} ({slots} at the same time; Ctrl-C ends it)"]
    lines.append("on the other side:")
    if told not in ("none", "known"):
        lines.append(f"  export RELAX_AGENT_ENV_TOKEN={told}")
    elif told == "known":
        lines.append("  export RELAX_AGENT_ENV_TOKEN=…  (the same token)")
    lines.append(f"  relax-agent play {url}")
    lines.append(f'  env = relax_agent.make("{url}")')
    return "\n".join(lines)

"""The processes of a run: a tool server, the engines and the trainer's ranks.

All start at the same time, since each spends its first seconds on imports, and all are children of
one supervisor: a death anywhere ends the run with its cause, and nothing outlives the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from relax_agent.engines.client import EngineClient
from relax_agent.engines.launch import engine_command, engine_ports, make_client, wait_ready
from relax_agent.errors import ConfigError, ToolError
from relax_agent.processes import ChildProcess, Supervisor
from relax_agent.queue.waiting import first_cause
from relax_agent.run.folder import RunFolder
from relax_agent.run.recipe import Recipe, ToolsSettings
from relax_agent.tools import RemoteToolset
from relax_agent.trainers.client import TrainerProcess

TOOLS_TOKEN = "RELAX_TOOLS_TOKEN"
"""The variable through which the tool server learns its bearer token."""

_TOOLS_START_S = 180.0
"""Seconds for imports and the tools' warm-up."""
_POLL_S = 0.05


@dataclass(frozen=True)
class Services:
    """What a run talks to."""

    engines: list[EngineClient]
    trainer: TrainerProcess
    toolset: RemoteToolset | None
    """None: the environment calls its tools in the conductor's own process."""


@contextlib.asynccontextmanager
async def start_services(
    recipe: Recipe, folder: RunFolder, model: Path, children: Supervisor
) -> AsyncIterator[Services]:
    """Start everything, wait until it is ready, and let go of the connections at the end."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            async with asyncio.TaskGroup() as group:
                toolset = group.create_task(_start_tools(recipe.tools, folder, children, stack))
                engines = group.create_task(_start_engines(recipe, model, children, stack))
                trainer = group.create_task(_start_trainer(recipe, model, children, stack))
        except BaseExceptionGroup as failures:
            raise first_cause(failures) from None
        yield Services(engines.result(), trainer.result(), toolset.result())


async def connect_tools(url: str, token_env: str | None) -> RemoteToolset:
    """Connect to a tool server that runs somewhere already.

    Raises:
        ConfigError: There is none, it refuses us, or the variable with the token is not set.
    """
    token = os.environ.get(token_env) if token_env else None
    if token_env and not token:
        raise ConfigError(
            f"tools.token_env: the variable {token_env} is not set", hint=f"export {token_env}=…"
        )
    return await RemoteToolset.connect(url, token=token)


async def _start_tools(
    settings: ToolsSettings,
    folder: RunFolder,
    children: Supervisor,
    stack: contextlib.AsyncExitStack,
) -> RemoteToolset | None:
    if settings.url is not None:
        toolset = await connect_tools(settings.url, settings.token_env)
    elif settings.serve is not None:
        toolset = await _serve_tools(settings.serve, settings.workers, folder, children)
    else:
        return None
    return await stack.enter_async_context(toolset)


async def _serve_tools(
    module: str, workers: int, folder: RunFolder, children: Supervisor
) -> RemoteToolset:
    token, port_file = secrets.token_urlsafe(24), folder.logs / "tools.port"
    port_file.unlink(missing_ok=True)
    argv = [sys.executable, "-m", "relax_agent.tools.server", module]
    argv += ["--host", "127.0.0.1", "--port", "0", "--port-file", str(port_file)]
    argv += ["--token-env", TOOLS_TOKEN, "--workers", str(workers)]
    child = await children.start("tools", argv, env={TOOLS_TOKEN: token})
    port = await _wait_for_port(child, port_file)
    return await RemoteToolset.connect(f"http://127.0.0.1:{port}", token=token)


async def _wait_for_port(child: ChildProcess, file: Path) -> int:
    try:
        async with asyncio.timeout(_TOOLS_START_S):
            while not file.exists():
                if child.exit_code is not None:
                    raise child.death()
                await asyncio.sleep(_POLL_S)
            return int(file.read_text())
    except TimeoutError:
        raise ToolError(
            f"the tool server was not ready within {_TOOLS_START_S:g} s", hint=f"see {child.log}"
        ) from None


async def _start_engines(
    recipe: Recipe, model: Path, children: Supervisor, stack: contextlib.AsyncExitStack
) -> list[EngineClient]:
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_start_engine(recipe, model, children, stack, number, port))
            for number, port in enumerate(engine_ports(recipe.engine))
        ]
    return [task.result() for task in tasks]


async def _start_engine(
    recipe: Recipe,
    model: Path,
    children: Supervisor,
    stack: contextlib.AsyncExitStack,
    number: int,
    port: int,
) -> EngineClient:
    name = f"engine-{number}"
    token = secrets.token_urlsafe(24)
    command = engine_command(recipe.engine, model, port, token)
    child = await children.start(name, command.argv, env=command.env)
    client = make_client(recipe.engine, model, port, token, name=name)
    await stack.enter_async_context(client)
    await wait_ready(client, child, recipe.engine.start_timeout_s)
    return client


async def _start_trainer(
    recipe: Recipe, model: Path, children: Supervisor, stack: contextlib.AsyncExitStack
) -> TrainerProcess:
    trainer = await TrainerProcess.start(children, recipe.trainer, recipe.algorithm, model)

    async def leave(kind: object, error: BaseException | None, trace: object) -> None:
        """Let it finish what it is doing only if the run went well."""
        await (trainer.close() if error is None else trainer.abandon())

    stack.push_async_exit(leave)
    return trainer

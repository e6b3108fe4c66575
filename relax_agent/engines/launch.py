"""Starting an engine: the command of each kind, a free port, and the wait until it serves.

The embedded engine runs under this interpreter. Real SGLang runs under an interpreter of its own
(``engine.python``), because it pins versions that the trainer must not be bound to. On a CPU it
also gets the shims of :mod:`relax_agent.engines.sglang_cpu` on its path and the options that are
known to work without a GPU. Neither needs a tokenizer: engines see token ids only.

A :class:`~relax_agent.processes.ChildProcess` keeps the process group together: SGLang starts a
scheduler and a detokenizer of its own, which must not outlive it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from relax_agent.engines.client import EngineClient
from relax_agent.engines.folder import read_model_facts
from relax_agent.engines.settings import EngineSettings
from relax_agent.errors import ChildDied, ConfigError, EngineUnavailable
from relax_agent.processes import ChildProcess

HOST = "127.0.0.1"
"""Engines that a run starts serve this machine only."""

SHIMS = Path(__file__).with_name("sglang_cpu") / "shims"
"""Modules that let an unmodified SGLang wheel run without a GPU."""

_POLL_S = 0.2
_TOKEN_VARIABLE = "RELAX_ENGINE_TOKEN"
_SEPARATE_PYTHON = Path(".venv-sglang/bin/python")


class EngineCommand(NamedTuple):
    """What starts one engine."""

    argv: list[str]
    env: dict[str, str]
    """Variables on top of the parent's own."""


def find_free_port() -> int:
    """Return a port that was free a moment ago; who binds it next is not promised."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def engine_ports(settings: EngineSettings) -> list[int]:
    """Choose one port for each engine of the fleet, all different."""
    if settings.port is not None:
        return [settings.port + index for index in range(settings.count)]
    ports: set[int] = set()
    while len(ports) < settings.count:
        ports.add(find_free_port())
    return sorted(ports)


def engine_command(
    settings: EngineSettings, model_path: Path, port: int, token: str | None, *, version: int = 0
) -> EngineCommand:
    """Build the command of one engine.

    Args:
        settings: The recipe's engine section.
        model_path: Folder of the model in Hugging Face layout.
        port: Port to serve on.
        token: What clients must send; None lets everybody on this machine in.
        version: Weight version of what lies in ``model_path``.

    Raises:
        ConfigError: if the model or the interpreter cannot be found.
    """
    model_path = model_path.resolve()
    facts = read_model_facts(model_path)
    shared = _shared_arguments(settings, model_path, port, version)
    if settings.kind == "embedded":
        return _embedded_command(settings, shared, token)
    argv = [str(sglang_python(settings)), "-m", "sglang.launch_server", *shared]
    argv += ["--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle"]
    if facts.routes is not None:
        argv.append("--enable-return-routed-experts")
    if token:
        argv += ["--api-key", token]
    if settings.device == "cpu":
        argv += _SGLANG_CPU_ARGUMENTS
    return EngineCommand([*argv, *settings.extra_args], _sglang_environment(settings))


def _embedded_command(
    settings: EngineSettings, shared: list[str], token: str | None
) -> EngineCommand:
    argv = [sys.executable, "-m", "relax_agent.engines.embedded", *shared]
    argv += ["--threads", str(settings.threads), "--parent-pid", str(os.getpid())]
    env = {"OMP_NUM_THREADS": str(settings.threads)}
    if token:  # through the environment: a command line can be read by everybody
        argv += ["--token-env", _TOKEN_VARIABLE]
        env[_TOKEN_VARIABLE] = token
    return EngineCommand(argv, env)


def _shared_arguments(
    settings: EngineSettings, model_path: Path, port: int, version: int
) -> list[str]:
    options = {
        "model-path": model_path,
        "host": HOST,
        "port": port,
        "dtype": settings.dtype,
        "weight-version": version,
        "random-seed": settings.seed,
        "max-running-requests": settings.max_running_requests,
        "max-total-tokens": settings.max_total_tokens,
    }
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


_SGLANG_CPU_ARGUMENTS = [
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch"),
    *("--grammar-backend", "none"),
    "--disable-overlap-schedule",
    # Of the machine's memory; what the cache really takes is bounded by --max-total-tokens.
    *("--mem-fraction-static", "0.2"),
]


def _sglang_environment(settings: EngineSettings) -> dict[str, str]:
    env = {
        "OMP_NUM_THREADS": str(settings.threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if settings.device == "cpu":
        # PYTHONPATH is replaced, not extended: packages of the parent do not belong in there.
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(SHIMS)}
    return env


def sglang_python(settings: EngineSettings) -> Path:
    """Find the interpreter that has SGLang.

    Raises:
        ConfigError: if there is none.
    """
    hint = "run `make venv-sglang`, or name an interpreter with SGLang as engine.python"
    if settings.python is not None:
        python = Path.cwd() / settings.python
        if not python.exists():
            raise ConfigError(f"engine.python={settings.python} does not exist", hint=hint)
        return python
    python = Path.cwd() / _SEPARATE_PYTHON
    if python.exists():
        return python
    if importlib.util.find_spec("sglang") is None:
        raise ConfigError(f"there is no {_SEPARATE_PYTHON}, and no SGLang here", hint=hint)
    return Path(sys.executable)


def make_client(
    settings: EngineSettings, model_path: Path, port: int, token: str | None, *, name: str
) -> EngineClient:
    """Build the client of an engine that was started with the same settings."""
    return EngineClient(
        f"http://{HOST}:{port}",
        token=token,
        name=name,
        model_path=str(model_path.resolve()),
        generate_timeout_s=settings.generate_timeout_s,
        control_timeout_s=settings.control_timeout_s,
    )


async def wait_ready(client: EngineClient, process: ChildProcess, timeout_s: float) -> None:
    """Wait until a started engine serves.

    Raises:
        ChildDied: if it ended before; carries the last lines of its log.
        EngineUnavailable: if it is not ready within ``timeout_s``.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while not await client.serves():
                if process.exit_code is not None:
                    raise ChildDied(process.name, process.exit_code, hint=_last_words(process))
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        raise EngineUnavailable(
            f"{process.name} was not ready within {timeout_s:g} s", hint=_last_words(process)
        ) from error


def _last_words(process: ChildProcess) -> str:
    lines = [line.strip() for line in process.tail(200)]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    shown = dict.fromkeys([*errors[-2:], *lines[-3:]])
    return f"see {process.log}: " + (" | ".join(shown) if shown else "it wrote nothing")


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """An engine with its process and a client that is connected to it."""

    process: ChildProcess
    client: EngineClient


@contextlib.asynccontextmanager
async def running_engine(
    settings: EngineSettings, model_path: Path, log: Path, *, token: str | None = None
) -> AsyncIterator[RunningEngine]:
    """Start one engine, wait until it serves, and end it with everything it started."""
    port = engine_ports(settings)[0]
    command = engine_command(settings, model_path, port, token)
    name = f"{settings.kind} engine on port {port}"
    process = await ChildProcess.start(name, command.argv, log=log, env=command.env)
    try:
        async with make_client(settings, model_path, port, token, name=name) as client:
            await wait_ready(client, process, settings.start_timeout_s)
            yield RunningEngine(process, client)
    finally:
        await process.terminate(grace_s=1.0)  # an engine has nothing to save

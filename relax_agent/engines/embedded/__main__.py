"""``python -m relax_agent.engines.embedded``: serve one model until told to stop.

The port is bound first, so that a port in use is known before the model is loaded, but nobody
is listened to until the model is ready. SIGTERM and SIGINT end the process at once; open
requests fail. With ``--parent-pid`` the process also ends when that parent does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from relax_agent.engines.embedded.settings import EmbeddedSettings
from relax_agent.errors import ConfigError, RelaxError

_PARENT_POLL_S = 0.5
_MAX_DEFAULT_TOKENS = 65_536


def parse_arguments(arguments: list[str] | None = None) -> EmbeddedSettings:
    """Read the command line; one flag for each setting."""
    parser = argparse.ArgumentParser(prog="python -m relax_agent.engines.embedded")
    for name, field in EmbeddedSettings.model_fields.items():
        default = "" if field.is_required() or field.default is None else f" ({field.default})"
        parser.add_argument(
            "--" + name.replace("_", "-"),
            dest=name,
            required=field.is_required(),
            default=argparse.SUPPRESS,
            help=f"see EmbeddedSettings.{name}{default}",
        )
    given = vars(parser.parse_args(arguments))
    try:
        return EmbeddedSettings.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        flag = "--" + str(first["loc"][0]).replace("_", "-")
        raise ConfigError(f"{flag}: {first['msg']}") from error


def bind(host: str, port: int) -> socket.socket:
    """Bind without listening.

    Raises:
        ConfigError: if the port is in use or may not be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise _cannot_bind(host, port, error) from error
    return bound


def _cannot_bind(host: str, port: int, error: OSError) -> ConfigError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    return ConfigError(
        f"cannot bind {host}:{port}: {reason}", hint="choose another port, or 0 for a free one"
    )


def watch_parent(pid: int) -> None:
    """End this process when the process ``pid``, usually its parent, is gone."""
    direct = os.getppid() == pid

    def poll() -> None:
        while os.getppid() == pid if direct else _exists(pid):
            time.sleep(_PARENT_POLL_S)
        os._exit(0)

    threading.Thread(target=poll, name="watch-parent", daemon=True).start()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def build_server(settings: EmbeddedSettings, on_death: Any = lambda: None) -> Any:
    """Load the model and start its scheduler; return the endpoints over it."""
    import torch

    from relax_agent.engines.embedded.batch import Batch
    from relax_agent.engines.embedded.requests import Limits
    from relax_agent.engines.embedded.runner import ModelRunner, load_model, stop_tokens
    from relax_agent.engines.embedded.scheduler import Scheduler
    from relax_agent.engines.embedded.server import EngineServer
    from relax_agent.engines.embedded.weights import checkpoint_shapes
    from relax_agent.models.media_model import media_model

    torch.set_num_threads(settings.threads)
    model = load_model(settings.model_path, settings.dtype)
    shapes = checkpoint_shapes(settings.model_path)
    context = settings.context_length or model.config.get_text_config().max_position_embeddings
    total = settings.max_total_tokens or max(context, _MAX_DEFAULT_TOKENS)
    runner = ModelRunner(model, total, media_model(model, settings.model_path))
    limits = Limits(context, total, runner.vocabulary, stop_tokens(model))
    batch = Batch(
        runner,
        max_running=settings.max_running_requests,
        max_prefill=settings.max_prefill_tokens,
        cache_tokens=int(settings.prefix_cache_mb * 2**20 / runner.slots.shape.token_bytes),
    )
    scheduler = Scheduler(batch, shapes, version=settings.weight_version, on_death=on_death)
    scheduler.start()
    return EngineServer(scheduler, limits, settings, token=_token(settings))


def _check(settings: EmbeddedSettings) -> None:
    """Find out what is wrong before torch is loaded, which takes seconds."""
    _token(settings)
    if not (settings.model_path / "config.json").is_file():
        raise ConfigError(f"no model in {settings.model_path}: config.json is missing")


def _token(settings: EmbeddedSettings) -> str | None:
    if settings.token_env is None:
        return None
    token = os.environ.get(settings.token_env)
    if not token:
        raise ConfigError(f"--token-env: environment variable {settings.token_env} is not set")
    return token


async def serve(settings: EmbeddedSettings, bound: socket.socket) -> int:
    """Serve until a signal comes or the scheduler dies; return the exit status."""
    from aiohttp import web

    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    died = threading.Event()

    def on_death() -> None:
        died.set()
        loop.call_soon_threadsafe(ended.set)

    settings = settings.model_copy(update={"port": bound.getsockname()[1]})
    server = build_server(settings, on_death)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    runner = web.AppRunner(
        server.app(),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=0.2,
        keepalive_timeout=75.0,
    )
    await runner.setup()
    try:
        await web.SockSite(runner, bound, backlog=1024).start()
    except OSError as error:  # two processes may both have bound; only one can listen
        raise _cannot_bind(settings.host, settings.port, error) from error
    _announce(settings)
    await ended.wait()
    server.scheduler.stop()
    await runner.cleanup()
    return 1 if died.is_set() else 0


def _announce(settings: EmbeddedSettings) -> None:
    if settings.port_file is not None:
        _write_whole(settings.port_file, str(settings.port))
    print(f"serving {settings.model_path} on http://{settings.host}:{settings.port}", flush=True)


def _write_whole(file: Path, text: str) -> None:
    """Write so that a reader never sees half of it."""
    part = file.with_name(file.name + ".part")
    part.write_text(text)
    part.replace(file)


def main(arguments: list[str] | None = None) -> int:
    """Run; return the exit status."""
    # While the model is loaded nothing waits for events yet: a signal ends the process itself.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    try:
        settings = parse_arguments(arguments)
        _check(settings)
        if settings.parent_pid is not None:
            watch_parent(settings.parent_pid)
        if settings.port_file is not None:  # one of an earlier engine would mislead
            settings.port_file.unlink(missing_ok=True)
        bound = bind(settings.host, settings.port)
        return asyncio.run(serve(settings, bound))
    except RelaxError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # at once: torch's own teardown takes long and nothing is left to save

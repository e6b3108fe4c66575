"""From a recipe to an exit status: check, open the run folder, run, say how it ended.

Everything that can be found wrong without starting anything is found before the run folder is
made. A run that ends early raises one error of the project's tree, whatever else broke with it:
:func:`cause_of` finds the one to tell. Ctrl-C and SIGTERM end a run in order; a second one hurries.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from relax_agent.engines.folder import read_model_facts
from relax_agent.engines.launch import HOST, engine_ports, sglang_python
from relax_agent.errors import (
    ChildDied,
    ConfigError,
    Interrupted,
    MissingExtraError,
    ProducerFailed,
    QueueError,
    RelaxError,
    ResumeError,
    RunFailed,
)
from relax_agent.files import NO_ROOM, require_whole_safetensors, storage_error
from relax_agent.models import resolve_model
from relax_agent.monitor import RunMonitor
from relax_agent.run.checkpoints import Checkpoint
from relax_agent.run.conductor import conduct
from relax_agent.run.environment import (
    env_maker,
    require_expert,
    require_tasks,
    require_tools_argument,
)
from relax_agent.run.folder import RunFolder
from relax_agent.run.goal import Outcome
from relax_agent.run.recipe import Recipe
from relax_agent.run.services import connect_tools

_SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


def run(recipe: Recipe, *, resume: Path | None = None, quiet: bool = False) -> int:
    """Do a whole run and return the exit status.

    Args:
        recipe: What to do.
        resume: The folder of an earlier run to go on with.
        quiet: Show nothing but the result.

    Raises:
        RelaxError: The run could not start, or ended early; everything written so far is kept.
        RunFailed: It ended without reaching its goal.
    """
    check(recipe)
    folder = RunFolder.create(recipe) if resume is None else RunFolder.reopen(resume, recipe)
    with folder.locked():
        outcome = folder.read_outcome()
        if outcome is None or outcome["step"] < recipe.steps:
            outcome = _go(recipe, folder, resume is not None, quiet)
        elif not quiet:
            print(
                f"this run has made all its {outcome['step']} steps and is finished; a larger"
                " steps=… goes on with it"
            )
    print(json.dumps({"run": str(folder.path), **outcome}))
    if outcome["missed"]:
        raise RunFailed("; ".join(outcome["missed"]), hint=f"everything is in {folder.path}")
    return 0


def check(recipe: Recipe) -> None:
    """Find what is wrong with a recipe on this machine, before anything is made or started.

    Raises:
        RelaxError: Something is, such as a missing model or a port in use.
    """
    _require_packages(recipe)
    if recipe.model.path is not None:
        _check_model(resolve_model(recipe.model, recipe.runs))
    if recipe.engine.kind == "sglang":
        sglang_python(recipe.engine)
    if recipe.engine.port is not None:
        for port in engine_ports(recipe.engine):
            _require_free(port)
    asyncio.run(_check_env_and_tools(recipe))


def _require_packages(recipe: Recipe) -> None:
    needed = ["torch", "transformers", "renderers", "matplotlib", "tensorboard"]
    if recipe.trainer.kind == "megatron":
        needed.append("megatron")
    for package in needed:
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "train")


def _check_model(folder: Path) -> None:
    read_model_facts(folder)
    for file in folder.glob("*.safetensors"):
        try:
            require_whole_safetensors(file)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the model in {folder} is damaged: {error}") from None


async def _check_env_and_tools(recipe: Recipe) -> None:
    if recipe.tools.url is not None:
        async with await connect_tools(recipe.tools.url, recipe.tools.token_env):
            pass
    warm_start = recipe.trainer.warm_start
    async with env_maker(recipe)() as env:
        require_tasks(env)
        if recipe.tools.url is not None or recipe.tools.serve is not None:
            require_tools_argument(env)
        if recipe.tools.trace and env.spec is not None and env.spec.isolation is not None:
            raise ConfigError(
                f"tools.trace cannot tell of the calls of {recipe.env.id}, which runs in processes"
                " of its own",
                hint="leave tools.trace out",
            )
        if warm_start.enabled:
            require_expert(env, noise=warm_start.noise, seed=recipe.seed)


def _require_free(port: int) -> None:
    hint = "choose another engine.port, or leave it out to take any free ones"
    if port > 65535:
        raise ConfigError(f"engine.port: there is no port {port}", hint=hint)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            words = (error.strerror or str(error)).lower()
            raise ConfigError(f"engine.port: {HOST}:{port}: {words}", hint=hint) from None


def _go(recipe: Recipe, folder: RunFolder, resumed: bool, quiet: bool) -> dict[str, Any]:
    checkpoint = folder.checkpoints.newest() if resumed else None
    if checkpoint is not None and checkpoint.progress.step > recipe.steps:
        raise ResumeError(
            f"{folder.path} has made {checkpoint.progress.step} steps already, more than"
            f" steps={recipe.steps}",
            hint="set steps to what the run shall reach in all",
        )
    try:
        with _told_as_one_error():
            outcome = asyncio.run(_watched(recipe, folder, checkpoint, resumed, quiet))
    except RelaxError as error:
        if not quiet and not isinstance(error, ConfigError):
            print(f"to go on with this run: --resume {folder.path}", file=sys.stderr)
        raise
    result = {"step": recipe.steps, **outcome.to_json()}
    folder.write_outcome(result)
    return result


async def _watched(
    recipe: Recipe,
    folder: RunFolder,
    checkpoint: Checkpoint | None,
    resumed: bool,
    quiet: bool,
) -> Outcome:
    last_step = checkpoint.progress.step if checkpoint else 0
    if resumed:
        folder.sweep(last_step)
    with RunMonitor(
        folder.path,
        name=folder.path.name,
        total_steps=recipe.steps,
        last_step=last_step if resumed else None,
        quiet=quiet,
    ) as monitor:
        monitor.message(f"run folder {folder.path}")
        if resumed:
            words = f"goes on after step {last_step}" if checkpoint else "begins again"
            monitor.message(f"the run {words}")
        work = conduct(recipe, folder, monitor, checkpoint)
        return await _until_signal(work, lambda: monitor.doing)


async def _until_signal(work: Coroutine[Any, Any, Outcome], doing: Callable[[], str]) -> Outcome:
    """Let Ctrl-C and SIGTERM end the work in order, with nothing left behind."""
    task = asyncio.ensure_future(work)
    told: list[tuple[signal.Signals, str]] = []

    def stop(signum: signal.Signals) -> None:
        told.append((signum, doing()))
        task.cancel()

    for signum in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(signum, stop, signum)
    try:
        return await task
    except asyncio.CancelledError:
        if not told:
            raise
        signum, phase = told[0]
        raise Interrupted(
            f"{_SIGNALS[signum]} ended the run (phase: {phase})",
            signum=signum,
            hint="--resume goes on with it",
        ) from None


@contextlib.contextmanager
def _told_as_one_error() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        cause = cause_of(error)
        if isinstance(cause, OSError) and cause.errno in NO_ROOM:
            raise storage_error(Path(cause.filename or "a file"), cause) from cause
        if cause is error:
            raise
        raise cause from cause.__cause__


def cause_of(error: BaseException) -> BaseException:
    """Return the one error to tell of all those that one failure has set off.

    The death of a process explains everything else. A fault in the program comes next. The queue's
    errors come last: they only pass on what has gone wrong elsewhere.
    """
    return min(_leaves(error), key=_rank)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    elif isinstance(error, ProducerFailed) and isinstance(error.__cause__, RelaxError):
        yield error.__cause__
    else:
        yield error


def _rank(error: BaseException) -> int:
    if isinstance(error, ChildDied):
        return 0
    if not isinstance(error, RelaxError):
        return 1
    return 3 if isinstance(error, QueueError) else 2

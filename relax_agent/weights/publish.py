"""Bring a new version of the weights to every engine, without losing a single request.

On all engines at the same time::

    pause → begin → update → end → flush → resume

``pause`` never aborts: a request that was being sampled goes on after ``resume`` with the new
weights, and its tokens carry the version that sampled each. With ``retract`` the engine computes
the key-value cache of such requests anew, so its prefix cache can be flushed. With ``in_place``
they keep the old cache, which cannot be flushed under them; there the engines keep prefixes of
different versions apart, so no later request is served from an old one.

A failure resumes every engine that can be resumed, and then raises
:class:`~relax_agent.errors.WeightSyncError` with the engine's name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relax_agent.engines.folder import weight_files
from relax_agent.engines.protocol import Engine
from relax_agent.engines.wire import parse_version
from relax_agent.errors import EngineError, RelaxError, WeightSyncError
from relax_agent.weights.settings import WeightsSettings

_RESUME_S = 10.0
"""Limit of the attempt to resume an engine after a failure."""


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What one publication took."""

    version: int
    engines: int
    bytes_per_engine: int
    """Size of the weight files."""
    paused_s: float
    """Longest time that an engine did not sample."""
    wall_s: float
    """From the first call to the last answer."""


async def publish(
    engines: Sequence[Engine], folder: Path, version: int, settings: WeightsSettings
) -> PublishReport:
    """Load the weights in ``folder`` into all engines as ``version``.

    Args:
        engines: All engines of the fleet.
        folder: Model in Hugging Face layout (safetensors files and config.json).
        version: The version that the engines report from now on.
        settings: The way, the kind of pause and the time limit.

    Raises:
        WeightSyncError: naming the engines that do not have the new weights.
    """
    started = time.monotonic()
    files = await asyncio.to_thread(weight_files, folder)
    outcomes = await asyncio.gather(
        *(_update_bounded(engine, folder, files, version, settings) for engine in engines),
        return_exceptions=True,
    )
    failures = _failures(engines, outcomes)
    if failures:
        first = failures[0][1]
        raise WeightSyncError(
            f"version {version} did not reach {len(failures)} of {len(engines)} engines: "
            + "; ".join(f"{name}: {error}" for name, error in failures)
        ) from first
    return PublishReport(
        version,
        len(engines),
        sum(file.stat().st_size for file in files),
        max((seconds for seconds in outcomes if isinstance(seconds, float)), default=0.0),
        time.monotonic() - started,
    )


def _failures(
    engines: Sequence[Engine], outcomes: Sequence[float | BaseException]
) -> list[tuple[str, RelaxError | OSError]]:
    failures = []
    for engine, outcome in zip(engines, outcomes, strict=True):
        if isinstance(outcome, RelaxError | OSError):
            failures.append((engine.name, outcome))
        elif isinstance(outcome, BaseException):
            raise outcome
    return failures


async def _update_bounded(
    engine: Engine, folder: Path, files: Sequence[Path], version: int, settings: WeightsSettings
) -> float:
    """Update one engine; it runs again afterwards, whatever happened. Returns paused seconds."""
    started = time.monotonic()
    try:
        async with asyncio.timeout(settings.timeout_s):
            await engine.pause(settings.pause)
            await _update(engine, folder, files, version, settings)
            await engine.resume()
    except TimeoutError as error:
        await _resume_anyway(engine)
        raise WeightSyncError(f"no end after {settings.timeout_s:g} s") from error
    except BaseException:
        await _resume_anyway(engine)
        raise
    return time.monotonic() - started


async def _update(
    engine: Engine, folder: Path, files: Sequence[Path], version: int, settings: WeightsSettings
) -> None:
    await engine.begin_weight_update()
    try:
        if settings.kind == "disk":
            await engine.update_weights_from_disk(str(folder), version)
        else:
            for file in files:
                await engine.update_weights_from_tensor(
                    await asyncio.to_thread(file.read_bytes), version
                )
    except BaseException:
        await _close_session(engine)
        raise
    await engine.end_weight_update()
    if settings.pause == "retract":
        await engine.flush_cache()
    served = parse_version((await engine.model_info()).get("weight_version"))
    if served != version:
        raise WeightSyncError(f"took the weights but reports version {served}")


async def _close_session(engine: Engine) -> None:
    """Leave no session open behind a failed update, or the next one could not begin."""
    try:
        async with asyncio.timeout(_RESUME_S):
            await engine.end_weight_update()
    except (EngineError, TimeoutError):
        return  # the engine refused the unfinished session, or is gone: the first error tells why


async def _resume_anyway(engine: Engine) -> None:
    try:
        async with asyncio.timeout(_RESUME_S):
            await engine.resume()
    except (EngineError, TimeoutError):
        return  # an engine that cannot even resume is dead; the first error says why

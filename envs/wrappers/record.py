"""``RecordEpisode``: episodes as files that people and programs can read.

It records what passes through: put it outside of the wrappers whose effect it shall show. An
episode is written when it ends, however it ends: by itself, at a limit, by an exception in
``reset`` or ``step``, by a cancellation, by another ``reset`` or by ``close`` in the middle. Its
status says which.

Recording never costs an episode. If the disk takes no more, ``step`` returns what it always does,
with the reason in ``info["recording_error"]``; the episode is kept in memory and written with the
next one. ``close`` tries once more and raises StorageError if something still is not written. A
folder that cannot be used at all is refused at once, by the constructor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

from relax_agent.envs.core import Env, Info, StepResult, Wrapper
from relax_agent.envs.specs import WrapperSpec
from relax_agent.envs.wrappers.functions import plain_arguments
from relax_agent.envs.wrappers.recording import RecordedEpisode, Recorder
from relax_agent.errors import ConfigError, StorageError, ToolError, one_line
from relax_agent.limits import STOPS
from relax_agent.messages import AssistantMessage, Observation, Rewrite
from relax_agent.status import TRUNCATIONS, EpisodeStatus
from relax_agent.threads import THREADS

logger = logging.getLogger(__name__)


class RecordEpisode(Wrapper):
    """Records episodes into a folder: JSON lines, media files and pages. See the module.

    ``info["recorded"]`` of the last step is the episode's id: its page is ``pages/ID.html``.
    :func:`~relax_agent.envs.wrappers.read_episodes` reads the folder back.
    """

    def __init__(self, env: Env, folder: str | Path, *, every: int = 1, html: bool = True) -> None:
        """Record into ``folder``, which is made if need be and may be shared.

        Args:
            env: The environment.
            folder: Where the episodes go.
            every: Record the first episode of this environment and every so many after it.
            html: Whether to write pages for people too.

        Raises:
            StorageError: The folder cannot be made or written to.
        """
        super().__init__(env)
        if every < 1:
            raise ConfigError(f"every must be ≥ 1, not {every}")
        self.every = every
        self._recorder = Recorder(Path(folder), html=html)
        self._episode: RecordedEpisode | None = None
        self._seen = 0
        self._begun = 0.0

    def wrapper_spec(self) -> WrapperSpec | None:
        """Describe this wrapper; the folder goes as text."""
        return plain_arguments(super().wrapper_spec())

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin an episode; one that is still running is written as cancelled."""
        await self._finish(EpisodeStatus.CANCELLED, "reset() before the episode's end")
        self._seen += 1
        if (self._seen - 1) % self.every:
            return await self.env.reset(seed=seed, options=options)
        self._begun = time.perf_counter()
        self._episode = episode = RecordedEpisode(
            self._name(), self._spec(), seed, (options or {}).get("task")
        )
        try:
            observation, info = await self.env.reset(seed=seed, options=options)
        except BaseException as error:
            await self._fail("reset", error)
            raise
        if episode.task_id is None and (task := info.get("task")) is not None:
            episode.task_id = str(task)
        episode.tools = list(self.env.tools.schemas())
        _observe(episode, observation)
        return observation, info

    async def step(self, action: AssistantMessage) -> StepResult:
        """Step; the last step of an episode writes it."""
        episode = self._episode
        if episode is None or not isinstance(action, AssistantMessage):
            return await self.env.step(action)
        episode.actions.append(len(episode.messages))
        episode.messages.append(action)
        begun = time.perf_counter()
        try:
            result = await self.env.step(action)
        except BaseException as error:
            episode.step_durations_s.append(time.perf_counter() - begun)
            await self._fail("step", error)
            raise
        episode.step_durations_s.append(time.perf_counter() - begun)
        observation, reward, episode.terminated, episode.truncated, info = result
        episode.rewards.append(float(reward))
        episode.metrics |= _numbers(info.get("metrics"))
        _observe(episode, observation)
        if not (episode.terminated or episode.truncated):
            return result
        told = await self._finish(*_ending(action, episode.terminated, info))
        return (*result[:4], info | told)

    async def close(self) -> None:
        """Close the environment; an episode that is still running is written as cancelled.

        Raises:
            StorageError: Something recorded could not be written.
        """
        try:
            await self._finish(EpisodeStatus.CANCELLED, "close() before the episode's end")
        finally:
            await self.env.close()
        await THREADS.run(self._recorder.close)

    def _name(self) -> str:
        spec = self.env.spec
        return type(self.unwrapped).__name__ if spec is None else spec.id

    def _spec(self) -> dict[str, Any] | None:
        """Return the recorded environment's spec as data, if it goes to JSON."""
        spec = self.env.spec
        try:
            return None if spec is None else json.loads(spec.to_json())
        except ConfigError:  # defined in a notebook, or made from objects: it has no description
            return None

    async def _fail(self, call: str, error: BaseException) -> None:
        """End the episode by what was raised; when cancelled, without waiting for a thread."""
        words = f"{call}(): {one_line(error)}"
        if isinstance(error, asyncio.CancelledError):
            episode = self._end(EpisodeStatus.CANCELLED, f"{call}() was cancelled")
            if episode is not None:
                self._write(episode)
        elif isinstance(error, ToolError):
            await self._finish(EpisodeStatus.TOOL_FAILURE, words)
        elif isinstance(error, STOPS):
            await self._finish(EpisodeStatus.CANCELLED, words)
        else:
            await self._finish(EpisodeStatus.ENV_FAILURE, words)

    async def _finish(self, status: EpisodeStatus, detail: str) -> Info:
        """Write the running episode, if there is one, and return what to tell of it."""
        episode = self._end(status, detail)
        return {} if episode is None else await THREADS.run(partial(self._write, episode))

    def _end(self, status: EpisodeStatus, detail: str) -> RecordedEpisode | None:
        episode, self._episode = self._episode, None
        if episode is not None:
            episode.status, episode.detail = status.value, detail
            episode.duration_s = time.perf_counter() - self._begun
        return episode

    def _write(self, episode: RecordedEpisode) -> Info:
        try:
            self._recorder.write(episode)
        except StorageError as error:
            logger.warning("%s", error)
            return {"recording_error": str(error)}
        return {"recorded": episode.id}


def _observe(episode: RecordedEpisode, observation: Observation) -> None:
    if isinstance(observation, Rewrite):
        episode.observe(observation.messages, observation.reason)
    else:
        episode.observe(observation, None)


def _ending(action: AssistantMessage, terminated: bool, info: Info) -> tuple[EpisodeStatus, str]:
    if action.finish_reason == "length":
        return EpisodeStatus.TRUNCATED_TOKENS, "the last message was cut"
    if terminated:
        return EpisodeStatus.COMPLETED, ""
    status = TRUNCATIONS.get(str(info.get("status")), EpisodeStatus.TRUNCATED_TURNS)
    return status, str(info.get("detail") or "the environment truncated the episode")


def _numbers(metrics: Any) -> dict[str, float]:
    """Keep what is a number; an environment's mistake must not cost the recording."""
    found = {}
    for name, value in metrics.items() if isinstance(metrics, dict) else ():
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if math.isfinite(number := float(value)):
                found[str(name)] = number
    return found

"""The loop that drives one episode: reset, render, sample, parse, step, until it ends.

The prompt only ever grows: sampled ids go into the log as they were sampled, and what the renderer
adds behind them is appended. A :class:`~relax_agent.messages.Rewrite` is the one exception; it
forks the token log where the new prompt leaves the old one. Every wait has a limit and can be
cancelled, and whatever goes wrong becomes the episode's status, with the trace up to there:

    env raises, hangs or breaks its contract   env_failure (tool_failure for a ToolError)
    engine fails                               engine_failure
    engine aborts and on_abort is "retry"      cancelled
    a message is cut and the env ends on it    truncated_tokens
    no room for another message                truncated_tokens
    the env truncates, or max_turns is reached truncated_turns, or what info["status"] says
    the time is over                           truncated_time

A message that ``max_tokens_per_turn`` cuts goes to the env like any other, with its
``finish_reason``: whether the episode goes on is the env's rule, here and everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from relax_agent.engines.protocol import GenerateRequest, GenerateResult, SamplingParams
from relax_agent.envs import Env
from relax_agent.episode import Episode, EpisodeStatus, Turn
from relax_agent.errors import EngineError, PromptTooLong, RenderError, ToolError, at_line, one_line
from relax_agent.media import Media
from relax_agent.messages import AssistantMessage, Message, Rewrite, Usage
from relax_agent.rendering import Rendered, Renderer, truncate_messages
from relax_agent.rendering.media import prepare_media
from relax_agent.rollout.expert import ExpertSource
from relax_agent.rollout.limits import (
    GRACE_S,
    EpisodeLimits,
    Overrun,
    TimeBudget,
    bounded,
    contained,
    outcome,
    stop,
    wait_bounded,
)
from relax_agent.rollout.sampling import PolicySource, SampledTurn, TurnPlan, sample_turn
from relax_agent.status import TRUNCATIONS
from relax_agent.tools import call_context

Ending = tuple[EpisodeStatus, str]


@dataclass(frozen=True, slots=True)
class EpisodeOptions:
    """How episodes are sampled; the same for all members of a group."""

    sampling: SamplingParams
    """``max_new_tokens`` and ``seed`` are set for every message."""
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    run_seed: int = 0
    return_routes: bool = False
    """Ask for routed experts (mixture-of-experts models only)."""
    on_abort: Literal["resume", "retry"] = "resume"
    paused: Callable[[], float] = lambda: 0.0
    """Seconds that the engines have been paused so far; they do not count against an episode."""


class _EnvFailed(Exception):
    """The environment failed; the cause says how."""

    def __init__(self, call: str, cause: BaseException | None, words: str) -> None:
        super().__init__(f"{call}: {words}")
        self.status = EpisodeStatus.ENV_FAILURE
        if isinstance(cause, ToolError):
            self.status = EpisodeStatus.TOOL_FAILURE


async def run_episode(
    env: Env,
    source: PolicySource | ExpertSource,
    renderer: Renderer,
    episode: Episode,
    options: EpisodeOptions,
    *,
    member: int = 0,
    attempt: int = 0,
) -> Episode:
    """Drive ``env`` through one episode and return it with its status.

    Args:
        env: An environment that nobody else uses meanwhile.
        source: Samples tokens: a fleet, an engine or a scripted expert.
        renderer: Messages to ids and back.
        episode: A new, empty episode; its task and seed go to the env. It is filled in place, so a
            caller that is cancelled still holds the trace.
        options: How to sample, and the limits.
        member: Number of the episode within its group; its samples differ from the others' by it.
        attempt: Number of the try; a retry draws other samples.

    Raises:
        asyncio.CancelledError: after the episode has ended as cancelled.
        Exception: a defect of this program; failures of env and engine never raise.
    """
    loop = _Loop(env, source, renderer, episode, options, (member, attempt))
    try:
        with call_context(episode=episode.id):
            status, detail = await loop.play()
    except Overrun:
        status, detail = EpisodeStatus.TRUNCATED_TIME, f"{options.limits.timeout_s:g} s are over"
    except _EnvFailed as error:
        status, detail = error.status, str(error)
    except PromptTooLong as error:
        status, detail = EpisodeStatus.TRUNCATED_TOKENS, str(error)
    except RenderError as error:
        status, detail = EpisodeStatus.ENV_FAILURE, f"what the env said: {error}"
    except EngineError as error:
        status, detail = EpisodeStatus.ENGINE_FAILURE, one_line(error, None)
    except BaseException as error:
        episode.finish(EpisodeStatus.CANCELLED, one_line(error, None))
        raise
    episode.finish(status, detail)
    return episode


class _Loop:
    """The state of one running episode."""

    def __init__(
        self,
        env: Env,
        source: PolicySource | ExpertSource,
        renderer: Renderer,
        episode: Episode,
        options: EpisodeOptions,
        salt: tuple[int, int],
    ) -> None:
        self._env = env
        self._source = source
        self._renderer = renderer
        self._episode = episode
        self._options = options
        self._limits = options.limits
        self._salt = salt
        self._tools: list[dict[str, Any]] = []
        self._prompt: list[int] = []
        self._media: list[Media] = []
        self._conversation: list[Message] = []
        self._time = TimeBudget(options.limits.timeout_s, options.paused)

    async def play(self) -> Ending:
        """Run to the end and say how it ended."""
        await self._reset()
        while True:
            prompt, sampled = len(self._prompt), self._episode.sampled_tokens
            room = self._limits.room(prompt, sampled)
            if room <= 0:
                return EpisodeStatus.TRUNCATED_TOKENS, self._limits.used_up(prompt, sampled)
            turn = await self._sample(room)
            if turn.finish_reason == "abort":
                if self._time.left() <= 0:
                    raise Overrun
                return EpisodeStatus.CANCELLED, "the engine aborted the answer"
            ending = await self._step(turn)
            if ending is not None:
                return ending

    # -- the environment ---------------------------------------------------------------------

    async def _reset(self) -> None:
        options = {"task": self._episode.task_id}
        answer = await self._call(
            "reset", lambda: self._env.reset(seed=self._episode.seed, options=options)
        )
        with _blamed("reset"):
            observation, _ = answer
            _require_messages(observation)
            self._tools = list(self._env.tools.schemas())
        messages = observation.messages if isinstance(observation, Rewrite) else observation
        self._hear(messages)
        await self._prepare(messages)
        self._grow(self._renderer.start(messages, self._tools))

    async def _step(self, turn: Turn) -> Ending | None:
        """Hand the message to the env and take in what comes back."""
        message = turn.message
        assert message is not None
        answer = await self._call("step", lambda: self._env.step(message))
        with _blamed("step"):
            observation, reward, terminated, truncated, info = answer
            _require_messages(observation)
            turn.reward = _finite(reward, "the reward")
            metrics = info.get("metrics") or {}
            self._episode.metrics.update(
                {str(k): _finite(v, f"the metric {k}") for k, v in metrics.items()}
            )
        ended = bool(terminated or truncated)
        ending = self._ending(turn, bool(terminated), info) if ended else self._out_of_turns()
        if ending is not None:
            self._hear([] if isinstance(observation, Rewrite) else observation)
            return ending
        await self._observe(observation, turn)
        return None

    def _ending(self, turn: Turn, terminated: bool, info: dict[str, Any]) -> Ending:
        if turn.finish_reason == "length":
            return EpisodeStatus.TRUNCATED_TOKENS, "the last message was cut"
        if terminated:
            return EpisodeStatus.COMPLETED, ""
        status = TRUNCATIONS.get(str(info.get("status")), EpisodeStatus.TRUNCATED_TURNS)
        return status, str(info.get("detail") or "the environment truncated the episode")

    def _out_of_turns(self) -> Ending | None:
        if len(self._episode.turns) < self._limits.max_turns:
            return None
        return EpisodeStatus.TRUNCATED_TURNS, f"{self._limits.max_turns} turns are used"

    async def _call(self, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """Await an env call under both limits; whatever it raises is the env's failure."""
        own = TimeBudget(self._limits.env_timeout_s)
        try:
            return await bounded(call(), lambda: min(own.left(), self._time.left()))
        except Overrun:
            if self._time.left() <= 0:
                raise
            words = f"no answer within {self._limits.env_timeout_s:g} s"
            raise _EnvFailed(name, None, words) from None
        except Exception as error:
            raise _EnvFailed(name, error, one_line(error, None) + at_line(error)) from error

    async def _observe(self, observation: list[Message] | Rewrite, turn: Turn) -> None:
        """Take in what came back, as far as there is room for it."""
        if isinstance(observation, Rewrite):
            await self._prepare(observation.messages)
            rendered = self._renderer.start(observation.messages, self._tools)
            rendered = replace(rendered, fork=observation.reason)
            self._conversation = []
            self._hear(observation.messages)
        else:
            await self._prepare(observation)
            sampled = self._prompt[len(self._prompt) - (turn.end - turn.start) :]
            rendered = self._renderer.extend(sampled, observation, self._tools, self._conversation)
            if rendered.fork is not None:
                self._count("template_forks", 1)
            self._hear(observation)
        rendered = self._fitting(rendered)
        if rendered.fork is None:
            self._grow(rendered)
        else:
            self._fork(rendered, rendered.fork)

    def _fitting(self, rendered: Rendered) -> Rendered:
        """Return a prompt that leaves room for an answer, by the stated policy.

        Raises:
            PromptTooLong: There is none; the log is not to hold what nobody can answer.
        """
        limits = self._limits
        used = len(rendered.ids) + (len(self._prompt) if rendered.fork is None else 0)
        most = limits.max_context - limits.max_tokens_per_turn
        if limits.on_overflow == "drop_oldest" and used > most:
            with contextlib.suppress(PromptTooLong):
                return self._without_oldest(most)
        if used >= limits.max_context:
            raise PromptTooLong(f"{used} of {limits.max_context} tokens are used")
        return rendered

    def _without_oldest(self, most_tokens: int) -> Rendered:
        kept = truncate_messages(
            self._conversation,
            most_tokens,
            lambda messages: len(self._renderer.start(messages, self._tools).ids),
        )
        dropped = len(self._conversation) - len(kept)
        self._count("dropped_messages", dropped)
        self._conversation = kept
        rendered = self._renderer.start(kept, self._tools)
        return replace(rendered, fork=f"{dropped} messages left out")

    def _count(self, metric: str, number: int) -> None:
        self._episode.metrics[metric] = self._episode.metrics.get(metric, 0.0) + number

    def _fork(self, rendered: Rendered, reason: str) -> None:
        """Go on in a new segment from where the new prompt leaves the old one."""
        spans = self._episode.media_spans()
        known = [(span.start, span.count, self._episode.media[span.digest]) for span in spans]
        shared = rendered.shared_with(self._prompt, known)
        self._episode.fork(shared, reason)
        self._prompt = self._prompt[:shared]
        self._media = self._media[: sum(span.start < shared for span in spans)]
        self._grow(rendered.after(shared))

    def _hear(self, messages: Sequence[Message]) -> None:
        self._conversation.extend(messages)
        self._episode.messages.extend(messages)

    def _grow(self, rendered: Rendered) -> None:
        self._episode.add_prompt(rendered.ids, rendered.media)
        self._prompt.extend(rendered.ids)
        self._media.extend(medium for _, _, medium in rendered.media)

    async def _prepare(self, messages: Sequence[Message]) -> None:
        """Have media decoded off the event loop before they are rendered."""
        if any(message.media for message in messages):  # most have none: no task for them
            await bounded(prepare_media(self._renderer, messages), self._time.left)

    # -- the policy --------------------------------------------------------------------------

    async def _sample(self, room: int) -> Turn:
        """Sample one message; what there is of it goes into the log even if that fails."""
        episode = self._episode
        sampled = SampledTurn(self._prompt, episode.routed_until())
        number = len(episode.turns)
        plan = TurnPlan(
            rid=f"{episode.id}.{number:04d}",
            sampling=replace(
                self._options.sampling,
                max_new_tokens=room,
                stop_token_ids=self._renderer.stop_token_ids,
            ),
            seed=(self._options.run_seed, episode.group_id, *self._salt, number),
            return_routes=self._options.return_routes and not self._is_expert,
            on_abort=self._options.on_abort,
            max_resumes=self._limits.max_resumes,
            media=tuple(self._media),
        )
        try:
            await sample_turn(sampled, plan, self._ask)
        except BaseException:
            if sampled.ids:
                self._record(sampled, None)
            raise
        return self._record(sampled, self._read(sampled))

    @property
    def _is_expert(self) -> bool:
        return isinstance(self._source, ExpertSource)

    async def _ask(self, request: GenerateRequest) -> GenerateResult:
        if self._time.left() <= 0:
            raise Overrun
        if isinstance(self._source, ExpertSource):
            answer = self._source.answer(request, self._conversation, self._tools)
            return await bounded(answer, self._time.left)
        asked = asyncio.ensure_future(contained(self._source.generate(request)))
        try:
            if await wait_bounded(asked, self._time.left):
                return outcome(asked)
            return await _cut_short(self._source, request.rid, asked)
        finally:
            await stop(asked)

    def _read(self, sampled: SampledTurn) -> AssistantMessage | None:
        """Parse a whole message; an aborted one is never read."""
        if sampled.finish_reason == "abort":
            return None
        used = len(self._prompt) + len(sampled.ids)
        usage = Usage(len(self._prompt), len(sampled.ids), self._limits.max_context - used)
        message = self._renderer.parse(sampled.ids, self._tools)
        return replace(message, usage=usage, finish_reason=sampled.finish_reason)

    def _record(self, sampled: SampledTurn, message: AssistantMessage | None) -> Turn:
        turn = self._episode.add_sampled(
            sampled.ids, sampled.logprobs, sampled.versions, sampled.finish_reason, message
        )
        for start, routes in sampled.routes:
            self._episode.add_routes(start, routes)
        self._prompt.extend(sampled.ids)
        if message is not None:
            self._hear([message])
        return turn


async def _cut_short(
    source: PolicySource, rid: str, asked: asyncio.Future[GenerateResult]
) -> GenerateResult:
    """End a request whose time is over and return what it has sampled, if it says so soon."""
    try:
        async with asyncio.timeout(GRACE_S):
            await source.abort(rid)
            return await asyncio.shield(asked)
    except (TimeoutError, EngineError):
        raise Overrun from None


@contextlib.contextmanager
def _blamed(call: str) -> Iterator[None]:
    """Turn what goes wrong while an env's answer is unpacked into the env's failure."""
    try:
        yield
    except Exception as error:
        raise _EnvFailed(
            call, error, f"its answer cannot be used: {one_line(error, None)}"
        ) from error


def _require_messages(observation: object) -> None:
    messages = observation.messages if isinstance(observation, Rewrite) else observation
    if not isinstance(messages, (list, tuple)):
        raise TypeError(f"the observation is a {type(messages).__name__}, not a list of Message")
    for message in messages:
        if not isinstance(message, Message):
            raise TypeError(f"the observation holds a {type(message).__name__}, not a Message")


def _finite(number: float, what: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{what} is {value}")
    return value

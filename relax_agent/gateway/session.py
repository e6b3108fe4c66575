"""One episode that a program plays: from a request to sampled tokens in the token log.

A session knows the conversations that the program has had, each with its tokens. A request whose
history is one of them and goes on from its end is appended to it. Any other history (an edit, a
question asked again, a sub-agent's own conversation) becomes a fork of the log with a name. Nothing
is written before an answer is there, so requests may run at the same time, and one whose client
has gone leaves no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from relax_agent.engines.protocol import GenerateRequest, GenerateResult
from relax_agent.episode import Episode, EpisodeStatus
from relax_agent.errors import EpisodeError, PromptTooLong
from relax_agent.gateway.history import known_part
from relax_agent.limits import Overrun, TimeBudget, bounded
from relax_agent.messages import AssistantMessage, Message, Usage
from relax_agent.rendering import Placed, Rendered, Renderer
from relax_agent.rendering.media import prepare_media
from relax_agent.rollout.episode_loop import EpisodeOptions
from relax_agent.rollout.sampling import PolicySource, SampledTurn, TurnPlan, sample_turn


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a program asks for, in no dialect."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    max_tokens: int | None = None
    """Most tokens of the answer; None leaves it to the run."""
    answer_id: str = ""
    """What the answer will be called."""
    previous: str | None = None
    """The answer whose conversation goes before ``messages``; None if they are all there is."""
    again: bool = False
    """Whether the program's SDK says that it asks once more, because it got no answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What was sampled for one request."""

    message: AssistantMessage
    ids: list[int]
    logprobs: list[float]


@dataclass(slots=True)
class _Conversation:
    """What was said in one line of the log, and its tokens up to the last answer."""

    segment: int
    ids: list[int]
    media: tuple[Placed, ...]
    messages: list[Message]
    answer: Answer
    """The last one."""
    answer_id: str
    tools: list[dict[str, Any]]


@dataclass(slots=True)
class _Prompt:
    """A request as tokens, and where in the log it goes."""

    rendered: Rendered
    """The whole prompt."""
    after: _Conversation | None = None
    """The conversation that it goes on; None where it begins another."""
    reason: str = ""
    """Why it is a fork."""

    @property
    def ids(self) -> list[int]:
        """All of its tokens."""
        return self.rendered.ids


class GatewaySession:
    """Answers the requests of one program and writes the episode."""

    def __init__(
        self, episode: Episode, source: PolicySource, renderer: Renderer, options: EpisodeOptions
    ) -> None:
        """Begin with an empty episode.

        Args:
            episode: Filled as answers come.
            source: Samples tokens.
            renderer: Messages to ids and back.
            options: How to sample, and the limits; what a program asks for never widens them.
        """
        self.episode = episode
        self._source, self._renderer, self._options = source, renderer, options
        self._time = TimeBudget(options.limits.timeout_s, options.paused)
        self._conversations: list[_Conversation] = []
        self._asked = 0
        self._ended = False

    def end(self) -> None:
        """Write no more into the log: whatever is still being sampled is too late."""
        self._ended = True

    async def respond(self, request: ChatRequest) -> Answer:
        """Sample the answer to a request.

        Raises:
            LookupError: There is no answer of the name that it goes on from.
            PromptTooLong: There is no room for an answer.
            RenderError: The chat format cannot hold the messages.
            EpisodeError: The episode is over, or all its turns are used.
            Overrun: Its time is over.
            EngineError: No engine answers.
        """
        request = self._whole_request(request)
        if request.again and (lost := self._answered(request)) is not None:
            return lost
        self._require_room()
        await self._prepare(request.messages)
        prompt = self._place(request)
        sampled = await self._sample(prompt, request)
        return self._record(prompt, request, sampled)

    def _require_room(self) -> None:
        limits = self._options.limits
        if self._ended or self.episode.status is not EpisodeStatus.RUNNING:
            raise EpisodeError("this episode is over")
        if len(self.episode.turns) >= limits.max_turns:
            raise EpisodeError(f"all {limits.max_turns} turns of this episode are used")
        if self._time.left() <= 0:
            raise Overrun

    async def _prepare(self, messages: Sequence[Message]) -> None:
        if any(message.media for message in messages):  # most have none: no task for them
            await bounded(prepare_media(self._renderer, messages), self._time.left)

    async def count(self, request: ChatRequest) -> int:
        """Return how many tokens a request has as a prompt of its own.

        Raises:
            RenderError: The chat format cannot hold the messages.
        """
        await self._prepare(request.messages)
        return len(self._renderer.start(request.messages, request.tools).ids)

    # -- where a request belongs -------------------------------------------------------------------

    def _whole_request(self, request: ChatRequest) -> ChatRequest:
        """Put before the messages those that the request only refers to."""
        if request.previous is None:
            return request
        for each in self._conversations:
            if each.answer_id == request.previous:
                break
        else:
            raise LookupError(f"there is no answer {request.previous[:64]!r} in this episode")
        before, new = each.messages, request.messages
        if new and new[0].role == "system" and before[0].role == "system":
            before = before[1:]  # instructions replace the earlier ones
            new, before = new[1:], [new[0], *before]
        return replace(request, messages=[*before, *new])

    def _answered(self, request: ChatRequest) -> Answer | None:
        """Find the answer to a request that was answered already, but did not arrive."""
        for each in reversed(self._conversations):
            asked = len(each.messages) - 1
            same = each.tools == request.tools and len(request.messages) == asked
            if same and known_part(request.messages, each.messages) == asked:
                return each.answer
        return None

    def _place(self, request: ChatRequest) -> _Prompt:
        messages = request.messages
        best, most = None, 0
        for each in self._conversations:
            count = known_part(messages, each.messages)
            if count == len(each.messages) and count >= most and each.tools == request.tools:
                best, most = each, count
        new = messages[most:]
        goes_on = best is not None and new and not any(m.role == "assistant" for m in new)
        if best is not None and goes_on:
            rendered = self._renderer.extend(
                best.answer.ids, new, request.tools, best.messages[:-1]
            )
            if rendered.fork is None:
                start = len(best.ids)
                media = (*best.media, *((at + start, n, m) for at, n, m in rendered.media))
                return _Prompt(Rendered([*best.ids, *rendered.ids], media), best)
            return _Prompt(rendered, reason=rendered.fork)
        whole = self._renderer.start(messages, request.tools)
        return _Prompt(whole, reason=self._reason(request))

    def _reason(self, request: ChatRequest) -> str:
        messages = request.messages
        answered = any(message.role == "assistant" for message in messages)
        for each in self._conversations:
            known = known_part(messages, each.messages)
            if known == len(messages) == len(each.messages) - 1:
                return "the same was asked again"
            if known == len(each.messages) and each.tools != request.tools:
                return "the tools were changed"
            if known and answered:
                return "the history was edited"
        return "another conversation"

    # -- sampling ----------------------------------------------------------------------------------

    async def _sample(self, prompt: _Prompt, request: ChatRequest) -> SampledTurn:
        limits, number = self._options.limits, self._asked
        self._asked += 1
        left = limits.max_context - len(prompt.ids)
        if left <= 0:
            raise PromptTooLong(f"{len(prompt.ids)} of {limits.max_context} tokens are used")
        sampled = SampledTurn(prompt.ids, 0)
        plan = TurnPlan(
            rid=f"{self.episode.id}.{number:04d}",
            sampling=replace(
                self._options.sampling,
                max_new_tokens=min(left, limits.max_tokens_per_turn, request.max_tokens or left),
                stop_token_ids=self._renderer.stop_token_ids,
            ),
            seed=(self._options.run_seed, self.episode.group_id, self.episode.id, number),
            return_routes=self._options.return_routes,
            on_abort="resume",
            max_resumes=limits.max_resumes,
            media=tuple(medium for _, _, medium in prompt.rendered.media),
        )
        await sample_turn(sampled, plan, self._ask)
        return sampled

    async def _ask(self, request: GenerateRequest) -> GenerateResult:
        if self._time.left() <= 0:
            raise Overrun
        return await bounded(self._source.generate(request), self._time.left)

    # -- the log -----------------------------------------------------------------------------------

    def _record(self, prompt: _Prompt, request: ChatRequest, sampled: SampledTurn) -> Answer:
        """Write prompt and answer into the log: at once, and only now."""
        self._require_room()
        message = self._read(prompt, request, sampled)
        shared = self._go_to(prompt)
        rest = prompt.rendered.after(shared)
        self.episode.add_prompt(rest.ids, rest.media)
        self.episode.add_sampled(
            sampled.ids, sampled.logprobs, sampled.versions, sampled.finish_reason, message
        )
        for start, routes in sampled.routes:
            self.episode.add_routes(start, routes)
        before = [] if prompt.after is None else prompt.after.messages
        new = [*request.messages[len(before) :], message]
        self.episode.messages.extend(new)
        answer = Answer(message, list(sampled.ids), list(sampled.logprobs))
        self._conversations.append(
            _Conversation(
                segment=len(self.episode.segments) - 1,
                ids=[*prompt.ids, *sampled.ids],
                media=prompt.rendered.media,
                messages=[*before, *new],
                answer=answer,
                answer_id=request.answer_id,
                tools=request.tools,
            )
        )
        return answer

    def _go_to(self, prompt: _Prompt) -> int:
        """Bring the log to where the prompt goes on; return how many of its tokens are there."""
        episode = self.episode
        if not episode.turns:
            return 0
        last = len(episode.segments) - 1
        after = prompt.after
        if after is not None and after.segment == last and len(episode) == len(after.ids):
            return len(after.ids)
        if after is not None:
            episode.fork(len(after.ids), "back to an earlier conversation", parent=after.segment)
            return len(after.ids)
        shared, parent = max(
            (prompt.rendered.shared_with(each.ids, each.media), each.segment)
            for each in self._conversations
        )
        episode.fork(shared, prompt.reason, parent=parent)
        return shared

    def _read(
        self, prompt: _Prompt, request: ChatRequest, sampled: SampledTurn
    ) -> AssistantMessage:
        """Parse the answer, and give its calls ids that no other answer has."""
        message = self._renderer.parse(sampled.ids, request.tools)
        used = len(prompt.ids) + len(sampled.ids)
        left = self._options.limits.max_context - used
        turn = len(self.episode.turns)
        calls = tuple(
            replace(call, id=f"call_{self.episode.id[:8]}_{turn}_{number}")
            for number, call in enumerate(message.tool_calls)
        )
        return replace(
            message,
            tool_calls=calls,
            usage=Usage(len(prompt.ids), len(sampled.ids), left),
            finish_reason=sampled.finish_reason,
        )

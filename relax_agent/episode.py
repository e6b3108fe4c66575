"""The token log: everything that happened in one run of an environment, append-only.

An :class:`Episode` is a tree of :class:`Segment` objects. A segment stores only its own new
tokens; where history is edited (compaction, a rewritten system prompt) ``fork`` starts another
segment that shares a stated number of its parent's tokens. Four columns run beside each other:

    token_ids        what the engine read or sampled; never re-tokenised text
    loss_mask        1 exactly on sampled tokens
    logprobs         log-prob of a sampled token (after temperature and logit bias), else 0
    weight_versions  the version that sampled the token, -1 for tokens that were not sampled

Routed experts (mixture-of-experts models) lie beside them with a list of spans that says which
tokens have a route: the last sampled token gets its own only when the next turn is prefilled.
So do the media: spans of tokens that stand for one, and the encoded media themselves, each once.
Appending a turn costs time in the turn, not in the episode. Plain NumPy; no torch.
"""

from __future__ import annotations

import uuid
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from relax_agent.errors import EpisodeError
from relax_agent.media.kinds import MEDIA_CLASSES, Kind, Media, digest_of, kind_of
from relax_agent.messages import AssistantMessage, Message, from_record, to_record
from relax_agent.status import EpisodeStatus as EpisodeStatus

NOT_SAMPLED = -1
"""The weight version of a token that no engine sampled."""

Routes = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Tokens that stand for one medium."""

    start: int
    """The first of them, counted within the segment's own tokens, or within a row."""
    count: int
    kind: Kind
    digest: str
    """SHA-256 of the encoded medium, in hex: its key in ``Episode.media``."""


@dataclass(slots=True)
class Turn:
    """One assistant message and what came back."""

    segment: int
    """Index of the segment that holds its tokens."""
    start: int
    """First sampled token, counted within the segment's own tokens."""
    end: int
    """One past the last sampled token."""
    finish_reason: str
    reward: float = 0.0
    message: AssistantMessage | None = None


class Segment:
    """A run of tokens that only ever grows at its end."""

    __slots__ = (
        "_route_chunks",
        "logprobs",
        "loss_mask",
        "media",
        "parent",
        "reason",
        "route_spans",
        "shared",
        "token_ids",
        "weight_versions",
    )

    def __init__(self, parent: int | None = None, shared: int = 0, reason: str = "start") -> None:
        self.parent = parent
        """Index of the segment this one forked from; None for the first."""
        self.shared = shared
        """How many tokens of the parent's full sequence come before this segment's own."""
        self.reason = reason
        """Why the fork happened, for people."""
        self.token_ids = array("i")
        self.loss_mask = array("b")
        self.logprobs = array("f")
        self.weight_versions = array("i")
        self.route_spans: list[tuple[int, int]] = []
        """Half-open spans of own tokens that have a route, ascending."""
        self.media: list[MediaSpan] = []
        """Own tokens that stand for media, ascending."""
        self._route_chunks: list[Routes] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(
        self, ids: Sequence[int], mask: int, logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        """Append tokens; all four columns grow by ``len(ids)``."""
        count = len(ids)
        if len(logprobs) != count or len(versions) != count:
            raise EpisodeError(
                f"{count} tokens came with {len(logprobs)} log-probs and {len(versions)} versions"
            )
        # Converted first, so that a value of a wrong type leaves no column longer than another.
        new_ids, new_logprobs = array("i", ids), array("f", logprobs)
        new_versions = array("i", versions)
        self.token_ids.extend(new_ids)
        self.loss_mask.extend(array("b", [mask]) * count)
        self.logprobs.extend(new_logprobs)
        self.weight_versions.extend(new_versions)

    def add_routes(self, start: int, routes: Routes) -> None:
        """Record routed experts ``[tokens, layers, top_k]`` of own tokens from ``start`` on.

        Tokens that already have a route keep it: it was used when they were sampled.
        """
        done = self.route_spans[-1][1] if self.route_spans else 0
        routes = routes[max(0, done - start) :]
        start = max(start, done)
        end = start + len(routes)
        if end > len(self):
            raise EpisodeError(f"routes reach token {end} of {len(self)}")
        if start == end:
            return
        if self.route_spans and done == start:
            self.route_spans[-1] = (self.route_spans[-1][0], end)
        else:
            self.route_spans.append((start, end))
        self._route_chunks.append(routes)

    @property
    def routes(self) -> Routes | None:
        """All routes ``[routed tokens, layers, top_k]``, in the order of ``route_spans``."""
        if not self._route_chunks:
            return None
        if len(self._route_chunks) > 1:
            merged: Any = np.concatenate(self._route_chunks)
            self._route_chunks = [merged]
        return self._route_chunks[0]


@dataclass(slots=True)
class Row:
    """One training sequence: a leaf of the tree with everything before it. All ``[tokens]``."""

    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.int8]
    """1 exactly on sampled tokens that this row trains (shared prefixes are trained once)."""
    logprobs: npt.NDArray[np.float32]
    weight_versions: npt.NDArray[np.int32]
    turn_index: npt.NDArray[np.int32]
    """The turn that sampled the token, -1 elsewhere."""
    routes: Routes | None
    """``[tokens, layers, top_k]``; meaningless where ``has_route`` is False."""
    has_route: npt.NDArray[np.bool_]
    media: list[MediaSpan] = field(default_factory=list)
    """Tokens that stand for media, ascending."""


@dataclass(slots=True)
class Episode:
    """One run of one environment."""

    env_id: str
    task_id: str
    group_id: str
    seed: int
    """The environment's seed, the same for all members of a group."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    segments: list[Segment] = field(default_factory=lambda: [Segment()])
    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    """The conversation as people read it; training never looks at it."""
    media: dict[str, Media] = field(default_factory=dict)
    """What the media spans stand for, by digest: each medium once, however often it was shown."""
    status: EpisodeStatus = EpisodeStatus.RUNNING
    detail: str = ""
    """One line on why it ended so."""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def reward(self) -> float:
        """The sum of all turn rewards."""
        return sum(turn.reward for turn in self.turns)

    @property
    def sampled_tokens(self) -> int:
        """How many tokens engines sampled."""
        return sum(turn.end - turn.start for turn in self.turns)

    def __len__(self) -> int:
        """Tokens of the current leaf, shared prefix included."""
        return self.segments[-1].shared + len(self.segments[-1])

    def lineage(self, segment: int) -> Iterator[tuple[int, int]]:
        """Yield ``(segment, how many of its own tokens count)`` from the root to ``segment``."""
        path, count = [(segment, len(self.segments[segment]))], self.segments[segment].shared
        parent = self.segments[segment].parent
        while parent is not None:
            node = self.segments[parent]
            path.append((parent, max(0, count - node.shared)))
            count, parent = min(count, node.shared), node.parent
        yield from reversed(path)

    def token_ids(self) -> list[int]:
        """The current leaf's full sequence, as the next prompt must begin."""
        out: list[int] = []
        for index, count in self.lineage(len(self.segments) - 1):
            out.extend(self.segments[index].token_ids[:count])
        return out

    def add_prompt(self, ids: Sequence[int], media: Sequence[tuple[int, int, Media]] = ()) -> None:
        """Append tokens that were not sampled: a prompt, an observation, a separator.

        Args:
            ids: The tokens.
            media: For each medium among them, ascending: where its tokens begin within ``ids``,
                how many there are, and the medium.

        Raises:
            EpisodeError: Media that overlap or reach beyond ``ids``.
        """
        self._require_running()
        count, segment = len(ids), self.segments[-1]
        _check_spans([(start, many) for start, many, _ in media], count, "the prompt")
        found = [(start, many, digest_of(each), each) for start, many, each in media]
        base = len(segment)
        segment.extend(ids, 0, [0.0] * count, [NOT_SAMPLED] * count)
        for start, many, digest, medium in found:
            segment.media.append(MediaSpan(base + start, many, kind_of(medium), digest))
            self.media.setdefault(digest, medium)

    def add_sampled(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        finish_reason: str,
        message: AssistantMessage | None = None,
    ) -> Turn:
        """Append what an engine sampled, as one turn."""
        self._require_running()
        segment = self.segments[-1]
        start = len(segment)
        segment.extend(ids, 1, logprobs, versions)
        turn = Turn(len(self.segments) - 1, start, len(segment), finish_reason, 0.0, message)
        self.turns.append(turn)
        return turn

    def add_routes(self, start: int, routes: Routes) -> None:
        """Record routes of the current leaf from position ``start`` of its full sequence on."""
        segment = self.segments[-1]
        skip = max(0, segment.shared - start)
        segment.add_routes(start + skip - segment.shared, routes[skip:])

    def routed_until(self) -> int:
        """The first position of the leaf's full sequence without a recorded route."""
        segment = self.segments[-1]
        return segment.shared + (segment.route_spans[-1][1] if segment.route_spans else 0)

    def fork(self, shared: int, reason: str, *, parent: int | None = None) -> None:
        """Go on in a new segment that shares the first ``shared`` tokens of another one.

        Args:
            shared: Tokens of the parent's full sequence that come before the new segment's own.
            reason: Why, for people.
            parent: Index of the segment; None is the current leaf.

        Raises:
            EpisodeError: There are not as many, or the last one lies within a medium.
        """
        self._require_running()
        index = len(self.segments) - 1 if parent is None else parent
        count = self.segments[index].shared + len(self.segments[index])
        if not 0 <= shared <= count:
            raise EpisodeError(f"cannot share {shared} of {count} tokens")
        if any(span.start < shared < span.start + span.count for span in self._spans(index)):
            raise EpisodeError(f"sharing {shared} tokens would cut a medium in two")
        self.segments.append(Segment(index, shared, reason))

    def media_spans(self) -> list[MediaSpan]:
        """Return the media of the current leaf's full sequence, with starts within it."""
        return self._spans(len(self.segments) - 1)

    def _spans(self, segment: int) -> list[MediaSpan]:
        spans, offset = [], 0
        for index, count in self.lineage(segment):
            spans += [
                MediaSpan(offset + each.start, each.count, each.kind, each.digest)
                for each in self.segments[index].media
                if each.start + each.count <= count
            ]
            offset += count
        return spans

    def finish(self, status: EpisodeStatus, detail: str = "") -> None:
        """End the episode. A second end is an error: every episode ends exactly once."""
        self._require_running()
        if status is EpisodeStatus.RUNNING:
            raise EpisodeError("an episode cannot end as running")
        self.status, self.detail = status, detail

    def rows(self) -> list[Row]:
        """Return one training row per leaf; tokens that leaves share are trained in the first."""
        trained: set[tuple[int, int]] = set()
        return [self._row(leaf, trained) for leaf in self._leaves()]

    def _leaves(self) -> list[int]:
        """The last segment, and every other one with sampled tokens that no later row holds."""
        leaves: list[int] = []
        held = dict.fromkeys(range(len(self.segments)), 0)
        for index in reversed(range(len(self.segments))):
            own = self.segments[index].loss_mask
            if leaves and not any(own[held[index] :]):
                continue
            leaves.append(index)
            for node, count in self.lineage(index):
                held[node] = max(held[node], count)
        return leaves[::-1]

    def _row(self, leaf: int, trained: set[tuple[int, int]]) -> Row:
        columns: list[tuple[npt.NDArray[Any], ...]] = []
        routed: list[tuple[int, Routes]] = []
        offset = 0
        for index, count in self.lineage(leaf):
            node = self.segments[index]
            mask = np.array(node.loss_mask[:count], np.int8)
            done = max((c for i, c in trained if i == index), default=0)
            mask[:done] = 0
            trained.add((index, count))
            turn_index = np.full(count, -1, np.int32)
            for number, turn in enumerate(self.turns):
                if turn.segment == index:
                    turn_index[turn.start : min(turn.end, count)] = number
            columns.append(
                (
                    np.array(node.token_ids[:count], np.int32),
                    mask,
                    np.array(node.logprobs[:count], np.float32),
                    np.array(node.weight_versions[:count], np.int32),
                    turn_index,
                )
            )
            taken = 0
            for start, end in node.route_spans:
                assert node.routes is not None
                keep = max(0, min(end, count) - start)
                routed.append((offset + start, node.routes[taken : taken + keep]))
                taken += end - start
            offset += count
        ids, mask, logprobs, versions, turn_index = (
            np.concatenate(column) for column in zip(*columns, strict=True)
        )
        has_route = np.zeros(offset, np.bool_)
        routes: Routes | None = None
        for start, part in routed:
            if routes is None:
                routes = np.zeros((offset, *part.shape[1:]), part.dtype)
            routes[start : start + len(part)] = part
            has_route[start : start + len(part)] = True
        return Row(ids, mask, logprobs, versions, turn_index, routes, has_route, self._spans(leaf))

    def validate(self) -> None:
        """Raise EpisodeError naming the first broken invariant."""
        for index, node in enumerate(self.segments):
            lengths = {
                len(node.token_ids),
                len(node.loss_mask),
                len(node.logprobs),
                len(node.weight_versions),
            }
            if len(lengths) != 1:
                raise EpisodeError(f"segment {index}: columns of different lengths {lengths}")
            sampled = array("b", bytes(len(node)))
            for turn in self.turns:
                if turn.segment == index:
                    sampled[turn.start : turn.end] = array("b", b"\1" * (turn.end - turn.start))
            if sampled != node.loss_mask:
                raise EpisodeError(f"segment {index}: the mask is not 1 exactly on sampled tokens")
            for position, (mask, version) in enumerate(
                zip(node.loss_mask, node.weight_versions, strict=True)
            ):
                if (version != NOT_SAMPLED) != bool(mask):
                    raise EpisodeError(f"segment {index}: token {position} has version {version}")
            if not np.isfinite(np.array(node.logprobs, np.float32)).all():
                raise EpisodeError(f"segment {index}: a log-prob is not finite")
            routed = sum(end - start for start, end in node.route_spans)
            if routed != (0 if node.routes is None else len(node.routes)):
                raise EpisodeError(f"segment {index}: route spans and routes differ in length")
            self._check_media(index, node)

    def _check_media(self, index: int, node: Segment) -> None:
        where = f"segment {index}"
        _check_spans([(span.start, span.count) for span in node.media], len(node), where)
        for span in node.media:
            if any(node.loss_mask[span.start : span.start + span.count]):
                raise EpisodeError(f"{where}: a sampled token stands for a medium")
            medium = self.media.get(span.digest)
            if medium is None or not isinstance(medium, MEDIA_CLASSES.get(span.kind, ())):
                raise EpisodeError(f"{where}: the {span.kind} {span.digest[:12]} is not there")

    def _require_running(self) -> None:
        if self.status is not EpisodeStatus.RUNNING:
            raise EpisodeError(f"episode {self.id} has already ended as {self.status}")

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return every column of every segment, named ``<segment>.<column>``, for safetensors."""
        out: dict[str, npt.NDArray[Any]] = {}
        for index, node in enumerate(self.segments):
            out[f"{index}.token_ids"] = np.array(node.token_ids, np.int32)
            out[f"{index}.loss_mask"] = np.array(node.loss_mask, np.int8)
            out[f"{index}.logprobs"] = np.array(node.logprobs, np.float32)
            out[f"{index}.weight_versions"] = np.array(node.weight_versions, np.int32)
            if node.routes is not None:
                out[f"{index}.routes"] = node.routes
        for digest, medium in self.media.items():
            out[f"media.{digest}"] = np.frombuffer(medium.data, np.uint8)
        return out

    def to_json(self) -> dict[str, Any]:
        """Return everything that is not an array as plain JSON data."""
        return {
            "id": self.id,
            "env_id": self.env_id,
            "task_id": self.task_id,
            "group_id": self.group_id,
            "seed": self.seed,
            "status": self.status.value,
            "detail": self.detail,
            "reward": self.reward,
            "metrics": self.metrics,
            "segments": [
                {
                    "parent": s.parent,
                    "shared": s.shared,
                    "reason": s.reason,
                    "spans": s.route_spans,
                    "media": [[each.start, each.count, each.kind, each.digest] for each in s.media],
                }
                for s in self.segments
            ],
            "media": {digest: medium.mime for digest, medium in self.media.items()},
            "turns": [
                {
                    "segment": t.segment,
                    "start": t.start,
                    "end": t.end,
                    "finish_reason": t.finish_reason,
                    "reward": t.reward,
                    "message": None if t.message is None else to_record(t.message),
                }
                for t in self.turns
            ],
            "messages": [to_record(message) for message in self.messages],
        }

    @classmethod
    def load(cls, data: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> Episode:
        """Rebuild an episode from :meth:`to_json` and :meth:`to_arrays`."""
        segments = []
        for index, item in enumerate(data["segments"]):
            node = Segment(item["parent"], item["shared"], item["reason"])
            for column in ("token_ids", "loss_mask", "logprobs", "weight_versions"):
                getattr(node, column).frombytes(arrays[f"{index}.{column}"].tobytes())
            node.route_spans = [(start, end) for start, end in item["spans"]]
            if node.route_spans:
                node._route_chunks = [arrays[f"{index}.routes"]]
            node.media = [MediaSpan(*each) for each in item["media"]]
            segments.append(node)
        turns = []
        for item in data["turns"]:
            message = None if item["message"] is None else from_record(item["message"])
            assert message is None or isinstance(message, AssistantMessage)
            turns.append(Turn(**{**item, "message": message}))
        return cls(
            env_id=data["env_id"],
            task_id=data["task_id"],
            group_id=data["group_id"],
            seed=data["seed"],
            id=data["id"],
            segments=segments,
            turns=turns,
            messages=[from_record(item) for item in data["messages"]],
            status=EpisodeStatus(data["status"]),
            detail=data["detail"],
            metrics=dict(data["metrics"]),
            media=_load_media(data["media"], segments, arrays),
        )


def _check_spans(spans: Sequence[tuple[int, int]], tokens: int, where: str) -> None:
    """Raise EpisodeError unless spans (start, count) are ascending and lie within ``tokens``."""
    ends = [0, *(start + count for start, count in spans)]
    starts = [*(start for start, _ in spans), tokens]
    if any(end > start for end, start in zip(ends, starts, strict=True)):
        raise EpisodeError(f"{where}: media overlap or reach beyond its {tokens} tokens")
    if any(count < 1 for _, count in spans):
        raise EpisodeError(f"{where}: a medium without tokens")


def _load_media(
    mimes: dict[str, str], segments: Sequence[Segment], arrays: dict[str, npt.NDArray[Any]]
) -> dict[str, Media]:
    kinds = {each.digest: each.kind for node in segments for each in node.media}
    return {
        digest: MEDIA_CLASSES[kinds[digest]](arrays[f"media.{digest}"].tobytes(), mime)
        for digest, mime in mimes.items()
    }


@dataclass(slots=True)
class Group:
    """The n episodes of one task whose rewards are compared."""

    id: str
    env_id: str
    task_id: str
    episodes: list[Episode] = field(default_factory=list)

    @property
    def sampled_tokens(self) -> int:
        """How many tokens engines sampled for this group."""
        return sum(episode.sampled_tokens for episode in self.episodes)

    def oldest_version(self) -> int | None:
        """The lowest weight version that sampled a token; None if nothing was sampled."""
        versions = [
            version
            for episode in self.episodes
            for node in episode.segments
            for version in node.weight_versions
            if version != NOT_SAMPLED
        ]
        return min(versions, default=None)

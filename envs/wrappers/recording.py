"""A folder of recorded episodes: written by many at once, read back whole.

    episodes.jsonl      one line an episode; the truth, everything else can be made from it
    media/HASH.png      pictures, sounds and videos, each once, named by their content
    pages/ID.html       one conversation, with its media and tool calls
    index.html          a table of all episodes, appended to

Lines and rows are appended under a lock on the folder, so environments of several tasks, threads
and processes may share it. A line that a crash has torn is passed over by the reader and closed by
the next writer. What the disk does not take is kept in memory, and tried again with the next
episode and at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from relax_agent.errors import ConfigError, StorageError, one_line
from relax_agent.files import append_to_file
from relax_agent.media.kinds import MEDIA_CLASSES, Media
from relax_agent.messages import (
    Message,
    Part,
    Text,
    from_record,
    to_record,
)

logger = logging.getLogger(__name__)

_EXTENSIONS = {
    "image/png": "png",
    "image/jpeg": "jpg",
    "image/gif": "gif",
    "image/webp": "webp",
    "audio/wav": "wav",
    "audio/x-wav": "wav",
    "audio/mpeg": "mp3",
    "audio/ogg": "ogg",
    "audio/flac": "flac",
    "video/mp4": "mp4",
    "video/webm": "webm",
}
_FILE = re.compile(r"media/[0-9a-f]{32}\.[a-z0-9]{2,4}")
_COLUMNS = ("started", "environment", "task", "seed", "reward", "ended", "turns", "seconds")
_MAX_WAITING = 100
"""Episodes that are kept while the disk takes none."""


@dataclass(slots=True)
class RecordedEpisode:
    """One episode, as it was recorded."""

    env_id: str
    spec: dict[str, Any] | None = None
    """The environment's spec as JSON data; None if it has none that goes to JSON."""
    seed: int | None = None
    task_id: str | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    """The tools' schemas."""
    messages: list[Message] = field(default_factory=list)
    """The whole conversation; a rewritten history follows the one that it replaces."""
    rewrites: list[tuple[int, str]] = field(default_factory=list)
    """Where in ``messages`` a rewritten conversation begins, and why it was rewritten."""
    actions: list[int] = field(default_factory=list)
    """Which of the messages the policy said, by index."""
    rewards: list[float] = field(default_factory=list)
    """One for each step that was answered; the last action may have none."""
    status: str = "running"
    """How it ended: a value of :class:`~relax_agent.episode.EpisodeStatus`."""
    detail: str = ""
    terminated: bool = False
    truncated: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    started: str = ""
    """When, in UTC, as ISO 8601."""
    duration_s: float = 0.0
    step_durations_s: list[float] = field(default_factory=list)
    """Seconds that each step of the environment took."""
    labels: dict[str, Any] = field(default_factory=dict)
    """What whoever records wants to find it by, e.g. the sample's number in an evaluation."""
    id: str = ""

    def __post_init__(self) -> None:
        if not self.started:
            self.started = datetime.now(UTC).isoformat(timespec="milliseconds")
        if not self.id:
            moment = re.sub(r"[-:]", "", self.started)[:15].replace("T", "-")
            self.id = f"{moment}-{uuid.uuid4().hex[:10]}"

    @property
    def reward(self) -> float:
        """The sum of the rewards."""
        return sum(self.rewards)

    @property
    def turns(self) -> int:
        """Messages that the policy said."""
        return len(self.actions)

    def observe(self, messages: list[Message] | tuple[Message, ...], reason: str | None) -> None:
        """Add an observation; ``reason`` if it is a rewritten history."""
        if reason is not None:
            self.rewrites.append((len(self.messages), reason))
        self.messages.extend(messages)

    def to_json(self) -> dict[str, Any]:
        """Return the episode as plain data; media are named by their file."""
        return {
            "id": self.id,
            "env_id": self.env_id,
            "task_id": self.task_id,
            "seed": self.seed,
            "reward": self.reward,
            "status": self.status,
            "detail": self.detail,
            "terminated": self.terminated,
            "truncated": self.truncated,
            "turns": self.turns,
            "metrics": self.metrics,
            "rewards": self.rewards,
            "started": self.started,
            "duration_s": round(self.duration_s, 6),
            "step_durations_s": [round(seconds, 6) for seconds in self.step_durations_s],
            "messages": [_message_to_json(message) for message in self.messages],
            "actions": self.actions,
            "rewrites": [list(item) for item in self.rewrites],
            "tools": self.tools,
            "spec": self.spec,
            "labels": self.labels,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any], folder: Path) -> RecordedEpisode:
        """Rebuild an episode from :meth:`to_json`, with the media that lie in ``folder``."""
        return cls(
            env_id=data["env_id"],
            spec=data.get("spec"),
            seed=data.get("seed"),
            task_id=data.get("task_id"),
            tools=data.get("tools") or [],
            messages=[_message_from_json(item, folder) for item in data["messages"]],
            rewrites=[(at, reason) for at, reason in data.get("rewrites") or ()],
            actions=data["actions"],
            rewards=data["rewards"],
            status=data["status"],
            detail=data.get("detail", ""),
            terminated=data["terminated"],
            truncated=data["truncated"],
            metrics=data.get("metrics") or {},
            started=data["started"],
            duration_s=data["duration_s"],
            step_durations_s=data["step_durations_s"],
            labels=data.get("labels") or {},
            id=data["id"],
        )


def read_episodes(folder: Path | str) -> list[RecordedEpisode]:
    """Read every whole episode of a folder, in the order in which they ended.

    A line that a crash has torn is passed over; so is, with a warning, one that is no episode.

    Raises:
        ConfigError: There is no such recording.
    """
    folder = Path(folder)
    path = folder / "episodes.jsonl"
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", hint="name the folder of a RecordEpisode"
        ) from error
    episodes = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            episodes.append(RecordedEpisode.from_json(json.loads(line), folder))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s, line %d is no whole episode: %r", path, number, error)
    return episodes


class Recorder:
    """Writes episodes into a folder. Its methods block; call them from a thread."""

    def __init__(self, folder: Path, *, html: bool) -> None:
        """Make the folder, if need be.

        Raises:
            StorageError: It cannot be made or written to.
        """
        self.folder = folder
        self.html = html
        self._waiting: deque[deque[Callable[[], None]]] = deque()
        """For each episode that is not wholly written, what is left to do."""
        self._lost = 0
        self._lock = threading.Lock()
        try:
            (folder / "media").mkdir(parents=True, exist_ok=True)
            if html:
                (folder / "pages").mkdir(exist_ok=True)
            with self._locked():
                pass
        except OSError as error:
            raise _cannot_write(folder, error) from None

    def write(self, episode: RecordedEpisode) -> None:
        """Write an episode, and what could not be written before.

        Raises:
            StorageError: The disk does not take it; it is tried again with the next one.
        """
        jobs: deque[Callable[[], None]] = deque([partial(self._write_line, episode)])
        if self.html:
            jobs.extend([partial(self._write_page, episode), partial(self._write_row, episode)])
        with self._lock:
            if len(self._waiting) >= _MAX_WAITING:
                self._waiting.popleft()
                self._lost += 1
            self._waiting.append(jobs)
            self._flush()

    def close(self) -> None:
        """Write what could not be written before.

        Raises:
            StorageError: Some of it still cannot be, or had to be given up meanwhile.
        """
        with self._lock:
            self._flush()
            if self._lost:
                raise StorageError(
                    f"{self._lost} episodes are missing from {self.folder}, which took none",
                    hint="those before and after are whole",
                )

    def _flush(self) -> None:
        try:
            while self._waiting:
                jobs = self._waiting[0]
                while jobs:
                    jobs[0]()
                    jobs.popleft()
                self._waiting.popleft()
        except OSError as error:
            raise _cannot_write(self.folder, error) from None
        except Exception as error:  # no disk is at fault: trying again would block all others
            self._waiting.popleft()
            self._lost += 1
            raise StorageError(f"an episode cannot be recorded: {one_line(error)}") from error

    def _write_line(self, episode: RecordedEpisode) -> None:
        for message in episode.messages:
            for part in message.media:
                _write_once(self.folder / media_file(part), part.data)
        line = json.dumps(episode.to_json(), ensure_ascii=False, default=str)
        # Half a surrogate pair, which no file takes, may come in a tool call's arguments.
        self._append("episodes.jsonl", line.encode("utf-8", "replace") + b"\n")

    def _write_page(self, episode: RecordedEpisode) -> None:
        path = self.folder / "pages" / f"{episode.id}.html"
        _write_once(path, recorded_html(episode).encode("utf-8", "replace"))

    def _write_row(self, episode: RecordedEpisode) -> None:
        from relax_agent.pages import table_page_head, table_row

        cells = (
            episode.started[:19].replace("T", " "),
            episode.env_id,
            episode.task_id or "",
            "" if episode.seed is None else str(episode.seed),
            f"{episode.reward:g}",
            episode.status.replace("_", " "),
            str(episode.turns),
            f"{episode.duration_s:.1f}",
        )
        row = table_row(cells, link=f"pages/{episode.id}.html")
        head = table_page_head("Episodes", _COLUMNS)
        self._append("index.html", row.encode("utf-8", "replace"), head.encode())

    def _append(self, name: str, data: bytes, head: bytes = b"") -> None:
        """Add to a file that may be new, or end in half a line."""
        path = self.folder / name
        with self._locked():
            end = _last_byte(path)
            if end is None:
                data = head + data
            elif end != b"\n":
                data = b"\n" + data
            append_to_file(path, data)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        import fcntl  # not on every system; environments are

        with (self.folder / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def recorded_html(episode: RecordedEpisode) -> str:
    """Return an episode as a page whose media lie in ``../media``."""
    from relax_agent.pages import conversation_html

    facts = {"reward": f"{episode.reward:g}", "ended": episode.status.replace("_", " ")}
    if episode.detail:
        facts["because"] = episode.detail
    facts |= {"turns": str(episode.turns), "seconds": f"{episode.duration_s:.2f}"}
    if episode.seed is not None:
        facts["seed"] = str(episode.seed)
    facts |= {
        name.replace("_", " "): f"{value:g}"
        for name, value in episode.metrics.items()
        if name != "turns"
    }
    title = episode.env_id if episode.task_id is None else f"{episode.env_id} · {episode.task_id}"
    return conversation_html(
        episode.messages,
        title=title,
        facts=facts,
        actions=episode.actions,
        rewards=dict(zip(episode.actions, episode.rewards, strict=False)),
        forks=dict(episode.rewrites),
        media_url=lambda part: f"../{media_file(part)}",
        back="../index.html",
    )


def media_file(part: Media) -> str:
    """Return where a part lies in the folder: by the hash of its bytes."""
    digest = hashlib.sha256(part.data).hexdigest()[:32]
    return f"media/{digest}.{_EXTENSIONS.get(part.mime, 'bin')}"


def _message_to_json(message: Message) -> dict[str, Any]:
    if not message.media:
        return to_record(message)
    plain = to_record(replace(message, content=()))
    return plain | {"content": [_part_to_json(part) for part in message.content]}


def _part_to_json(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    kind = next(name for name, cls in MEDIA_CLASSES.items() if isinstance(part, cls))
    return {"type": kind, "mime": part.mime, "file": media_file(part), "bytes": len(part.data)}


def _message_from_json(item: dict[str, Any], folder: Path) -> Message:
    content = item.get("content")
    if not isinstance(content, list) or not any("file" in part for part in content):
        return from_record(item)
    return replace(
        from_record({**item, "content": ""}),
        content=tuple(_part_from_json(part, folder) for part in content),
    )


def _part_from_json(item: dict[str, Any], folder: Path) -> Part:
    if item["type"] == "text":
        return Text(item["text"])
    if not _FILE.fullmatch(item["file"]):
        raise ValueError(f"{item['file']!r} is no file of this folder")
    try:
        data = (folder / item["file"]).read_bytes()
    except OSError as error:
        logger.warning("cannot read %s: %s", folder / item["file"], error.strerror)
        return Text(f"[{item['type']}: {item['file']} is missing]")
    return MEDIA_CLASSES[item["type"]](data, item["mime"])


def _write_once(path: Path, data: bytes) -> None:
    """Write a file that is whole or absent; one that is there already is left as it is."""
    if path.exists():
        return
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _last_byte(path: Path) -> bytes | None:
    """Return the last byte of a file; None if there is no file or nothing in it."""
    try:
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return None
            file.seek(-1, os.SEEK_END)
            return file.read(1)
    except FileNotFoundError:
        return None


def _cannot_write(path: Path, error: OSError) -> StorageError:
    where = error.filename or path
    return StorageError(
        f"cannot record episodes: {where}: {error.strerror or error}",
        hint="free space, or choose a folder that you may write to",
    )

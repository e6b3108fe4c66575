"""One object that knows a model's media: counts, token ids and features.

Renderer, embedded engine and trainer each load it from the model's folder. Whatever it computes is
a function of a medium's bytes and of that folder alone, so it may be cached by digest. The cache
is bounded in bytes, whatever the number of media that pass by.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from relax_agent.errors import MediaError
from relax_agent.media import Kind, Media, decode_image, digest_of, in_thread, kind_of
from relax_agent.messages import Audio, Image, Video
from relax_agent.rendering.media import film, sound, vision
from relax_agent.rendering.media.config import MediaConfig, read_media_config
from relax_agent.rendering.media.layout import (
    Layout,
    film_layout,
    picture_layout,
    sound_layout,
    timed_frames_layout,
)
from relax_agent.rendering.tokens import load_tokenizer

Features = dict[str, npt.NDArray[Any]]
"""What the towers read, by transformers' names."""

LAYOUT_BYTES, FEATURE_BYTES = 32 * 2**20, 256 * 2**20
"""What cached layouts and features may take."""
_T = TypeVar("_T")


class MediaProcessor:
    """Turns media into placeholder tokens and features. Safe to share between threads."""

    def __init__(
        self,
        folder: Path,
        config: MediaConfig,
        *,
        layout_bytes: int = LAYOUT_BYTES,
        feature_bytes: int = FEATURE_BYTES,
    ) -> None:
        """Use :meth:`load`; the limits are what the two caches may take."""
        self.folder, self.config = folder, config
        self._layouts: BoundedCache[Layout] = BoundedCache(layout_bytes, lambda each: each.size)
        self._features: BoundedCache[Features] = BoundedCache(feature_bytes, _feature_bytes)

    @classmethod
    def load(cls, folder: Path) -> MediaProcessor | None:
        """Return the processor of a model's folder, or None if the model takes no media.

        Raises:
            ConfigError: The model takes media, but its folder does not say how.
        """
        config = read_media_config(Path(folder))
        return None if config is None else cls(Path(folder), config)

    @property
    def placeholder_ids(self) -> dict[Kind, int]:
        """The placeholder token of each kind."""
        return self.config.pads

    @property
    def suppressed_ids(self) -> list[int]:
        """Tokens that stand for media and that a policy, which can make none, never samples."""
        return sorted({*self.config.pads.values(), *self.config.markers.values()})

    def count(self, medium: Media) -> int:
        """Return how many tokens lie from the first placeholder of a medium to its last."""
        return self.layout(medium).count

    def layout(self, medium: Media) -> Layout:
        """Return the tokens of a medium.

        Raises:
            MediaError: It is damaged, or of a kind that the model does not take.
        """
        kind = kind_of(medium)
        if kind not in self.config.pads:
            raise MediaError(f"this model takes {' and '.join(self.config.pads)}, not {kind}")
        digest = digest_of(medium)
        make = partial(_MAKERS[kind], self, medium, digest)
        return self._layouts.get((kind, digest), make)

    async def prepare(self, media: Sequence[Media]) -> None:
        """Have the layouts of media at hand; decoding happens in threads, the loop goes on.

        Raises:
            MediaError: One is damaged, too slow to decode, or of a kind that the model does not
                take.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for medium in media:
                    tasks.create_task(in_thread(partial(self.layout, medium)))
        except ExceptionGroup as group:
            raise next((e for e in group.exceptions if isinstance(e, MediaError)), group) from None

    def features(self, media: Sequence[Media]) -> Features:
        """Return what the towers read of all media, in order.

        ``pixel_values`` ``[patches, width]`` and ``image_grid_thw`` ``[images, 3]``, the same as
        ``pixel_values_videos`` and ``video_grid_thw``, ``input_features`` ``[bands, frames]`` and
        ``feature_lens`` ``[clips]``; only those that there are. The sound of a video is a clip.
        """
        parts = [self.features_of(medium) for medium in media]
        names = dict.fromkeys(name for part in parts for name in part)
        joined: Features = {}
        for name in names:
            axis = 1 if name == "input_features" else 0
            joined[name] = np.concatenate([part[name] for part in parts if name in part], axis=axis)
        return joined

    def features_of(self, medium: Media) -> Features:
        """Return what the towers read of one medium."""
        key = (kind_of(medium), digest_of(medium))
        return self._features.get(key, partial(self._extract, medium))

    def _extract(self, medium: Media) -> Features:
        if isinstance(medium, Image):
            patches, grid = vision.image_patches(decode_image(medium), self.config.image)
            return {"pixel_values": patches, "image_grid_thw": _row(grid)}
        if isinstance(medium, Audio):
            return self._hear(medium)
        frames = film.read_shots(medium, film.choose_shots(medium, self.config.video))
        patches, grid = vision.video_patches(frames, self.config.video.patches)
        seen: Features = {"pixel_values_videos": patches, "video_grid_thw": _row(grid)}
        track = self._sound_of(medium)
        return seen if track is None else {**seen, **self._hear(track)}

    def _hear(self, audio: Audio) -> Features:
        assert self.config.audio is not None
        bands = sound.log_mel(sound.read_sound(audio, self.config.audio), self.config.audio)
        return {"input_features": bands, "feature_lens": np.array([bands.shape[1]])}

    def _sound_of(self, video: Video) -> Audio | None:
        return None if self.config.audio is None else film.sound_track(video)

    def _sound_tokens(self, audio: Audio) -> int:
        config = self.config.audio
        assert config is not None
        samples = len(sound.read_sound(audio, config))
        return sound.tokens_of(sound.frames_of(samples, config), config)

    def _picture(self, medium: Image, digest: str) -> Layout:
        picture = decode_image(medium)
        grid = vision.image_grid(picture.height, picture.width, self.config.image)
        return picture_layout(grid, digest, self.config)

    def _clip(self, medium: Audio, digest: str) -> Layout:
        return sound_layout(self._sound_tokens(medium), digest, self.config)

    def _film(self, medium: Video, digest: str) -> Layout:
        config = self.config.video
        shots = film.choose_shots(medium, config)
        grid = vision.video_grid(len(shots.times), shots.height, shots.width, config.patches)
        if self.config.family == "qwen3_vl":
            stamps = [self._encode(text) for text in _stamps(shots.times, config.patches.temporal)]
            return timed_frames_layout(grid, stamps, digest, self.config)
        track = self._sound_of(medium)
        tokens = 0 if track is None else self._sound_tokens(track)
        return film_layout(
            grid, shots.step_s * config.patches.temporal, tokens, digest, self.config
        )

    def word(self, token: int) -> str:
        """Return the text of one token."""
        return str(self._tokenizer.decode([token]))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self.folder)


_MAKERS: dict[Kind, Callable[..., Layout]] = {
    "image": MediaProcessor._picture,
    "audio": MediaProcessor._clip,
    "video": MediaProcessor._film,
}


class BoundedCache(Generic[_T]):
    """Keeps what was made last, up to a number of bytes; what alone is larger is never kept."""

    def __init__(self, limit: int, size: Callable[[_T], int]) -> None:
        self.limit, self.bytes = limit, 0
        self._size = size
        self._kept: OrderedDict[Any, _T] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return how many are kept."""
        return len(self._kept)

    def get(self, key: Any, make: Callable[[], _T]) -> _T:
        """Return what is kept under a key, or make it."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = make()  # outside the lock: two threads may make the same, and one is kept
        with self._lock:
            if key not in self._kept and self._size(made) <= self.limit:
                self._kept[key] = made
                self.bytes += self._size(made)
            while self.bytes > self.limit:
                _, oldest = self._kept.popitem(last=False)
                self.bytes -= self._size(oldest)
        return made


def _stamps(times: Sequence[float], temporal: int) -> list[str]:
    """Return the words for the time of each step: the middle of its first and last frame."""
    filled = [*times, *[times[-1]] * (-len(times) % temporal)]
    steps = range(0, len(filled), temporal)
    return [f"<{(filled[at] + filled[at + temporal - 1]) / 2:.1f} seconds>" for at in steps]


def _row(grid: vision.Grid) -> npt.NDArray[np.int64]:
    return np.array([grid], dtype=np.int64)


def _feature_bytes(features: Features) -> int:
    return sum(array.nbytes for array in features.values()) + 512

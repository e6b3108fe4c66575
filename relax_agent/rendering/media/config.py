"""What a model's folder says about media: nothing here is assumed, least of all a patch size.

Hugging Face keeps it in up to four files: the tokens in ``config.json``, the rest either in one
``processor_config.json`` or in ``preprocessor_config.json`` and ``video_preprocessor_config.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from relax_agent.errors import ConfigError
from relax_agent.media import Kind

MediaFamily: TypeAlias = Literal["qwen3_vl", "qwen3_omni"]
"""How media stand in the prompt; the models of a family differ in size only."""

_FAMILIES: dict[str, MediaFamily] = {
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl",
    "qwen3_omni_moe": "qwen3_omni",
    "qwen3_omni_moe_thinker": "qwen3_omni",
}


@dataclass(frozen=True, slots=True)
class PatchConfig:
    """How pictures and frames become patches."""

    patch: int
    """Side of a patch in pixels."""
    temporal: int
    """Frames in a patch; a picture is repeated as often."""
    merge: int
    """Side of the square of patches that becomes one token."""
    min_pixels: int
    """Of a whole picture or of all frames of a video; smaller ones are enlarged."""
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def factor(self) -> int:
        """Side of what becomes one token, in pixels."""
        return self.patch * self.merge


@dataclass(frozen=True, slots=True)
class FilmConfig:
    """Which frames of a video are seen."""

    patches: PatchConfig
    fps: float
    """Frames per second that are taken."""
    min_frames: int
    max_frames: int


@dataclass(frozen=True, slots=True)
class SoundConfig:
    """How sound becomes features."""

    rate: int
    """Samples per second that the features are computed from, whatever the file has."""
    hop: int
    """Samples from one frame of features to the next."""
    window: int
    """Samples that one frame looks at."""
    n_window: int
    """Half a chunk of the audio tower, in frames."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of transformers' WhisperFeatureExtractor."""


@dataclass(frozen=True, slots=True)
class MediaConfig:
    """All of it for one model."""

    family: MediaFamily
    pads: dict[Kind, int]
    """The placeholder token of each kind that the model takes."""
    markers: dict[str, int]
    """The tokens around placeholders, by name: ``vision_start``, ``vision_end``, ``audio_…``."""
    image: PatchConfig
    video: FilmConfig
    audio: SoundConfig | None
    """None: the model does not hear."""
    positions_per_second: float
    """Steps of the temporal position in a second of video; only ``qwen3_omni`` has them."""


def read_media_config(folder: Path) -> MediaConfig | None:
    """Return what the folder says, or None if the model takes no media that are known here.

    Raises:
        ConfigError: The model takes media, but a file or a value is missing.
    """
    config = _json(folder / "config.json")
    family = _FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return None
    config = config.get("thinker_config", config)
    try:
        return _read(folder, config, family)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{folder} does not say how media are prepared: {error!r}",
            hint="copy the processor's files (preprocessor_config.json, …) beside the weights",
        ) from error


def _read(folder: Path, config: Mapping[str, Any], family: MediaFamily) -> MediaConfig:
    joint = _json(folder / "processor_config.json")
    single = _json(folder / "preprocessor_config.json")
    film = joint.get("video_processor") or _json(folder / "video_preprocessor_config.json")
    pads: dict[Kind, int] = {"image": config["image_token_id"], "video": config["video_token_id"]}
    tokens = _token_ids(folder)
    names = ["vision_start", "vision_end"]
    audio = None
    if family == "qwen3_omni":
        pads["audio"] = config["audio_token_id"]
        names += ["audio_start", "audio_end"]
        audio = _sound(joint.get("feature_extractor") or single, config["audio_config"])
    image = _patches(joint.get("image_processor") or single)
    return MediaConfig(
        family=family,
        pads=pads,
        markers={name: _marker(config, tokens, name) for name in names},
        image=image,
        video=_film(film or single, family),
        audio=audio,
        positions_per_second=float(config.get("position_id_per_seconds", 0)),
    )


def _patches(values: Mapping[str, Any]) -> PatchConfig:
    size = values.get("size") or {}
    return PatchConfig(
        patch=int(values["patch_size"]),
        temporal=int(values["temporal_patch_size"]),
        merge=int(values["merge_size"]),
        min_pixels=int(values.get("min_pixels") or size["shortest_edge"]),
        max_pixels=int(values.get("max_pixels") or size["longest_edge"]),
        mean=tuple(map(float, values["image_mean"])),
        std=tuple(map(float, values["image_std"])),
    )


def _film(values: Mapping[str, Any], family: MediaFamily) -> FilmConfig:
    return FilmConfig(
        patches=_patches(values),
        fps=float(values.get("fps") or 2.0),
        min_frames=int(values.get("min_frames") or 4),
        max_frames=int(values.get("max_frames") or 768),
    )


def _sound(values: Mapping[str, Any], tower: Mapping[str, Any]) -> SoundConfig:
    wanted = ("feature_size", "sampling_rate", "hop_length", "chunk_length", "n_fft")
    options = {name: values[name] for name in wanted}
    if options["feature_size"] != tower["num_mel_bins"]:
        raise ValueError(
            f"features of {options['feature_size']} bands for a tower of {tower['num_mel_bins']}"
        )
    return SoundConfig(
        rate=int(options["sampling_rate"]),
        hop=int(options["hop_length"]),
        window=int(options["n_fft"]),
        n_window=int(tower["n_window"]),
        options=options,
    )


def _marker(config: Mapping[str, Any], tokens: Mapping[str, int], name: str) -> int:
    found = config.get(f"{name}_token_id")
    return int(tokens[f"<|{name}|>"] if found is None else found)


def _token_ids(folder: Path) -> dict[str, int]:
    """Return the ids of added tokens: a config does not name all of its markers."""
    added = _json(folder / "tokenizer.json").get("added_tokens", [])
    return {entry["content"]: int(entry["id"]) for entry in added}


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    return found if isinstance(found, dict) else {}

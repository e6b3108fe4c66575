"""Tiny models that see and hear: Qwen3-VL, and the thinker of Qwen3-Omni.

The towers are true to their architectures and two layers deep. Pictures are scaled to at most 16
tokens and films to as many, so an episode with media trains on a laptop's CPU. The processor's
files are written as real models have them: the sizes come from there and from nowhere else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_agent.models.settings import TinySettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

KINDS = ("qwen3_vl", "qwen3_omni")
"""Kinds of :class:`~relax_agent.models.settings.TinySettings` that take media."""
PATCH, MERGE, TEMPORAL = 16, 2, 2
_TOKENS = 16
_BANDS = 128
_AREA = (PATCH * MERGE) ** 2
_TOWER = 64


def build(
    settings: TinySettings, common: dict[str, Any], tokenizer: PreTrainedTokenizerFast
) -> PreTrainedModel:
    """Return a random model.

    Args:
        settings: Its sizes.
        common: What its text part shares with models of text alone.
        tokenizer: Names the placeholders.
    """
    text = common | {"rope_parameters": _rope(settings)}
    text["intermediate_size"] = settings.top_k * settings.expert_hidden
    if settings.kind == "qwen3_vl":
        from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

        return Qwen3VLForConditionalGeneration(
            Qwen3VLConfig(
                text_config=text,
                vision_config=_vision(settings),
                tie_word_embeddings=False,
                **_tokens(tokenizer, "image_pad", "video_pad", "vision_start", "vision_end"),
            )
        )
    return _omni(settings, text, tokenizer)


def _omni(
    settings: TinySettings, text: dict[str, Any], tokenizer: PreTrainedTokenizerFast
) -> PreTrainedModel:
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration
    from transformers.models.qwen3_omni_moe import Qwen3OmniMoeThinkerConfig

    experts = {
        "moe_intermediate_size": settings.expert_hidden,
        "num_experts": settings.experts,
        "num_experts_per_tok": settings.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    names = ("image_pad", "video_pad", "audio_pad", "vision_start", "vision_end")
    config = Qwen3OmniMoeThinkerConfig(
        text_config=text | experts,
        vision_config=_vision(settings),
        audio_config=_audio(settings),
        tie_word_embeddings=False,
        position_id_per_seconds=13,
        initializer_range=settings.init_std,
        **_tokens(tokenizer, *names, "audio_start", "audio_end"),
    )
    return Qwen3OmniMoeThinkerForConditionalGeneration(config)


def _rope(settings: TinySettings) -> dict[str, Any]:
    """Share the rotary frequencies out among time, height and width."""
    half = settings.head_dim // 2
    side = half // 3
    return {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [half - 2 * side, side, side],
        "mrope_interleaved": True,
    }


def _tokens(tokenizer: PreTrainedTokenizerFast, *names: str) -> dict[str, Any]:
    """Return the config's fields for tokens, e.g. ``image_token_id`` for ``image_pad``."""
    fields = {name: f"{name.removesuffix('_pad')}_token_id" for name in names}
    return {
        field: int(tokenizer.convert_tokens_to_ids(f"<|{name}|>"))  # type: ignore[arg-type]
        for name, field in fields.items()
    }


def _vision(settings: TinySettings) -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": _TOWER,
        "intermediate_size": 2 * _TOWER,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": TEMPORAL,
        "out_hidden_size": settings.hidden,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": settings.init_std,
    }


def _audio(settings: TinySettings) -> dict[str, Any]:
    return {
        "num_mel_bins": _BANDS,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 2 * _TOWER,
        "d_model": _TOWER,
        "output_dim": settings.hidden,
        "n_window": 50,
        "n_window_infer": 800,
        "downsample_hidden_size": 16,
        "initializer_range": settings.init_std,
    }


def save_processor(folder: Path, settings: TinySettings) -> None:
    """Write what prepares media for the model into its folder."""
    processor = "Qwen3VLProcessor" if settings.kind == "qwen3_vl" else "Qwen3OmniMoeProcessor"
    patches = {
        "processor_class": processor,
        "patch_size": PATCH,
        "temporal_patch_size": TEMPORAL,
        "merge_size": MERGE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    image = patches | {"image_processor_type": "Qwen2VLImageProcessor", "size": _size(1)}
    film = patches | {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": _size(TEMPORAL),
        "fps": 2,
        "min_frames": 4,
        "max_frames": 16,
    }
    if settings.kind == "qwen3_omni":
        image |= _sound()
    _write(folder / "preprocessor_config.json", image)
    _write(folder / "video_preprocessor_config.json", film)


def _size(frames: int) -> dict[str, int]:
    return {"shortest_edge": frames * _AREA, "longest_edge": frames * _TOKENS * _AREA}


def _sound() -> dict[str, Any]:
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": _BANDS,
        "sampling_rate": 16_000,
        "hop_length": 160,
        "chunk_length": 30,
        "n_fft": 400,
    }


def _write(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", "utf-8")

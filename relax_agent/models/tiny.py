"""Tiny models with true architectures, made on the spot and found again.

:func:`resolve_model` turns :class:`~relax_agent.models.settings.ModelSettings` into a folder in
Hugging Face layout, which every engine and trainer loads. A tiny model's folder is named after a
hash of everything it depends on (settings and the tokenizer's texts), is written beside its place
and renamed into it, so it is either whole or absent, and is made once.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_agent.errors import ConfigError, StorageError
from relax_agent.models import tiny_media
from relax_agent.models.settings import ModelSettings, TinySettings
from relax_agent.models.tokenizer import build_tokenizer, chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


def resolve_model(settings: ModelSettings, work_dir: Path, texts: Sequence[str] = ()) -> Path:
    """Return the folder of the model that a run trains; make it first if it is a tiny one.

    Args:
        settings: Which model.
        work_dir: Where a tiny model's folder is made, or found again.
        texts: What a tiny model's tokenizer is trained on (see ``chat_texts``).

    Raises:
        ConfigError: the folder is missing or holds no model, or a tiny model got no texts.
        StorageError: the folder cannot be written.
    """
    if settings.path is not None:
        return _existing(settings.path)
    assert settings.tiny is not None
    if not texts:
        raise ConfigError("a tiny model needs texts for its tokenizer", hint="give conversations")
    folder = work_dir / f"{settings.tiny.kind}-{_fingerprint(settings.tiny, texts)}"
    if not (folder / "config.json").is_file():
        create_tiny_model(folder, settings.tiny, texts)
    return folder


def create_tiny_model(folder: Path, settings: TinySettings, texts: Sequence[str]) -> None:
    """Write a tiny model and its tokenizer to ``folder``, whole or not at all."""
    from safetensors import SafetensorError

    tokenizer = build_tokenizer(texts, settings.vocab, audio=settings.kind == "qwen3_omni")
    model = build_model(settings, tokenizer)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            _save_quietly(model, temporary)
            tokenizer.save_pretrained(temporary)
            if settings.kind in tiny_media.KINDS:
                tiny_media.save_processor(temporary, settings)
            _move_into_place(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except (OSError, SafetensorError) as error:  # which is what a full disk is to safetensors
        raise StorageError(
            f"the model cannot be written to {folder}: {error}", hint="free some space"
        ) from error


def build_model(settings: TinySettings, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Return a random float32 model for a tokenizer; the caller's random state is untouched."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    common = _common_config(settings, tokenizer)
    if settings.kind in tiny_media.KINDS:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            return tiny_media.build(settings, common, tokenizer).float()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        if settings.kind == "qwen3":
            width = settings.top_k * settings.expert_hidden
            return Qwen3ForCausalLM(Qwen3Config(**common, intermediate_size=width)).float()
        config = Qwen3MoeConfig(
            **common,
            intermediate_size=settings.top_k * settings.expert_hidden,
            moe_intermediate_size=settings.expert_hidden,
            num_experts=settings.experts,
            num_experts_per_tok=settings.top_k,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        )
        return Qwen3MoeForCausalLM(config).float()


def _save_quietly(model: PreTrainedModel, folder: Path) -> None:
    """Save without the progress bar that transformers prints, also into other programs' output."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()


def _common_config(settings: TinySettings, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": settings.hidden,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.kv_heads,
        "head_dim": settings.head_dim,
        "max_position_embeddings": settings.max_positions,
        "initializer_range": settings.init_std,
        "rope_parameters": _ROPE,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _existing(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        what = "holds no config.json" if folder.is_dir() else "does not exist"
        raise ConfigError(
            f"model.path: {folder} {what}",
            hint="give a folder in Hugging Face layout, or model.tiny to make a small one",
        )
    return folder


def _fingerprint(settings: TinySettings, texts: Sequence[str]) -> str:
    digest = hashlib.sha256(settings.model_dump_json().encode())
    for text in (chat_template(), *texts):
        digest.update(b"\0" + text.encode())
    return digest.hexdigest()[:12]


def _move_into_place(temporary: Path, folder: Path) -> None:
    """Rename; where another process was faster, its folder is as good."""
    if folder.is_dir() and not (folder / "config.json").is_file():
        shutil.rmtree(folder)
    temporary.chmod(0o755)
    try:
        temporary.replace(folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise

"""Loading a model for inference or training, whatever it takes besides text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from relax_agent.errors import ConfigError


def load_pretrained(folder: Path, dtype: Any) -> Any:
    """Load a language model from a folder; one that takes media comes with its towers.

    Args:
        folder: In Hugging Face layout.
        dtype: Of the weights, a ``torch.dtype``.

    Raises:
        ConfigError: transformers cannot load a model from it.
    """
    import transformers

    kind = _model_type(folder)
    if kind == "qwen3_omni_moe":
        raise ConfigError(
            f"{folder} holds a whole Qwen3-Omni, which also speaks; only its thinker is trained",
            hint="save model.thinker in a folder of its own, with the processor's files beside it",
        )
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    takes_media = kind in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    load: Any = transformers.AutoModelForCausalLM
    if takes_media and kind not in _causal_types():
        load = transformers.AutoModelForMultimodalLM
    try:
        return load.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"cannot load a model from {folder}: {reason}") from error


def _causal_types() -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _model_type(folder: Path) -> str:
    try:
        return str(json.loads((folder / "config.json").read_text("utf-8")).get("model_type"))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"no model in {folder}: config.json cannot be read: {error}") from error

"""What the embedded engine can be told."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class EmbeddedSettings(BaseModel):
    """Settings of one embedded engine; the command line has one flag for each."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_path: Path
    """Folder in Hugging Face layout, safetensors."""
    host: str = "127.0.0.1"
    """Address to bind."""
    port: int = Field(default=30000, ge=0, le=65535)
    """Port to bind; 0 takes a free one."""
    port_file: Path | None = None
    """Written with the port number once the engine serves."""
    weight_version: str = "0"
    """Version of the weights in ``model_path``."""
    max_running_requests: int = Field(default=64, ge=1)
    """Requests that decode together; others wait."""
    max_total_tokens: int | None = Field(default=None, ge=1)
    """Key-value slots: rows times the longest row. None: 65,536 or the context length."""
    max_prefill_tokens: int = Field(default=4096, ge=1)
    """Prompt tokens read in one step, unless a single prompt is longer."""
    context_length: int | None = Field(default=None, ge=2)
    """Prompt and answer together, in tokens. None: what the model's config says."""
    prefix_cache_mb: float = Field(default=256.0, ge=0)
    """Memory for cached prefixes in MiB; 0 turns the cache off."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number type of weights and key-value cache."""
    threads: int = Field(default=1, ge=1)
    """Threads of the model's arithmetic."""
    random_seed: int | None = None
    """Seeds requests that bring no seed of their own. None: from the operating system."""
    token_env: str | None = None
    """Environment variable that holds the bearer token clients must send."""
    parent_pid: int | None = None
    """Process whose end ends this engine too."""

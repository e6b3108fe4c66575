"""Which engines a run starts, as the recipe's ``engine`` section."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class EngineSettings(BaseModel):
    """How many inference engines of which kind, and their limits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["embedded", "sglang"] = "embedded"
    """``embedded``: this project's CPU engine; ``sglang``: real SGLang, on a CPU or a GPU."""
    count: int = Field(default=2, ge=1)
    """Engines in the fleet; each is a process with a copy of the model."""
    max_running_requests: int = Field(default=32, ge=1)
    """Requests that one engine samples at a time; more wait in its queue."""
    max_total_tokens: int = Field(default=32768, ge=256)
    """Tokens that the key-value cache of one engine holds. SGLang's cached prefixes are part of it;
    the embedded engine's have a limit of their own (its ``--prefix-cache-mb``)."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of one engine's arithmetic."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the served weights; float32 keeps log-probs close to the trainer's."""
    seed: int = 0
    """Seeds the engine's own generator; a request's own seed wins where the engine knows it."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the first engine, the next ones count up; None takes any free ports."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds in which an engine must be ready to serve."""
    generate_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that one request may take, pauses for weight updates not counted."""
    control_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that every other call may take, weight updates included."""
    python: Path | None = None
    """SGLang only: the interpreter of the environment that has SGLang; None looks for
    ``.venv-sglang`` in the working folder and else takes the running one."""
    device: Literal["cpu", "cuda"] = "cpu"
    """SGLang only: where it computes."""
    extra_args: tuple[str, ...] = ()
    """SGLang only: more arguments of ``sglang.launch_server``, such as ``--tp-size 2``."""

    @model_validator(mode="after")
    def _no_option_is_ignored(self) -> Self:
        if self.kind == "embedded":
            only = ("python", "device", "extra_args")
            given = [name for name in only if getattr(self, name) != self._default(name)]
            if given:
                raise ValueError(f"{', '.join(given)}: only for engine.kind=sglang")
        return self

    @classmethod
    def _default(cls, name: str) -> object:
        return cls.model_fields[name].default

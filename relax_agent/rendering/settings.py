"""Settings of the renderer: which chat format a model speaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class RendererSettings(BaseModel):
    """How messages become tokens, and how what a model says is read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "auto"
    """``auto``: the ``renderers`` package's format of the model's family where it writes what the
    model's own chat template writes, else that template. ``template``: the template in any case.
    Or a format of the package, e.g. ``qwen3``, ``glm-4.5``, ``kimi-k2``."""
    template: Path | None = None
    """A Jinja chat template that replaces the one in the model's folder."""
    tool_parser: str = "auto"
    """For templates: how tool calls are written, e.g. ``hermes`` or ``qwen3_coder``. ``auto`` takes
    the first parser that reads the template's own calls."""
    reasoning: Literal["auto", "tagged", "opened", "none"] = "auto"
    """For templates: where a model's reasoning is. ``tagged``: between tags at the beginning of its
    answer; ``opened``: the prompt holds the opening tag already; ``none``: tags are text."""
    reasoning_tags: tuple[str, str] = ("<think>", "</think>")
    """For templates: the tags around reasoning."""
    on_unstable: Literal["refuse", "fork"] = "refuse"
    """What to do where a format rewrites what was said before, so that a turn cannot be appended:
    refuse at start-up, or render the whole history and fork the token log, each turn."""
    tool_media: Literal["refuse", "insert"] = "refuse"
    """What to do where a template shows media in a user's message and drops them in a tool's:
    refuse at start-up, or insert their placeholders all the same."""
    enable_thinking: bool | None = None
    """Whether the model may think before it answers; None is the format's own default."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further fields of a format's configuration, checked by it; variables of a template."""

"""Rendering: messages to token ids and back. See :mod:`relax_agent.rendering.renderer`."""

from relax_agent.rendering.renderer import (
    PackageRenderer,
    Renderer,
    load_renderer,
    normalise_tools,
)
from relax_agent.rendering.settings import RendererSettings

__all__ = ["PackageRenderer", "Renderer", "RendererSettings", "load_renderer", "normalise_tools"]

"""Rendering: messages to token ids and back; tool calls and reasoning in text.

See :mod:`relax_agent.rendering.renderer` and :mod:`relax_agent.rendering.parsers`.
"""

from relax_agent.rendering.parsers import (
    TOOL_PARSERS,
    CallRead,
    Event,
    ReasoningDelta,
    TextDelta,
    ToolParser,
    ToolStream,
    fold,
    tool_parser,
)
from relax_agent.rendering.rendered import Medium, Rendered, Renderer, normalise_tools
from relax_agent.rendering.renderer import PackageRenderer, load_renderer
from relax_agent.rendering.settings import RendererSettings

__all__ = [
    "PackageRenderer",
    "Medium",
    "Rendered",
    "Renderer",
    "RendererSettings",
    "load_renderer",
    "normalise_tools",
    "TOOL_PARSERS",
    "tool_parser",
    "ToolParser",
    "ToolStream",
    "Event",
    "TextDelta",
    "ReasoningDelta",
    "CallRead",
    "fold",
]

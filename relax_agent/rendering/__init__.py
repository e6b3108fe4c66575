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
from relax_agent.rendering.renderer import (
    PackageRenderer,
    Renderer,
    load_renderer,
    normalise_tools,
)
from relax_agent.rendering.settings import RendererSettings

__all__ = [
    "PackageRenderer",
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

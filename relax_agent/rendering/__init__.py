"""Rendering: messages to token ids and back; tool calls and reasoning in text.

rendered.py       what every renderer offers and returns
loading.py        from a model's folder to its renderer
package.py        formats that the ``renderers`` package knows
template.py       any other chat template; chat_template.py, template_text.py and probes.py
run it, cut it and prove what it does with earlier turns
lookalikes.py     text that looks like a special token stays text
overflow.py       what to leave out of a conversation that does not fit
parsers/          tool calls and reasoning in text
media/            placeholders and features of pictures, sounds and films
"""

from relax_agent.rendering.chat_template import ChatTemplate, load_template
from relax_agent.rendering.loading import load_renderer
from relax_agent.rendering.overflow import truncate_messages
from relax_agent.rendering.package import PackageRenderer
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
from relax_agent.rendering.rendered import Placed, Rendered, Renderer, normalise_tools
from relax_agent.rendering.settings import RendererSettings
from relax_agent.rendering.streaming import OutputStream
from relax_agent.rendering.template import TemplateRenderer

__all__ = [
    "ChatTemplate",
    "PackageRenderer",
    "Placed",
    "OutputStream",
    "Rendered",
    "Renderer",
    "RendererSettings",
    "TemplateRenderer",
    "load_renderer",
    "load_template",
    "normalise_tools",
    "truncate_messages",
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

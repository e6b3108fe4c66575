"""Tool calls in text: one parser a format, for whole outputs and for outputs that arrive in pieces.

    parser = tool_parser("hermes")
    message = parser.parse(text)                # an AssistantMessage
    stream = parser.stream()                    # the same, as it comes
    events = stream.feed(delta)                 # TextDelta, ReasoningDelta, CallRead
    events += stream.finish()

Nothing here ever runs what a model wrote, or raises because of it. How each format is read, and
what becomes of broken and cut calls: ``docs/parsing.md``.
"""

from __future__ import annotations

import difflib

from relax_agent.errors import ConfigError
from relax_agent.rendering.parsers import (
    fenced,
    hermes,
    llama3,
    mistral,
    pythonic,
    qwen3_coder,
)
from relax_agent.rendering.parsers.reasoning import Reasoning
from relax_agent.rendering.parsers.stream import (
    CallRead,
    Event,
    ReasoningDelta,
    TextDelta,
    ToolParser,
    ToolStream,
    fold,
)

TOOL_PARSERS = {
    "hermes": ToolParser("hermes", hermes.read, hermes.OPENER),
    "qwen3_coder": ToolParser("qwen3_coder", qwen3_coder.read, qwen3_coder.OPENER),
    "llama3": ToolParser("llama3", llama3.read, llama3.OPENER),
    "mistral": ToolParser("mistral", mistral.read, mistral.OPENER),
    "pythonic": ToolParser("pythonic", pythonic.read, None),
    "fenced": ToolParser("fenced", fenced.read, None),
}
"""Every format by name. Names are those of SGLang where it has the format."""


def tool_parser(name: str, reasoning: Reasoning = "tagged") -> ToolParser:
    """Return the parser of a format.

    Args:
        name: One of :data:`TOOL_PARSERS`.
        reasoning: Where reasoning is; see :class:`ToolParser`.

    Raises:
        ConfigError: there is no such format.
    """
    if name not in TOOL_PARSERS:
        near = difflib.get_close_matches(name, TOOL_PARSERS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"formats: {', '.join(TOOL_PARSERS)}"
        raise ConfigError(f"there is no tool parser {name!r}", hint=hint)
    known = TOOL_PARSERS[name]
    return ToolParser(known.name, known.read, known.opener, reasoning)


__all__ = [
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

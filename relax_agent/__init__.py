"""Relax Agent: a Gymnasium for agents, with the whole training stack attached."""

from relax_agent.messages import (
    AssistantMessage,
    Audio,
    Image,
    Message,
    Rewrite,
    Text,
    ToolCall,
    Video,
)

__version__ = "0.1.0"

__all__ = [
    "AssistantMessage",
    "Audio",
    "Image",
    "Message",
    "Rewrite",
    "Text",
    "ToolCall",
    "Video",
]

"""Models: which one a run trains, and tiny ones made on the spot. See :mod:`.tiny`."""

from relax_agent.models.settings import ModelSettings, TinySettings
from relax_agent.models.texts import environment_texts
from relax_agent.models.tiny import build_model, create_tiny_model, resolve_model
from relax_agent.models.tokenizer import build_tokenizer, chat_texts

__all__ = [
    "ModelSettings",
    "TinySettings",
    "build_model",
    "build_tokenizer",
    "chat_texts",
    "create_tiny_model",
    "environment_texts",
    "resolve_model",
]

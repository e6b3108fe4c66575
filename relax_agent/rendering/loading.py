"""From a model's folder to its renderer.

A model's own chat template is what it was trained on. So ``auto`` takes a format of the
``renderers`` package only where it writes the template's very ids on a few conversations; it is the
faster of the two then. Anything else goes through the template. The renderer of a model that takes
media is wrapped, so that placeholders and counts come from the model's folder.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from relax_agent.errors import ConfigError, RelaxError, RenderError
from relax_agent.messages import Message, ToolCall, assistant, system, tool_message, user
from relax_agent.rendering.chat_template import ChatTemplate, has_template, load_template
from relax_agent.rendering.package import PackageRenderer
from relax_agent.rendering.rendered import Renderer
from relax_agent.rendering.settings import RendererSettings
from relax_agent.rendering.template import TemplateRenderer
from relax_agent.rendering.tokens import TokenIds, load_tokenizer, read_json, stop_ids

_FAMILIES = {
    "qwen3": ("qwen3", "prime-qwen3"),
    "qwen3_moe": ("qwen3",),
    "qwen3_5": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "qwen3_5_moe": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "qwen3_next": ("qwen3",),
    "glm4_moe": ("glm-4.5",),
    "deepseek_v3": ("deepseek-v3", "deepseek-r1", "kimi-k2"),
    "kimi_k2": ("kimi-k2",),
    "llama": ("llama-3",),
    "minimax_m2": ("minimax-m2",),
    "gpt_oss": ("gpt-oss",),
    "nemotron_h": ("nemotron-3",),
}
"""Formats to try, by the ``model_type`` of a model's configuration."""

_CALL = ToolCall("look", {"where": "there", "n": 1}, "call_0")
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look somewhere.",
            "parameters": {
                "type": "object",
                "properties": {"where": {"type": "string"}, "n": {"type": "integer"}},
            },
        },
    }
]
_CONVERSATIONS: list[list[Message]] = [
    [user("One?")],
    [system("Be brief."), user("One?"), assistant("Two."), user("Three?")],
    [
        user("One?"),
        assistant("I look.", tool_calls=[_CALL, _CALL]),
        tool_message("1", _CALL),
        tool_message("2", _CALL),
        assistant("Two."),
        user("Three?"),
    ],
]


def load_renderer(folder: Path, settings: RendererSettings) -> Renderer:
    """Return the renderer for a model's folder; its ``summary`` says in one line how it works.

    Raises:
        ConfigError: there is no such format, it does not fit the tokenizer, the folder has no
            tokenizer or no template, or the template cannot be used as the settings ask.
        MissingExtraError: a package that this needs is not installed.
    """
    processor = _media_processor(folder)
    words = () if processor is None else _words(processor)
    text = _load_text(folder, settings, words)
    if processor is None:
        return text
    from relax_agent.rendering.media import MediaRenderer

    if isinstance(text, TemplateRenderer) and settings.tool_media == "refuse":
        text.require_tool_media()
    return MediaRenderer(text, processor, settings.name)


def _load_text(
    folder: Path, settings: RendererSettings, kept: Collection[str]
) -> PackageRenderer | TemplateRenderer:
    tokenizer = load_tokenizer(folder)
    if settings.name not in ("auto", "template"):
        if settings.template is not None:
            raise ConfigError("renderer.template needs renderer.name: template")
        return PackageRenderer(tokenizer, settings, kept=kept)
    variables = dict(settings.options)
    if settings.enable_thinking is not None:
        variables["enable_thinking"] = settings.enable_thinking
    template = load_template(folder, settings.template, variables)
    if settings.name == "auto" and settings.template is None:
        found = _matching_format(folder, tokenizer, template, settings, kept)
        if found is not None:
            return found
    stops = stop_ids(folder, tokenizer)
    return TemplateRenderer(tokenizer, template, settings, stop_ids=stops, kept=kept)


def _matching_format(
    folder: Path,
    tokenizer: TokenIds,
    template: ChatTemplate,
    settings: RendererSettings,
    kept: Collection[str],
) -> PackageRenderer | None:
    """Return the package's format that writes what the template writes, if there is one."""
    model_type = read_json(folder / "config.json").get("model_type", "")
    for name in _FAMILIES.get(str(model_type), ()):
        named = settings.model_copy(update={"name": name})
        try:
            renderer = PackageRenderer(tokenizer, named, kept=kept)
            if _same(renderer, template, tokenizer):
                return renderer
        except RelaxError:  # it does not fit this tokenizer, or takes other options
            continue
    return None


def _same(renderer: PackageRenderer, template: ChatTemplate, tokenizer: TokenIds) -> bool:
    from relax_agent.messages import to_openai

    for messages in _CONVERSATIONS:
        for tools in ([], _TOOLS):
            plain = [to_openai(message) for message in messages]
            try:
                theirs = tokenizer.encode(template.render(plain, tools))
            except RenderError:
                return False
            if renderer.start(messages, tools).ids != theirs:
                return False
    return True


def _media_processor(folder: Path) -> Any:
    """Return the folder's media processor; None if the model takes text only."""
    config = read_json(folder / "config.json")
    if not any(key.endswith("_config") and key != "text_config" for key in config):
        return None  # no tower: the media extra need not be there
    from relax_agent.rendering.media import MediaProcessor

    return MediaProcessor.load(folder)


def _words(processor: Any) -> list[str]:
    return [processor.word(token) for token in processor.config.pads.values()]


__all__ = ["has_template", "load_renderer"]

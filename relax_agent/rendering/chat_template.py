"""The Jinja chat template of a model's folder: messages to one text.

Compiled and run by transformers, in its sandbox and with its helpers, so a template means here what
it means everywhere. The file is looked for where any version of transformers has put it: the
processor's places first, then the tokenizer's, because many processors have none of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_agent.errors import ConfigError, MissingExtraError, RenderError, one_line
from relax_agent.rendering.tokens import read_json, special_names

_PLACES = ("chat_template.json", "processor_config.json", "tokenizer_config.json")


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and the variables that it always gets."""

    name: str
    """Where it came from, for messages."""
    source: str
    variables: dict[str, Any] = field(default_factory=dict)
    """Special tokens by name, ``enable_thinking`` and the recipe's own options."""

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        *,
        prompt: bool = True,
    ) -> str:
        """Return the text of messages, with the beginning of an answer if ``prompt`` is true.

        Raises:
            RenderError: the template refuses the messages, in its own words.
        """
        try:
            texts, _ = _render_function()(
                [list(messages)],
                tools=list(tools) or None,
                chat_template=self.source,
                add_generation_prompt=prompt,
                **self.variables,
            )
        except MissingExtraError:
            raise
        except Exception as error:  # a template is a program, and fails in any way
            raise RenderError(f"the chat template refuses: {one_line(error)}") from error
        return str(texts[0])


def load_template(
    folder: Path, file: Path | None = None, variables: dict[str, Any] | None = None
) -> ChatTemplate:
    """Return the chat template of a model's folder.

    Args:
        folder: The model's folder.
        file: A template that replaces the folder's own.
        variables: What the template gets besides messages, tools and special tokens.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    given = special_names(folder) | (variables or {})
    if file is not None:
        return ChatTemplate(file.name, _read(file), given)
    name, source = _find(folder)
    if source is None:
        raise ConfigError(
            f"{folder} holds no chat template",
            hint="give one as renderer.template, or name a format as renderer.name",
        )
    return ChatTemplate(f"{folder.name}/{name}", source, given)


def has_template(folder: Path) -> bool:
    """Return whether the folder holds a chat template."""
    return _find(folder)[1] is not None


def _find(folder: Path) -> tuple[str, str | None]:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.name, _read(file)
    for name in _PLACES:
        found = read_json(folder / name).get("chat_template")
        if isinstance(found, list):  # several by name; the one for tools shows what it can do
            named = {each["name"]: each["template"] for each in found}
            found = named.get("tool_use", named.get("default"))
        if isinstance(found, str):
            return name, found
    return "", None


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"renderer.template: {file} cannot be read: {error}") from error


def _render_function() -> Callable[..., Any]:
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError:
        raise MissingExtraError("transformers", "train") from None
    return render_jinja_template

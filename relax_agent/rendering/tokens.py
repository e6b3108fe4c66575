"""The few tokenizer calls that rendering needs, straight from the ``tokenizers`` library.

``renderers`` asks for encode, decode and the id of a token. Without the transformers wrapper around
them a turn renders several times faster, and the process that drives episodes never imports torch.

Text is cut at every :data:`~relax_agent.rendering.lookalikes.BREAK` and its pieces are encoded on
their own: what only looks like a special token stays text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_agent.errors import ConfigError, MissingExtraError
from relax_agent.rendering.lookalikes import cut

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer


class TokenIds:
    """A tokenizer as ``renderers`` wants it. Safe to share between threads: it keeps no state."""

    unk_token_id: int | None = None
    """Unknown tokens are None here, never an id."""

    def __init__(self, tokenizer: Tokenizer, name_or_path: str = "") -> None:
        # Many tokenizer files carry the limits of some earlier use; a token log is never cut.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.name_or_path = name_or_path
        added = tokenizer.get_added_tokens_decoder().items()
        self.special = {token.content: index for index, token in added if token.special}
        """Tokens that steer a model, by their text."""
        self.markup = {token.content: index for index, token in added if not token.special}
        """Tokens that were added as ordinary text, e.g. ``<think>``."""
        self.opening_ids = _opening_ids(tokenizer)
        """What the tokenizer itself puts before a text, a begin-of-sequence token as a rule."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text; no begin-of-sequence token is ever added."""
        pieces = cut(text)
        if len(pieces) == 1:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        # One by one: a batch would start threads, which no later fork survives unharmed.
        encoded = (self._tokenizer.encode(each, add_special_tokens=False) for each in pieces)
        return [index for each in encoded for index in each.ids]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ids; ids outside the vocabulary are skipped."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str) -> int | None:
        """Return the id of one token, None if there is no such token."""
        return self._tokenizer.token_to_id(tokens)

    def token(self, index: int) -> str | None:
        """Return the text of one token, None if there is no such id."""
        return self._tokenizer.id_to_token(index)


class SlowTokenIds(TokenIds):
    """The same over a transformers tokenizer that has no fast one inside (SentencePiece, tiktoken).

    Such tokenizers keep no state between calls either, so threads may share them.
    """

    def __init__(self, tokenizer: Any, name_or_path: str = "") -> None:
        self._slow = tokenizer
        self.name_or_path = name_or_path
        added = tokenizer.added_tokens_decoder.items()
        self.special = {token.content: index for index, token in added if token.special}
        self.markup = {token.content: index for index, token in added if not token.special}
        ids = tokenizer.encode("", add_special_tokens=True)
        self.opening_ids = ids[:1] if ids[:1] == [tokenizer.bos_token_id] else []

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text; no begin-of-sequence token is ever added."""
        encoded = (self._slow.encode(each, add_special_tokens=False) for each in cut(text))
        return [index for ids in encoded for index in ids]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ids; ids outside the vocabulary are skipped."""
        known = [index for index in token_ids if 0 <= index < len(self._slow)]
        return str(self._slow.decode(known, skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, tokens: str) -> int | None:
        """Return the id of one token, None if there is no such token."""
        index = self._slow.convert_tokens_to_ids(tokens)
        return None if index is None or index == self._slow.unk_token_id else int(index)

    def token(self, index: int) -> str | None:
        """Return the text of one token, None if there is no such id."""
        known = 0 <= index < len(self._slow)
        return str(self._slow.convert_ids_to_tokens(index)) if known else None


def load_tokenizer(folder: Path) -> TokenIds:
    """Return the tokenizer in a model's folder, as ``renderers`` wants it.

    Raises:
        ConfigError: the folder holds no tokenizer.
        MissingExtraError: the package that reads it is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingExtraError("tokenizers", "train") from None
    file = folder / "tokenizer.json"
    try:
        if file.is_file():
            return TokenIds(Tokenizer.from_file(str(file)), str(folder))
        return _load_slowly(folder)
    except Exception as error:
        raise ConfigError(
            f"no tokenizer can be read from {folder}: {error}",
            hint="the folder must be in Hugging Face layout",
        ) from error


def special_names(folder: Path) -> dict[str, str]:
    """Return the tokens that a tokenizer's configuration names, e.g. ``bos_token``."""
    names: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in read_json(folder / file).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                names[key] = text
    return names


def stop_ids(folder: Path, tokenizer: TokenIds) -> list[int]:
    """Return every token that the folder's files name as an end, each once, the first named first.

    ``eos_token_id`` may be a number or a list, and the files need not agree: a model may end a
    turn with any of them.
    """
    eos = tokenizer.convert_tokens_to_ids(special_names(folder).get("eos_token", ""))
    found: list[Any] = [eos]
    for file in ("generation_config.json", "config.json"):
        config = read_json(folder / file)
        for level in (config, config.get("text_config") or {}):
            ids = level.get("eos_token_id")
            found += ids if isinstance(ids, list) else [ids]
    return list(dict.fromkeys(i for i in found if isinstance(i, int) and tokenizer.token(i)))


def read_json(file: Path) -> dict[str, Any]:
    """Return what a JSON file of a model's folder holds; nothing if it is missing.

    Raises:
        ConfigError: the file is damaged.
    """
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    return data if isinstance(data, dict) else {}


def _opening_ids(tokenizer: Tokenizer) -> list[int]:
    """Return what comes before a text, and not what comes behind it."""
    encoding = tokenizer.encode("x", add_special_tokens=True)
    before: list[int] = []
    for index, special in zip(encoding.ids, encoding.special_tokens_mask, strict=True):
        if not special:
            return before
        before.append(index)
    return []


def _load_slowly(folder: Path) -> TokenIds:
    """Read what has no tokenizer.json through transformers, which converts most of it."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    if tokenizer.is_fast:
        return TokenIds(tokenizer.backend_tokenizer, str(folder))
    return SlowTokenIds(tokenizer, str(folder))

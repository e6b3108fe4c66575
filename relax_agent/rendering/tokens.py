"""The few tokenizer calls that rendering needs, straight from the ``tokenizers`` library.

``renderers`` asks for encode, decode and the id of a token. Without the transformers wrapper around
them a turn renders several times faster, and the process that drives episodes never imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_agent.errors import ConfigError, MissingExtraError

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

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text; no begin-of-sequence token is ever added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ids; ids outside the vocabulary are skipped."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str) -> int | None:
        """Return the id of one token, None if there is no such token."""
        return self._tokenizer.token_to_id(tokens)


def load_tokenizer(folder: Path) -> Any:
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


def _load_slowly(folder: Path) -> Any:
    """Tokenizers without a tokenizer.json (SentencePiece, tiktoken) go through transformers."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))

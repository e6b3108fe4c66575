"""A tokenizer with Qwen3's special tokens, trained in a second on an environment's own texts.

**Superword BPE**: merges may cross spaces and line breaks inside a text, so the fixed part of a
prompt (the tool header, the frame of a call) becomes a handful of tokens; an episode of the
calculator is then about 80 tokens long instead of several hundred. Three cuts stay sharp, because
token-level rendering builds a conversation from separately encoded pieces: special tokens, the role
word and the line breaks that open a piece, and every single digit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from relax_agent.errors import ConfigError
from relax_agent.messages import Message, to_openai

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Qwen3's special tokens: decoders may skip them."""

AUDIO_TOKENS = ("<|audio_start|>", "<|audio_end|>", "<|audio_pad|>")
"""Special tokens that models which hear have besides."""

MARKUP_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""Qwen3's tokens that are text to a decoder: one token each, never skipped."""

_MULTIPLE = 8
"""The vocabulary's size is a multiple of it, so that tensor-parallel ranks can share it evenly."""


def chat_template() -> str:
    """Return the chat template, Qwen3's format in Jinja."""
    return resources.files(__package__).joinpath("chat_template.jinja").read_text("utf-8")


def chat_texts(
    conversations: Iterable[Sequence[Message]], tools: Sequence[dict[str, Any]]
) -> list[str]:
    """Render conversations to text, tool header included: what a tokenizer is trained on."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    blank = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), chat_template=chat_template()
    )
    texts = []
    for messages in conversations:
        plain = [to_openai(message) for message in messages]
        text = blank.apply_chat_template(plain, tools=list(tools) or None, tokenize=False)
        texts.append(str(text))
    return texts


def build_tokenizer(
    texts: Iterable[str], vocab: int = 1024, *, audio: bool = False
) -> PreTrainedTokenizerFast:
    """Train a tokenizer on rendered conversations. Equal texts give an equal tokenizer.

    Args:
        texts: Conversations as text, special tokens spelled out (see :func:`chat_texts`).
        vocab: Most tokens it may have, special ones included.
        audio: Whether the tokens of models that hear are among them.
    """
    from transformers import PreTrainedTokenizerFast

    pieces = _pieces(texts)
    special = SPECIAL_TOKENS + (AUDIO_TOKENS if audio else ())
    if not pieces:
        raise ConfigError("a tokenizer needs texts to be trained on", hint="give conversations")
    added = len(special) + len(MARKUP_TOKENS)
    core = _train(pieces, vocab - added)
    core = _train(pieces, core.get_vocab_size() - (core.get_vocab_size() + added) % _MULTIPLE)
    _add_tokens(core, special)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        chat_template=chat_template(),
    )


def _pieces(texts: Iterable[str]) -> list[str]:
    """Cut texts at special tokens: merges never reach across one."""
    cut = re.compile("|".join(map(re.escape, SPECIAL_TOKENS + AUDIO_TOKENS + MARKUP_TOKENS)))
    return [piece for text in texts for piece in cut.split(text) if piece]


def _train(pieces: list[str], size: int) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    cuts = [
        pre_tokenizers.Split(Regex(pattern), "isolated")
        for pattern in (r"\A(?:system|user|assistant)(?=\n|\z)", r"\A\n+", r"\d")
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        special_tokens=[],
    )
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, special: Sequence[str]) -> None:
    from tokenizers import AddedToken

    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS]
    )

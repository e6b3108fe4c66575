"""An episode's tokens for a terminal, each coloured by whether it is trained on.

Sampled tokens are green, the darker the less likely they were; what the model was told is dim, and
what stands for media is blue. With ``details`` every sampled token carries its log-prob and the
weight version that sampled it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.text import Text

from relax_agent.episode import NOT_SAMPLED, Episode, Segment
from relax_agent.pages import plain

_LIKELY, _UNSURE = 0.5, 0.1
"""Probabilities from which a token counts as likely, or as unsure; below it was a surprise."""

LEGEND = Text.assemble(
    ("told", "dim"),
    "  ",
    ("sampled, p ≥ 0.5", "green"),
    "  ",
    ("p ≥ 0.1", "yellow"),
    "  ",
    ("below", "red"),
    "  ",
    ("media", "blue"),
    "   ⟨log-prob, weight version⟩",
)


def tokens_text(episode: Episode, word_of: Callable[[int], str], *, details: bool = True) -> Text:
    """Return all segments' tokens.

    Args:
        episode: With its token columns.
        word_of: What a token id says; ids themselves where there is no tokenizer.
        details: Whether log-probs and weight versions are shown.
    """
    text = Text()
    for number, segment in enumerate(episode.segments):
        if number:
            head = f"\n⑂ fork of segment {segment.parent} after {segment.shared} tokens"
            text.append(f"{head}: {plain(segment.reason)}\n", "magenta")
        text.append_text(_segment_text(segment, word_of, details))
    return text


def _segment_text(segment: Segment, word_of: Callable[[int], str], details: bool) -> Text:
    media = {
        at: span for span in segment.media for at in range(span.start, span.start + span.count)
    }
    text, at = Text(), 0
    while at < len(segment):
        if at in media:
            span = media[at]
            text.append(f"[{span.kind}, {span.count} tokens, {span.digest[:8]}]", "blue")
            at = span.start + span.count
            continue
        word = _visible(word_of(segment.token_ids[at]))
        if segment.loss_mask[at]:
            logprob, version = segment.logprobs[at], segment.weight_versions[at]
            text.append(word, _style(logprob))
            if details:
                text.append(f"⟨{logprob:.2f}, {_version(version)}⟩", "dim cyan")
        else:
            text.append(word, "dim")
        at += 1
    return text


def _style(logprob: float) -> str:
    probability = math.exp(min(0.0, logprob))
    if probability >= _LIKELY:
        return "green"
    return "yellow" if probability >= _UNSURE else "red"


def _version(version: int) -> str:
    return "?" if version == NOT_SAMPLED else f"v{version}"


def _visible(word: str) -> str:
    """Keep line breaks, and make every other control character visible."""
    return "\n".join(map(plain, word.split("\n")))


def ids_alone(token: int) -> str:
    """Return an id as a word, for episodes whose tokenizer is not at hand."""
    return f"{token} "


def words_of(decode: Callable[[Sequence[int]], str]) -> Callable[[int], str]:
    """Return what each id says by itself; a part of a character is shown as ``�``."""
    known: dict[int, str] = {}

    def word(token: int) -> str:
        if token not in known:
            known[token] = decode([token]) or f"<{token}>"
        return known[token]

    return word

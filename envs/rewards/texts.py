"""Rewards that compare texts: the same words exactly, or a share of them."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from typing import Any

from relax_agent.envs.rewards.answers import AnswerReward

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_EDGES = " \t\r\n\"'`*“”‘’«»."
# Scripts that are written without spaces: Chinese, Japanese kana, Thai, Lao, Burmese, Khmer.
_UNSPACED = re.compile(
    "([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])"
)


@dataclass(frozen=True)
class ExactMatch(AnswerReward):
    """1 if the answer is the right one, else 0.

    Both sides are normalised alike: Unicode's compatibility form (NFKC), white space as single
    spaces, and what the options say.
    """

    ignore_case: bool = True
    ignore_edges: bool = True
    """Quotation marks, asterisks, backticks and full stops around the answer do not count."""
    ignore_punctuation: bool = False
    """No punctuation counts. ``3.5`` and ``35`` are then the same."""
    ignore_articles: bool = False
    """The words a, an and the do not count."""

    def compare(self, answer: str, gold: Any) -> float:
        """Return 1.0 or 0.0."""
        found, right = self.normalise(answer), self.normalise(str(gold))
        if not right:  # nothing but what does not count, such as "." or "the"
            return float(answer.split() == str(gold).split())
        return float(found == right)

    def normalise(self, text: str) -> str:
        """Return what of a text is compared."""
        text = " ".join(unicodedata.normalize("NFKC", text).split())
        if self.ignore_case:
            text = text.casefold()
        if self.ignore_punctuation:
            text = without_punctuation(text)
        if self.ignore_articles:
            text = _ARTICLES.sub(" ", text)
        if self.ignore_edges:
            text = text.strip(_EDGES)
        return " ".join(text.split())


@dataclass(frozen=True)
class F1(AnswerReward):
    """The share of words that answer and right answer have in common, from 0 to 1.

    The F1 of SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250, and its evaluation script): texts are
    lower-cased, punctuation and the articles a, an, the taken out, and split at white space; with
    ``common`` the size of the multiset intersection of their words,

        P = common / words of the answer,  R = common / words of the right one,  F1 = 2PR / (P + R)

    Two deviations: punctuation is all of Unicode's, not ASCII's alone, and scripts without spaces
    count every character as a word (as MLQA does, arXiv:1910.07475).
    """

    name = "f1"

    def compare(self, answer: str, gold: Any) -> float:
        """Return the F1 of the two texts."""
        found, right = self.words(answer), self.words(str(gold))
        if not right or not found:
            return float(answer.casefold().split() == str(gold).casefold().split())
        common = (Counter(found) & Counter(right)).total()
        return 2 * common / (len(found) + len(right))

    def words(self, text: str) -> list[str]:
        """Return the words of a text that are compared."""
        text = without_punctuation(unicodedata.normalize("NFKC", text).casefold())
        return _UNSPACED.sub(r" \1 ", _ARTICLES.sub(" ", text)).split()


def without_punctuation(text: str) -> str:
    """Return a text without the characters that Unicode calls punctuation or symbols of ASCII."""
    return "".join(
        char
        for char in text
        if not unicodedata.category(char).startswith("P") and char not in "$+<=>^`|~"
    )


exact_match = ExactMatch()
f1 = F1()

r"""A reward that compares numbers, in the many ways that they are written.

Values are exact fractions, so no digit is lost before a tolerance is applied. Read are ``1,234.5``,
``-3``, ``.5``, ``1e-3``, ``2 × 10^5``, ``2^10``, ``12%``, ``1/2``, ``3 1/2``, ``½``, ``$1.50``,
``\frac{1}{2}`` and ``1{,}234``. A comma is a thousands separator, never a decimal one.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from relax_agent.envs.rewards.answers import AnswerReward, boxed
from relax_agent.errors import ConfigError

_MOST_DIGITS = 400
_MOST_EXPONENT = 400
_MINUS = str.maketrans({"−": "-", "–": "-", "—": "-", "﹣": "-", "－": "-", "⁄": "/", "∕": "/"})
_LATEX = [
    (re.compile(r"\\[dt]?frac\s*\{([^{}]{1,50})\}\s*\{([^{}]{1,50})\}"), r" \1/\2 "),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"(?<=\d)\\[,!;:]\s?(?=\d{3})"), ","),
    (re.compile(r"\\([%$])"), r"\1"),
    (re.compile(r"\\(?:times|cdot)"), "×"),
]
_SUPER = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_FROM_SUPER = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "+-0123456789")
_WHOLE = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_RAISED = r"\s?(?:\^|\*\*)\s?\{?"
_NUMBER = re.compile(
    rf"""
    (?<![\w./])  # not inside a word, a version or a date
    (?:(?<![^\s(\[{{=:,;$€£¥+|*~<>"'`])(?P<sign>[-+])\s?)?  # no minus behind a word: GPT-4
    [$€£¥]?\s?(?P<sign2>-)?
    (?:
        (?:(?P<whole>\d{{1,3}})\s+)?(?P<top>{_WHOLE})\s?/\s?(?P<bottom>{_WHOLE})(?!\s?/\s?\d)
      | (?P<plain>{_WHOLE}(?:\.\d+)?|\.\d+)
        (?:
            [eE](?P<exp>[-+]?\d{{1,4}})(?!\w)
          | \s?[×x*]\s?10{_RAISED}(?P<power>[-+]?\d{{1,4}})\}}?
          | {_RAISED}(?P<raised>[-+]?\d{{1,4}})\}}?
        )?
        (?!\s?/\s?\d)
    )
    (?![eE][-+]?\d|\.?\d)
    \s?(?P<percent>%|percent\b|per\s?cent\b)?
    """,
    re.VERBOSE | re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it was written."""

    value: Fraction
    """Its value; for ``12%`` it is 12."""
    percent: bool = False


@dataclass(frozen=True)
class NumericMatch(AnswerReward):
    r"""1 if the answer is the right number, else 0.

    The number is the one in the last ``\boxed{…}``, or the last one of the text. Two numbers agree
    if ``|a - b| ≤ max(abs_tol, rel_tol · max(|a|, |b|))``, as in :func:`math.isclose`. ``12%``
    agrees with ``0.12`` and with ``12``, but with another percentage only if they are equal.
    """

    rel_tol: float = 1e-12
    """Difference that is allowed, as a share of the larger number."""
    abs_tol: float = 0.0
    """Difference that is allowed in any case."""

    def __post_init__(self) -> None:
        if not (0 <= self.rel_tol < 1 and 0 <= self.abs_tol < float("inf")):
            raise ConfigError(
                f"tolerances must be ≥ 0, rel_tol < 1, not {self.rel_tol} and {self.abs_tol}"
            )

    def compare(self, answer: str, gold: Any) -> float:
        """Return 1.0 or 0.0; 0.0 if either text holds no number."""
        found, right = read_number(answer), read_number(str(gold))
        if found is None or right is None:
            return 0.0
        pairs = [(found.value, right.value)]
        if found.percent != right.percent:
            share = Fraction(1, 100)
            pairs.append(
                (found.value * share, right.value)
                if found.percent
                else (found.value, right.value * share)
            )
        return float(any(self._close(a, b) for a, b in pairs))

    def _close(self, a: Fraction, b: Fraction) -> bool:
        allowed = max(Fraction(self.abs_tol), Fraction(self.rel_tol) * max(abs(a), abs(b)))
        return abs(a - b) <= allowed


def read_number(text: str) -> Number | None:
    r"""Return the number in the last ``\boxed{…}``, or else the last one of a text."""
    inner = boxed(text)
    texts = [text] if inner is None else [inner, text]
    for each in texts:
        *_, last = [None, *_numbers(_simplified(each))]
        if last is not None:
            return last
    return None


def _numbers(text: str) -> Iterator[Number]:
    for match in _NUMBER.finditer(text):
        value = _value(match)
        if value is not None:
            yield Number(value, match["percent"] is not None)


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > _MOST_DIGITS:
        return None
    if match["top"] is not None:
        bottom = int(match["bottom"].replace(",", ""))
        if not bottom:
            return None
        value = int(match["whole"] or 0) + Fraction(int(match["top"].replace(",", "")), bottom)
        if match["whole"] is not None and value >= int(match["whole"]) + 1:
            value -= int(match["whole"])  # no mixed number: another one stands before it
    else:
        value = Fraction(match["plain"].replace(",", ""))
        power, raised = int(match["exp"] or match["power"] or 0), int(match["raised"] or 1)
        too_large = abs(power) > _MOST_EXPONENT or abs(raised) * len(match["plain"]) > _MOST_DIGITS
        if too_large or (raised < 0 and not value):
            return None
        value = value**raised * Fraction(10) ** power
    negative = (match["sign"] == "-") != (match["sign2"] is not None)
    return -value if negative else value


def _simplified(text: str) -> str:
    if not text.isascii():
        text = _SUPER.sub(lambda found: "^" + found[0].translate(_FROM_SUPER), text)
        text = "".join(map(_ascii_number, text)).translate(_MINUS)
    if "\\" in text or "{" in text:
        for pattern, replacement in _LATEX:
            text = pattern.sub(replacement, text)
    return text


def _ascii_number(char: str) -> str:
    """Return digits of any script as ASCII, and ½ as `` 1/2``."""
    if char.isascii():
        return char
    digit = unicodedata.decimal(char, None)
    if digit is not None:
        return str(digit)
    if unicodedata.decomposition(char).startswith("<fraction>"):
        return " " + unicodedata.normalize("NFKC", char)
    return char


numeric_match = NumericMatch()

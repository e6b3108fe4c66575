"""The side of :class:`~relax_agent.envs.rewards.mathematics.MathEqual` that may hang.

Imported in worker processes only: it needs math-verify, and sympy with it. Time-outs of its own
are switched off, because they rest on signals, which do not interrupt everything; the parent kills
the process.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that nothing limits its time

_HOW = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
_DELIMITED = re.compile(r"\$|\\boxed|\\\(|\\\[|\\begin\{")
_PROSE = re.compile(
    r"(?<![\\A-Za-z])(?!(?:sqrt|sin|cos|tan|cot|sec|csc|log|exp|arcsin|arccos|arctan)\b)[A-Za-z]{3,}"
)
_MOST_CHARS = 400


def math_equal(answer: str, golds: Sequence[str], float_rounding: int) -> bool:
    """Tell whether the last mathematical expression of ``answer`` equals one of ``golds``."""
    found = read(answer)
    return bool(found) and any(
        verify(read(gold), found, float_rounding=float_rounding, timeout_seconds=None)
        for gold in golds
    )


def read(text: str) -> list[Any]:
    """Return what math-verify finds in a text; a text that is a bare expression is one."""
    bare = len(text) <= _MOST_CHARS and "\n" not in text.strip()
    if bare and not _DELIMITED.search(text) and not _PROSE.search(text):
        found = _parse(f"\\boxed{{{text}}}")
        if found:
            return found
    return _parse(text)


def _parse(text: str) -> list[Any]:
    return list(parse(text, extraction_config=_HOW, parsing_timeout=None))


# The first time builds grammars for 0.1 s: part of a worker's start, not of somebody's limit.
math_equal(r"$\frac{1}{2}x^2=\sqrt{3}$", ["1"], 6)

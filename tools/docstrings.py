"""Docstrings as descriptions: Google, NumPy and reStructuredText style.

The model reads the first paragraphs; what is said of each parameter becomes its description. A
docstring that describes a parameter which does not exist is out of date, and a model would be
misled: it is refused.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import docstring_parser

from relax_agent.errors import ToolDeclarationError

_PARAMETER = {"param", "parameter", "arg", "argument", "key", "keyword"}
_NAME = re.compile(r"\*{0,2}(\w+)")


def describe(function: Callable[..., Any], name: str) -> tuple[str, dict[str, str]]:
    """Return a function's description and the description of each parameter that has one.

    Args:
        function: What has the docstring.
        name: What messages call it.

    Raises:
        ToolDeclarationError: The docstring cannot be read.
    """
    try:
        parsed = docstring_parser.parse(inspect.getdoc(function) or "")
    except docstring_parser.ParseError as error:
        raise ToolDeclarationError(
            f"tool {name}: its docstring cannot be read: {error}",
            hint="write it in Google, NumPy or reStructuredText style",
        ) from None
    pieces = [parsed.short_description, parsed.long_description]
    text = "\n\n".join(piece.strip() for piece in pieces if piece)
    described: dict[str, str] = {}
    for each in parsed.params:
        if each.args[0] in _PARAMETER:
            words = " ".join((each.description or "").split())
            described |= dict.fromkeys(_names(each.arg_name), words)
    return text, described


def _names(written: str) -> list[str]:
    """Split what NumPy style allows: several parameters on one line."""
    found = [_NAME.match(part.strip()) for part in written.split(",")]
    return [each[1] for each in found if each]


def check_described(name: str, described: Iterable[str], parameters: Iterable[str]) -> None:
    """Raise ToolDeclarationError if a parameter is described that does not exist."""
    known = list(parameters)
    unknown = [each for each in described if each not in known]
    if unknown:
        raise ToolDeclarationError(
            f"tool {name}: its docstring describes '{unknown[0]}', which is no parameter",
            hint=f"its parameters are: {', '.join(known) or 'none'}",
        )

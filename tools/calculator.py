"""A calculator that never rounds: integers and fractions, + - * / and parentheses.

The expression is read by a hand-written recursive-descent parser; nothing of it is ever executed
as Python. Every value is a :class:`fractions.Fraction`. A result that is whole prints as an
integer, one with a finite decimal expansion of at most 12 places as a decimal (``0.125``), any
other as a reduced fraction (``22/7``). Length and nesting are limited. There are no powers, so a
result has hardly more digits than the expression, and a call takes microseconds at most.
"""

from __future__ import annotations

import re
from fractions import Fraction

from relax_agent.errors import ToolError, ToolErrorKind
from relax_agent.tools.declaration import tool

MAX_LENGTH = 200
"""Characters of an expression."""
MAX_DEPTH = 32
"""Nested parentheses and signs."""
_PLACES = 12

_TOKEN = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]+)?|\.[0-9]+)|([-+*/()]))", re.ASCII)
_LOOKALIKES = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})


def evaluate(expression: str) -> Fraction:
    """Return the exact value of an arithmetic expression, or raise ToolError."""
    if len(expression) > MAX_LENGTH:
        raise _wrong(f"the expression is longer than {MAX_LENGTH} characters")
    parser = _Parser(_tokens(expression.translate(_LOOKALIKES)))
    value = parser.sum(0)
    if parser.next is not None:
        raise _wrong(f"expected an operator, found '{parser.next}'")
    return value


def format_number(value: Fraction) -> str:
    """Print a value exactly: an integer, a short decimal, or a reduced fraction."""
    if value.denominator == 1:
        return str(value.numerator)
    scaled = value * 10**_PLACES
    if scaled.denominator != 1:
        return f"{value.numerator}/{value.denominator}"
    whole, part = divmod(abs(scaled.numerator), 10**_PLACES)
    digits = f"{part:0{_PLACES}d}".rstrip("0")
    return f"{'-' if value < 0 else ''}{whole}.{digits}"


@tool(inline=True, idempotent=True)
def calculator(expression: str) -> str:
    """Compute an arithmetic expression exactly.

    Args:
        expression: Numbers with + - * / and parentheses.
    """
    return format_number(evaluate(expression))


def _wrong(message: str) -> ToolError:
    return ToolError(message, kind=ToolErrorKind.INVALID_ARGUMENTS)


def _tokens(text: str) -> list[str]:
    out, position, text = [], 0, text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            rest = text[position:].lstrip()
            raise _wrong(f"cannot read '{rest[:10]}'; use numbers with + - * / and parentheses")
        out.append(match[1] or match[2])
        position = match.end()
    return out


class _Parser:
    """Recursive descent: sum := product (± product)*, product := factor (×÷ factor)*."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._position = 0

    @property
    def next(self) -> str | None:
        """The token to read next; None at the end."""
        return self._tokens[self._position] if self._position < len(self._tokens) else None

    def take(self) -> str:
        """Read one token."""
        token = self.next
        if token is None:
            raise _wrong("the expression ends too early")
        self._position += 1
        return token

    def sum(self, depth: int) -> Fraction:
        """Read products joined by + and -."""
        value = self.product(depth)
        while self.next in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            value += sign * self.product(depth)
        return value

    def product(self, depth: int) -> Fraction:
        """Read factors joined by * and /."""
        value = self.factor(depth)
        while self.next in ("*", "/"):
            operator, right = self.take(), self.factor(depth)
            if operator == "/" and right == 0:
                raise _wrong("division by zero")
            value = value * right if operator == "*" else value / right
        return value

    def factor(self, depth: int) -> Fraction:
        """Read a number, a signed factor or a sum in parentheses."""
        if depth > MAX_DEPTH:
            raise _wrong(f"more than {MAX_DEPTH} nested parentheses or signs")
        token = self.take()
        if token in ("+", "-"):
            value = self.factor(depth + 1)
            return -value if token == "-" else value
        if token == "(":
            value = self.sum(depth + 1)
            if self.next != ")":
                raise _wrong("a ')' is missing")
            self.take()
            return value
        if token in ("*", "/", ")"):
            raise _wrong(f"expected a number, found '{token}'")
        return Fraction(token)

"""Python literals and keyword arguments as data. Nothing is ever run.

The text is parsed to a syntax tree, and only constants, lists, tuples, dicts with string keys and
signs before numbers are read from it; ``true``, ``false`` and ``null`` too, which models mix in.
Everything else, a name, a call, an expression, is a ValueError.
"""

from __future__ import annotations

import ast
import re
from typing import Any

_MAX_CODE = 100_000
"""Characters outside of strings: a syntax tree takes hundreds of bytes for each."""
_NAMES = {"true": True, "false": False, "null": None}
_STRING = re.compile(
    r"""(?P<prefix>\b[A-Za-z]{1,2})?(?P<body>'''(?:[^'\\]|\\.|'(?!''))*'''"""
    r'''|"""(?:[^"\\]|\\.|"(?!""))*"""|'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")''',
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_KNOWN_ESCAPES = frozenset("\\'\"abfnrtvxuUN01234567\n\r")


def keyword_arguments(text: str) -> dict[str, Any]:
    """Return the arguments between the brackets of ``f(a=1, b="x")``.

    Raises:
        ValueError: with one line that tells a model what is wrong.
    """
    call = _tree(f"f({text}\n)")
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError("the arguments cannot be read as Python literals")
    if call.args:
        raise ValueError("arguments must be given by name: f(key=value)")
    values: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError("** cannot be used in a call")
        if keyword.arg in values:
            raise ValueError(f"{keyword.arg[:80]!r} is given twice")
        values[keyword.arg] = _value(keyword.value, keyword.arg)
    return values


def literal(text: str) -> Any:
    """Return the value of one literal.

    Raises:
        ValueError: it is none.
    """
    tree = _tree(text.strip())
    if isinstance(tree, ast.Tuple) and not text.lstrip().startswith("("):
        raise ValueError("a comma outside of brackets")  # 1,000
    return _value(tree, "the value")


def _tree(text: str) -> ast.expr:
    if len(text) > _MAX_CODE and len(_STRING.sub("", text)) > _MAX_CODE:
        raise ValueError("it is too long to be read as Python")
    try:
        return ast.parse(_STRING.sub(_plain_escapes, text), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"it is not valid Python: {error.msg}") from None
    except (ValueError, OverflowError, MemoryError, RecursionError):
        raise ValueError("it cannot be read as Python") from None


def _plain_escapes(string: re.Match[str]) -> str:
    r"""Double the backslash of an escape that Python does not know (``\d``): it warns of those."""
    if "r" in (string["prefix"] or "").lower() or "\\" not in string[0]:
        return string[0]
    return _ESCAPE.sub(lambda e: e[0] if e[1] in _KNOWN_ESCAPES else f"\\{e[0]}", string[0])


def _value(node: ast.expr, where: str) -> Any:
    try:
        return _convert(node)
    except RecursionError:
        raise ValueError(f"{where[:80]} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where[:80]}: {error}") from None


def _convert(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_convert(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [_key(key) for key in keys]
            if len(set(names)) < len(names):
                raise ValueError("a key is given twice")
            return dict(zip(names, map(_convert, values), strict=True))
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(
            op=ast.USub() | ast.UAdd() as sign,
            operand=ast.Constant(value=int() | float() as number),
        ) if not isinstance(number, bool):
            return -number if isinstance(sign, ast.USub) else number
    raise ValueError("only literals can be given, no names or expressions")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("the keys of a dict must be strings")

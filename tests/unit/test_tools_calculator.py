"""The calculator: exact, total over any text, and never an interpreter of Python."""

import asyncio
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_agent.errors import ToolError, ToolErrorKind
from relax_agent.messages import ToolCall
from relax_agent.tools import Toolset
from relax_agent.tools.calculator import MAX_DEPTH, calculator, evaluate, format_number


def render(tree) -> str:
    if isinstance(tree, int):
        return str(tree)
    left, operator, right = tree
    return f"({render(left)} {operator}{render(right)})"


def value_of(tree) -> Fraction:
    """The oracle: the tree's value, without any text."""
    if isinstance(tree, int):
        return Fraction(tree)
    left, operator, right = value_of(tree[0]), tree[1], value_of(tree[2])
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    return left * right if operator == "*" else left / right


trees = st.recursive(
    st.integers(-999, 999),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(trees)
def test_agrees_with_exact_arithmetic_on_trees(tree):
    text = render(tree)
    if len(text) > 200:
        return
    try:
        expected = value_of(tree)
    except ZeroDivisionError:
        with pytest.raises(ToolError, match="division by zero"):
            evaluate(text)
    else:
        assert evaluate(text) == expected


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("(17+5)*3", "66"),
        ("17+5*3", "32"),
        ("10-4-3", "3"),
        ("64/4/2", "8"),
        ("-3*-(2+1)", "9"),
        ("2 - -3", "5"),
        ("1/8", "0.125"),
        ("-1/8", "-0.125"),
        ("0.1+0.2", "0.3"),
        ("22/7", "22/7"),
        ("7/-21", "-1/3"),
        (".5*2", "1"),
        ("6 × 7 ÷ 2 − 1", "20"),
        ("0/5", "0"),
        ("9" * 60 + "*" + "9" * 60, str(int("9" * 60) ** 2)),
    ],
)
def test_known_results(expression, result):
    assert calculator(expression) == result


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("", "ends too early"),
        ("1+", "ends too early"),
        ("(1", "a '\\)' is missing"),
        ("1)", "expected an operator, found '\\)'"),
        ("2 3", "expected an operator, found '3'"),
        ("*2", "expected a number, found '\\*'"),
        ("2**3", "expected a number, found '\\*'"),
        ("1/(2-2)", "division by zero"),
        ("1e9", "cannot read 'e9'"),
        ("__import__('os').getcwd()", "cannot read '__import__'"),
        ("(lambda: 1)()", "cannot read 'lambda: 1\\)'"),
        ("٣+1", "cannot read"),
        ("1" * 201, "longer than 200"),
        ("(" * (MAX_DEPTH + 2) + "1" + ")" * (MAX_DEPTH + 2), "nested"),
        ("-" * 199 + "1", "nested"),
    ],
)
def test_what_is_wrong_is_said_in_words(expression, words):
    """T53: nothing that a model writes is ever executed."""
    with pytest.raises(ToolError, match=words) as caught:
        evaluate(expression)
    assert caught.value.kind is ToolErrorKind.INVALID_ARGUMENTS


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="0123456789.+-*/() eax_'", max_size=40))
def test_any_text_gives_a_number_or_a_soft_error(text):
    result = asyncio.run(Toolset([calculator]).call(ToolCall("calculator", {"expression": text})))
    assert result.error in (None, ToolErrorKind.INVALID_ARGUMENTS)
    if result.ok:
        assert evaluate(result.text) is not None


@given(st.fractions())
def test_printing_is_exact(value):
    text = format_number(value)
    if len(text) < 200:
        assert evaluate(text) == value

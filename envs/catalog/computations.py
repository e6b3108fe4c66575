"""What ``relax/PythonInterpreter-v0`` asks: kinds of questions that have to be computed.

Each kind says how it is asked and drawn, computes its gold answer, and has code that solves it in
another way, which the expert runs: the two check each other.
"""

from __future__ import annotations

import calendar
import math
import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of question: how it is asked, drawn, answered, and solved by code."""

    text: str
    draw: Callable[[random.Random], dict[str, Any]]
    answer: Callable[..., object]
    code: str
    """What the expert runs; another way than ``answer`` takes."""


def _letters(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase[:8], k=rng.randint(60, 90)))


def _day(rng: random.Random) -> date:
    return date(1900, 1, 1) + timedelta(days=rng.randrange(70_000))


def _primes(low: int, high: int) -> list[int]:
    return [
        n for n in range(max(2, low), high + 1) if all(n % d for d in range(2, int(n**0.5) + 1))
    ]


def _divisors(count: int, above: int) -> int:
    number = above + 1
    while True:
        small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
        if len({*small, *(number // d for d in small)}) == count:
            return number
        number += 1


def _palindrome(text: str) -> int:
    sizes = range(len(text), 0, -1)
    return next(n for n in sizes for i in range(len(text) - n + 1)
                if text[i : i + n] == text[i : i + n][::-1])  # fmt: skip


def _last_seat(people: int, step: int) -> int:
    seat = 0
    for size in range(2, people + 1):
        seat = (seat + step) % size
    return seat + 1


def _generator(start: int, factor: int, plus: int, modulus: int, steps: int) -> int:
    for _ in range(steps):
        start = (factor * start + plus) % modulus
    return start


KINDS = (
    Kind("What is the sum of all primes from {low} to {high}?",
         lambda r: {"low": (low := r.randint(50, 900)), "high": low + r.randint(100, 400)},
         lambda low, high: sum(_primes(low, high)),
         "sum(n for n in range({low}, {high} + 1) if all(n % d for d in range(2, n)))"),
    Kind("What is the smallest number above {above} with exactly {count} divisors?",
         lambda r: {"above": r.randint(100, 900), "count": r.choice([5, 6, 8, 9, 10, 12])},
         lambda above, count: _divisors(count, above),
         "import itertools\nnext(n for n in itertools.count({above} + 1)\n"
         "     if len([d for d in range(1, n + 1) if not n % d]) == {count})"),
    Kind("What is {base} to the power of {exponent}, modulo {modulus}?",
         lambda r: {"base": r.randint(2, 99), "exponent": r.randint(1000, 99_999),
                    "modulus": r.randint(1000, 9999)},
         pow, "{base} ** {exponent} % {modulus}"),
    Kind("How long is the longest palindrome within {text}?",
         lambda r: {"text": _letters(r)}, _palindrome,
         "s = '{text}'\nbest = 0\nfor i in range(len(s)):\n    for j in range(i, len(s) + 1):\n"
         "        if s[i:j] == s[i:j][::-1]:\n            best = max(best, j - i)\nbest"),
    Kind("How many different three-letter pieces are there within {text}?",
         lambda r: {"text": _letters(r)},
         lambda text: len({text[i : i + 3] for i in range(len(text) - 2)}),
         "s = '{text}'\nlen(set(zip(s, s[1:], s[2:])))"),
    Kind("Which day of the week comes {days} days after {day}?",
         lambda r: {"days": r.randint(100, 9999), "day": _day(r).isoformat()},
         lambda days, day: calendar.day_name[(date.fromisoformat(day).weekday() + days) % 7],
         "from datetime import date, timedelta\n"
         "print((date.fromisoformat('{day}') + timedelta({days})).strftime('%A'))"),
    Kind("How many Fridays the 13th are there from {first} to {last}, both years included?",
         lambda r: {"first": (y := r.randint(1900, 2050)), "last": y + r.randint(5, 40)},
         lambda first, last: sum(calendar.weekday(y, m, 13) == 4
                                 for y in range(first, last + 1) for m in range(1, 13)),
         "from datetime import date\nsum(date(y, m, 13).isoweekday() == 5\n"
         "    for y in range({first}, {last} + 1) for m in range(1, 13))"),
    Kind("{people} people sit in a circle, numbered from 1. Counting from person 1, every {step}th "
         "leaves until one is left. Which number is left?",
         lambda r: {"people": r.randint(20, 300), "step": r.randint(4, 19)}, _last_seat,
         "ring, i = list(range(1, {people} + 1)), 0\nwhile len(ring) > 1:\n"
         "    i = (i + {step} - 1) % len(ring)\n    ring.pop(i)\nring[0]"),
    Kind("Start with {start}. In each step multiply by {factor}, add {plus} and keep the remainder "
         "of a division by {modulus}. What is there after {steps} steps?",
         lambda r: {"start": r.randint(1, 99), "factor": r.randint(3, 99),
                    "plus": r.randint(1, 99), "modulus": r.randint(1000, 9999),
                    "steps": r.randint(20, 200)},
         _generator,
         "x = {start}\nfor _ in range({steps}):\n    x = (x * {factor} + {plus}) % {modulus}\nx"),
)  # fmt: skip

"""The data behind ``relax/SQL-v0``: a shop's ledger, and questions with answers known beforehand.

Customers, products, orders and order lines are drawn from a seed, and so are the names of tables
and columns: only the schema tells them. Gold answers are computed here in Python, from the same
rows but without SQL, so a wrong join cannot agree with itself.
"""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from relax_agent.envs.tasks import Task

WORDS = {
    "customers": ("customers", "clients", "buyers"),
    "town": ("town", "city", "place"),
    "products": ("products", "articles", "goods"),
    "price": ("price", "unit_price", "cost"),
    "orders": ("orders", "purchases", "bookings"),
    "year": ("year", "ordered_in", "season"),
    "lines": ("order_lines", "positions", "entries"),
    "count": ("quantity", "amount", "pieces"),
}
"""The names that tables and columns may have."""
TOWNS = ("Arden", "Brill", "Corby", "Dale", "Esk")
PEOPLE = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gwen", "Hugo", "Ines", "Jack", "Kim", "Leo")
PRODUCTS = ("anvil", "broom", "candle", "drum", "easel", "flute", "globe", "hammer", "inkwell")
YEARS = (2019, 2020, 2021, 2022)


@dataclass(frozen=True)
class Ledger:
    """The rows of all tables, and what they are called."""

    words: dict[str, str]
    customers: dict[str, str]
    """The town of each name; ids count from 1 in this order, here and below."""
    products: dict[str, int]
    """The price of each name."""
    orders: list[tuple[int, int]]
    """Customer's id and year."""
    lines: list[tuple[int, int, int]]
    """Order's id, product's id and count."""

    @classmethod
    def draw(cls, rng: random.Random) -> Ledger:
        """Draw a ledger of about a hundred and fifty rows."""
        people = rng.sample(PEOPLE, rng.randint(8, len(PEOPLE)))
        goods = rng.sample(PRODUCTS, rng.randint(6, len(PRODUCTS)))
        orders = [(rng.randint(1, len(people)), rng.choice(YEARS)) for _ in range(40)]
        lines = {
            (rng.randint(1, 40), rng.randint(1, len(goods))): rng.randint(1, 9) for _ in range(90)
        }
        return cls(
            {word: rng.choice(names) for word, names in WORDS.items()},
            {name: rng.choice(TOWNS) for name in people},
            {name: rng.randint(2, 99) for name in goods},
            orders,
            [(*pair, count) for pair, count in lines.items()],
        )

    def build(self, database: sqlite3.Connection) -> None:
        """Create and fill the tables."""
        database.executescript(SCRIPT.format(**self.words))
        for table, rows in {
            "customers": self.customers.items(),
            "products": self.products.items(),
            "orders": self.orders,
            "lines": self.lines,
        }.items():
            for number, row in enumerate(rows, 1):
                marks = ", ".join("?" * (len(row) + 1))
                database.execute(
                    f"INSERT INTO {self.words[table]} VALUES ({marks})", (number, *row)
                )

    def sales(self) -> list[tuple[str, str, int, int]]:
        """Return (customer, product, year, count) for each order line."""
        people, goods = list(self.customers), list(self.products)
        return [
            (
                people[self.orders[order - 1][0] - 1],
                goods[product - 1],
                self.orders[order - 1][1],
                count,
            )
            for order, product, count in self.lines
        ]

    def spent(self) -> Counter[str]:
        """Return what each customer has paid in all."""
        paid: Counter[str] = Counter()
        for customer, product, _, count in self.sales():
            paid[customer] += self.products[product] * count
        return paid


SCRIPT = """
CREATE TABLE {customers} (id INTEGER PRIMARY KEY, name TEXT, {town} TEXT);
CREATE TABLE {products} (id INTEGER PRIMARY KEY, name TEXT, {price} INTEGER);
CREATE TABLE {orders} (id INTEGER PRIMARY KEY, who INTEGER REFERENCES {customers}, {year} INTEGER);
CREATE TABLE {lines} (id INTEGER PRIMARY KEY, in_order INTEGER REFERENCES {orders},
    what INTEGER REFERENCES {products}, {count} INTEGER);
"""
JOINED = """FROM {lines} l JOIN {orders} o ON o.id = l.in_order
JOIN {customers} c ON c.id = o.who JOIN {products} p ON p.id = l.what"""


class Question(NamedTuple):
    """A kind of question. ``{it}`` is what it is about."""

    level: int
    """How many tables it takes, about."""
    text: str
    choose: Callable[[Ledger], Any]
    """What it may be about."""
    answer: Callable[[Ledger, Any], Any]
    """The gold answer, without SQL; None where there is no single one."""
    sql: str
    """A query that finds the answer; only an expert ever sees it."""


def _best(ledger: Ledger, town: str) -> str | None:
    spent = ledger.spent()
    paid = Counter({name: spent[name] for name, home in ledger.customers.items() if home == town})
    (name, most), (_, second) = [*paid.most_common(2), ("", 0), ("", 0)][:2]
    return name if most > second else None


QUESTIONS = (
    Question(
        1,
        "How many customers live in {it}?",
        lambda ledger: TOWNS,
        lambda ledger, it: list(ledger.customers.values()).count(it),
        "SELECT count(*) FROM {customers} WHERE {town} = '{it}'",
    ),
    Question(
        1,
        "What does one {it} cost?",
        lambda ledger: ledger.products,
        lambda ledger, it: ledger.products[it],
        "SELECT {price} FROM {products} WHERE name = '{it}'",
    ),
    Question(
        2,
        "How many orders did {it} place?",
        lambda ledger: ledger.customers,
        lambda ledger, it: sum([*ledger.customers][who - 1] == it for who, _ in ledger.orders),
        "SELECT count(*) FROM {orders} o JOIN {customers} c ON c.id = o.who WHERE c.name = '{it}'",
    ),
    Question(
        3,
        "How many pieces were sold in {it}, all products together?",
        lambda ledger: YEARS,
        lambda ledger, it: sum(count for _, _, year, count in ledger.sales() if year == it),
        "SELECT sum(l.{count}) FROM {lines} l JOIN {orders} o ON o.id = l.in_order"
        " WHERE o.{year} = {it}",
    ),
    Question(
        4,
        "How much did {it} spend in all?",
        lambda ledger: ledger.customers,
        lambda ledger, it: ledger.spent()[it],
        f"SELECT sum(p.{{price}} * l.{{count}}) {JOINED} WHERE c.name = '{{it}}'",
    ),
    Question(
        4,
        "Which customer from {it} spent the most in all?",
        lambda ledger: TOWNS,
        _best,
        f"SELECT c.name {JOINED} WHERE c.{{town}} = '{{it}}'"
        " GROUP BY c.id ORDER BY sum(p.{price} * l.{count}) DESC LIMIT 1",
    ),
)


def draw(rng: random.Random, level: int) -> Task:
    """Draw a ledger and a question about it that has one answer, and not a trivial one."""
    while True:
        ledger = Ledger.draw(rng)
        question = rng.choice([each for each in QUESTIONS if each.level <= level])
        it = rng.choice([*question.choose(ledger)])
        if answer := question.answer(ledger, it):
            return Task("", question.text.format(it=it), answer, {"ledger": ledger})

"""A small invented world and the pages that tell it: the corpus of ``relax/Search-v0``.

Towns, people, companies and works are drawn from a seed, with ten relations between them. Every
subject has one page with its own facts, in shuffled order and in one of several wordings, so the
words of a question rarely stand beside the answer. The names are invented: no model knows them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from relax_agent.tools.search import Document


class Relation(NamedTuple):
    """A kind of fact: ``{s}`` is the subject, ``{o}`` the object of a wording."""

    subject: str
    object: str
    phrase: str
    """How a question names the object; ``{}`` stands for the subject."""
    wordings: tuple[str, ...]
    """How a page states the fact."""


RELATIONS = {
    "birthplace": Relation(
        "person",
        "town",
        "the town where {} was born",
        ("{s} was born in {o}.", "A native of {o}, {s} left home early.", "{o} raised {s}."),
    ),
    "birth": Relation(
        "person",
        "year",
        "the year in which {} was born",
        ("{s} came into the world in {o}.", "Church books of {o} list {s} as newborn."),
    ),
    "employer": Relation(
        "person",
        "company",
        "the company that employs {}",
        ("{s} works for {o}.", "For years {o} has paid the wages of {s}.", "{o} hired {s}."),
    ),
    "founder": Relation(
        "company",
        "person",
        "the founder of {}",
        ("{s} was founded by {o}.", "It was {o} who set up {s}.", "{s} was the idea of {o}."),
    ),
    "seat": Relation(
        "company",
        "town",
        "the town where {} has its seat",
        ("The head office of {s} is in {o}.", "From {o}, {s} runs its business."),
    ),
    "product": Relation(
        "company",
        "product",
        "the main product of {}",
        ("{s} mainly makes {o}.", "Most of what {s} sells is {o}.", "Think of {s}, think of {o}."),
    ),
    "river": Relation(
        "town",
        "river",
        "the river that flows through {}",
        ("The {o} flows through {s}.", "{s} lies on the banks of the {o}."),
    ),
    "mayor": Relation(
        "town",
        "person",
        "the mayor of {}",
        ("The mayor of {s} is {o}.", "{s} is governed by {o}.", "Last spring {s} elected {o}."),
    ),
    "author": Relation(
        "work",
        "person",
        "the author of {}",
        ("{s} was written by {o}.", "Critics call {s} the masterpiece of {o}."),
    ),
    "appeared": Relation(
        "work",
        "year",
        "the year in which {} appeared",
        ("The first edition of {s} dates from {o}.", "Readers first met {s} in {o}."),
    ),
}
KINDS = ("town", "person", "company", "work")
"""What has a page of its own."""
_SHARES = {"town": 0.2, "person": 0.45, "company": 0.15, "work": 0.2, "river": 0.1}
_PADDING = (
    "Little else is recorded.",
    "Letters of the time confirm this.",
    "Opinions differ on the rest.",
    "A plaque recalls it.",
    "The older archive burnt down.",
)
_SYLLABLES = ("bar", "bel", "dor", "fen", "gal", "hol", "iv", "jor", "kas", "lim", "mor",
              "nal", "os", "pel", "quin", "ras", "sul", "tor", "ul", "ven")  # fmt: skip
_WARES = ("kettles", "chairs", "lamps", "flutes", "clocks", "anchors", "saddles", "kites")
_STUFF = ("copper", "oak", "glass", "silk", "iron")
_THINGS = ("Garden", "Winter", "Mirror", "Harbour", "Orchard", "Letter", "Station", "Violin")


class World:
    """All names by kind, and the object of each (relation, subject)."""

    def __init__(self, pages: int, seed: int) -> None:
        rng = random.Random(seed)
        self.names = {kind: _names(kind, int(pages * _SHARES[kind]), rng) for kind in _SHARES}
        self.names["product"] = [f"{stuff} {ware}" for stuff in _STUFF for ware in _WARES]
        self.names["year"] = [str(year) for year in range(1820, 1990)]
        self.facts = {
            (key, subject): rng.choice(self.names[relation.object])
            for key, relation in RELATIONS.items()
            for subject in self.names[relation.subject]
        }
        self.pages = list(self._pages(rng))

    def _pages(self, rng: random.Random) -> Iterator[Document]:
        subjects = [name for kind in KINDS for name in self.names[kind]]
        for number, subject in enumerate(rng.sample(subjects, len(subjects))):
            told = [
                rng.choice(RELATIONS[key].wordings).format(s=subject, o=object)
                for (key, name), object in self.facts.items()
                if name == subject
            ]
            told += rng.sample(_PADDING, 2)
            yield Document(f"p{number:03}", subject, " ".join(rng.sample(told, len(told))))


def _names(kind: str, count: int, rng: random.Random) -> list[str]:
    """Return different names in the order drawn."""
    names: dict[str, None] = {}
    while len(names) < max(2, count):
        names[_name(kind, rng)] = None
    return list(names)


def _name(kind: str, rng: random.Random) -> str:
    first = "".join(rng.choices(_SYLLABLES, k=2)).capitalize()
    if kind == "person":
        return f"{first} {''.join(rng.choices(_SYLLABLES, k=2)).capitalize()}"
    if kind == "company":
        return f"{first} {rng.choice(['Works', 'Brothers', 'Trading', 'and Sons'])}"
    if kind == "work":
        return f"The {rng.choice(_THINGS)} of {first}"
    return f"{first}{rng.choice(['ford', 'stead', 'mouth', 'wick'])}" if kind == "town" else first

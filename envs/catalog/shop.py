"""The shop behind ``relax/ShopOrder-v0``: offers, coupons, a cart, and what a customer wants.

A :class:`Wish` is drawn from a seed; its budget is what the order costs if every piece comes from
the cheapest offer that still has it and the better coupon is used. A :class:`Shop` has the tools
and the state that they change; what is asked for before its time is refused and counted.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from relax_agent.envs.tasks import Task
from relax_agent.errors import ToolError, ToolErrorKind
from relax_agent.tools import Tool, tool

COLOURS = ("red", "blue", "green", "white")
THINGS = ("mug", "lamp", "rug", "bowl", "vase", "clock")
CODES = ("SPRING", "WELCOME", "FRIENDS", "SUNDAY", "THANKS")
NAMES = ("Ada Brill", "Ben Corby", "Cleo Dale", "Dan Esk", "Eve Arden", "Finn Hale")
STREETS = ("Mill Lane", "High Street", "Station Road", "Church Hill")
TOWNS = ("Arden", "Brill", "Corby", "Dale")

_WORDS = {*COLOURS, *THINGS}

Address: TypeAlias = tuple[str, str, str]
"""Name, street and town."""


@dataclass(frozen=True)
class Offer:
    """Something to buy."""

    name: str
    price: int
    stock: int

    @property
    def words(self) -> set[str]:
        """The words of the name."""
        return set(self.name.split())


@dataclass(frozen=True)
class Coupon:
    """Money off an order of at least ``minimum``."""

    off: int
    in_percent: bool
    minimum: int

    def saves(self, total: int) -> int:
        """Return what the coupon takes off a total."""
        if total < self.minimum:
            return 0
        return total * self.off // 100 if self.in_percent else min(self.off, total)


@dataclass(frozen=True)
class Wish:
    """What the customer wants, and the shop that sells it."""

    counts: dict[str, int]
    address: Address
    offers: dict[str, Offer]
    coupons: dict[str, Coupon]
    budget: int

    @property
    def text(self) -> str:
        """The customer's words."""
        things = " and ".join(f"{count} × {name}" for name, count in self.counts.items())
        coupons = " and ".join(self.coupons)
        return (
            f"Please order {things} for {', '.join(self.address)}."
            f" It may cost {self.budget} at most."
            f" I have two coupons, of which an order takes one: {coupons}."
        )


def draw(rng: random.Random, things: int) -> Task:
    """Draw a wish for so many different things that the shop can fulfil."""
    names = [f"{colour} {thing}" for colour in COLOURS for thing in THINGS]
    while True:
        counts = {name: rng.randint(1, 3) for name in rng.sample(names, things)}
        offers = [
            Offer(name, rng.randint(4, 40), rng.randint(1, 4)) for name in names for _ in range(3)
        ]
        shelf = {f"A{n:02}": offer for n, offer in enumerate(rng.sample(offers, len(offers)), 10)}
        total = sum(shelf[id].price * count for id, count in cheapest(counts, shelf))
        percent = Coupon(rng.randint(10, 30), True, rng.randint(10, 60))
        fixed = Coupon(rng.randint(4, 20), False, rng.randint(10, 60))
        codes = dict(zip(rng.sample(CODES, 2), rng.sample([percent, fixed], 2), strict=True))
        saved = sorted(coupon.saves(total) for coupon in codes.values())
        enough = all(sum(o.stock for o in offers if o.name == n) >= c for n, c in counts.items())
        if enough and saved[0] < saved[1]:
            street = f"{rng.randint(1, 99)} {rng.choice(STREETS)}"
            address = (rng.choice(NAMES), street, rng.choice(TOWNS))
            wish = Wish(counts, address, shelf, codes, total - saved[1])
            return Task("", wish.text, data={"wish": wish})


def cheapest(counts: dict[str, int], offers: dict[str, Offer]) -> Iterator[tuple[str, int]]:
    """Yield (id, count) of what to buy: the cheapest offers first, as far as their stock goes."""
    for name, count in counts.items():
        for id, offer in sorted(offers.items(), key=lambda item: item[1].price):
            if offer.name == name and count:
                taken = min(count, offer.stock)
                count -= taken
                yield id, taken


class Shop:
    """One visit at a time: the cart and the order as they stand, and the tools that change them."""

    def __init__(self, wish: Wish) -> None:
        self.open(wish)

    def open(self, wish: Wish) -> None:
        """Begin a new visit."""
        self._wish = wish
        self.cart: Counter[str] = Counter()
        self.coupon: str | None = None
        self.address: Address | None = None
        self.placed = False
        self.missteps = 0

    @property
    def tools(self) -> list[Tool[..., Any]]:
        """Everything that a model may do here."""
        cart: list[Tool[..., Any]] = [self.search_items, self.add_to_cart, self.remove_from_cart]
        return [*cart, self.coupon_info, self.apply_coupon, self.set_address, self.checkout]

    @tool(inline=True)
    def search_items(self, query: str) -> dict[str, Offer] | str:
        """Find items by words of their name. Gives name, price and stock under each item's id.

        Args:
            query: For example "red mug".
        """
        wanted = {word.rstrip("s") for word in query.lower().split()}
        offers = self._wish.offers.items()
        found = {id: offer for id, offer in offers if wanted & _WORDS and wanted <= offer.words}
        return found or "Nothing has all these words in its name."

    @tool(inline=True)
    def add_to_cart(self, item_id: str, count: int = 1) -> str:
        """Put pieces of an item into the cart.

        Args:
            item_id: The id that the search gave.
            count: How many pieces.
        """
        return self._change(item_id, count, 1)

    @tool(inline=True)
    def remove_from_cart(self, item_id: str, count: int = 1) -> str:
        """Take pieces of an item out of the cart.

        Args:
            item_id: The item's id.
            count: How many pieces.
        """
        return self._change(item_id, count, -1)

    @tool(inline=True)
    def coupon_info(self, code: str) -> Coupon:
        """Tell what a coupon takes off, in money or in percent, and from which total on.

        Args:
            code: The coupon's name.
        """
        if code not in self._wish.coupons:
            raise _wrong(f"there is no coupon {code[:20]!r}")
        return self._wish.coupons[code]

    @tool(inline=True)
    def apply_coupon(self, code: str) -> str:
        """Use a coupon for the cart as it is; it replaces an earlier one.

        Args:
            code: The coupon's name.
        """
        minimum = self.coupon_info(code).minimum
        self._check_open()
        if self._sum() < minimum:
            raise self._too_early(
                f"{code} takes an order of {minimum} or more; fill the cart first"
            )
        self.coupon = code
        return self._describe()

    @tool(inline=True)
    def set_address(self, name: str, street: str, town: str) -> str:
        """Say where the order goes.

        Args:
            name: Who gets it.
            street: Number and street.
            town: The town.
        """
        self._check_open()
        self.address = (name.strip(), street.strip(), town.strip())
        return f"The order goes to {', '.join(self.address)}."

    @tool(inline=True)
    def checkout(self) -> str:
        """Place the order. This is final."""
        self._check_open()
        if not self.cart:
            raise self._too_early("the cart is empty; add items first")
        if self.address is None:
            raise self._too_early("there is no address; set it first")
        self.placed = True
        return f"The order is placed. {self._describe()}"

    @property
    def total(self) -> int:
        """What is to pay."""
        total = self._sum()
        return total - (self._wish.coupons[self.coupon].saves(total) if self.coupon else 0)

    @property
    def has_wanted_things(self) -> bool:
        """Whether the cart holds what the customer wants, and nothing else."""
        counts: Counter[str] = Counter()
        for id, count in self.cart.items():
            counts[self._wish.offers[id].name] += count
        return counts == Counter(self._wish.counts)

    @property
    def has_wanted_address(self) -> bool:
        """Whether the address is the customer's, in whatever case."""
        return f"{self.address}".casefold() == f"{self._wish.address}".casefold()

    @property
    def is_within_budget(self) -> bool:
        """Whether the customer can pay."""
        return self.total <= self._wish.budget

    def _sum(self) -> int:
        return sum(self._wish.offers[id].price * count for id, count in self.cart.items())

    def _change(self, id: str, count: int, sign: int) -> str:
        self._check_open()
        if id not in self._wish.offers:
            raise _wrong(f"there is no item {id[:20]!r}; search for the id")
        stock, held = self._wish.offers[id].stock, self.cart[id]
        if count < 1 or not 0 <= held + sign * count <= stock:
            raise _wrong(f"of {id} there are {stock} pieces, {held} of them in the cart")
        self.cart[id] = held + sign * count
        self.cart += Counter()  # drops what is down to 0
        lost, self.coupon = self.coupon, None
        return self._describe() + (f" {lost} is no longer applied." if lost else "")

    def _describe(self) -> str:
        lines = [f"{n} × {self._wish.offers[id].name} ({id})" for id, n in self.cart.items()]
        coupon = f", coupon {self.coupon}" if self.coupon else ""
        return f"Cart: {', '.join(lines) or 'empty'}{coupon}. To pay: {self.total}."

    def _check_open(self) -> None:
        if self.placed:
            raise ToolError("the order is placed and final", kind=ToolErrorKind.DENIED)

    def _too_early(self, words: str) -> ToolError:
        self.missteps += 1
        return ToolError(words, kind=ToolErrorKind.DENIED)


def _wrong(words: str) -> ToolError:
    return ToolError(words, kind=ToolErrorKind.INVALID_ARGUMENTS)

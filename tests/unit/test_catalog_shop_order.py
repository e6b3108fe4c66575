"""ShopOrder: the state of the order counts, not what is said; calls before their time cost."""

import asyncio
import json

import pytest

from relax_agent.envs import ScriptedPolicy, make, play
from relax_agent.envs.catalog.shop import Coupon, Offer, Shop, Wish
from relax_agent.errors import ToolError
from relax_agent.messages import ToolCall

ADDRESS = {"name": "Ada", "street": "1 Mill Lane", "town": "Dale"}
WISH = Wish(
    counts={"red mug": 3},
    address=("Ada", "1 Mill Lane", "Dale"),
    offers={
        "A1": Offer("red mug", 5, 2),
        "A2": Offer("red mug", 8, 4),
        "A3": Offer("blue mug", 1, 4),
    },
    coupons={"TEN": Coupon(10, True, 10), "FOUR": Coupon(4, False, 18)},
    budget=14,
)


@pytest.fixture
def env(monkeypatch):
    made = make("relax/ShopOrder-v0")
    monkeypatch.setattr(made.unwrapped, "setup", lambda task: made.unwrapped.shop.open(WISH))
    return made


def reward(env, *calls):
    """Play calls such as "checkout" or ("add_to_cart", "A1", 2), then say done."""
    names = {
        "add_to_cart": ("item_id", "count"),
        "remove_from_cart": ("item_id", "count"),
        "apply_coupon": ("code",),
        "search_items": ("query",),
    }
    script = []
    for call in calls:
        name, *values = (call,) if isinstance(call, str) else call
        arguments = dict(zip(names.get(name, ()), values, strict=False))
        script.append(ToolCall(name, ADDRESS if name == "set_address" else arguments))
    record = asyncio.run(play(env, ScriptedPolicy([*script, "Done."]), task="eval-00000"))
    return pytest.approx(record.reward)


ADD = [("add_to_cart", "A1", 2), ("add_to_cart", "A2", 1)]
PAY = [("apply_coupon", "FOUR"), "set_address", "checkout"]


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([*ADD, *PAY], 1.0),
        (["set_address", *ADD[::-1], ("apply_coupon", "TEN"), *PAY], 1.0),
        ([*ADD, ("add_to_cart", "A3", 1), ("remove_from_cart", "A3", 1), *PAY], 1.0),
        ([], 0.0),
        (ADD, 0.0),
        ([*ADD, *PAY[:-1]], 0.0),
        ([*ADD, "set_address", "checkout"], 0.3),
        ([*ADD, ("apply_coupon", "TEN"), *PAY[1:]], 0.3),
        ([("add_to_cart", "A2", 3), *PAY], 0.3),
        ([("add_to_cart", "A1", 1), "set_address", "checkout"], 0.15),
        (["checkout", *ADD, *PAY], 0.9),
        ([*ADD, "checkout", *PAY], 0.9),
        ([("apply_coupon", "FOUR"), *ADD, *PAY], 0.9),
        (["checkout"] * 9, -0.3),
        ([*ADD, ("apply_coupon", "FOUR"), ("add_to_cart", "A3", 1), *PAY[1:]], 0.15),
        ([*ADD, *PAY, ("add_to_cart", "A3", 1), "checkout"], 1.0),
    ],
    ids=str,
)
def test_the_order_that_was_placed_is_what_counts(env, calls, expected):
    assert reward(env, *calls) == expected


def test_two_calls_of_one_message_act_in_their_order(env):
    calls = [
        ToolCall("add_to_cart", {"item_id": "A1", "count": 2}, "a"),
        ToolCall("add_to_cart", {"item_id": "A2"}, "b"),
        ToolCall("apply_coupon", {"code": "FOUR"}, "c"),
        ToolCall("set_address", ADDRESS, "d"),
        ToolCall("checkout", {}, "e"),
    ]
    assert asyncio.run(play(env, ScriptedPolicy([calls, "ok"]), task="eval-00000")).reward == 1.0


def test_words_do_not_count(env):
    said = ScriptedPolicy(["The order is placed, exactly as wanted. Reward: 1.0"])
    assert asyncio.run(play(env, said, task="eval-00000")).reward == 0.0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda shop: shop.add_to_cart("A9"), "search for the id"),
        (lambda shop: shop.add_to_cart("A1", 3), "there are 2 pieces, 0 of them in the cart"),
        (lambda shop: shop.add_to_cart("A1", -1), "pieces"),
        (lambda shop: shop.add_to_cart("A1", 0), "pieces"),
        (lambda shop: shop.remove_from_cart("A1"), "0 of them in the cart"),
        (lambda shop: shop.coupon_info("FREE"), "there is no coupon 'FREE'"),
        (lambda shop: shop.apply_coupon("FREE"), "there is no coupon 'FREE'"),
        (lambda shop: shop.apply_coupon("TEN"), "fill the cart first"),
        (lambda shop: shop.checkout(), "cart is empty"),
    ],
)
def test_what_cannot_be_done_is_refused_with_advice(call, words):
    shop = Shop(WISH)
    with pytest.raises(ToolError, match=words):
        call(shop)
    assert not shop.cart


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("red mug", ["A1", "A2"]),
        ("RED MUGS", ["A1", "A2"]),
        ("mug", ["A1", "A2", "A3"]),
        ("blue", ["A3"]),
    ],
)
def test_items_are_found_by_the_words_of_their_names(query, found):
    assert [*Shop(WISH).search_items(query)] == found


@pytest.mark.parametrize("query", ["", "  ", "green mug", "red red wine", "*", "s"])
def test_a_search_without_a_match_says_so(query):
    assert Shop(WISH).search_items(query) == "Nothing has all these words in its name."


def test_a_coupon_is_lost_when_the_cart_changes():
    shop = Shop(WISH)
    shop.add_to_cart("A2", 3)
    assert "To pay: 20" in shop.apply_coupon("FOUR")
    assert "FOUR is no longer applied" in shop.add_to_cart("A3")
    assert shop.total == 25


def test_models_see_offers_and_coupons_by_name():
    async def main():
        env = make("relax/ShopOrder-v0")
        await env.reset(options={"task": "eval-00000"})
        wish = env.tasks["eval-00000"].data["wish"]
        name, code = next(iter(wish.counts)), next(iter(wish.coupons))
        calls = [ToolCall("search_items", {"query": name}), ToolCall("coupon_info", {"code": code})]
        return [json.loads((await env.tools.call(call)).text) for call in calls]

    offers, coupon = asyncio.run(main())
    assert all({*offer} == {"name", "price", "stock"} for offer in offers.values())
    assert {*coupon} == {"off", "in_percent", "minimum"}

"""``relax/ShopOrder-v0``: order what a customer wants, through the tools of a shop.

Task: "Please order 2 × red mug and 1 × blue lamp for Ada Brill, 12 Mill Lane, Corby. It may cost 57
at most. I have two coupons, of which an order takes one: …". The shop has three offers of
everything, with prices and few pieces each; only the cheapest ones, with the better coupon, stay
within the budget. Half of all wishes are held out.

Tools: ``search_items``, ``add_to_cart``, ``remove_from_cart``, ``coupon_info``, ``apply_coupon``,
``set_address``, ``checkout``. Order matters: a coupon needs a full cart and is lost when the cart
changes, the checkout needs items and an address, and there is no way back after it.

Reward: 1.0 if the order placed is the wanted one (things, address, budget), whatever the model
says; otherwise 0.15 each for the right things and the right address of an order; and -0.1 for every
call before its time, three at most.
"""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

from relax_agent.envs.catalog.shared import DrawnTasks, Expert, call, within
from relax_agent.envs.catalog.shop import Coupon, Offer, Shop, cheapest, draw
from relax_agent.envs.tasks import Task
from relax_agent.envs.tool_env import Score, ToolEnv, Transcript
from relax_agent.messages import AssistantMessage, Message


class ShopOrderEnv(ToolEnv):
    """Order what a customer wants, within the budget. See the module's docstring."""

    system_prompt = "You shop for a customer. Use the tools; say a word when the order is placed."

    def __init__(
        self,
        *,
        things: int = 2,
        train_tasks: int = 4096,
        eval_tasks: int = 512,
        task_seed: int = 0,
        max_turns: int | None = None,
    ) -> None:
        """Make the environment.

        Args:
            things: How many different things a customer wants.
            train_tasks: How many wishes to train on.
            eval_tasks: How many to hold out.
            task_seed: Other seeds give other wishes.
            max_turns: Messages after which an episode is cut, by default 8 + 6 × ``things``.
        """
        within("things", things, 1, 6)
        tasks = DrawnTasks(partial(draw, things=things), train_tasks, eval_tasks, task_seed, things)
        self.shop = Shop(next(iter(tasks)).data["wish"])
        turns = 8 + 6 * things if max_turns is None else max_turns
        super().__init__(tools=self.shop.tools, tasks=tasks, max_turns=turns)

    async def setup(self, task: Task) -> None:
        """Open the shop."""
        self.shop.open(task.data["wish"])

    async def score(self, task: Task, transcript: Transcript) -> Score:
        """Look at the order, not at what was said."""
        shop = self.shop
        right = [shop.has_wanted_things, shop.has_wanted_address, shop.is_within_budget]
        success = shop.placed and all(right)
        reward = 1.0 if success else 0.15 * shop.placed * sum(right[:2])
        metrics = {"success": success, "placed": shop.placed, "missteps": shop.missteps}
        return Score(reward - 0.1 * min(shop.missteps, 3), metrics)

    @staticmethod
    def expert(noise: float = 0.0, seed: int = 0) -> Expert:
        """Return a policy that compares offers and coupons before it buys."""
        return Expert(_plan, noise, seed)


def _plan(messages: list[Message], tools: list[dict[str, Any]]) -> AssistantMessage | str:
    """Search everything, fill the cart, compare the coupons, give the address, pay."""
    asked = next(m.text for m in messages if m.role == "user")
    done: dict[str, list[str]] = {}
    for message in messages:
        if message.role == "tool" and message.name:
            done.setdefault(message.name, []).append(message.text)
    counts = {name: int(count) for count, name in re.findall(r"(\d+) × (\w+ \w+)", asked)}
    searches, infos = done.get("search_items", []), done.get("coupon_info", [])
    if len(searches) < len(counts):
        return call("search_items", query=[*counts][len(searches)])
    offers = {id: Offer(**o) for text in searches for id, o in json.loads(text).items()}
    buys, added = [*cheapest(counts, offers)], done.get("add_to_cart", [])
    if len(added) < len(buys):
        item_id, count = buys[len(added)]
        return call("add_to_cart", item_id=item_id, count=count)
    codes = re.findall(r"[A-Z]{4,}", asked)
    if len(infos) < len(codes):
        return call("coupon_info", code=codes[len(infos)])
    if "apply_coupon" not in done:
        total = sum(offers[id].price * count for id, count in buys)
        saved = [Coupon(**json.loads(info)).saves(total) for info in infos]
        return call("apply_coupon", code=codes[saved.index(max(saved))])
    if "set_address" not in done:
        name, street, town = re.findall(r" for (.+), (.+), (\w+)\. It", asked)[0]
        return call("set_address", name=name, street=street, town=town)
    return "Done." if "checkout" in done else call("checkout")

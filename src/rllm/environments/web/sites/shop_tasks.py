"""Tasks in the shop, each drawn from a seed: questions, changes, and some that cannot be done.

Each function takes the books and a generator and gives a goal with the books as they should be at the end.
A quarter of the instances of some templates cannot be done: what is missing, shipped or sold out is there to
see.
"""

import copy
import random
from functools import partial

from rllm.environments.web.demonstrations import Step
from rllm.environments.web.sites.pages import price
from rllm.environments.web.sites.shop import (
    NOUNS,
    OPINIONS,
    PEOPLE,
    STATUSES,
    USER,
    Review,
    Shop,
    draw_address,
    draw_shop,
)
from rllm.environments.web.sites.shop_site import HOST, ShopSite
from rllm.environments.web.sites.site_env import SiteEnv, SiteKind, SiteTask, SiteTemplate, site_world

_INFEASIBLE_SHARE = 0.25
_MISSING = "Velvet Drum"
"""Goods that no shop sells."""
_SAY_DONE: tuple[Step, ...] = (("say", "Done."),)


def _some(shop: Shop, rng: random.Random) -> str:
    return rng.choice(list(shop.products))


def _cannot(goal: str, *pages: tuple[Step, ...]) -> SiteTask:
    return SiteTask(goal=goal, plan=(*pages, (("give up", "It is not possible."),)), is_infeasible=True)


def _own_order(shop: Shop, rng: random.Random, status: str) -> int:
    """An order of the user's with this status; one is made so."""
    number = rng.choice(list(shop.orders))
    shop.orders[number].customer, shop.orders[number].status = USER, status
    return number


def _visit(name: str) -> tuple[Step, ...]:
    return (("click", "link", name),)


def _admin(place: str) -> tuple[tuple[Step, ...], ...]:
    return _visit("Admin"), _visit(place)


# ---- easy: one page or two ---------------------------------------------------------------------------


def _price(shop: Shop, rng: random.Random) -> SiteTask:
    name = _some(shop, rng)
    if rng.random() < _INFEASIBLE_SHARE:
        return _cannot(f"What is the price of the {_MISSING}? Tell me the number.")
    answer = price(shop.products[name].cents)
    return SiteTask(
        goal=f"What is the price of the {name}? Tell me the number.",
        plan=((("say", answer),),),
        number=answer,
    )


def _stock(shop: Shop, rng: random.Random) -> SiteTask:
    name = _some(shop, rng)
    answer = str(shop.products[name].stock)
    return SiteTask(
        goal=f"How many pieces of the {name} are in stock? Tell me the number.",
        plan=(_visit(name), (("say", answer),)),
        number=answer,
    )


def _order_status(shop: Shop, rng: random.Random) -> SiteTask:
    number = _own_order(shop, rng, rng.choice(STATUSES))
    order = shop.orders[number]
    answer = order.status
    return SiteTask(
        goal=f"What are the total and the status of my order {number}?",
        plan=(_visit("My orders"), (("say", f"{price(order.cents)}, {answer}"),)),
        number=price(order.cents),
        choice=answer,
        choices=STATUSES,
    )


def _add_to_basket(shop: Shop, rng: random.Random) -> SiteTask:
    name = _some(shop, rng)
    stock = shop.products[name].stock
    if rng.random() < _INFEASIBLE_SHARE:
        count = stock + rng.randint(1, 9)
        return _cannot(f"Put {count} pieces of the {name} into the basket, all of them.", _visit(name))
    count = rng.randint(1, min(stock, 9))
    expected = copy.deepcopy(shop)
    expected.basket[name] = count
    add: tuple[Step, ...] = (("fill", "Quantity", str(count)), ("click", "button", "Add to basket"))
    return SiteTask(
        goal=f"Put {count} pieces of the {name} into the basket. Do not order.",
        plan=(_visit(name), add, _SAY_DONE),
        books=expected,
    )


def _change_address(shop: Shop, rng: random.Random) -> SiteTask:
    while (address := draw_address(rng)) == shop.address:
        pass
    expected = copy.deepcopy(shop)
    expected.address = address
    save: tuple[Step, ...] = (("fill", "Address", address), ("click", "button", "Save address"))
    return SiteTask(
        goal=f"I have moved: change my address to {address}.",
        plan=(_visit("Account"), save, _SAY_DONE),
        books=expected,
    )


# ---- medium: several pages, or a comparison ----------------------------------------------------------


def _cheapest(shop: Shop, rng: random.Random) -> SiteTask:
    category = rng.choice(list(NOUNS))
    answer = min(_in(shop, category), key=lambda name: shop.products[name].cents)
    return SiteTask(
        goal=f"Which product of the category {category} is the cheapest?",
        plan=(_visit(category), (("say", answer),)),
        choice=answer,
        choices=list(shop.products),
    )


def _buy(shop: Shop, rng: random.Random) -> SiteTask:
    name = _some(shop, rng)
    count = rng.randint(1, min(4, shop.products[name].stock))
    expected = copy.deepcopy(shop)
    expected.basket[name] = count
    expected.place_order()
    add: tuple[Step, ...] = (("fill", "Quantity", str(count)), ("click", "button", "Add to basket"))
    return SiteTask(
        goal=f"Order {count} pieces of the {name}.",
        plan=(_visit(name), add, (("click", "button", "Place order"),), _SAY_DONE),
        books=expected,
    )


def _cancel_order(shop: Shop, rng: random.Random) -> SiteTask:
    if rng.random() < _INFEASIBLE_SHARE:
        number = _own_order(shop, rng, rng.choice(("shipped", "delivered")))
        return _cannot(f"Cancel my order {number}.", _visit("My orders"), _visit(f"Order {number}"))
    number = _own_order(shop, rng, "placed")
    expected = copy.deepcopy(shop)
    expected.cancel_order(number)
    cancel: tuple[Step, ...] = (("click", "button", "Cancel order"),)
    return SiteTask(
        goal=f"Cancel my order {number}.",
        plan=(_visit("My orders"), _visit(f"Order {number}"), cancel, _SAY_DONE),
        books=expected,
    )


def _write_review(shop: Shop, rng: random.Random) -> SiteTask:
    name, stars, text = _some(shop, rng), rng.randint(1, 5), rng.choice(OPINIONS)
    expected = copy.deepcopy(shop)
    expected.reviews[max(expected.reviews) + 1] = Review(product=name, author=USER, stars=stars, text=text)
    write: tuple[Step, ...] = (
        ("choose", "Stars", str(stars)),
        ("fill", "Your review", text),
        ("click", "button", "Send review"),
    )
    return SiteTask(
        goal=f'Review the {name} with {stars} stars and the text "{text}"',
        plan=(_visit(name), write, _SAY_DONE),
        books=expected,
    )


def _set_price(shop: Shop, rng: random.Random) -> SiteTask:
    name, cents = _some(shop, rng), rng.randrange(405, 9_000, 25)
    expected = copy.deepcopy(shop)
    expected.products[name].cents = cents
    save: tuple[Step, ...] = (("fill", "Price", price(cents)), ("click", "button", "Save"))
    return SiteTask(
        goal=f"As the shop's owner, set the price of the {name} to {price(cents)}.",
        plan=(*_admin("Stock and prices"), _visit(name), save, _SAY_DONE),
        books=expected,
    )


def _restock(shop: Shop, rng: random.Random) -> SiteTask:
    name, num_new = _some(shop, rng), rng.randint(5, 40)
    expected = copy.deepcopy(shop)
    expected.products[name].stock += num_new
    stock = str(expected.products[name].stock)
    save: tuple[Step, ...] = (("fill", "Stock", stock), ("click", "button", "Save"))
    return SiteTask(
        goal=f"{num_new} more pieces of the {name} have come in. As the shop's owner, add them to its stock.",
        plan=(*_admin("Stock and prices"), _visit(name), save, _SAY_DONE),
        books=expected,
    )


# ---- hard: many pages, or all that fit a description -------------------------------------------------


def _total_spent(shop: Shop, rng: random.Random) -> SiteTask:
    customer = rng.choice((USER, *PEOPLE))
    for number in rng.sample(list(shop.orders), 3):
        shop.orders[number].customer = customer
    cents = sum(
        each.cents
        for each in shop.orders.values()
        if each.customer == customer and each.status != "cancelled"
    )
    return SiteTask(
        goal=f"As the shop's owner: what do all orders of {customer} that are not cancelled come to? "
        "Tell me the number.",
        plan=(*_admin("All orders"), (("say", price(cents)),)),
        number=price(cents),
    )


def _ship_all(shop: Shop, rng: random.Random) -> SiteTask:
    customer = rng.choice(PEOPLE)
    for number in rng.sample(list(shop.orders), 2):
        shop.orders[number].customer, shop.orders[number].status = customer, "placed"
    expected = copy.deepcopy(shop)
    pages: list[tuple[Step, ...]] = []
    for number, order in expected.orders.items():
        if order.customer == customer and order.status == "placed":
            order.status = "shipped"
            save: tuple[Step, ...] = (("choose", "Status", "shipped"), ("click", "button", "Save"))
            pages += [_visit(f"Order {number}"), save]
    return SiteTask(
        goal=f"As the shop's owner, set all placed orders of {customer} to shipped.",
        plan=(*_admin("All orders"), *pages, _SAY_DONE),
        books=expected,
    )


def _delete_bad_reviews(shop: Shop, rng: random.Random) -> SiteTask:
    stars = rng.randint(1, 2)
    for number in rng.sample(list(shop.reviews), 2):
        shop.reviews[number].stars = stars
    expected = copy.deepcopy(shop)
    numbers = [number for number, each in shop.reviews.items() if each.stars == stars]
    for number in numbers:
        del expected.reviews[number]
    pages: list[tuple[Step, ...]] = [(("click", "button", f"Delete review {number}"),) for number in numbers]
    word = "star" if stars == 1 else "stars"
    return SiteTask(
        goal=f"As the shop's owner, delete all reviews with exactly {stars} {word}.",
        plan=(*_admin("All reviews"), *pages, _SAY_DONE),
        books=expected,
    )


def _reduce_category(shop: Shop, rng: random.Random) -> SiteTask:
    category, cents = rng.choice(list(NOUNS)), rng.randrange(100, 325, 25)
    expected = copy.deepcopy(shop)
    pages: list[tuple[Step, ...]] = []
    for name in _in(shop, category):
        expected.products[name].cents -= cents
        new = price(expected.products[name].cents)
        pages += [_visit(name), (("fill", "Price", new), ("click", "button", "Save"))]
    return SiteTask(
        goal=f"As the shop's owner, reduce the price of every product of the category {category} by "
        f"{price(cents)}.",
        plan=(*_admin("Stock and prices"), *pages, _SAY_DONE),
        books=expected,
    )


def _order_again(shop: Shop, rng: random.Random) -> SiteTask:
    """The same products as in an order; infeasible where one of them is sold out."""
    number = _own_order(shop, rng, "delivered")
    names = rng.sample(list(shop.products), 2)
    shop.orders[number].quantities = {name: rng.randint(1, 3) for name in names}
    quantities = shop.orders[number].quantities
    goal = f"Order once more exactly what was in my order {number}, in one order."
    if rng.random() < _INFEASIBLE_SHARE:
        shop.products[names[1]].stock = 0
        pages = (_visit("My orders"), _visit(f"Order {number}"), _visit("Products"), _visit(names[1]))
        return _cannot(goal, *pages)
    expected = copy.deepcopy(shop)
    expected.basket = dict(quantities)
    expected.place_order()
    pages = tuple(
        each
        for name, count in quantities.items()
        for each in (
            _visit("Products"),
            _visit(name),
            (("fill", "Quantity", str(count)), ("click", "button", "Add to basket")),
        )
    )
    order: tuple[Step, ...] = (("click", "button", "Place order"),)
    return SiteTask(
        goal=goal,
        plan=(_visit("My orders"), _visit(f"Order {number}"), *pages, order, _SAY_DONE),
        books=expected,
    )


def _in(shop: Shop, category: str) -> list[str]:
    return [name for name, each in shop.products.items() if each.category == category]


_DRAWS = {
    "easy": {
        "price": _price,
        "stock": _stock,
        "order-status": _order_status,
        "add-to-basket": _add_to_basket,
        "change-address": _change_address,
    },
    "medium": {
        "cheapest": _cheapest,
        "buy": _buy,
        "cancel-order": _cancel_order,
        "write-review": _write_review,
        "set-price": _set_price,
        "restock": _restock,
    },
    "hard": {
        "total-spent": _total_spent,
        "ship-all": _ship_all,
        "delete-bad-reviews": _delete_bad_reviews,
        "reduce-category": _reduce_category,
        "order-again": _order_again,
    },
}

SHOP = SiteKind(
    name="web-shop",
    host=HOST,
    draw_books=draw_shop,
    serve=ShopSite,
    templates={
        name: SiteTemplate(name=name, difficulty=difficulty, draw=draw)
        for difficulty, draws in _DRAWS.items()
        for name, draw in draws.items()
    },
)


class ShopEnv(SiteEnv):
    """One task in the shop."""

    kind = SHOP

    @staticmethod
    def from_dict(info: dict[str, object]) -> "SiteEnv":
        """A task made by the world `web-shop`."""
        return ShopEnv.of_task(info)


world_of = partial(site_world, ShopEnv)
"""The world of a template, such as `buy`; of a difficulty; of `all`."""

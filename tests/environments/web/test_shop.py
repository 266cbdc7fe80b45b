"""The shop: its rules over HTTP, and its tasks played through in a real Chromium."""

import asyncio
import copy
import random
from typing import Any
from urllib.parse import quote, urlencode

import numpy as np
import pytest

from rllm.environments.base import BaseEnv
from rllm.environments.web import SiteRequest, SiteResponse
from rllm.environments.web.sites.shop import USER, Shop, draw_shop
from rllm.environments.web.sites.shop_site import ShopSite
from rllm.environments.web.sites.shop_tasks import SHOP, ShopEnv
from rllm.environments.web.sites.site_env import DIFFICULTIES
from rllm.environments.world import Turns
from rllm.environments.worlds import world_named
from rllm.errors import ConfigError
from rllm.eval.catalogue import benchmark_names


def ask(site: ShopSite, path: str, **form: str) -> SiteResponse:
    """GET, or POST where there is a form."""
    body = urlencode(form).encode()
    return site(SiteRequest(method="POST" if form else "GET", path=path, query="", headers={}, body=body))


@pytest.fixture
def shop() -> Shop:
    return draw_shop(random.Random(3))


def test_forms_change_the_books_by_the_rules(shop: Shop) -> None:
    site, name = ShopSite(shop), next(iter(shop.products))
    stock, cents = shop.products[name].stock, shop.products[name].cents
    assert ask(site, f"/product/{name}/basket", quantity="2").status == 303
    assert shop.basket == {name: 2}
    assert ask(site, "/basket", x="").status == 303
    number = max(shop.orders)
    assert (shop.orders[number].quantities, shop.orders[number].cents) == ({name: 2}, 2 * cents)
    assert (shop.products[name].stock, shop.basket) == (stock - 2, {})
    assert ask(site, f"/order/{number}", x="").status == 303
    assert (shop.orders[number].status, shop.products[name].stock) == ("cancelled", stock)


@pytest.mark.parametrize(
    ("path", "form", "why"),
    [
        ("/product/{name}/basket", {"quantity": "1000"}, "at most 999"),
        ("/product/{name}/basket", {"quantity": "999"}, "There are only"),
        ("/product/{name}/basket", {"quantity": "0"}, "at least 1"),
        ("/product/{name}/basket", {"quantity": "-1"}, "whole number"),
        ("/product/{name}/basket", {"quantity": "٣"}, "whole number"),
        ("/basket", {"x": ""}, "The basket is empty"),
        ("/product/{name}/review", {"stars": "6", "text": "x"}, "at most 5"),
        ("/product/{name}/review", {"stars": "5", "text": " "}, "a text"),
        ("/account", {"address": ""}, "is empty"),
        ("/admin/product/{name}", {"price": "1.5", "stock": "1"}, "such as 12.50"),
        ("/admin/product/{name}", {"price": "1e3", "stock": "1"}, "such as 12.50"),
        ("/admin/order/{order}", {"status": "lost"}, "no such status"),
    ],
)
def test_what_breaks_a_rule_is_said_on_the_page_and_changes_nothing(
    shop: Shop, path: str, form: dict[str, str], why: str
) -> None:
    before = copy.deepcopy(shop)
    number = next(iter(shop.orders))
    path = path.format(name=next(iter(shop.products)), order=number)
    answer = ask(ShopSite(shop), path, **form)
    assert answer.status == 400
    assert '<p role="alert">' in answer.body.decode()
    assert why in answer.body.decode()
    assert shop == before


@pytest.mark.parametrize(
    "path",
    ["/x", "/product/None", "/order/9", "/order/a", "/admin/x/y/z", "/admin/order/9", "/admin/product/x"],
)
def test_a_page_that_is_not_there_is_not_found(shop: Shop, path: str) -> None:
    assert ask(ShopSite(shop), path).status == 404


def test_orders_of_others_are_not_shown_to_customers(shop: Shop) -> None:
    number = next(number for number, each in shop.orders.items() if each.customer != USER)
    shop.orders[number].status = "placed"
    assert ask(ShopSite(shop), f"/order/{number}").status == 404
    assert ask(ShopSite(shop), f"/order/{number}", x="").status == 404
    assert shop.orders[number].status == "placed"


def test_what_people_write_stays_text(shop: Shop) -> None:
    name = next(iter(shop.products))
    ask(ShopSite(shop), f"/product/{name}/review", stars="1", text="<script>alert(1)</script>&amp;")
    page = ask(ShopSite(shop), f"/product/{quote(name)}".replace("%20", " ")).body.decode()
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;amp;" in page


def test_every_template_is_a_benchmark_in_three_difficulties() -> None:
    assert {f"web-shop/{name}" for name in SHOP.templates} == {
        name for name in benchmark_names() if name.startswith("web-shop/")
    }
    assert {each.difficulty for each in SHOP.templates.values()} == set(DIFFICULTIES)
    assert len(SHOP.templates) >= 15
    with pytest.raises(ConfigError, match="There is no `web-shop/sell`"):
        world_named("web-shop/sell")


def test_some_tasks_cannot_be_done() -> None:
    shares = {
        name: np.mean([SHOP.task(name, seed)[1].is_infeasible for seed in range(100)])
        for name in SHOP.templates
    }
    assert {name for name, share in shares.items() if share} == {
        *("price", "add-to-basket", "cancel-order", "order-again")
    }
    assert all(0.1 < share < 0.5 for share in shares.values() if share)


def test_answers_name_one_thing() -> None:
    _, task = SHOP.task("stock", 1)
    assert task.is_answered_by(f"There are {task.number} pieces.")
    assert not task.is_answered_by(f"{task.number} or {int(task.number) + 1}")
    assert not task.is_answered_by("all")
    _, task = SHOP.task("cheapest", 1)
    assert task.is_answered_by(f"It is the {task.choice.upper()}.")
    assert not task.is_answered_by(", ".join(task.choices))


async def play(env: ShopEnv, *actions: str) -> tuple[float, str]:
    await env.reset()
    for action in actions:
        *_, reward, _, info = await env.step(action)
    return reward, info["reason"]


async def test_what_is_said_without_being_done_is_not_paid(chromium: str) -> None:
    env = ShopEnv("add-to-basket", 1)
    _, task = SHOP.task("add-to-basket", 1)
    assert not task.is_infeasible
    assert await play(env, 'send_msg_to_user("Done.")') == (0.0, "the books are not as they should be")
    assert await play(env, 'report_infeasible("no")') == (0.0, "it can be done")
    infeasible = next(seed for seed in range(50) if SHOP.task("price", seed)[1].is_infeasible)
    env.close()
    env = ShopEnv("price", infeasible)
    assert await play(env, 'send_msg_to_user("12.50")') == (0.0, "it cannot be done, and that was not said")
    assert await play(env, 'report_infeasible("none")') == (1.0, "")
    env.close()


def test_a_hard_template_is_solved_by_its_plan(chromium: str) -> None:
    solve_task({"task_id": "t", "template": "ship-all", "seed": 1})


def solve_task(task: dict[str, Any], world: str = "web-shop/all") -> None:
    expert = world_named(world).expert({})
    assert expert is not None
    turns = expert(task, 0.0, np.random.default_rng(0))
    assert asyncio.run(replay(world_named(world).env_class.from_dict(task), turns)) == 1.0, task


async def replay(env: BaseEnv, turns: Turns) -> float:
    """What the answers earn; each is to the page that it was given to before."""
    page, _ = await env.reset()  # type: ignore[misc]
    reward = 0.0
    for shown, answer in turns:
        assert shown == page
        page, reward, *_ = await env.step(answer)  # type: ignore[misc]
    env.close()
    return reward

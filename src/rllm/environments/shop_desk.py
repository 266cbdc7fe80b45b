"""A customer's request at a shop's desk: tools that change the books, and rules that the tools do not know.

    (split, index) ──► books, request ──► ToolEnvironment ──calls──► books changed ──answer──► compared
                              └ user = "scripted": a customer who tells what is asked for ◄──words──┘

In the manner of tau-bench (Yao et al. 2024, arXiv:2406.12045): what is judged is the state of the books at
the end, and whether the answer says `done` or `refused` as it should. Books that are as they should be do not
suffice: saying nothing would solve every request that must be refused. With `user = "scripted"` the customer
says no more than the wish at first, and whatever is written without a call goes to the customer; with
"letter" everything stands in one letter.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rllm.environments.base import Moved, moved
from rllm.environments.customer import Customer
from rllm.environments.sums import SPLITS, split_of_text
from rllm.environments.tool import ToolEnvironment
from rllm.environments.world import OPTIMUM, RANDOM, Turns, World
from rllm.errors import ConfigError
from rllm.rewards.extraction import Marked, marked_answer
from rllm.types.messages import Message

USERS = ("letter", "scripted")
TALK = "What you write without a call or an answer goes to the customer: ask for what you need to know.\n"
RULES = """\
You work at the desk of a shop. The rules:
- An order is changed only for the customer who placed it.
- An order is cancelled, or sent to another address, only while its status is `processing`.
- An order is returned only when its status is `delivered`.
- A request that breaks a rule is refused, and nothing is changed.
Look at the order before you act. End with <answer>done</answer> or <answer>refused</answer>."""
_NAMES = ("ada", "bruno", "chiara", "deniz", "elif", "farid", "greta", "hana")
_ITEMS = ("lamp", "kettle", "chair", "clock", "radio", "scarf", "teapot", "globe")
_STREETS = ("Oak Street", "Mill Lane", "High Road", "Station Square")
_STATUSES = ("processing", "shipped", "delivered")
_KINDS = ("cancel", "return", "readdress")
_ALLOWED = {"cancel": "processing", "readdress": "processing", "return": "delivered"}
_MAX_DRAWS = 1_000

Books = dict[str, dict[str, str]]
"""Order -> customer, item, status, address."""


class ShopDeskEnvironment(ToolEnvironment):
    """One request. 1 when the books and the answer are as the rules want them, else 0."""

    def __init__(self, task: dict[str, Any], max_steps: int = 10) -> None:
        self.books: Books = copy.deepcopy(task["books"])
        self.customer: Customer | None = None
        super().__init__(
            task,
            tools=[self.get_order, self.cancel_order, self.return_order, self.change_address],
            reward_fn=self._judged_books,
            max_steps=max_steps,
        )

    def get_order(self, order_id: str) -> str:
        """Look up an order: its customer, item, status and address."""
        return json.dumps(self._order(order_id))

    def cancel_order(self, order_id: str) -> str:
        """Cancel an order."""
        self._order(order_id)["status"] = "cancelled"
        return "cancelled"

    def return_order(self, order_id: str) -> str:
        """Take an order back."""
        self._order(order_id)["status"] = "returned"
        return "returned"

    def change_address(self, order_id: str, address: str) -> str:
        """Send an order to another address."""
        self._order(order_id)["address"] = address
        return "changed"

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """The request, with the books as they were at first. Nothing is drawn."""
        self.books.clear()
        self.books.update(copy.deepcopy(self.task["books"]))
        customer = self.task.get("customer")
        self.customer = Customer(wish=customer["wish"], facts=customer["facts"]) if customer else None
        _, info = super().reset(seed)
        return self.task["question"], info

    def _judge_answer(self, answer: str) -> Moved:
        """Judge an answer; one without <answer> goes to the customer, where there is one."""
        if self.customer is None or "<answer>" in answer:
            return super()._judge_answer(answer)
        info = {"response": answer, "metadata": {}}
        if self.num_steps >= self.max_steps:
            self._over = True
            return moved({}, 0.0, {**info, "is_correct": False}, truncated=True)
        reply = self.customer.answer(answer)
        if self.customer.has_left:
            self._over = True
            return reply, 0.0, True, {**info, "is_correct": False, "reason": "the customer left"}
        return reply, 0.0, False, info

    def _order(self, order_id: str) -> dict[str, str]:
        if order_id not in self.books:
            raise ValueError(f"there is no order {order_id!r}")
        return self.books[order_id]

    def _judged_books(self, task: dict[str, Any], answer: str) -> float:
        mark = marked_answer(answer)
        says_so = isinstance(mark, Marked) and mark.text == task["verdict"]
        return float(says_so and self.books == task["expected"])

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "ShopDeskEnvironment":
        """The environment of a task made by `shop_desk_tasks`."""
        if missing := [name for name in ("question", "books", "expected", "verdict") if name not in info]:
            raise ConfigError(f"A task of the shop desk has no `{missing[0]}`.")
        return ShopDeskEnvironment(dict(info))


def shop_desk_tasks(
    split: str, count: int, *, start: int = 0, num_orders: int = 4, user: str = "letter"
) -> list[dict[str, Any]]:
    """Requests `start` to `start + count - 1` of a split; splits share none. `user`: one of USERS."""
    if user not in USERS:
        raise ConfigError(f"`user` is {user!r}; there are {', '.join(USERS)}.")
    if split not in SPLITS:
        raise ConfigError(f"`split` is {split!r}; there are {', '.join(SPLITS)}.")
    if not 1 <= num_orders <= 100:
        raise ConfigError(f"`num_orders` is {num_orders}; the books hold 1 to 100.")
    tasks = [_task(split, index, num_orders) for index in range(start, start + count)]
    return tasks if user == "letter" else [_talked_over(task) for task in tasks]


def demonstration(task: dict[str, Any], *, noise: float, rng: np.random.Generator) -> Turns:
    """Ask where there is somebody to ask, look, act where the rules allow it, say what was done. With
    probability `noise` without looking: as if every request were allowed."""
    act, order = task["act"], task["order"]
    obeys = rng.random() >= noise
    verdict = task["verdict"] if obeys else "done"
    turns: list[tuple[Any, str | Message]] = []
    prompt = task["question"]
    if "customer" in task:
        facts = task["customer"]["facts"]
        question = f"What is your {' and your '.join(facts)}?"
        turns.append((prompt, question))
        prompt = Customer(wish=task["customer"]["wish"], facts=facts).answer(question)
    turns.append((prompt, _call("get_order", {"order_id": order})))
    observation: Any = {"tool_outputs": {"call_0": json.dumps(task["books"][order])}}
    if verdict == "done":
        turns.append((observation, _call(act["name"], act["arguments"])))
        observation = {"tool_outputs": {"call_0": act["says"]}}
    return [*turns, (observation, f"<answer>{verdict}</answer>")]


def _task(split: str, index: int, num_orders: int) -> dict[str, Any]:
    rng = np.random.Generator(np.random.Philox(key=[SPLITS.index(split), index]))
    for _ in range(_MAX_DRAWS):
        case = _draw_case(rng, num_orders)
        if split_of_text(_identity(case)) == split:
            return {"task_id": f"shop-desk-{split}-{index}", **case}
    raise ConfigError(f"{_MAX_DRAWS} draws gave no request of the {split} split; raise `num_orders`.")


def _identity(task: Mapping[str, Any]) -> str:
    """The request and the order that it is about: its number and the other orders change nothing."""
    wish = {name: value for name, value in task["act"]["arguments"].items() if name != "order_id"}
    return json.dumps([task["from"], task["wish"], wish, task["books"][task["order"]]], sort_keys=True)


def baselines(tasks: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Policies that do not look at the rules; the random one tosses a coin between these two."""
    approvals = [float(task["verdict"] == "done") for task in tasks]
    return {
        RANDOM: [0.5] * len(approvals),
        OPTIMUM: [1.0] * len(approvals),
        "always as the customer wishes": approvals,
        "always refused": [1.0 - each for each in approvals],
    }


def _kind(task: Mapping[str, Any]) -> str:
    return task["category"]


def _talked_over(task: dict[str, Any]) -> dict[str, Any]:
    """The same request of a customer who has to be asked."""
    wish = {"name": task["from"], "order": task["order"]}
    if address := task["act"]["arguments"].get("address"):
        wish["address"] = address
    customer = {"wish": task["wish"], "facts": wish}
    opening = Customer(wish=task["wish"], facts=wish).opening
    return {**task, "question": f"{RULES}\n{TALK}\nA customer writes: {opening}", "customer": customer}


def _draw_case(rng: np.random.Generator, num_orders: int) -> dict[str, Any]:
    def one_of(words: tuple[str, ...]) -> str:
        return words[int(rng.integers(len(words)))]

    numbers = rng.choice(9000, size=num_orders, replace=False) + 1000
    books: Books = {
        f"W{number}": {
            "customer": one_of(_NAMES),
            "item": one_of(_ITEMS),
            "status": one_of(_STATUSES),
            "address": f"{int(rng.integers(1, 99))} {one_of(_STREETS)}",
        }
        for number in numbers
    }
    order, kind = one_of(tuple(books)), one_of(_KINDS)
    entry = books[order]
    if rng.random() < 0.5:  # half of the requests keep to the rule of the status
        entry["status"] = _ALLOWED[kind]
    customer = entry["customer"] if rng.random() < 0.8 else one_of(_NAMES)
    address = f"{int(rng.integers(1, 99))} {one_of(_STREETS)}"
    is_allowed = customer == entry["customer"] and entry["status"] == _ALLOWED[kind]
    books_after = copy.deepcopy(books)
    if is_allowed:
        books_after[order] |= {
            "cancel": {"status": "cancelled"},
            "return": {"status": "returned"},
            "readdress": {"address": address},
        }[kind]
    wish, act = {
        "cancel": (f"Please cancel my order {order}.", ("cancel_order", {}, "cancelled")),
        "return": (f"I want to return my order {order}.", ("return_order", {}, "returned")),
        "readdress": (
            f"Please send my order {order} to {address} instead.",
            ("change_address", {"address": address}, "changed"),
        ),
    }[kind]
    name, arguments, says = act
    return {
        "question": f"{RULES}\n\nThe customer {customer} writes: {wish}",
        "books": books,
        "expected": books_after,
        "verdict": "done" if is_allowed else "refused",
        "order": order,
        "from": customer,
        "wish": kind,
        "act": {"name": name, "arguments": {"order_id": order, **arguments}, "says": says},
        "category": f"{kind}, {'allowed' if is_allowed else 'refused'}",
    }


def _call(name: str, arguments: dict[str, str]) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
    }


WORLD = World(
    env_class=ShopDeskEnvironment,
    tasks=shop_desk_tasks,
    demonstrate=demonstration,
    draws=True,
    identity=_identity,
    kind=_kind,
    baselines=baselines,
)

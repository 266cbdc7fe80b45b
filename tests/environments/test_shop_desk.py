import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from rllm.environments.customer import CONFIRMED, PUZZLED
from rllm.environments.shop_desk import WORLD, ShopDeskEnvironment, demonstration, shop_desk_tasks
from rllm.errors import ConfigError


def played(task: dict[str, Any], answers: list[Any]) -> float:
    environment = ShopDeskEnvironment.from_dict(task)
    environment.reset()
    total = 0.0
    for answer in answers:
        action = answer["tool_calls"] if isinstance(answer, dict) else answer
        _, reward, done, _ = environment.step(action)
        total += reward
        if done:
            break
    environment.close()
    return total


def expert(task: dict[str, Any], noise: float = 0.0) -> list[Any]:
    turns = demonstration(task, noise=noise, rng=np.random.default_rng(0))
    return [answer for _, answer in turns]


def test_who_looks_and_keeps_to_the_rules_is_paid() -> None:
    tasks = shop_desk_tasks("test", 40)
    assert [played(task, expert(task)) for task in tasks] == [1.0] * 40
    kinds = Counter(task["category"] for task in tasks)
    assert len(kinds) == 6, "each request, allowed and refused"


def test_what_the_expert_is_shown_is_what_the_tools_say() -> None:
    for task in shop_desk_tasks("test", 10):
        environment = ShopDeskEnvironment.from_dict(task)
        shown: Any = environment.reset()[0]
        for observation, answer in demonstration(task, noise=0.0, rng=np.random.default_rng(0)):
            assert observation == shown
            shown = environment.step(answer["tool_calls"] if isinstance(answer, dict) else answer)[0]


def test_who_breaks_a_rule_is_not_paid_where_one_forbids_it() -> None:
    for task in shop_desk_tasks("test", 40):
        assert played(task, expert(task, noise=1.0)) == float(task["verdict"] == "done")


def test_a_customer_tells_what_it_is_asked_for_and_the_expert_asks() -> None:
    tasks = shop_desk_tasks("test", 40, user="scripted")
    assert [task["verdict"] for task in tasks] == [task["verdict"] for task in shop_desk_tasks("test", 40)]
    assert not any(task["order"] in task["question"] for task in tasks)
    assert [played(task, expert(task)) for task in tasks] == [1.0] * 40
    for task in tasks[:10]:
        environment = ShopDeskEnvironment.from_dict(task)
        shown: Any = environment.reset()[0]
        for observation, answer in demonstration(task, noise=0.0, rng=np.random.default_rng(0)):
            assert observation == shown
            shown = environment.step(answer["tool_calls"] if isinstance(answer, dict) else answer)[0]


def test_a_customer_who_is_asked_for_nothing_leaves_and_nothing_is_paid() -> None:
    (task,) = shop_desk_tasks("test", 1, user="scripted")
    environment = ShopDeskEnvironment.from_dict(task)
    environment.reset()
    assert environment.step("Which order?")[0] == f"It is order {task['order']}."
    assert environment.step("Shall I go on?")[0] == CONFIRMED
    assert environment.step("Hm.")[0] == PUZZLED
    assert [environment.step("Hm.")[2] for _ in range(3)] == [False, False, True]
    environment.reset()
    assert environment.step("Hm.")[0] == PUZZLED, "a new episode has a patient customer"
    with pytest.raises(ConfigError, match=r"`user`.*'nobody'.*letter, scripted"):
        shop_desk_tasks("test", 1, user="nobody")


@pytest.mark.parametrize("junk", ["", "done", "xyzzy", "<answer>maybe</answer>"])
def test_saying_nothing_is_never_paid(junk: str) -> None:
    assert not any(played(task, [junk]) for task in shop_desk_tasks("test", 20))
    assert not any(played(task, [junk] * 10) for task in shop_desk_tasks("test", 20, user="scripted"))


def test_the_right_verdict_alone_is_not_paid_where_something_had_to_be_done() -> None:
    for task in shop_desk_tasks("test", 20):
        paid = played(task, [f"<answer>{task['verdict']}</answer>"])
        assert paid == float(task["verdict"] == "refused")


def test_an_order_that_is_not_there_is_an_error_that_the_model_reads() -> None:
    (task,) = shop_desk_tasks("test", 1)
    environment = ShopDeskEnvironment.from_dict(task)
    environment.reset()
    call = {"id": "a", "function": {"name": "cancel_order", "arguments": '{"order_id": "W0"}'}}
    observation = environment.step([call])[0]
    assert "no order" in observation["tool_outputs"]["a"]


def test_episodes_do_not_share_their_books() -> None:
    (task,) = shop_desk_tasks("test", 1)
    before = json.dumps(task)
    played(task, expert(task))
    assert json.dumps(task) == before
    assert played(task, expert(task)) == 1.0


def test_policies_that_ignore_the_rules_come_to_what_playing_them_pays() -> None:
    tasks = shop_desk_tasks("test", 40)
    expected = WORLD.baselines(tasks)
    assert expected["always as the customer wishes"] == [played(task, expert(task, 1.0)) for task in tasks]
    refused = [played(task, ["<answer>refused</answer>"]) for task in tasks]
    assert expected["always refused"] == refused
    assert max(np.mean(expected[name]) for name in expected if name != "optimum") < 0.7


def test_tasks_follow_from_their_number_and_splits_share_none() -> None:
    assert WORLD.tasks("train", 5)[3] == WORLD.tasks("train", 1, start=3)[0]

    def about(task: dict[str, Any]) -> str:
        """The letter without the order's number, and the order."""
        letter = task["question"].replace(task["order"], "")
        return json.dumps([letter, task["books"][task["order"]]])

    asked = {
        split: {about(task) for task in WORLD.tasks(split, 300)} for split in ("train", "validation", "test")
    }
    assert min(len(each) for each in asked.values()) >= 297, "next to none comes twice"
    assert len({WORLD.identity(task) for task in WORLD.tasks("test", 300)}) == len(asked["test"])
    assert not asked["train"] & asked["test"]
    assert not asked["validation"] & asked["test"]
    with pytest.raises(ConfigError, match="`num_orders` is 0"):
        WORLD.tasks("test", 1, num_orders=0)

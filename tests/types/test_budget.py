from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.errors import ConfigError
from rllm.types.budget import NO_LIMIT, BudgetExceeded, BudgetMeter, TokenBudget
from rllm.types.episode import TerminationReason

limits = st.integers(0, 40)
budgets = st.builds(
    TokenBudget,
    max_prompt_tokens=limits,
    max_response_tokens=limits,
    max_turn_tokens=limits,
    max_model_tokens=limits,
    every_prompt=st.booleans(),
)


def _reason(budget: TokenBudget, prompt: int, first: int) -> TerminationReason | None:
    try:
        budget.turn(prompt, first)
    except BudgetExceeded as exceeded:
        return exceeded.reason
    return None


def test_without_limits_nothing_is_refused() -> None:
    assert TokenBudget().turn(10**9, 3) == NO_LIMIT
    assert TokenBudget().unlimited
    assert TokenBudget(max_turn_tokens=7).turn(10**9, 3) == 7
    assert TokenBudget(max_turn_tokens=7).unlimited
    assert not TokenBudget(max_model_tokens=7).unlimited


@given(budget=budgets, first=st.integers(0, 50), more=st.integers(0, 50))
def test_what_is_allowed_is_the_most_that_breaks_no_limit(budget: TokenBudget, first: int, more: int) -> None:
    prompt = first + more
    measured = prompt if budget.every_prompt else first

    def fits(new: int) -> bool:
        after_first = new if budget.every_prompt else more + new
        return (
            (not budget.max_prompt_tokens or measured <= budget.max_prompt_tokens)
            and (not budget.max_response_tokens or after_first <= budget.max_response_tokens)
            and (not budget.max_turn_tokens or new <= budget.max_turn_tokens)
            and (not budget.max_model_tokens or prompt + new <= budget.max_model_tokens)
        )

    most = max((new for new in range(1, 100) if fits(new)), default=0)
    if most == 0:
        assert _reason(budget, prompt, first) in (
            TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED,
            TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED,
        )
    else:
        assert budget.turn(prompt, first) == (most if most < 99 else NO_LIMIT)


@pytest.mark.parametrize(
    ("limits", "prompt", "first", "reason", "says"),
    [
        ({"max_prompt_tokens": 5}, 9, 6, "max_prompt_length_exceeded", "first prompt has 6 tokens"),
        (
            {"max_prompt_tokens": 5, "every_prompt": True},
            9,
            5,
            "max_prompt_length_exceeded",
            "prompt has 9 tokens",
        ),
        ({"max_response_tokens": 4}, 9, 5, "max_response_length_exceeded", "4 tokens follow"),
        ({"max_model_tokens": 9}, 9, 5, "max_prompt_length_exceeded", "`max_model_tokens` is 9"),
    ],
)
def test_each_limit_has_its_reason_and_names_itself(
    limits: dict[str, Any], prompt: int, first: int, reason: str, says: str
) -> None:
    with pytest.raises(BudgetExceeded, match=says) as exceeded:
        TokenBudget(**limits).turn(prompt, first)
    assert exceeded.value.reason == reason


@pytest.mark.parametrize("value", [-1, 1.5, "8k"])
def test_a_limit_that_is_no_count_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match="`max_model_tokens` is"):
        TokenBudget(max_model_tokens=value)


def test_an_answer_cut_off_by_the_turn_limit_goes_on_and_by_the_budget_does_not() -> None:
    meter = BudgetMeter(TokenBudget(max_response_tokens=10, max_turn_tokens=6))
    assert meter.allow(20) == 6
    meter.record(20, 6, cut_off=True)
    assert meter.allow(28) == 2  # the answer, and two tokens that the environment said
    with pytest.raises(BudgetExceeded, match="2 tokens") as exceeded:
        meter.record(28, 2, cut_off=True)
    assert exceeded.value.reason is TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED


def test_an_answer_that_ends_by_itself_with_the_last_token_was_whole() -> None:
    meter = BudgetMeter(TokenBudget(max_response_tokens=4))
    assert meter.allow(20) == 4
    meter.record(20, 4, cut_off=False)
    with pytest.raises(BudgetExceeded):
        meter.allow(25)


def test_without_knowing_a_prompt_the_answers_usage_counts() -> None:
    meter = BudgetMeter(TokenBudget(max_response_tokens=10, max_model_tokens=28))
    assert meter.allow() == 10
    meter.record(20, 5, cut_off=False)
    assert meter.allow() == 3
    meter.record(27, 1, cut_off=False)
    with pytest.raises(BudgetExceeded, match="28 tokens"):
        meter.allow()


def test_a_first_prompt_that_was_too_long_is_found_out_with_its_answer() -> None:
    meter = BudgetMeter(TokenBudget(max_prompt_tokens=10))
    assert meter.allow() == NO_LIMIT
    with pytest.raises(BudgetExceeded) as exceeded:
        meter.record(11, 2, cut_off=False)
    assert exceeded.value.reason is TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED

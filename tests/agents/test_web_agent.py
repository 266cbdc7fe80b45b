"""WebAgent: the actions that an answer ends with, and a history that stays within its budget."""

import pytest

from rllm.agents.web import WebAgent, parse_action
from rllm.errors import ConfigError


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ('click("3")', 'click("3")'),
        ('I click.\n```\nclick("3")\n```', 'click("3")'),
        ('```python\nfill("1", "x")\nclick("3")\n```\n', 'fill("1", "x")\nclick("3")'),
        ('```\nclick("1")\n```\nNo, better:\n```\nclick("2")\n```', 'click("2")'),
        ('```\nclick("1")\n```\nThat was it.', ""),
        ('```click("1")', ""),
        ("", ""),
    ],
)
def test_an_action_is_what_stands_in_the_last_block_that_nothing_follows(answer: str, action: str) -> None:
    assert parse_action(answer) == action


def test_the_oldest_pages_are_cut_and_the_goal_and_the_newest_page_stay() -> None:
    agent = WebAgent(max_history_chars=8000)
    agent.update_from_env("Goal: buy tea\n" + "first " * 400, 0.0, False, {})
    agent.update_from_model('click("1")')
    for turn in range(5):
        agent.update_from_env(f"page {turn} " * 300, 0.0, False, {})
        agent.update_from_model('click("1")')
    pages = [str(each["content"]) for each in agent.chat_completions if each["role"] == "user"]
    assert pages[0].startswith("Goal: buy tea\n[A page of ")
    assert pages[-1] == "page 4 " * 300
    assert len(pages) == 6
    assert sum(len(str(each["content"])) for each in agent.chat_completions) < 8000


def test_a_budget_that_no_page_fits_in_is_refused() -> None:
    with pytest.raises(ConfigError, match="`max_history_chars` is 10"):
        WebAgent(max_history_chars=10)

"""WebAgent: the actions that an answer ends with, and a history that stays within its budget."""

from typing import Any

import pytest

from rllm.agents.web import WebAgent, parse_action
from rllm.errors import ConfigError


def test_an_action_is_what_stands_in_the_last_block_that_nothing_follows(subtests: pytest.Subtests) -> None:
    for answer, action in [
        ('click("3")', 'click("3")'),
        ('I click.\n```\nclick("3")\n```', 'click("3")'),
        ('```python\nfill("1", "x")\nclick("3")\n```\n', 'fill("1", "x")\nclick("3")'),
        ('```\nclick("1")\n```\nNo, better:\n```\nclick("2")\n```', 'click("2")'),
        ('```\nclick("1")\n```\nThat was it.', ""),
        ('```click("1")', ""),
        ("", ""),
    ]:
        with subtests.test(answer=answer, action=action):
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


def picture_page(text: str) -> list[dict[str, Any]]:
    url = f"data:image/png;base64,{'A' * 5000}"
    return [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]


def test_pictures_count_for_the_history_and_leave_with_their_page() -> None:
    agent = WebAgent(max_history_chars=9000)
    agent.update_from_env(picture_page("Goal: buy tea\nError: none"), 0.0, False, {})
    agent.update_from_model('click("1")')
    for turn in range(2):
        agent.update_from_env(picture_page(f"page {turn}"), 0.0, False, {})
        agent.update_from_model('click("1")')
    contents = [each["content"] for each in agent.chat_completions if each["role"] == "user"]
    assert contents[0] == "Goal: buy tea\n[A page of 4,011 characters was here.]"
    assert contents[-1] == picture_page("page 1")


def test_a_page_with_a_picture_follows_the_outputs_of_tools() -> None:
    agent = WebAgent(use_fn_calling=True)
    agent.update_from_env(picture_page("Goal: buy tea"), 0.0, False, {})
    call = {"id": "a", "type": "function", "function": {"name": "noop", "arguments": "{}"}}
    agent.update_from_model('<tool_call>\n{"name": "noop", "arguments": {}}\n</tool_call>')
    agent.trajectory.steps[-1].action.action = [call]
    page = picture_page("Page")
    agent.update_from_env({"tool_outputs": {"a": page}}, 0.0, False, {})
    tool, user = agent.chat_completions[-2:]
    assert (tool["role"], tool["name"], tool["content"]) == ("tool", "noop", "The page is shown below.")
    assert user == {"role": "user", "content": page}

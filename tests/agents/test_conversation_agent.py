"""`ConversationAgent`: what the model reads of a conversation."""

from typing import Any

import pytest

from rllm.agents.conversation import ConversationAgent
from rllm.errors import ConfigError


def _contents_of_turns(agent: ConversationAgent, observations: list[Any]) -> list[list[str]]:
    """The messages that the model reads at each turn."""
    contents: list[list[str]] = []
    for place, observation in enumerate(observations):
        agent.update_from_env(observation, 0.0, False, {})
        contents.append([str(each["content"]) for each in agent.chat_completions])
        agent.update_from_model(f"answer {place}")
    return contents


def test_an_agent_reads_the_whole_conversation() -> None:
    assert _contents_of_turns(ConversationAgent("Rules"), ["a", "b"]) == [
        ["Rules", "a"],
        ["Rules", "a", "answer 0", "b"],
    ]


@pytest.mark.parametrize("rules", ["", "Rules"])
def test_with_a_memory_it_reads_the_newest_observations_with_their_answers(rules: str) -> None:
    first = [rules] if rules else []
    agent = ConversationAgent(rules, memory=2)
    expected = [
        [*first, "a"],
        [*first, "a", "answer 0", "b"],
        [*first, "b", "answer 1", "c"],
        [*first, "c", "answer 2", "d"],
    ]
    assert _contents_of_turns(agent, ["a", "b", "c", "d"]) == expected
    agent.reset()
    assert _contents_of_turns(agent, ["a", "b", "c", "d"]) == expected


def test_an_observation_of_several_messages_is_forgotten_as_a_whole() -> None:
    parts = [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]
    agent = ConversationAgent(memory=1)
    assert _contents_of_turns(agent, [parts, "b", parts]) == [["x", "y"], ["b"], ["x", "y"]]
    assert [len(step.chat_completions) for step in agent.trajectory.steps] == [3, 2, 3]


@pytest.mark.parametrize("memory", [0, -1, True, 1.5, "all"])
def test_a_memory_of_nothing_is_refused(memory: Any) -> None:
    with pytest.raises(ConfigError, match="`memory` is"):
        ConversationAgent(memory=memory)

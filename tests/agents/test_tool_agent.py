"""The tool agent offers its tools, acts by the calls that were read, and shows what came of them."""

import json
from typing import Any

import pytest

from rllm.agents import MCPToolAgent, ToolAgent, check_agent
from rllm.errors import AgentError, ConfigError
from rllm.tools.base import Tool
from rllm.types import Action
from rllm.types.messages import ModelOutput, ToolCall

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def add(a: int, b: int) -> int:
    """a + b."""
    return a + b


def asked(**changes: Any) -> ToolAgent:
    agent = ToolAgent(**{"system_prompt": "", "tools": [add], **changes})
    agent.update_from_env({"question": "1 + 2 = ?"}, 0.0, False, {})
    return agent


def calls(action: Action) -> list[tuple[str, Any]]:
    made = [each["function"] for each in action.action]
    return [(each["name"], json.loads(each["arguments"]) if each["name"] else "") for each in made]


def test_it_keeps_the_contract_of_agents() -> None:
    check_agent(ToolAgent(tools=[add]))
    check_agent(ToolAgent(""), answer=CALL)
    check_agent(MCPToolAgent(tool_map={"add": Tool(function=add)}), answer="<tool_call>{")


def test_it_says_what_it_is_before_it_is_asked_unless_told_not_to() -> None:
    assert [message["role"] for message in asked(system_prompt=None).chat_completions] == ["system", "user"]
    assert asked(system_prompt="rules").chat_completions[0] == {"role": "system", "content": "rules"}
    assert asked().chat_completions == [{"role": "user", "content": "1 + 2 = ?"}]


@pytest.mark.parametrize(
    "how", [{"tools": [add]}, {"tool_map": {"add": Tool(function=add)}}, {"tools": ["calculator"]}]
)
def test_tools_come_as_functions_tools_names_and_maps(how: Any) -> None:
    (schema,) = ToolAgent(**how).tool_schemas
    assert schema["function"]["name"] in ("add", "calculator")


def test_without_tools_of_its_own_it_offers_what_the_environment_has() -> None:
    schema = Tool(function=add).json
    for observation, info in (("?", {"tools": [schema]}), ({"question": "?", "tools": [schema]}, {})):
        agent = ToolAgent("")
        assert agent.tool_schemas == []
        agent.update_from_env(observation, 0.0, False, info)
        assert agent.tool_schemas == [schema]
        agent.reset()
        assert agent.tool_schemas == []


def test_calls_that_the_client_read_become_the_action_and_a_message_in_parts() -> None:
    agent = asked()
    output = ModelOutput(
        text=f"Let me see. {CALL}",
        content="Let me see.",
        reasoning="hm",
        tool_calls=[ToolCall(name="add", arguments={"a": 1, "b": 2}, id="call_0")],
    )
    action = agent.update_from_model(output.text, output=output)
    assert calls(action) == [("add", {"a": 1, "b": 2})]
    assert action.action[0]["id"] == "call_0"
    message = agent.chat_completions[-1]
    assert (message["content"], message["tool_calls"]) == ("Let me see.", action.action)
    step = agent.trajectory.steps[-1]
    assert (step.thought, step.model_response) == ("hm", output.text)


def test_driven_by_hand_it_reads_calls_from_the_text() -> None:
    agent = asked(parser_name="qwen")
    assert calls(agent.update_from_model(f"{CALL}\n{CALL}")) == [("add", {"a": 1, "b": 2})] * 2
    agent.update_from_env({"tool_outputs": {"call_0": "3", "call_1": "4"}}, 0.0, False, {})
    assert agent.chat_completions[-2:] == [
        {"role": "tool", "tool_call_id": "call_0", "name": "add", "content": "3"},
        {"role": "tool", "tool_call_id": "call_1", "name": "add", "content": "4"},
    ]


def test_an_answer_without_a_call_is_finish() -> None:
    agent = asked()
    assert calls(agent.update_from_model("The sum is 3.")) == [("finish", {"response": "The sum is 3."})]
    agent.update_from_env({}, 1.0, True, {"is_correct": True})
    step = agent.trajectory.steps[-1]
    assert (step.reward, step.done, step.info) == (1.0, True, {"is_correct": True})
    assert agent.chat_completions[-1]["role"] == "assistant"


def test_what_could_not_be_read_stays_as_it_was_written_and_goes_to_the_environment() -> None:
    agent = asked()
    said = '<tool_call>\n{"name": "add", "arguments": {"a"'
    assert calls(agent.update_from_model(said)) == [("", "")]
    assert agent.chat_completions[-1] == {"role": "assistant", "content": said}


def test_what_it_does_not_understand_is_refused() -> None:
    with pytest.raises(ConfigError, match="`parser_name` is 'r1'"):
        ToolAgent(parser_name="r1")
    with pytest.raises(ConfigError, match="Both `tools` and `tool_map`"):
        ToolAgent(tools=[add], tool_map={"add": Tool(function=add)})
    with pytest.raises(AgentError, match="text, messages"):
        ToolAgent("").update_from_env({"grid": 1}, 0.0, False, {})


def test_attempts_do_not_share_what_they_were_shown() -> None:
    first, second = asked(), asked()
    first.update_from_model(CALL)
    assert len(second.chat_completions) == 1
    first.reset()
    assert first.chat_completions == []

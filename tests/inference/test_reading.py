"""An answer as an agent acts on it, and the messages in which it may say it again."""

import pytest

from rllm.inference.reading import answer_message, as_it_may_come_back, call_messages, read_into
from rllm.rendering.answers import ParsedAnswer, ParsedCall
from rllm.types.messages import FinishReason, ModelOutput, ToolCall

CALL = ToolCall(name="f", arguments={"où": 1}, id="call_0")
CALL_MESSAGE = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"où": 1}'}}


def test_calls_are_read_and_one_without_an_object_of_arguments_is_none() -> None:
    output = ModelOutput(text="whole", finish_reason=FinishReason.STOP)
    calls = [("f", '{"où": 1}'), ("g", "[1]"), ("h", ""), ("i", "nope"), ("j", "[" * 100_000)]
    parsed = [ParsedCall(name=name, arguments=arguments) for name, arguments in calls]
    read_into(output, ParsedAnswer(content="c", reasoning="r", calls=parsed))
    assert (output.content, output.reasoning, output.text) == ("c", "r", "whole")
    assert output.tool_calls == [CALL, ToolCall(name="h", arguments={}, id="call_2")]
    assert output.unparsed_markup
    assert output.finish_reason is FinishReason.TOOL_CALLS


@pytest.mark.parametrize("was_unparsed", [False, True])
def test_an_answer_that_was_cut_off_stays_so_whatever_it_called(was_unparsed: bool) -> None:
    output = ModelOutput(text="whole", finish_reason=FinishReason.LENGTH)
    parsed = [ParsedCall(name="f", arguments="{}")]
    read_into(output, ParsedAnswer(content="c", calls=parsed, unparsed_markup=was_unparsed))
    assert (output.finish_reason, output.unparsed_markup) == (FinishReason.LENGTH, was_unparsed)
    read_into(output, ParsedAnswer(content="c", unparsed_markup=was_unparsed))
    assert (output.tool_calls, output.unparsed_markup) == ([], was_unparsed)


def test_an_agent_may_say_an_answer_as_written_or_taken_apart() -> None:
    with_calls = ModelOutput(text="all", content="c", tool_calls=[CALL])
    taken_apart = {"role": "assistant", "content": "c", "tool_calls": [CALL_MESSAGE]}
    as_written = {"role": "assistant", "content": "all"}
    assert as_it_may_come_back(with_calls) == [as_written, taken_apart]
    assert answer_message(with_calls) == taken_apart
    assert call_messages([CALL]) == [CALL_MESSAGE]
    unread = ModelOutput(text="all", content="c", tool_calls=[CALL], unparsed_markup=True)
    assert answer_message(unread) == as_written
    thought = ModelOutput(text="all", content="c")
    assert as_it_may_come_back(thought) == [as_written, {"role": "assistant", "content": "c"}]
    assert answer_message(thought) == as_written
    assert as_it_may_come_back(ModelOutput(text="all", content="all")) == [as_written]

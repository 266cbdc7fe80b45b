"""Which conversation of a session a prompt goes on with: by how it begins, else by what was answered."""

from typing import Any

import pytest

from rllm.rendering.conversation_index import (
    ConversationIndex,
    IndexedConversation,
    message_digest,
    message_digests,
)
from rllm.types.messages import Message


def of(role: str, content: Any, **fields: Any) -> Message:
    return {"role": role, "content": content, **fields}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "x", "function": {"name": name, "arguments": arguments}}


RULES, FIRST, SECOND = of("system", "rules"), of("user", "one"), of("user", "two")
PART = {"type": "text", "text": "a"}
IMAGE = {"type": "image_url", "image_url": "i"}


@pytest.mark.parametrize(
    ("message", "other"),
    [
        (of("user", "ab"), of("user", [PART, {"type": "text", "text": "b"}])),
        (of("user", "ab"), of("user", ["a", "b"], refusal=None)),
        (of("user", ""), of("user", None)),
        (of("assistant", None), of("assistant", "", tool_calls=[])),
        (of("assistant", "", tool_calls=[call("f", '{"a": 1, "b": 2.0}')]),
         of("assistant", None, tool_calls=[call("f", '{"b":2,"a":1}')])),
        (of("assistant", "", tool_calls=[call("f", {"a": 1})]),
         of("assistant", "", tool_calls=[call("f", '{"a": 1.0}')])),
        (of("assistant", "", tool_calls=[call("f", "")]), of("assistant", "", tool_calls=[call("f", None)])),
        (of("assistant", "", tool_calls=[call("f", '{"a": 9007199254740991.0}')]),
         of("assistant", "", tool_calls=[call("f", '{"a": 9007199254740991}')])),
        (of("assistant", "a", name="n"), of("assistant", "a")),
        (of("user", "a", name=""), of("user", "a")),
    ],
)  # fmt: skip
def test_messages_that_a_model_reads_alike_are_the_same(message: Message, other: Message) -> None:
    assert message_digest(b"", message) == message_digest(b"", other)


@pytest.mark.parametrize(
    ("message", "other"),
    [
        (of("user", "a"), of("assistant", "a")),
        (of("user", "a"), of("user", "a ")),
        (of("user", "a", name="n"), of("user", "a")),
        (of("tool", "a", tool_call_id="1"), of("tool", "a", tool_call_id="2")),
        (of("tool", "a", tool_call_id="1"), of("tool", "a")),
        (of("user", [PART, IMAGE]), of("user", "a")),
        (of("user", [PART, IMAGE]), of("user", [PART, IMAGE | {"image_url": "j"}])),
        (of("assistant", "", tool_calls=[call("f", {})]), of("assistant", "")),
        (of("assistant", "", tool_calls=[call("f", {})]), of("assistant", "", tool_calls=[call("g", {})])),
        (of("assistant", "", tool_calls=[call("f", {"a": 1})]),
         of("assistant", "", tool_calls=[call("f", {"a": "1"})])),
        (of("assistant", "", tool_calls=[call("f", "{no")]), of("assistant", "", tool_calls=[call("f", "")])),
        # Beyond 2^53 a number with a point may have been any of several whole ones.
        (of("assistant", "", tool_calls=[call("f", '{"a": 9007199254740992.0}')]),
         of("assistant", "", tool_calls=[call("f", '{"a": 9007199254740992}')])),
    ],
)  # fmt: skip
def test_what_a_model_would_tell_apart_is_not_the_same(message: Message, other: Message) -> None:
    assert message_digest(b"", message) != message_digest(b"", other)


def test_every_beginning_has_a_digest_made_of_the_one_before() -> None:
    digests = message_digests([RULES, FIRST])
    assert digests == [b"", message_digest(b"", RULES), message_digest(digests[1], FIRST)]
    assert [len(each) for each in digests] == [0, 16, 16]
    assert digests[2] != message_digest(b"", FIRST)


def test_segments_of_a_conversation_are_counted_from_0() -> None:
    conversation = IndexedConversation(4)
    assert (conversation.number, [conversation.next_segment() for _ in range(3)]) == (4, [0, 1, 2])


def index_of(max_entries: int = 100) -> ConversationIndex:
    return ConversationIndex(max_entries=max_entries)


def find(index: ConversationIndex, *messages: Message) -> IndexedConversation | None:
    return index.find(messages, message_digests(messages))


def test_the_longest_common_beginning_wins_and_rules_alone_are_none() -> None:
    index = index_of()
    one, two = index.start(), index.start()
    assert (one.number, two.number, index.num_conversations) == (0, 1, 2)
    for conversation, messages in ((one, [RULES, FIRST]), (two, [RULES, FIRST, SECOND])):
        index.add_prompt(messages, message_digests(messages), conversation)
    assert find(index, RULES, FIRST) is one, "the first that had it keeps it"
    assert find(index, RULES, FIRST, SECOND, FIRST) is two
    assert find(index, RULES, FIRST, of("user", "other")) is one
    assert find(index, RULES) is find(index, RULES, SECOND) is find(index) is None
    developer = [of("developer", "d"), FIRST]
    index.add_prompt(developer, message_digests(developer), one)
    assert find(index, of("developer", "d"), SECOND) is None


def test_where_the_beginning_was_cut_off_the_last_known_answer_tells() -> None:
    index = index_of()
    one, two = index.start(), index.start()
    for conversation, answer in ((one, of("assistant", "yes")), (two, of("assistant", "no"))):
        digest = index.add_answer(message_digests([FIRST])[-1], answer, conversation)
        assert digest == message_digests([FIRST, answer])[-1]
    index.add_answer(b"", of("assistant", ""), two)
    assert find(index, FIRST, of("assistant", "yes")) is one
    assert find(index, SECOND, of("assistant", "no"), SECOND, of("assistant", "yes"), FIRST) is one
    assert find(index, SECOND, of("user", "yes")) is None
    assert find(index, SECOND, of("assistant", "")) is None, "nothing was said, so nothing is known by it"
    call_alone = of("assistant", None, tool_calls=[call("f", {})])
    index.add_answer(b"", call_alone, two)
    assert find(index, SECOND, call_alone) is two


def test_two_conversations_that_begin_alike_are_told_apart_by_what_was_answered() -> None:
    index = index_of()
    start, yes, no = message_digests([FIRST]), of("assistant", "yes"), of("assistant", "no")
    one, two = index.start(), index.start()
    for conversation, answer in ((one, yes), (two, no)):
        index.add_prompt([FIRST], start, conversation)
        index.add_answer(start[-1], answer, conversation)
    assert find(index, FIRST, yes, SECOND) is one
    assert find(index, FIRST, no, SECOND) is two
    assert find(index, FIRST, of("assistant", "perhaps"), SECOND) is one


def test_of_too_many_beginnings_the_oldest_is_forgotten() -> None:
    index = index_of(max_entries=2)
    conversations = [index.start() for _ in range(3)]
    for number, conversation in enumerate(conversations):
        messages = [of("user", str(number))]
        index.add_prompt(messages, message_digests(messages), conversation)
        assert len(index) == min(number + 1, 2)
    matches = [find(index, of("user", str(number))) for number in range(3)]
    assert matches == [None, *conversations[1:]]
    for number in range(3):
        index.add_answer(b"other", of("assistant", str(number)), conversations[0])
    assert len(index) == 2

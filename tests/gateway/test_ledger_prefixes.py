"""What a call keeps of earlier ones: all that is equal, of the best of them, and not too long a chain."""

import hashlib
import random
from typing import Any

import pytest

from rllm.gateway.ledger.prefixes import Kept, Tip, Tips, Trail, digest, num_equal_digests, part_digests
from rllm.gateway.ledger.rows import EncodedCall, encode_call
from rllm.types.wire import CallRecord

BLOCK = 1024


def encoded(tips: list[Tip] | None = None, **fields: Any) -> EncodedCall:
    return encode_call(CallRecord(id="c", session="lake", **fields), tips or [])


def message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_digests_are_of_everything_up_to_their_place() -> None:
    assert digest(b"ab") == hashlib.sha256(b"ab").digest()[:16]
    assert part_digests([b"a", b"b"]) == digest(b"a") + digest(b"ab")


def test_a_trail_has_a_digest_after_each_whole_block(subtests: pytest.Subtests) -> None:
    for num_bytes in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK):
        with subtests.test(num_bytes=num_bytes):
            data = random.Random(num_bytes).randbytes(num_bytes)
            blocks = range(BLOCK, num_bytes + 1, BLOCK)
            assert Trail(data).digests == b"".join(digest(data[:end]) for end in blocks)
            assert Trail(data).ends(0, num_bytes) == (((num_bytes, digest(data)),) if data else ())


def test_the_number_of_equal_digests_is_that_of_the_first_that_agree() -> None:
    texts = [[letter] * count + ["x"] * rest for letter in "ab" for count in range(6) for rest in range(3)]
    for mine in texts:
        for theirs in texts:
            pairs = zip(mine, theirs, strict=False)
            agree = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(mine), len(theirs)))
            sides = [part_digests(part.encode() for part in side) for side in (mine, theirs)]
            assert num_equal_digests(*sides) == agree, (mine, theirs)


def test_what_two_texts_share_is_exact_at_an_end_and_else_whole_blocks() -> None:
    rng = random.Random(4)
    for _ in range(200):
        first = rng.randbytes(rng.choice([0, 5, 700, BLOCK, 2500, 3 * BLOCK]))
        agreeing = rng.choice([0, 3, BLOCK, 2000, len(first)])
        second = first[:agreeing] + rng.randbytes(rng.choice([0, 1, 1500]))
        earlier, later = Trail(first), Trail(second)
        end = rng.choice([0, 3, 700, len(first)])
        ends = earlier.ends(min(end, len(first)), len(first))
        limit = rng.choice([0, len(second) // 2, len(second)])
        shared = next(
            (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
            min(len(first), len(second)),
        )
        usable = min(shared, limit)
        exact = [place for place, _ in ends if place <= usable]
        assert later.common_with(earlier.digests, ends, limit=limit) == max([usable // BLOCK * BLOCK, *exact])


def test_a_call_counts_for_what_has_to_be_read_of_it() -> None:
    """In bytes: its messages, response, tools and prompt as JSON or text, eight an id, four or eight a
    log-probability, and 256 for its row."""
    text = "x" * 800
    empty = encoded().kept_prefix.chain_bytes
    assert empty == 256 + len("{}") + len("f"), "a response, and what kind of numbers would follow"
    for fields, num_bytes in (
        ({"messages": [{"a": text}]}, 800 + len('{"a":""}')),
        ({"response": {"a": text}}, 800 + len('{"a":""}') - len("{}")),
        ({"tools": [{"a": text}]}, 800 + len('[{"a":""}]')),
        ({"prompt": text}, 800),
        ({"prompt": [7] * 100}, 800),
        ({"prompt_ids": [7] * 100}, 800),
        ({"completion_ids": [7] * 100}, 800),
        ({"logprobs": [-0.5] * 200}, 800),
        ({"logprobs": [-0.1] * 100}, 800),
    ):
        assert encoded(**fields).kept_prefix.chain_bytes - empty == num_bytes, fields


def test_a_call_that_goes_on_counts_for_its_row_and_what_is_new() -> None:
    said = [message("y" * 500)]
    first = encoded(
        messages=said, tools=[{"name": "move"}], prompt="z" * 300, prompt_ids=[1] * 50, completion_ids=[2] * 9
    )
    again = encoded(
        [first.tip],
        messages=[*said, {}, {"a": 1}],
        tools=[{"name": "move"}],
        prompt="z" * 300 + "new",
        prompt_ids=[1] * 50 + [2] * 9 + [3],
    )
    kept = again.kept_prefix
    assert kept.parent is first.tip
    assert (kept.id_bytes, kept.messages, kept.prompt_bytes, kept.tools) == (59 * 8, 2, 300, True)
    empty = encoded().kept_prefix.chain_bytes
    assert kept.chain_bytes - first.kept_prefix.chain_bytes == empty + len('{"a":1}') + len("new") + 8


def test_of_several_calls_the_one_that_saves_most_is_kept_and_of_equals_the_newest() -> None:
    parts: dict[str, Any] = {
        "prompt_ids": [5] * 50,
        "messages": [message("m" * 350)],
        "prompt": "p" * 300,
        "tools": [{"name": "t" * 200}],
    }
    later: dict[str, Any] = {
        "prompt_ids": [5] * 50 + [6],
        "messages": [*parts["messages"], message("more")],
        "prompt": parts["prompt"] + "more",
        "tools": parts["tools"],
    }
    # Sharing two of the parts saves more than sharing any other one.
    for one in parts:
        for two in parts:
            both = encoded(**{name: parts[name] for name in {one, two}})
            others = [encoded(**{name: parts[name]}) for name in parts]
            tips = [each.tip for each in others]
            best = encoded([*tips, both.tip], **later).kept_prefix
            assert best.parent is (both.tip if one != two else tips[list(parts).index("prompt_ids")])
    twins = [encoded(**parts).tip for _ in range(3)]
    assert encoded(twins, **later).kept_prefix.parent is twins[0]


def test_a_call_that_shares_nothing_goes_on_from_none() -> None:
    other = encoded(messages=[message("a")], prompt_ids=[1, 2], prompt="one", tools=[{"name": "a"}])
    for fields in ({}, {"messages": [message("b")], "prompt_ids": [2], "prompt": "two", "tools": [{}]}):
        kept = encoded([other.tip], **fields).kept_prefix
        assert kept == Kept(chain_bytes=kept.chain_bytes)


def test_a_request_asked_again_keeps_its_messages_and_not_the_answer_that_it_had() -> None:
    fields: dict[str, Any] = {
        "messages": [message("a" * 500)],
        "response": message("b"),
        "prompt_ids": [1] * 200,
        "completion_ids": [2] * 100,
    }
    kept = encoded([encoded(**fields).tip], **fields).kept_prefix
    assert (kept.messages, kept.id_bytes) == (1, 200 * 8)
    half = fields | {"prompt_ids": [1] * 100, "completion_ids": [1] * 100 + [2] * 100}
    assert encoded([encoded(**fields).tip], **half).kept_prefix.id_bytes <= 100 * 8


def test_no_call_keeps_what_would_be_read_more_than_four_times_and_16_kb_over() -> None:
    fields: dict[str, Any] = {"messages": [message("a" * 5000)]}
    tip = encoded(**fields).tip
    whole = encoded(**fields).kept_prefix.chain_bytes
    chain = encoded([tip], **fields).kept_prefix.chain_bytes - tip.chain_bytes
    tip.chain_bytes = 4 * whole + 16 * 1024 - chain
    assert encoded([tip], **fields).kept_prefix.parent is tip
    tip.chain_bytes += 1
    assert encoded([tip], **fields).kept_prefix.parent is None


def kept_after(first: EncodedCall, second: EncodedCall) -> list[Tip]:
    tips = Tips()
    for call in (first, second):
        tips.add("lake", call.tip, call.kept_prefix)
    assert tips.num_bytes == sum(tip.num_bytes for tip in tips.of("lake"))
    return tips.of("lake")


def test_a_call_takes_the_place_of_the_one_whose_answer_it_goes_on_from() -> None:
    by_ids = encoded(prompt_ids=[1] * 60, completion_ids=[2] * 60)
    goes_on = encoded([by_ids.tip], prompt_ids=[1] * 60 + [2] * 60 + [3])
    assert kept_after(by_ids, goes_on) == [goes_on.tip]
    fork = encoded([by_ids.tip], prompt_ids=[1] * 60, completion_ids=[4])
    assert fork.kept_prefix.parent is by_ids.tip
    assert kept_after(by_ids, fork) == [fork.tip, by_ids.tip]
    by_text = encoded(messages=[message("a")], response=message("b"))
    goes_on = encoded([by_text.tip], messages=[message("a"), message("b"), message("c")])
    assert kept_after(by_text, goes_on) == [goes_on.tip]
    fork = encoded([by_text.tip], messages=[message("a"), message("c")])
    assert fork.kept_prefix.parent is by_text.tip
    assert kept_after(by_text, fork) == [fork.tip, by_text.tip]


def test_tips_are_remembered_as_far_as_their_bytes_reach_the_least_active_session_first() -> None:
    call = encoded()
    assert call.tip.num_bytes == 1500 + 16  # of its response
    tips = Tips(limit_bytes=3 * 1516)
    for session in "abcad":
        tips.add(session, call.tip, call.kept_prefix)
        if session == "c":
            tips.forget("b")
    assert [session for session in "abcd" if tips.of(session)] == ["a", "d"]
    assert tips.num_bytes == 3 * 1516 == tips.limit_bytes
    assert Tips().limit_bytes == 32 * 2**20
    tips.forget_all()
    assert (tips.num_bytes, tips.of("a")) == (0, [])


@pytest.mark.parametrize(
    ("fields", "num_digests"),
    [({"prompt_ids": [1] * 256}, 2), ({"messages": [message("a")] * 5}, 5), ({"prompt": "a" * 3072}, 3)],
)
def test_the_digests_of_each_part_of_a_call_take_their_memory(fields: Any, num_digests: int) -> None:
    assert encoded(**fields).tip.num_bytes - encoded().tip.num_bytes == num_digests * 16

"""A call as a row and back: whatever it holds, and whatever it has in common with earlier calls."""

import copy
import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllm.gateway.ledger.prefixes import Tip, Tips
from rllm.gateway.ledger.rows import CallRow, decode_call, encode_call
from rllm.types.messages import LogprobMeaning
from rllm.types.wire import CallRecord, CallStatus, Dialect

texts = st.text(st.characters(exclude_categories=()), max_size=20)  # halves of surrogate pairs included
finite = st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(texts, values, max_size=4)
messages = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"]), "content": values})
ids = st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 2**32 - 1) | st.integers(0, 300), max_size=700)
counts = st.dictionaries(texts, st.integers(0, 2**40), max_size=3)
seconds = st.floats(0, 1e10)

records = st.builds(
    CallRecord,
    id=texts,
    session=st.just("lake"),
    choice=st.integers(0, 2**63 - 1),
    dialect=st.sampled_from(Dialect),
    model=texts,
    stream=st.booleans(),
    status=st.sampled_from(CallStatus),
    error=st.none() | objects,
    messages=st.lists(messages, max_size=4),
    prompt=st.none() | texts | st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5),
    tools=st.lists(objects, max_size=2),
    sampling=objects,
    response=messages | st.just({}),
    finish_reason=texts,
    stop_sequence=st.none() | texts,
    unparsed_markup=st.booleans(),
    prompt_ids=ids,
    completion_ids=ids,
    logprobs=st.lists(finite | st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=5),
    logprob_meaning=st.sampled_from(LogprobMeaning),
    temperature=st.none() | finite,
    policy_versions=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 3), max_size=5),
    mixed_versions=st.booleans(),
    no_ids_because=texts,
    token_logprobs=st.lists(
        st.fixed_dictionaries(
            {
                "token_id": st.integers(-1, 2**31),
                "text": texts,
                "logprob": finite,
                "top": st.lists(st.tuples(st.integers(-1, 9), texts, finite).map(list), max_size=2),
            }
        ),
        max_size=3,
    ),
    usage=counts,
    conversation=st.integers(0, 2**70),
    segment=st.integers(0, 2**70),
    segment_reason=texts,
    upstream=texts,
    retry_key=texts,
    started_at=seconds,
    latency_s=seconds,
    first_token_s=st.none() | seconds,
)


class Large(int):
    pass


class Half(float):
    pass


class Word(str):
    __slots__ = ()


def as_text(record: CallRecord) -> str:
    """Tells 1 from 1.0 and True, and 0.0 from -0.0."""
    return repr(asdict(record))


def stored_and_read(records: list[CallRecord]) -> tuple[list[CallRecord], list[CallRow]]:
    """As the ledger does it, without the ledger."""
    tips = Tips()
    rows: list[CallRow] = []
    read: dict[int, CallRecord] = {}
    for number, record in enumerate(records, start=1):
        encoded = encode_call(record, tips.of("lake"))
        encoded.tip.call = number
        row = encoded.row(session=1, is_first=True)
        rows.append(row)
        read[number] = decode_call(row, "lake", None if row.parent is None else read[row.parent])
        tips.add("lake", encoded.tip, encoded.kept_prefix)
    return list(read.values()), rows


@given(records)
def test_any_call_is_read_back_as_it_was(record: CallRecord) -> None:
    before = copy.deepcopy(record)
    (read,), _ = stored_and_read([record])
    assert as_text(read) == as_text(before)


LATER_FIELDS = {"stop_sequence": None, "unparsed_markup": False, "mixed_versions": False, "temperature": None}
"""What records did not have when the first ledgers were written, and what they are read as."""


@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize("innermost", ["text", 1.5, {}])
def test_json_is_read_back_as_deep_as_the_limit_and_refused_one_level_deeper(
    innermost: Any, is_list: bool
) -> None:
    def nested(levels: int) -> dict[str, Any]:
        value: Any = innermost
        for level in range(levels, 0, -1):
            value = [value] if is_list and level > 1 else {"a": value}
        return value

    # Text and the like are no level of their own.
    deepest = 201 if innermost == "text" else 200
    call = CallRecord(id="1", session="lake", dialect=Dialect.CHAT, model="m")
    call.response = nested(deepest)
    (read,), _ = stored_and_read([call])
    assert read.response == call.response
    call.response = nested(deepest + 1)
    with pytest.raises(ValueError, match="deeper than 200"):
        stored_and_read([call])


def test_a_ledger_from_before_a_field_is_read_with_its_default() -> None:
    record = CallRecord(id="a", session="lake", response={"role": "assistant", "content": "yes"})
    (read,), (row,) = stored_and_read([record])
    assert row.payload[:1] == b"o"
    assert not LATER_FIELDS.keys() & json.loads(row.payload[1:]).keys(), "as it was written then"
    assert {name: getattr(read, name) for name in LATER_FIELDS} == LATER_FIELDS
    told = {name: value for name, value in record.to_dict().items() if name not in LATER_FIELDS}
    assert CallRecord.from_dict(told) == record


def next_calls(first: CallRecord) -> st.SearchStrategy[list[CallRecord]]:
    """Calls that begin as earlier ones do, up to any place, and go on otherwise."""

    @st.composite
    def following(draw: st.DrawFn) -> list[CallRecord]:
        calls = [first]
        for _ in range(draw(st.integers(1, 4))):
            record = draw(records)
            parent = draw(st.sampled_from(calls))
            history = parent.prompt_ids + parent.completion_ids
            record.prompt_ids = history[: draw(st.integers(0, len(history)))] + record.prompt_ids[:300]
            said = [*parent.messages, parent.response]
            record.messages = said[: draw(st.integers(0, len(said)))] + record.messages
            if isinstance(parent.prompt, str):
                record.prompt = parent.prompt[: draw(st.integers(0, len(parent.prompt)))] + draw(texts)
            if draw(st.booleans()):
                record.tools = parent.tools
            calls.append(record)
        return calls

    return following()


@settings(max_examples=20, deadline=None)
@given(records.flatmap(next_calls))
def test_calls_that_share_any_beginning_are_read_back_as_they_were(calls: list[CallRecord]) -> None:
    read, _ = stored_and_read(calls)
    assert [as_text(record) for record in read] == [as_text(record) for record in calls]


def turns(num_turns: int, *, num_ids: int = 50) -> list[CallRecord]:
    said: list[dict[str, Any]] = []
    history: list[int] = []
    calls: list[CallRecord] = []
    for turn in range(num_turns):
        said = [*said, {"role": "user", "content": f"observation {turn}"}]
        history = history + [turn] * num_ids
        call = CallRecord(id=f"c{turn}", session="lake", messages=said, prompt_ids=history)
        call.response = {"role": "assistant", "content": f"move {turn}"}
        call.completion_ids = [100_000 + turn] * 20
        calls.append(call)
        said, history = [*said, call.response], history + call.completion_ids
    return calls


def test_a_turn_stores_only_what_is_new_in_it() -> None:
    calls = turns(30)
    _, rows = stored_and_read(calls)
    for number, row in enumerate(rows[1:], start=1):
        assert row.num_ids_kept == len(calls[number].prompt_ids) - 50
        assert row.num_messages_kept == len(calls[number].messages) - 1
        assert row.parent == number


def test_what_has_to_be_read_for_one_call_stays_in_proportion_to_it() -> None:
    """A short question asked ten thousand times is not a chain of ten thousand rows."""
    same = [
        CallRecord(id=f"c{n}", session="lake", messages=[{"role": "user", "content": "?"}])
        for n in range(2000)
    ]
    _, rows = stored_and_read(same)
    longest = chain = 0
    for row in rows:
        chain = 0 if row.parent is None else chain + 1
        longest = max(longest, chain)
    assert 2 < longest < 100


def test_a_system_prompt_is_kept_by_whole_blocks_when_the_rest_differs() -> None:
    system = list(range(2000))
    calls = [
        CallRecord(id=f"c{n}", session="lake", prompt_ids=[*system, n], completion_ids=[n]) for n in range(3)
    ]
    _, rows = stored_and_read(calls)
    assert [row.num_ids_kept for row in rows] == [0, 1920, 1920]


def test_ids_take_as_few_bytes_as_the_largest_needs() -> None:
    for largest in (0, 255, 256, 65535, 65536, 2**24 - 1, 2**24, 2**32 - 1, 2**32, 2**62 + 5):
        record = CallRecord(id="c", session="lake", prompt_ids=[0, largest] * 500)
        (read,), (row,) = stored_and_read([record])
        assert read.prompt_ids == record.prompt_ids
        assert len(row.tokens) < 1000 * max(1, (largest.bit_length() + 7) // 8) + 30


def test_log_probabilities_that_float32_holds_take_four_bytes_and_others_eight() -> None:
    short = CallRecord(id="c", session="lake", logprobs=[-0.5] * 1000)
    exact = CallRecord(id="c", session="lake", logprobs=[-0.1] * 1000)
    sizes = [len(stored_and_read([record])[1][0].tokens) for record in (short, exact)]
    assert sizes == [pytest.approx(4000, abs=30), pytest.approx(8000, abs=30)]


def test_text_is_compressed_where_that_pays() -> None:
    prose = CallRecord(id="c", session="lake", response={"content": "the ice is thin here, go right. " * 900})
    (read,), (row,) = stored_and_read([prose])
    assert read == prose
    assert len(row.payload) < 1000
    for half, kind in (("", b"O"), ("\ud83e", b"J")):
        beyond = CallRecord(id="c", session="lake", response={"content": "ice " * 900 + half})
        (read,), (row,) = stored_and_read([beyond])
        assert read == beyond
        assert row.payload[:1] == kind


def test_json_is_compressed_from_2048_bytes_up() -> None:
    def row_with(num_letters: int) -> CallRow:
        record = CallRecord(id="c", session="lake", response={"content": "a" * num_letters})
        (read,), (row,) = stored_and_read([record])
        assert read == record
        return row

    letters = 2048 - (len(row_with(1).payload) - 2)
    assert len(row_with(letters - 1).payload) == 1 + 2047
    assert row_with(letters - 1).payload[:1] == b"o"
    assert row_with(letters).payload[:1] == b"O"


def test_policy_versions_take_as_few_bytes_as_the_largest_needs_and_equal_ones_none() -> None:
    for largest, num_bytes in ((127, 1), (128, 2), (2**15, 4), (2**31, 8), (-129, 2)):
        empty = len(stored_and_read([CallRecord(id="c", session="lake")])[1][0].tokens)
        for versions, size in (
            ([0, largest] * 500, 1 + 1000 * num_bytes),
            ([largest] * 1000, 1 + 8 + 4),
            ([largest], 1 + 8 + 4),
        ):
            record = CallRecord(id="c", session="lake", policy_versions=versions)
            (read,), (row,) = stored_and_read([record])
            assert read == record
            assert len(row.tokens) - empty == size


def test_log_probabilities_whose_sum_is_beyond_all_numbers_are_numbers() -> None:
    record = CallRecord(id="c", session="lake", logprobs=[-1e308, -1e308])
    (read,), _ = stored_and_read([record])
    assert read == record


def test_a_choice_has_64_bits() -> None:
    for choice in (-(2**63), 2**63 - 1):
        (read,), _ = stored_and_read([CallRecord(id="c", session="lake", choice=choice)])
        assert read.choice == choice
        beyond = CallRecord(id="c", session="lake", choice=choice + (1 if choice > 0 else -1))
        with pytest.raises(ValueError, match=r"`choice`.*64 bits"):
            stored_and_read([beyond])


def test_what_is_equal_to_a_default_and_not_the_same_is_kept() -> None:
    for fields in (
        {"stream": 0},
        {"stream": True},
        {"segment": 0.0},
        {"conversation": False},
        {"latency_s": -0.0},
        {"latency_s": 0},
        {"usage": {"a": 1.0}},
        {"sampling": {"n": Large(7), "p": Half(0.5), "stop": Word("x")}},
    ):
        record = CallRecord(id="c", session="lake", **fields)
        (read,), _ = stored_and_read([record])
        assert json.dumps(read.to_dict()) == json.dumps(record.to_dict()), fields


def test_what_is_as_it_is_by_default_takes_no_space() -> None:
    _, (row,) = stored_and_read([CallRecord(id="c", session="lake", usage={}, sampling={}, model="")])
    assert json.loads(row.payload[1:]) == {"messages": [], "response": {}}


def test_a_number_of_a_kind_of_its_own_that_json_cannot_hold_is_refused() -> None:
    for value in (Half("nan"), Half("inf")):
        with pytest.raises(ValueError, match=r"sampling\['p'\].*JSON cannot hold"):
            stored_and_read([CallRecord(id="c", session="lake", sampling={"p": value})])


def test_what_json_cannot_hold_is_refused_also_where_an_earlier_call_had_null() -> None:
    def call(value: float | None) -> CallRecord:
        message = {"role": "user", "content": [{"score": value}]}
        return CallRecord(id="x", session="lake", messages=[message], tools=[{"default": value}])

    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="messages"):
            stored_and_read([call(None), call(value)])
    with_nan = call(None)
    with_nan.tools = call(float("nan")).tools
    with pytest.raises(ValueError, match="tools"):
        stored_and_read([call(None), with_nan])
    assert stored_and_read([call(None), call(None)])[0] == [call(None), call(None)]


def test_tools_are_the_earlier_calls_only_where_they_are_equal() -> None:
    one, two = [{"name": "one"}], [{"name": "two"}]
    said = [{"role": "user", "content": "a" * 100}]
    calls = [
        CallRecord(id=f"c{number}", session="lake", messages=said, tools=tools)
        for number, tools in enumerate((one, one, two, [], one))
    ]
    read, rows = stored_and_read(calls)
    assert read == calls
    assert [b"tools_kept" in row.payload for row in rows] == [False, True, False, False, True]
    assert [row.parent is None for row in rows] == [True, False, False, False, False]


def test_the_sessions_that_were_active_last_are_remembered() -> None:
    tips = Tips(limit_bytes=100_000)
    encoded = [encode_call(record, ()) for record in turns(3)]
    for number in range(1000):
        tips.add(f"s{number}", encoded[0].tip, encoded[0].kept_prefix)
        tips.add("busy", encoded[1].tip, encoded[1].kept_prefix)
    assert tips.num_bytes <= 100_000
    assert tips.of("s999")
    assert tips.of("busy")
    assert not tips.of("s1")


def test_many_conversations_of_one_session_are_told_apart_and_the_oldest_is_forgotten() -> None:
    tips = Tips()
    added: list[Tip] = []
    for number in range(20):
        encoded = encode_call(CallRecord(id="c", session="lake", prompt_ids=[number] * 400), tips.of("lake"))
        tips.add("lake", encoded.tip, encoded.kept_prefix)
        added.append(encoded.tip)
    assert tips.of("lake") == added[:-9:-1]

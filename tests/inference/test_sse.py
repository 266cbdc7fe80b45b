"""Streams are taken apart into the same events, however their bytes are cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.inference.sse import EventSplitter, _plain_events


def events_of(*parts: bytes) -> list[tuple[str, bytes]]:
    splitter = EventSplitter()
    return [event for part in parts for event in splitter.feed(part)] + splitter.finish()


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_events_have_a_name_and_data_whatever_ends_their_lines(end: bytes) -> None:
    lines = [
        b": hello",
        b"",
        b"event: a",
        b"data: 1",
        b"",
        b"data:2",
        b"data:  3",
        b"id: 9",
        b"",
        b"data",
        b"",
        b"",
    ]
    assert events_of(end.join(lines)) == [("a", b"1"), ("", b"2\n 3"), ("", b"")]


@given(st.lists(st.integers(0, 200), max_size=8), st.sampled_from([b"\n", b"\r\n"]))
def test_it_does_not_matter_where_the_bytes_are_cut(cuts: list[int], end: bytes) -> None:
    whole = end.join(
        [b"\xef\xbb\xbfdata: {}", b"", b"event: x", b"data: a", b"data: b", b"", b": c", b"", b"data: c"]
    )
    places = [3, *sorted(3 + cut % len(whole) for cut in cuts), len(whole)]
    parts = [whole[:3]] + [whole[a:b] for a, b in pairwise(places)]
    assert events_of(*parts) == [("", b"{}"), ("x", b"a\nb"), ("", b"c")]


def test_an_event_is_there_with_the_byte_that_completes_it() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: 1\n") == []
    assert splitter.feed(b"\n") == [("", b"1")]
    assert splitter.feed(b"\n\ndata: 2\n\ndata: 3") == [("", b"2")]
    assert splitter.finish() == [("", b"3")]

    splitter = EventSplitter()
    assert splitter.feed(b"data: 1\n") == []
    assert splitter.feed(b"\ndata: 2") == [("", b"1")], "the other half of the empty line may begin a part"
    assert splitter.feed(b"\n\n: c\n\ndata: 3\n") == [("", b"2")]
    assert splitter.feed(b"\n") == [("", b"3")]
    assert splitter.finish() == []


@pytest.mark.parametrize(
    ("part", "events"),
    [
        (b"data: 1\n\n", [b"1"]),
        (b"data: 1\n\ndata: {}\n\ndata: \n\n", [b"1", b"{}", b""]),
        (b"data: 1\ndata: 2\n\n", [b"1\n2"]),
        (b"data: 1\rdata: 2\n\n", [b"1\n2"]),
        (b"data: 1\nid: 7\n\ndata: 2\n\n", [b"1", b"2"]),
        (b"data: 1\n\n: c\n\ndata: 2\n\n", [b"1", b"2"]),
        (b"data: 1\n\n\n\n", [b"1"]),
    ],
)
def test_a_part_of_whole_events_gives_them_at_once(part: bytes, events: list[bytes]) -> None:
    splitter = EventSplitter()
    for _ in range(2):
        assert [data for _, data in splitter.feed(part)] == events
    assert splitter.finish() == []
    has_one_line_each = part.count(b"\n") == 2 * len(events) and b"\r" not in part
    assert [data for _, data in _plain_events(part)] == (events if has_one_line_each else [])


@pytest.mark.parametrize("first", [b"data: 1\n\n", b": c\n\ndata: 1\n\n"])
def test_a_mark_of_the_byte_order_stands_at_the_beginning_alone(first: bytes) -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"\xef\xbb\xbf" + first) == [("", b"1")]
    splitter = EventSplitter()
    assert splitter.feed(first) == [("", b"1")]
    assert splitter.feed(b"\xef\xbb\xbfdata: 2\n\n") == [], "of another name than data"


def test_an_event_without_end_is_given_up() -> None:
    splitter = EventSplitter(max_event_bytes=1000)
    for _ in range(100):
        assert splitter.feed(b"data: 90ab") == []
    with pytest.raises(ValueError, match="1000"):
        splitter.feed(b"data: 90ab")

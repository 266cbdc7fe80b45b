"""Where prompts are sent that begin as others did."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.inference import prefix_routes
from rllm.inference.prefix_routes import BLOCK, PrefixRoutes


def _ids(num: int, first: int = 0) -> list[int]:
    return list(range(first, first + num))


def test_a_conversation_and_its_branches_go_back_to_where_most_of_them_was_read() -> None:
    routes: PrefixRoutes[str] = PrefixRoutes()
    prompt = _ids(4 * BLOCK)
    assert routes.find(prompt) is None
    routes.note(prompt, "a")
    assert routes.find(prompt + _ids(BLOCK, 5_000)) == "a"
    assert routes.find(prompt[: 3 * BLOCK] + _ids(BLOCK, 5_000)) == "a"
    assert routes.find(prompt[:BLOCK] + _ids(3 * BLOCK, 5_000)) is None, "less than half of it"
    longer = prompt + _ids(4 * BLOCK, 9_000)
    routes.note(longer, "b")
    assert routes.find(longer + _ids(9)) == "b"
    routes.forget("b")
    assert routes.find(longer + _ids(9)) is None


def test_beginnings_are_told_apart_in_blocks_of_64_and_at_least_half_counts() -> None:
    routes: PrefixRoutes[str] = PrefixRoutes()
    routes.note(_ids(63), "a")
    assert routes.find(_ids(63)) is None
    routes.note(_ids(64), "b")
    assert routes.find(_ids(64)) == "b"
    routes.note(_ids(2 * BLOCK), "c")
    assert routes.find(_ids(2 * BLOCK) + _ids(2 * BLOCK, 5_000)) == "c"
    for more in (2 * BLOCK + 1, 3 * BLOCK):
        assert routes.find(_ids(2 * BLOCK) + _ids(more, 5_000)) is None


def test_the_beginning_that_nobody_used_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_routes, "MOST_BLOCKS", 2)
    routes: PrefixRoutes[str] = PrefixRoutes()
    rows = {name: _ids(BLOCK, 1_000 * place) for place, name in enumerate("abc")}
    for name in "abac":
        routes.note(rows[name], name)
    assert [routes.find(rows[name]) for name in "abc"] == ["a", None, "c"]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4 * BLOCK)), max_size=12), st.integers(1, 12))
def test_what_is_remembered_is_bounded_and_never_of_another_beginning(
    calls: list[tuple[int, int]], most: int
) -> None:
    routes: PrefixRoutes[int] = PrefixRoutes()
    limit, prefix_routes.MOST_BLOCKS = prefix_routes.MOST_BLOCKS, most
    try:
        for kind, length in calls:
            place = routes.find(_ids(length, 1_000 * kind))
            assert place in (kind, None)
            routes.note(_ids(length, 1_000 * kind), kind)
            assert len(routes._places) <= most
    finally:
        prefix_routes.MOST_BLOCKS = limit

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from rllm.inference.local.text import StopTexts, TextStream
from rllm.models.builtin import create_tokenizer

SAMPLES = [
    "Reach the goal.",
    "été 日本語 🙂👍🏽 e\u0301",
    "a\ufffdb",
    "  two  spaces\n\n",
    "مرحبا",
    "\U0001f468‍👩‍👧",
]


def _pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    stream = TextStream(lambda each: tokenizer.decode(list(each)), special.__contains__)
    return [*(stream.add(token) for token in ids), stream.rest()]


@pytest.fixture(scope="module")
def builtin() -> Any:
    return create_tokenizer()


@pytest.fixture(scope="module")
def sentences() -> Any:
    """As SentencePiece models do it: the first space is dropped, and unknown characters come in bytes."""
    letters = [*"▁abcdefghijklmnopqrstuvwxyz", "▁the", "▁go"]
    vocab = {
        token: number for number, token in enumerate([f"<0x{byte:02X}>" for byte in range(256)] + letters)
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return tokenizer


@given(ids=st.lists(st.integers(0, 511), max_size=120))
def test_pieces_of_any_token_sequence_add_up_to_what_the_whole_decodes_to(
    builtin: Any, ids: list[int]
) -> None:
    assert "".join(_pieces(builtin, ids)) == builtin.decode(ids)


@pytest.mark.parametrize("text", SAMPLES)
def test_a_character_is_handed_out_with_its_last_byte_and_never_in_parts(builtin: Any, text: str) -> None:
    ids = builtin.encode(text, add_special_tokens=False).ids * 9
    pieces = _pieces(builtin, ids)
    assert "".join(pieces) == text * 9
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)
        assert pieces[-1] == ""
        for count in range(len(ids) + 1):
            assert "".join(pieces[:count]) == builtin.decode(ids[:count]).rstrip("\ufffd")


@given(
    words=st.lists(st.sampled_from([256, 257, 258, 283, 284, (0xE6, 0x97, 0xA5), (0xC3, 0xA9)]), max_size=60)
)
def test_tokenizers_that_look_back_while_decoding_give_the_same_text_in_pieces(
    sentences: Any, words: list[Any]
) -> None:
    ids = [token for word in words for token in (word if isinstance(word, tuple) else (word,))]
    assert "".join(_pieces(sentences, ids)) == sentences.decode(ids)


def test_bytes_that_never_become_a_character_are_not_held_back_for_ever(builtin: Any) -> None:
    broken = builtin.token_to_id("Ģ")  # the byte 0x80
    pieces = _pieces(builtin, [broken] * 400)
    assert "".join(pieces) == "\ufffd" * 400
    assert max(len(piece) for piece in pieces) < 100


def test_the_work_grows_with_the_length_and_not_with_its_square(builtin: Any) -> None:
    decoded: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return builtin.decode(list(ids))

    for word, token in (("a", 70), ("broken", builtin.token_to_id("Ģ"))):
        decoded.clear()
        stream = TextStream(decode, lambda token: False)
        for _ in range(2000):
            stream.add(token)
        assert sum(decoded) < 2000 * 45, word


Feed = Callable[[Sequence[str], str, list[int]], tuple[str, str | None]]


def _first_stop(stops: Sequence[str], text: str) -> tuple[str, str | None]:
    """Character by character: the first stop text that is complete, the longest of those."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


letters = st.text("ab\n", max_size=30)


@given(
    stops=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4),
    text=letters,
    cuts=st.lists(st.integers(1, 6), max_size=30),
)
def test_a_stop_text_is_found_wherever_pieces_are_cut_and_never_shown_in_part(
    stops: list[str], text: str, cuts: list[int]
) -> None:
    expected, stop = _first_stop(stops, text)
    search, shown, start = StopTexts(stops), "", 0
    for cut in [*cuts, len(text) + 1]:
        shown += search.feed(text[start : start + cut])
        start += cut
        assert expected.startswith(shown), "something was shown that belongs to a stop text"
        if search.match is not None:
            break
    shown += search.rest()
    assert (shown, search.match) == (expected, stop)


def test_only_what_may_begin_a_stop_text_is_held_back() -> None:
    search = StopTexts(["</code>", "Observation:"])
    assert search.feed("x = 1 <") == "x = 1 "
    assert search.feed(" 2 </cod") == "< 2 "
    assert search.feed("a") == "</coda"
    assert search.feed(" Obs") == " "
    assert search.rest() == "Obs"

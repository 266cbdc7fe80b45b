"""Search in a corpus of one's own."""

import json
import math
import threading
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("bm25s")

from rllm.errors import ConfigError
from rllm.tools.local_search import Corpus, Document, LocalSearch, corpus_of

CITIES = [
    {"id": "no", "title": "Oslo", "text": "Oslo is the capital of Norway, on a fjord."},
    {"id": "ch", "title": "Zürich", "text": "The largest city of Switzerland lies on a lake."},
    {"id": "it", "title": "Roma", "text": "Rome is the capital of Italy. Rome is old."},
]


def ids(tool: LocalSearch, query: str) -> list[str]:
    return [hit["id"] for hit in tool(query=query).metadata["hits"]]


def test_documents_come_best_first_with_title_and_text() -> None:
    tool = LocalSearch(CITIES, num_hits=2)
    assert tool(query="capital of Italy").text.startswith("[1] Roma\nRome is the capital of Italy.")
    assert ids(tool, "capital rome") == ["it", "no"]
    assert ids(tool, "ZURICH lake") == ["ch"]
    assert tool(query="nothing such").text == "Nothing was found."
    assert "1 to 1000" in str(tool(query=" ").error)


def test_a_file_is_read_once_and_its_index_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps(each) + "\n\n" for each in [*CITIES, "Bergen lies on a fjord."]))
    first = corpus_of(file, index_directory=tmp_path / "kept")
    assert corpus_of(file, index_directory=tmp_path / "kept") is first
    (kept,) = (tmp_path / "kept").iterdir()
    before = {path.name: path.stat().st_mtime_ns for path in kept.iterdir()}
    again = Corpus(first.documents, index_directory=tmp_path / "kept")
    assert {path.name: path.stat().st_mtime_ns for path in kept.iterdir()} == before
    assert again.search("fjord", 5) == first.search("fjord", 5)
    assert [hit.document.id for hit in again.search("fjord", 5)] == ["3", "no"]


def test_many_at_once_make_one_index(tmp_path: Path) -> None:
    documents = [Document(id=str(n), title="", text=f"word{n % 7} word{n % 11}") for n in range(200)]
    found: list[object] = []

    def search() -> None:
        found.append(Corpus(documents, index_directory=tmp_path).search("word3", 5))

    threads = [threading.Thread(target=search) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert all(each == found[0] for each in found)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("corpus", "error"),
    [
        ([], "holds no document"),
        ([3], "Entry 0 of the corpus is '3'"),
        ([{"title": "no text"}], "an object with `text`"),
        ("no/such/file.jsonl", "There is no file"),
    ],
)
def test_what_is_no_corpus_is_refused(corpus: object, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        LocalSearch(corpus)  # pyright: ignore[reportArgumentType]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text('"a"\n{broken\n')
    with pytest.raises(ConfigError, match=r"corpus.jsonl line 2 .*JSON"):
        LocalSearch(file)


def test_a_long_document_is_clipped_with_a_mark() -> None:
    assert LocalSearch(["a " * 1000], max_hit_chars=10)(query="a").text.endswith(
        "[… 1,990 characters left out …]"
    )


WORDS = st.lists(st.sampled_from(["ab", "cd", "ef", "gh"]), max_size=6).map(" ".join)


@given(texts=st.lists(WORDS, min_size=1, max_size=8), query=WORDS)
def test_scores_are_those_of_bm25(texts: list[str], query: str) -> None:
    """Against the formula of Robertson and Zaragoza, with Lucene's idf."""
    documents = [Document(id=str(place), title="", text=text) for place, text in enumerate(texts)]
    hits = Corpus(documents).search(query, 20)
    counts = [Counter(text.split()) for text in texts]
    lengths = [max(1, len(text.split())) for text in texts]
    mean = sum(lengths) / len(lengths)
    scores = [0.0] * len(texts)
    for word in set(query.split()):
        having = sum(word in count for count in counts)
        idf = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
        for place, count in enumerate(counts):
            norm = 1.5 * (1 - 0.75 + 0.75 * lengths[place] / mean)
            scores[place] += idf * count[word] / (count[word] + norm)
    best = sorted((place for place in range(len(texts)) if scores[place] > 0), key=lambda p: -scores[p])
    assert sorted(hit.score for hit in hits) == pytest.approx(
        sorted(scores[place] for place in best), rel=1e-4
    )

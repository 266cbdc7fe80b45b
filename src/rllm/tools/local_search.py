"""Search in a corpus of one's own, by words (BM25 of `bm25s`): no network, the same hits every time.

    corpus: JSONL file or list ──► words ──► index, kept under its digest ──► hits: title, text, score

A line of the file is text, or an object with `text` (or `contents`), and `title` and `id` if there are any.
"""

import hashlib
import json
import os
import re
import threading
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rllm.errors import ConfigError, MissingExtraError
from rllm.tools.base import Tool, ToolError, ToolOutput

MAX_QUERY_CHARS = 1000
MAX_HITS = 20
_WORD = re.compile(r"\w+")
_TEXT_KEYS = ("text", "contents", "content", "passage")
_K1, _B = 1.5, 0.75
"""The constants of BM25: the saturation of a word's count, and the weight of a document's length."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Document:
    """One entry of a corpus."""

    id: str
    title: str
    text: str


@dataclass(kw_only=True, slots=True, frozen=True)
class Hit:
    """One document that was found."""

    document: Document
    score: float
    """BM25: comparable within one search."""


class Corpus:
    """Documents and their index. Safe from several threads; one serves any number of tools."""

    def __init__(self, documents: Sequence[Document], *, index_directory: Path | None = None) -> None:
        """`index_directory` keeps the index for the next time."""
        if not documents:
            raise ConfigError("The corpus holds no document; give at least one.")
        self.documents = list(documents)
        self._index = _index_of(self.documents, index_directory)

    def search(self, query: str, limit: int) -> list[Hit]:
        """The best documents first, equals in the order of the corpus. Each shares a word with the query."""
        # Sorted, because the last digits of a sum of scores depend on the order of the words.
        words = sorted(set(_words(query)) & set(self._index.vocab_dict))
        if not words:
            return []
        scores_D = self._index.get_scores(words)
        matches = np.flatnonzero(scores_D > 0)
        best = matches[np.argsort(-scores_D[matches], kind="stable")][:limit]
        return [Hit(document=self.documents[place], score=float(scores_D[place])) for place in best]


class LocalSearch(Tool):
    """`local_search(query)`: passages of a local corpus."""

    name = "local_search"

    def __init__(
        self,
        corpus: str | Path | Corpus | Iterable[str | Mapping[str, Any]],
        *,
        num_hits: int = 5,
        max_hit_chars: int = 1000,
        index_directory: str | Path | None = None,
    ) -> None:
        """`corpus` is a JSONL file, a list of texts or of objects with `text`, or a Corpus.

        A file is read and indexed once per process, and once for all where there is an `index_directory`.
        """
        if not 1 <= num_hits <= MAX_HITS:
            raise ConfigError(f"`num_hits` is {num_hits}; it must be from 1 to {MAX_HITS}.")
        where = None if index_directory is None else Path(index_directory)
        self._num_hits, self._max_hit_chars = num_hits, max_hit_chars
        self._corpus = corpus_of(corpus, index_directory=where)
        super().__init__()

    def forward(self, query: str) -> ToolOutput:
        """Search a collection of documents by keywords.

        Args:
            query: A few words that the documents should hold.
        """
        if not query.strip() or len(query) > MAX_QUERY_CHARS:
            raise ToolError(f"The query has {len(query)} characters; write 1 to {MAX_QUERY_CHARS}.")
        hits = self._corpus.search(query, self._num_hits)
        text = "\n\n".join(_hit_text(number, hit, self._max_hit_chars) for number, hit in enumerate(hits, 1))
        results = [{"id": hit.document.id, "score": round(hit.score, 4)} for hit in hits]
        return ToolOutput(name=self.name, output=text or "Nothing was found.", metadata={"hits": results})


_corpora: dict[tuple[Any, ...], Corpus] = {}
_lock = threading.Lock()


def corpus_of(
    source: str | Path | Corpus | Iterable[str | Mapping[str, Any]], *, index_directory: Path | None = None
) -> Corpus:
    """The corpus; of a file that has not changed, the one that is there already."""
    if isinstance(source, Corpus):
        return source
    if not isinstance(source, (str, Path)):
        documents = [_document(each, place, "the corpus") for place, each in enumerate(source)]
        return Corpus(documents, index_directory=index_directory)
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"There is no file {path} for the corpus; give a JSONL file or a list.")
    stat = path.stat()
    key = (path.resolve(), stat.st_mtime_ns, stat.st_size, index_directory)
    with _lock:
        # Made under the lock, so that a large file is not indexed by several threads at the same time.
        if key not in _corpora:
            _corpora[key] = Corpus(_read(path), index_directory=index_directory)
        return _corpora[key]


def _read(path: Path) -> list[Document]:
    documents: list[Document] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path} line {number + 1} is no JSON: {error}") from error
            documents.append(_document(value, len(documents), f"{path} line {number + 1}"))
    return documents


def _document(value: Any, place: int, where: str) -> Document:
    if isinstance(value, str):
        return Document(id=str(place), title="", text=value)
    if isinstance(value, Mapping):
        text = next((value[key] for key in _TEXT_KEYS if isinstance(value.get(key), str)), None)
        if text is not None:
            name = value.get("id", value.get("_id", place))
            return Document(id=str(name), title=str(value.get("title") or ""), text=text)
    raise ConfigError(
        f"Entry {place} of {where} is {str(value)[:80]!r}; it must be text or an object with `text`."
    )


def _words(text: str) -> list[str]:
    """Lower-case words without accents, so that `Zürich` is found as `zurich`."""
    plain = unicodedata.normalize("NFKD", text.lower())
    return _WORD.findall("".join(sign for sign in plain if not unicodedata.combining(sign)))


def _index_of(documents: Sequence[Document], directory: Path | None) -> Any:
    bm25s = _library()
    index_path = None if directory is None else directory / f"bm25-{_digest(documents)}"
    if index_path is not None and (index_path / "params.index.json").is_file():
        return bm25s.BM25.load(index_path, show_progress=False)
    index = bm25s.BM25(k1=_K1, b=_B)
    words = [_words(f"{each.title} {each.text}") or [""] for each in documents]
    index.index(words, show_progress=False)
    if index_path is not None:
        _keep(index, index_path)
    return index


def _keep(index: Any, directory: Path) -> None:
    """Whole or not at all: another process may make the same one now."""
    temporary = directory.with_name(f"{directory.name}.{os.getpid()}-{threading.get_ident()}")
    index.save(temporary, show_progress=False)
    try:
        temporary.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise
        for file in temporary.iterdir():
            file.unlink()
        temporary.rmdir()


def _digest(documents: Sequence[Document]) -> str:
    digest = hashlib.blake2b(f"1 {_K1} {_B}".encode(), digest_size=12)
    for each in documents:
        digest.update(json.dumps([each.title, each.text]).encode())
    return digest.hexdigest()


def _library() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise MissingExtraError("bm25s", "search") from error
    return bm25s


def _hit_text(number: int, hit: Hit, max_chars: int) -> str:
    title = f" {hit.document.title}" if hit.document.title else ""
    text = hit.document.text
    left = len(text) - max_chars
    clip = text if left <= 0 else f"{text[:max_chars]} [… {left:,} characters left out …]"
    return f"[{number}]{title}\n{clip}"

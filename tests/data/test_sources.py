"""Rows from a hub, an archive and a package, through the real clients and servers of our own."""

import gzip
import io
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rllm.data.parquet import parquet_bytes
from rllm.data.sources import ArchiveSource, Documents, HubSource, Join, PackageSource, Split, pull, source_of
from rllm.errors import ConfigError, MissingExtraError

sys.path.insert(0, str(Path(__file__).parent))
import fake_hub

constants = pytest.importorskip("huggingface_hub.constants")
pytest.importorskip("pyarrow")


ROWS = [{"question": f"{number} + 1?", "answer": str(number + 1)} for number in range(6)]


def rows_file(rows: list[dict[str, Any]]) -> bytes:
    return parquet_bytes(rows, "rows")


def zipped(texts: dict[str, str]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, text in texts.items():
            archive.writestr(name, text)
    return data.getvalue()


REPOS = {
    "org/one": {
        "default/test/0000.parquet": rows_file(ROWS[:4]),
        "default/test/0001.parquet": rows_file(ROWS[4:]),
        "default/train/0000.parquet": rows_file(ROWS[:1]),
        "README.md": b"# One",
    },
    "org/many": {
        "algebra/test/0000.parquet": rows_file(ROWS[:2]),
        "geometry/test/0000.parquet": rows_file(ROWS[2:3]),
    },
    "org/lines": {
        "questions.json": b'{"id": 1, "question": "a?"}\n{"id": 2, "question": "b?"}\n',
        "answers/questions.json": b'{"id": 2, "truth": "B"}\n{"id": 1, "truth": "A"}\n',
    },
    "org/reports": {
        "rows.csv": b"question,kind,set,files\nq1,law,s1,a.txt;b.txt\nq2,law,s1,b.txt\n",
        "short.csv": b"question,kind,set,files\nq3,law,s1,a.txt;c.txt\n",
        "none.csv": b"question,kind,set,files\nq4,law,s1,\n",
        "flat.csv": b"question,files\nq5,a.txt\n",
        "texts.zip": zipped(
            {"t/law/s1/a.txt": "first", "t/law/s1/b.txt": "zwei – 2", "t/law/s2/a.txt": "other"}
        ),
    },
    "org/gated": {"default/test/0000.parquet": rows_file(ROWS)},
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    with fake_hub.running(fake_hub.FakeHub(dict(REPOS), gated=("org/gated",))) as served:
        yield served


def test_the_files_of_a_split_are_fetched_once_and_their_commit_is_known(hub: Any) -> None:
    source, split = HubSource(repo="org/one"), Split(published="test")
    heard: list[str] = []
    pulled = pull(source, split, endpoint=hub.endpoint, on_progress=heard.append)
    assert pulled.rows == ROWS
    assert pulled.facts["revision"] == fake_hub.COMMIT
    assert heard == ["default/test/0000.parquet", "default/test/0001.parquet"]
    assert pull(source, split, endpoint=hub.endpoint).rows == ROWS
    assert [name for name, _ in hub.served] == heard


def test_rows_of_several_configurations_say_which(hub: Any) -> None:
    source = HubSource(repo="org/many", configs=("algebra", "geometry"))
    rows = pull(source, Split(published="test"), endpoint=hub.endpoint).rows
    assert [row["subset"] for row in rows] == ["algebra", "algebra", "geometry"]


def test_files_of_two_kinds_are_joined_by_their_key(hub: Any) -> None:
    source = HubSource(
        repo="org/lines", revision="main", join=Join(files=("answers/questions.json",), on="id")
    )
    rows = pull(source, Split(files=("questions.json",)), endpoint=hub.endpoint).rows
    assert [(row["question"], row["truth"]) for row in rows] == [("a?", "A"), ("b?", "B")]


REPORTS = HubSource(
    repo="org/reports",
    revision="main",
    documents=Documents(archive="texts.zip", names="files", folder="t/{kind}/{set}"),
)


def test_rows_come_with_the_documents_that_they_name_in_their_order(hub: Any) -> None:
    rows = pull(REPORTS, Split(files=("rows.csv",)), endpoint=hub.endpoint).rows
    assert [[each["paragraph_text"] for each in row["context"]] for row in rows] == [
        ["first", "zwei – 2"],
        ["zwei – 2"],
    ]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("short.csv", "row 0 names t/law/s1/c.txt, which texts.zip does not hold"),
        ("none.csv", "row 0 names no document"),
        ("flat.csv", "row 0 has no `kind`"),
    ],
)
def test_a_row_without_its_documents_is_refused(hub: Any, file: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pull(REPORTS, Split(files=(file,)), endpoint=hub.endpoint)


def test_a_file_that_is_not_what_the_hub_says_is_thrown_away(hub: Any) -> None:
    hub.lies_about.add("default/train/0000.parquet")
    source, split = HubSource(repo="org/one"), Split(published="train")
    with pytest.raises(ConfigError, match=r"default/train/0000.parquet.*org/one.*checksum"):
        pull(source, split, endpoint=hub.endpoint)
    hub.lies_about.clear()
    assert pull(source, split, endpoint=hub.endpoint).rows == ROWS[:1]


def test_a_download_that_broke_off_goes_on_where_it_stopped(
    hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    content = rows_file([{"text": f"{number * 7919 % 10007:05d}" * 50} for number in range(20_000)])
    hub.repos = {"org/large": {"default/test/0000.parquet": content}}
    cut = len(content) // 2
    hub.cuts_after = [cut]
    pulled = pull(HubSource(repo="org/large"), Split(published="test"), endpoint=hub.endpoint)
    assert len(pulled.rows) == 20_000
    asked = [begin for _, begin in hub.served]
    assert asked[0] in (None, "bytes=0-")
    assert asked[-1] is not None
    assert int(asked[-1].removeprefix("bytes=").partition("-")[0]) > 0


def test_a_split_that_is_not_there_says_what_there_is(hub: Any) -> None:
    with pytest.raises(ConfigError, match=r"default/dev/\*.parquet; .*default/test"):
        pull(HubSource(repo="org/one"), Split(published="dev"), endpoint=hub.endpoint)


@pytest.mark.parametrize(
    ("repo", "revision", "message"),
    [
        ("org/none", "", r"org/none.*hub"),
        ("org/one", "v9", "has no revision `v9`"),
        ("org/gated", "", r"then.*HF_TOKEN"),
    ],
)
def test_a_hub_that_refuses_is_explained(hub: Any, repo: str, revision: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pull(HubSource(repo=repo), Split(published="test"), revision=revision, endpoint=hub.endpoint)


def test_without_a_network_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"hub.*connect.*RLLM_HOME"):
        pull(HubSource(repo="org/one"), Split(published="test"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ConfigError, match=r"hub.*reached"):
        pull(HubSource(repo="org/one"), Split(published="test"), endpoint="http://127.0.0.1:9")


def served_file(monkeypatch: pytest.MonkeyPatch, path: Path) -> ArchiveSource:
    """An archive source whose download is a file that is here."""
    from rllm.data import sources
    from rllm.data.downloads import Download

    monkeypatch.setattr(sources, "download", lambda url, sha256="": Download(path=path, sha256="0" * 64))
    return ArchiveSource(url="https://example.org/archive")


def test_a_zip_gives_the_members_that_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data/a.jsonl", '{"n": 1}\n')
        archive.writestr("data/b.jsonl", '{"n": 2}\n')
        archive.writestr("README.md", "no rows")
    source = served_file(monkeypatch, path)
    assert pull(source, Split(files=("data/b*",))).rows == [{"n": 2}]
    assert [row["n"] for row in pull(source, Split()).rows] == [1, 2]
    with pytest.raises(ConfigError, match=r"matches c\*"):
        pull(source, Split(files=("c*",)))


def test_lines_of_parallel_texts_become_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "texts.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("en.txt", "one\ntwo\u2028lines\n")
        archive.writestr("de.txt.gz", gzip.compress(b"eins\r\nzwei\r\n"))
        archive.writestr("short.txt", "un\n")
    served_file(monkeypatch, path)
    source = ArchiveSource(url="https://example.org/texts.zip", lines=("source", "target"))
    rows = pull(source, Split(files=("en.txt", "de.txt.gz"))).rows
    assert rows == [{"source": "one", "target": "eins"}, {"source": "two\u2028lines", "target": "zwei"}]
    with pytest.raises(ConfigError, match=r"en.txt: 2, short.txt: 1"):
        pull(source, Split(files=("en.txt", "short.txt")))


def test_rows_that_hold_several_questions_are_taken_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "dev.json"
    path.write_text(json.dumps([{"table": "t", "questions": [{"q": "a"}, {"q": "b"}]}]))
    served_file(monkeypatch, path)
    source = ArchiveSource(url="https://example.org/dev.json", explode="questions")
    assert pull(source, Split()).rows == [{"table": "t", "q": "a"}, {"table": "t", "q": "b"}]


def test_a_package_is_read_without_being_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_rows"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('nobody may run this')")
    data = io.BytesIO()
    with gzip.GzipFile(fileobj=data, mode="w") as file:
        file.write(b'{"n": 1}\n')
    (package / "rows.jsonl.gz").write_bytes(data.getvalue())
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.0")
    source = PackageSource(package="some-rows", module="some_rows", file="rows.jsonl.gz", extra="data")
    pulled = pull(source, Split())
    assert pulled.rows == [{"n": 1}]
    assert pulled.facts["revision"] == "1.0"
    missing = PackageSource(package="none-such", module="none_such_here", file="x.jsonl", extra="data")
    with pytest.raises(MissingExtraError, match=r"pip install 'rllm\[data\]'"):
        pull(missing, Split())


def test_a_source_that_says_too_little_or_too_much_is_refused() -> None:
    assert source_of({"kind": "hub", "repo": "a/b", "config": "main"}, "x") == HubSource(
        repo="a/b", configs=("main",)
    )
    with pytest.raises(ConfigError, match=r"x: .*`source.speed`"):
        source_of({"kind": "archive", "url": "https://a", "speed": 1}, "x")
    with pytest.raises(ConfigError, match="x: `source` is incomplete"):
        source_of({"kind": "archive"}, "x")

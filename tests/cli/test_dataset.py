import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rllm.cli import dataset as module
from rllm.cli.main import rllm
from rllm.data import Dataset, DatasetRegistry
from rllm.data.sources import Pulled


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def rows(home: Path) -> Path:
    path = home / "rows.jsonl"
    Dataset([{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(5)]).save(path)
    return path


def run(*words: str) -> Result:
    return CliRunner().invoke(rllm, ["dataset", *words])


def told(*words: str) -> dict[str, Any]:
    done = run(*words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.usefixtures("rows")
def test_rows_of_ones_own_are_kept_shown_exported_and_removed(home: Path) -> None:
    made = told("register", "mine", "rows.jsonl", "--description", "Sums.")
    assert made["splits"]["test"]["rows"] == 5
    assert told("list")["datasets"] == [
        {"name": "mine", "here": True, "category": "own", "source": "rows.jsonl", "splits": {"test": 5}}
    ]
    shown = told("inspect", "mine", "-n", "2", "--start", "3")
    assert [each["row"] for each in shown["shown"]] == [3, 4]
    assert shown["shown"][0]["values"] == {"question": "3 + 1?", "answer": "4"}
    asked = told("inspect", "mine", "-n", "1", "--as-tasks")["shown"][0]["values"]
    assert (asked["grader"], asked["grading"]["answer"]) == ("exact", "1")
    assert told("export", "mine", "out.csv")["rows"] == 5
    assert (home / "out.csv").read_text().splitlines()[1] == "0 + 1?,1"
    assert told("info", "mine")["description"] == "Sums."
    assert told("remove", "mine") == {"removed": "mine", "split": None}
    assert told("list")["datasets"] == []


@pytest.mark.usefixtures("rows")
def test_every_command_says_what_to_type_next() -> None:
    for words in (
        ("register", "mine", "rows.jsonl"),
        ("list",),
        ("info", "mine"),
        ("inspect", "mine"),
        ("export", "mine", "out.jsonl"),
        ("remove", "mine"),
    ):
        done = run(*words)
        assert done.exit_code == 0, done.output
        assert "Next:" in done.stdout


def test_a_row_that_lacks_a_field_is_named_before_anything_is_kept(home: Path) -> None:
    (home / "bad.jsonl").write_text('{"question": "a", "answer": "b"}\n{"question": "c"}\n')
    done = run("register", "mine", "bad.jsonl")
    assert done.exit_code == 2
    assert "row 1 has no `answer`" in done.stderr
    assert DatasetRegistry.get_dataset_names() == []


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("register", "gsm8k", "rows.jsonl"), "`gsm8k` is in the catalogue; choose another name"),
        (("register", "mine", "gone.jsonl"), "There is no"),
        (("register", "a b", "rows.jsonl"), "The name of a data set is 'a b'"),
        (("inspect", "mine"), "There is no data set `mine` here"),
        (("remove", "mine"), "There is no data set `mine` here"),
        (("pull", "gsm9k"), "did you mean `gsm8k`?"),
        (("inspect", "gsm8k"), "not here yet; fetch them: rllm dataset pull gsm8k"),
        (("info", "frozenlake"), "`frozenlake` makes its tasks itself and has no rows"),
        (
            ("register", "mine", "rows.jsonl", "--evaluator", "matth"),
            "There is no grader `matth`; did you mean",
        ),
        (
            ("register", "mine", "rows.jsonl", "--agent", "gme"),
            "There is no agent `gme`; did you mean `game`?",
        ),
        (("pull", "gsm8k", "--split", "dev"), "`gsm8k` has no split `dev`; it has test, train"),
    ],
)
def test_what_cannot_be_done_is_exit_code_two_and_says_why(words: tuple[str, ...], message: str) -> None:
    done = run(*words)
    assert done.exit_code == 2
    assert message in done.stderr.replace("\n", " ")


@pytest.mark.usefixtures("rows")
def test_a_place_that_is_not_there_is_exit_code_two_and_says_why(home: Path) -> None:
    told("register", "mine", "rows.jsonl")
    for words, message in (
        (("export", "mine", "gone/out.csv"), "no directory gone for gone/out.csv"),
        (("inspect", "mine", "--start", "5"), "`mine` has 5 rows in test, the first is 0: 5 is none."),
    ):
        done = run(*words)
        assert (done.exit_code, done.stdout) == (2, "")
        assert message in done.stderr
    assert not (home / "gone").exists()


def test_pulling_without_a_network_says_what_to_do() -> None:
    pytest.importorskip("huggingface_hub")
    done = run("pull", "gsm8k", "--json")
    assert done.exit_code == 2
    message = json.loads(done.stderr)["error"]["message"]
    assert "hub cannot" in message
    assert "copy RLLM_HOME" in message


def test_what_is_pulled_is_kept_with_its_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    from rllm.eval import tasks

    rows = [{"question": "1 + 1?", "answer": "#### 2"}]
    pulled = Pulled(rows=rows, facts={"address": "https://example.org", "revision": "c0ffee"})
    monkeypatch.setattr(tasks, "pull", lambda *_, **__: pulled)
    made = told("pull", "gsm8k")
    assert list(made["splits"]) == ["test", "train"]
    assert made["splits"]["test"]["revision"] == "c0ffee"
    assert told("inspect", "gsm8k", "--as-tasks")["shown"][0]["values"]["grading"] == {"answer": "2"}
    everything = {each["name"]: each["here"] for each in told("list", "--all")["datasets"]}
    assert everything["gsm8k"] is True
    assert everything["mmlu"] is False


def test_a_hub_id_is_registered_under_a_name_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def pull(source: Any, split: Any, **_: Any) -> Pulled:
        asked.extend((source.repo, source.configs, split.published))
        return Pulled(rows=[{"question": "a", "answer": "b"}], facts={"revision": "c0ffee"})

    monkeypatch.setattr(module, "pull", pull)
    made = told("register", "mine", "org/name", "--config", "main", "--hub-split", "dev")
    assert asked == ["org/name", ("main",), "dev"]
    assert made["splits"]["test"]["revision"] == "c0ffee"

from pathlib import Path

import pytest

from rllm.algorithms.task_sampler import TaskSampler
from rllm.errors import ConfigError
from rllm.files.jsonl import read_jsonl
from rllm.types.task import Task, tasks_of


def test_rows_become_tasks_by_the_fields_that_they_have() -> None:
    own = Task(id="mine", instruction=[{"type": "text", "text": "look"}], dataset_dir=Path("data"))
    tasks = tasks_of(
        [
            {"task_id": "a", "id": "b", "instruction": "I", "question": "Q", "answer": 4},
            {"uid": 7, "prompt": "P"},
            {"problem": "B", "id": None},
            {},
            own,
        ]
    )
    assert [(task.id, task.instruction) for task in tasks[:4]] == [
        ("a", "I"),
        ("7", "P"),
        ("2", "B"),
        ("3", ""),
    ]
    assert tasks[0].metadata["answer"] == 4
    assert tasks[4] is own
    assert tasks[0].to_row()["task_id"] == "a"
    assert tasks[1].to_row() == {"task_id": "7", "instruction": "P", "uid": 7, "prompt": "P"}


def test_tasks_are_walked_through_in_epochs_with_an_id_for_each_visit() -> None:
    tasks = tasks_of([{"id": name} for name in "abc"])
    sampler = TaskSampler(tasks, seed=0, purpose="tasks")
    ids = [task.id for task in sampler.batch(0, 6)]
    assert sorted(ids) == ["a", "a@1", "b", "b@1", "c", "c@1"]
    rows = TaskSampler([{"task_id": name} for name in "abc"], seed=0, purpose="tasks")
    assert ids == [row["task_id"] for row in rows.batch(0, 6)]


def test_jsonl_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n{"b": "\xc3\xa9"}')
    assert read_jsonl(path) == [{"a": 1}, {"b": "é"}]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b'{"a": 1}\n{"a": NaN}\n', r"rows.jsonl:2 is not valid JSON: NaN is no JSON number"),
        (b'{"a": 1}\n\xff\n', r"rows.jsonl:2 is not UTF-8"),
        (b'"text"\n', r"rows.jsonl:1 holds a str"),
        (b"[" * 100_000, r"rows.jsonl:1 is not valid JSON"),
        (b" \n", r"rows.jsonl is empty"),
    ],
)
def test_a_line_that_is_no_object_is_named(tmp_path: Path, content: bytes, named: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=named):
        read_jsonl(tmp_path / "rows.jsonl")

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rllm.data import DatasetRegistry
from rllm.data.registry import require_dataset
from rllm.errors import ConfigError, StorageError
from rllm.files import atomic

ROWS = [{"question": "1 + 1", "answer": "2"}, {"question": "1 + 2", "answer": "3"}]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_published_programs_find_what_they_registered() -> None:
    assert not DatasetRegistry.dataset_exists("mine", "test")
    assert DatasetRegistry.load_dataset("mine", "test") is None
    made = DatasetRegistry.register_dataset("mine", ROWS, "test")
    assert made.get_data() == ROWS
    DatasetRegistry.register_dataset("mine", ROWS[:1], "train")
    loaded = DatasetRegistry.load_dataset("mine", "test")
    assert loaded is not None
    assert loaded.get_data() == ROWS
    assert Path(loaded.get_data_path() or "").is_file()
    assert DatasetRegistry.get_dataset_names() == ["mine"]
    assert DatasetRegistry.get_dataset_splits("mine") == ["test", "train"]
    assert DatasetRegistry.dataset_exists("mine")
    assert DatasetRegistry.remove_dataset("mine")
    assert not DatasetRegistry.remove_dataset("mine")
    assert DatasetRegistry.get_dataset_names() == []


def test_registering_again_replaces_and_leaves_no_old_file(home: Path) -> None:
    DatasetRegistry.register_dataset("mine", ROWS, "test")
    DatasetRegistry.register_dataset("mine", ROWS[:1], "test", description="Fewer.")
    loaded = DatasetRegistry.load_dataset("mine", "test")
    assert loaded is not None
    assert len(loaded) == 1
    assert len(list((home / "datasets" / "mine").iterdir())) == 1
    info = DatasetRegistry.get_dataset_info("mine")
    assert info is not None
    assert info["description"] == "Fewer."
    assert info["splits"]["test"]["rows"] == 1


def test_removing_the_last_split_removes_the_dataset(home: Path) -> None:
    DatasetRegistry.register_dataset("mine", ROWS, "test")
    DatasetRegistry.register_dataset("mine", ROWS, "train")
    assert DatasetRegistry.remove_dataset_split("mine", "test")
    assert DatasetRegistry.get_dataset_splits("mine") == ["train"]
    assert DatasetRegistry.remove_dataset_split("mine", "train")
    assert not DatasetRegistry.remove_dataset_split("mine", "train")
    assert DatasetRegistry.get_dataset_names() == []


def test_a_file_that_was_changed_is_noticed(home: Path) -> None:
    DatasetRegistry.register_dataset("mine", ROWS, "test")
    (file,) = (home / "datasets" / "mine").iterdir()
    file.write_text(file.read_text().replace('"3"', '"4"'))
    with pytest.raises(ConfigError, match="registered"):
        DatasetRegistry.load_dataset("mine", "test")


def test_a_full_disk_loses_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DatasetRegistry.register_dataset("mine", ROWS, "test")
    before = (home / "datasets" / "registry.json").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        DatasetRegistry.register_dataset("mine", ROWS * 2, "test")
    monkeypatch.undo()
    monkeypatch.setenv("RLLM_HOME", str(home))
    assert (home / "datasets" / "registry.json").read_bytes() == before
    loaded = DatasetRegistry.load_dataset("mine", "test")
    assert loaded is not None
    assert loaded.get_data() == ROWS


REGISTER_SOME = """
import sys
from rllm.data.registry import DatasetRegistry
for number in range(int(sys.argv[1]), int(sys.argv[1]) + 5):
    DatasetRegistry.register_dataset(f"set-{number}", [{"question": "q", "answer": "a"}], "test")
"""


def test_writers_in_several_processes_lose_no_entry(home: Path) -> None:
    environment = os.environ | {"RLLM_HOME": str(home)}
    started = [
        subprocess.Popen([sys.executable, "-c", REGISTER_SOME, str(first)], env=environment)
        for first in (0, 100)
    ]
    assert [process.wait() for process in started] == [0, 0]
    assert len(DatasetRegistry.get_dataset_names()) == 10


def test_names_that_would_leave_the_folder_are_refused(subtests: pytest.Subtests) -> None:
    for name in ("", "../up", "a/b", ".hidden", "a b", "x\n"):
        with subtests.test(name=name), pytest.raises(ConfigError, match="name"):
            DatasetRegistry.register_dataset(name, ROWS)


def test_rows_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no rows"):
        DatasetRegistry.register_dataset("mine", [], "test")


def test_a_registry_of_another_version_is_not_written_over(home: Path) -> None:
    (home / "datasets").mkdir(parents=True)
    (home / "datasets" / "registry.json").write_text(json.dumps({"version": 99, "datasets": {}}))
    with pytest.raises(ConfigError, match="is of version 99"):
        DatasetRegistry.register_dataset("mine", ROWS)


def test_a_name_that_is_not_there_is_answered_with_the_nearest() -> None:
    DatasetRegistry.register_dataset("mine", ROWS, "test")
    with pytest.raises(ConfigError, match=r"`mime`.*`mine`"):
        require_dataset("mime")
    with pytest.raises(ConfigError, match=r"`train`.* test"):
        require_dataset("mine", "train")
    assert require_dataset("mine").split == "test"

"""Names of a person's own code, and the directory that they are kept in."""

import json
import os
from pathlib import Path

import pytest

from rllm.errors import ConfigError
from rllm.files import locks
from rllm.files.home import rllm_home
from rllm.files.named_places import NamedPlaces

PLACES = NamedPlaces("agent")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "below" / "home"  # neither has been made
    monkeypatch.setenv("RLLM_HOME", str(path))
    return path


def top() -> None: ...


def test_a_name_is_kept_until_it_is_taken_back(home: Path, tmp_path: Path) -> None:
    assert PLACES.all() == {}
    assert PLACES.register("mine", "package.module:solve") == "package.module:solve"
    kept = PLACES.register("own-file.2", os.path.relpath(tmp_path / "flow.py") + ":Flow.solve")
    assert kept == f"{tmp_path / 'flow.py'}:Flow.solve", "wherever it is asked for later"
    assert PLACES.all() == {"mine": "package.module:solve", "own-file.2": kept}
    assert NamedPlaces("evaluator").all() == {}, "of each kind its own"
    assert [PLACES.place_of(name) for name in ("mine", "other", "a.b:c")] == [
        "package.module:solve",
        "other",
        "a.b:c",
    ]
    PLACES.register("mine", "package.module:better")
    assert PLACES.place_of("mine") == "package.module:better"
    PLACES.unregister("mine")
    assert PLACES.all() == {"own-file.2": kept}
    assert json.loads((home / "agents.json").read_text()) == {"version": 1, "agents": {"own-file.2": kept}}
    for names in ("own-file.2", "none"):
        with pytest.raises(ConfigError, match=f"agent `mine` .*{names}"):
            PLACES.unregister("mine")
        if names != "none":
            PLACES.unregister(names)


@pytest.mark.parametrize("name", ["", "-a", ".a", "a b", "a/b", "x" * 65])
def test_what_is_no_name_is_refused(home: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="at most 64"):
        PLACES.register(name, "a:b")
    assert not home.exists()
    assert PLACES.register("x" * 64, "a:b") == "a:b"


def test_a_function_is_kept_by_its_file_where_it_can_be_found_again(home: Path) -> None:
    assert PLACES.register_function("mine", top) == f"{Path(__file__).resolve()}:top"
    assert PLACES.all() == {"mine": f"{Path(__file__).resolve()}:top"}
    for function in (lambda: None, len, Path.exists):
        with pytest.raises(ConfigError, match="`register`"):
            PLACES.register_function("other", function)
    assert "other" not in PLACES.all()


@pytest.mark.parametrize(
    "text",
    ["nope", "[]", "{}", '{"version": 1}', '{"version": 2, "agents": {}}', '{"version": 1, "agents": [1]}'],
)
def test_a_file_that_cannot_be_read_is_named(home: Path, text: str) -> None:
    home.mkdir(parents=True)
    (home / "agents.json").write_text(text)
    with pytest.raises(ConfigError, match=r"agents\.json"):
        PLACES.all()
    with pytest.raises(ConfigError, match=r"agents\.json"):
        PLACES.register("mine", "a:b")
    assert (home / "agents.json").read_text() == text


def test_the_directory_of_a_person_is_where_it_is_set_or_else_in_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable, home in (("", tmp_path / ".rllm"), ("~/own", tmp_path / "own"), (str(tmp_path), tmp_path)):
        monkeypatch.setenv("RLLM_HOME", variable)
        assert rllm_home() == home
    (tmp_path / "file").touch()
    for variable in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("RLLM_HOME", str(variable))
        with pytest.raises(ConfigError, match=f"{tmp_path / 'file'} "):
            rllm_home()
    assert not (tmp_path / ".rllm").exists(), "not made before something is written there"


def test_a_forked_worker_lets_go_of_the_locks_of_its_parent_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = os.open(tmp_path / "other", os.O_CREAT | os.O_RDWR)
    held = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    monkeypatch.setattr(locks, "_held", {held})
    locks._let_go_in_forked_child()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(held)
    os.dup2(other, held)  # the number is somebody else's now
    locks._let_go_in_forked_child()
    os.fstat(held)
    os.close(held)
    os.close(other)

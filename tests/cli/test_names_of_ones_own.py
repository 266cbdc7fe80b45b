"""`rllm agent register` and `rllm model show|swap`: names of one's own, kept until they are forgotten."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rllm.agents.flow import load_flow
from rllm.build.actors import actor_named, program_named
from rllm.build.model_settings import ModelEntry, ModelSettings
from rllm.cli.main import rllm as front_door


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    (tmp_path / "flow.py").write_text('"""Mine."""\ndef solve(task, config):\n    """Say nothing."""\n')


def typed(*words: str) -> Result:
    return CliRunner().invoke(front_door, words, prog_name="rllm")


def test_a_registered_agent_is_found_by_its_name_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = typed("agent", "register", "mine", "flow.py:solve", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output) == {"name": "mine", "place": f"{tmp_path / 'flow.py'}:solve"}
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_flow("mine").name == "solve"
    assert actor_named("mine").flow is not None
    assert program_named("mine").name == "solve"
    rows = json.loads(typed("agent", "list", "--json").output)["agents"]
    assert {"name": "mine", "comes_from": "registered", "summary": f"{tmp_path / 'flow.py'}:solve"} in rows
    assert "Say nothing." in typed("agent", "info", "mine").output
    assert typed("agent", "unregister", "mine").exit_code == 0
    assert "agent `mine`" in typed("agent", "unregister", "mine").output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("math", "flow.py:solve"), "`math` is an agent already"),
        (("a b", "flow.py:solve"), "is to be called 'a b'"),
        (("mine", "solve"), "`solve` says no place"),
        (("mine", "flow.py:absent"), "has no agent `absent`"),
        (("mine", "absent.py:solve"), "There is no file absent.py"),
    ],
)
def test_what_cannot_be_registered_is_refused_and_nothing_is_kept(
    words: tuple[str, str], message: str, tmp_path: Path
) -> None:
    done = typed("agent", "register", *words)
    assert done.exit_code == 2
    assert message in done.output
    assert not (tmp_path / "home" / "agents.json").exists()


def test_a_registry_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "agents.json").write_text("[")
    done = typed("agent", "list")
    assert done.exit_code == 2
    assert "agents.json" in done.output


def test_the_default_model_is_shown_and_swapped() -> None:
    assert "is the default" in typed("model", "show").output
    entries = {
        name: ModelEntry(name=name, provider="vllm", model="m", base_url="http://127.0.0.1:1/v1")
        for name in ("one", "two")
    }
    ModelSettings(entries=entries, default="one").save()
    assert json.loads(typed("model", "show", "--json").output)["name"] == "one"
    assert typed("model", "swap", "two").exit_code == 0
    shown = json.loads(typed("model", "show", "--json").output)
    assert (shown["name"], shown["is_default"]) == ("two", True)
    assert json.loads(typed("model", "show", "one", "--json").output)["is_default"] is False
    assert "model `three`" in typed("model", "swap", "three").output

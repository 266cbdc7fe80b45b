"""`rllm agent`: who there is, and what they take."""

import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from rllm.agents.named import AGENTS
from rllm.environments.harness.spec import shipped_names

Rllm = Callable[..., Result]


def test_all_built_in_agents_are_listed_with_what_they_do(rllm: Rllm) -> None:
    rows = json.loads(rllm("agent", "list", "--json").stdout)["agents"]
    built_in = {row["name"]: row for row in rows if row["comes_from"] == "built in"}
    assert set(built_in) == set(AGENTS)
    assert all(row["summary"] for row in built_in.values())
    assert "frozenlake" in rllm("agent", "list").stdout


def test_an_agent_says_what_it_takes(rllm: Rllm) -> None:
    row = json.loads(rllm("agent", "info", "frozenlake", "--json").stdout)
    assert row["defined_in"] == "rllm.agents.frozenlake:FrozenLakeAgent"
    assert row["arguments"]
    shown = rllm("agent", "info", "frozenlake").stdout
    assert all(f"agent_args.{name}" in shown for name in row["arguments"])


def test_harnesses_are_listed_and_described_with_what_they_install(rllm: Rllm, tmp_path: Path) -> None:
    rows = json.loads(rllm("agent", "list", "--json").stdout)["agents"]
    harnesses = {row["name"]: row["summary"] for row in rows if row["comes_from"] == "harness"}
    assert set(harnesses) == {f"harness:{name}" for name in shipped_names()}
    assert all(harnesses.values())
    row = json.loads(rllm("agent", "info", "harness:openhands", "--json").stdout)
    assert row["kind"].startswith("harness")
    assert row["description"] == harnesses["harness:openhands"]
    assert row["installs"] == ["openhands==1.16.0", "func-timeout==4.3.5"]
    assert "func-timeout==4.3.5" in rllm("agent", "info", "harness:openhands").stdout
    (tmp_path / "own.toml").write_text('about = "Mine."\ncommand = ["mine", "{task}"]\n')
    row = json.loads(rllm("agent", "info", "harness:own.toml", "--json").stdout)
    assert (row["defined_in"], row["description"], row["installs"]) == ("own.toml", "Mine.", [])
    refused = rllm("agent", "info", "harness:openhand")
    assert refused.exit_code == 2
    assert "did you mean `harness:openhands`?" in refused.stderr


def test_ones_own_program_and_agent_are_described(rllm: Rllm, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        'import rllm\n\n@rllm.rollout\ndef solve(task, config):\n    """Asks once."""\n\nnumber = 3\n'
    )
    row = json.loads(rllm("agent", "info", "mine.py:solve", "--json").stdout)
    assert row["kind"].startswith("program")
    assert row["description"] == "Asks once."
    workflow = "class Work(Workflow):\n    async def run(self, task, uid): ...\n"
    (tmp_path / "work.py").write_text(f"from rllm.workflows import Workflow\n{workflow}")
    assert json.loads(rllm("agent", "info", "work.py:Work", "--json").stdout)["kind"].startswith("workflow")
    refused = rllm("agent", "info", "mine.py:number")
    assert refused.exit_code == 2
    assert "BaseAgent" in " ".join(refused.stderr.split())


def test_agents_of_packages_are_listed_without_importing_them(
    rllm: Rllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = metadata.EntryPoint(name="theirs", value="no_such_module:Agent", group="rllm.agents")

    def entry_points(**wanted: Any) -> Any:
        return metadata.EntryPoints([broken]).select(**wanted)

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    rows = json.loads(rllm("agent", "list", "--json").stdout)["agents"]
    assert rows[-1] == {"name": "theirs", "comes_from": "?", "summary": "no_such_module:Agent"}
    refused = rllm("agent", "info", "theirs")
    assert refused.exit_code == 2
    assert "no_such_module" in refused.stderr


def test_an_unknown_agent_is_refused_with_the_nearest(rllm: Rllm) -> None:
    refused = rllm("agent", "info", "frozenlak")
    assert refused.exit_code == 2
    assert "did you mean `frozenlake`?" in refused.stderr

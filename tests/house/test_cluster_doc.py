"""docs/cluster.md: what it says is refused is, and every key is on it. Its runs are in tests/cluster."""

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from rllm.build.configs import training_config
from rllm.cli.main import rllm as front_door
from rllm.config.loader import config_dict
from rllm.config.schema import TrainConfig


@pytest.fixture(scope="module")
def page(checkout: Path) -> str:
    return (checkout / "docs" / "cluster.md").read_text()


def test_what_the_page_says_is_refused_is_refused_before_any_work(page: str, empty_directory: Path) -> None:
    (refused,) = re.findall(r"^```sh fails\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    for line in refused.splitlines():
        done = CliRunner().invoke(front_door, shlex.split(line)[1:], prog_name="rllm")
        assert done.exit_code == 2, (line, done.output)
        assert not (empty_directory / "runs").exists()


def test_the_recipes_are_resolved_to_processes_ports_and_leases(
    page: str, empty_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rllm.integrations.ray.kind.require_installed", lambda: None)
    recipes = re.findall(r"^rllm train .*--dry-run$", page, re.MULTILINE)
    printed = [
        json.loads(CliRunner().invoke(front_door, [*shlex.split(line)[1:], "--json"]).stdout)
        for line in recipes
    ]
    assert all(each["memory"]["sampler"] > each["memory"]["cache"] == 0 for each in printed)
    plans = [each["derived"] for each in printed]
    assert [each["cores_of_workers"] for each in plans] == [12, 6, 0, 64]
    by_name = [{process["name"]: process for process in each["processes"]} for each in printed]
    assert [each["trainer"]["number"] for each in by_name] == [1, 2, 1, 1]
    assert [each["rollout worker"]["number"] for each in by_name] == [12, 6, 0, 32]
    ports = {
        port for each in by_name for port in (*each["Ray head"]["ports"], *each["rollout worker"]["ports"])
    }
    named = {"6379", "10002 to 19999"}
    assert all(any(number in port for port in ports) and number in page for number in named)
    tasks = training_config("frozenlake").rollout.tasks_per_step
    assert {each["tasks_per_lease"] * each["leases_per_step"] for each in plans} == {tasks}


def test_every_key_is_on_the_page(page: str) -> None:
    keys = {f"cluster.{name}" for name in config_dict(TrainConfig())["cluster"]}
    rows = set(re.findall(r"^\| `(cluster\.\w+)` \|", page, re.MULTILINE))
    assert rows == keys

"""Names of pulled models and of the hub, wherever a model is named: flags, --set, files, every policy."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from rllm.build import providers
from rllm.build.models import settle_model_names
from rllm.config.loader import load_as, load_config
from rllm.config.supervised import SftConfig
from rllm.errors import ConfigError
from rllm.models.builtin import create_model

Rllm = Callable[..., Result]
PULLED, ON_HUB = "smollm2-135m-instruct", "acme/tiny"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    create_model(path, "tiny", 0)
    return path


@pytest.fixture
def places(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Name -> directory of a model that is here under it already."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    kept_by_hub = tmp_path / "home" / "hub" / "tiny"
    monkeypatch.setattr(providers, "hub_model", {ON_HUB: kept_by_hub}.__getitem__)
    model_places = {PULLED: tmp_path / "home" / "models" / "pulled" / PULLED, ON_HUB: kept_by_hub}
    for place in model_places.values():
        shutil.copytree(tiny, place)
    return model_places


ROWS = {
    "sft": {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]},
    "dpo": {"prompt": "1", "chosen": "2", "rejected": "3"},
}
COMMANDS = {
    "train": ["train", "frozenlake"],
    "distill": ["distill", "frozenlake", "--teacher", "builtin:tiny"],
    "sft": ["sft", "rows.jsonl"],
    "dpo": ["dpo", "rows.jsonl"],
}


@pytest.mark.parametrize(
    ("command", "by", "name"),
    [
        *((command, "--set", PULLED) for command in COMMANDS),
        ("sft", "--config", PULLED),
        ("sft", "--model", ON_HUB),
        ("train", "--set", ON_HUB),
    ],
)
def test_every_command_that_trains_takes_the_name_of_a_model(
    rllm: Rllm, places: dict[str, Path], tmp_path: Path, command: str, by: str, name: str
) -> None:
    if command in ROWS:
        (tmp_path / "rows.jsonl").write_text((json.dumps(ROWS[command]) + "\n") * 4)
    (tmp_path / "mine.toml").write_text(f'[model]\npath = "{name}"\n')
    value = {"--model": name, "--set": f"model.path={name}", "--config": "mine.toml"}[by]
    planned = rllm(*COMMANDS[command], by, value, "--dry-run", "--json")
    assert planned.exit_code == 0, planned.stderr
    assert json.loads(planned.stdout)["config"]["model"]["path"] == str(places[name])


@pytest.mark.parametrize(("form", "name"), [("--teacher={}", PULLED), ("--set=distill.teacher={}", ON_HUB)])
def test_a_teacher_may_be_the_name_of_a_model(
    rllm: Rllm, places: dict[str, Path], form: str, name: str
) -> None:
    planned = rllm("distill", "frozenlake", form.format(name), "--dry-run", "--json")
    assert planned.exit_code == 0, planned.stderr
    assert json.loads(planned.stdout)["config"]["distill"]["teacher"] == str(places[name])


@pytest.mark.parametrize("name", [PULLED, ON_HUB])
def test_a_gateway_takes_the_tokenizer_of_a_name(rllm: Rllm, places: dict[str, Path], name: str) -> None:
    upstream = "http://127.0.0.1:9/v1"
    words = ("serve", "gateway", "--upstream", upstream, "--port", "0", "--tokenizer")
    served = rllm(*words, name)
    assert served.exit_code == 1, "the tokenizer is there and the upstream is not"
    assert "127.0.0.1:9" in served.stderr
    unknown = rllm(*words, "nowhere")
    assert unknown.exit_code == 2
    assert "nowhere" in unknown.stderr


def test_every_policy_may_name_its_model(places: dict[str, Path], tiny: Path) -> None:
    by_name = {"judge": {"path": PULLED}, "critic": {"path": ON_HUB}, "scribe": {"path": str(tiny)}}
    config = load_config({"policies": {**by_name, "solver": {}}, "model": {"path": PULLED}})
    settle_model_names(config)
    paths = {name: policy.path for name, policy in config.named_policies.items()}
    pulled = str(places[PULLED])
    assert paths == {"judge": pulled, "critic": str(places[ON_HUB]), "scribe": str(tiny), "solver": pulled}


def test_a_name_of_a_service_and_the_address_of_a_teacher_stay_as_they_are(places: dict[str, Path]) -> None:
    teacher = {"distill": {"teacher": "http://127.0.0.1:9/v1"}, "algorithm": {"estimator": "teacher"}}
    config = load_config({**teacher, "warm_start": {"steps": 0, "noise": 0.0}})
    settle_model_names(config)
    assert config.distill.teacher == "http://127.0.0.1:9/v1"
    assert config.model.path == "builtin:tiny"
    config.backend, config.model.path = "tinker", "Qwen/Qwen3-8B"
    settle_model_names(config)
    assert config.model.path == "Qwen/Qwen3-8B"


def test_a_name_that_leads_nowhere_is_refused_with_its_key(places: dict[str, Path]) -> None:
    config = load_as(SftConfig, {"model": {"path": "smollm2-136m"}})
    with pytest.raises(ConfigError, match=r"`model.path`.*`smollm2-136m`.*smollm2-135m-instruct"):
        settle_model_names(config)
